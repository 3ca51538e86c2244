# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 drafter as it lies on disk: its configuration as vLLM reads it, and its weights' headers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ansible.module_utils.aerie.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    CheckpointError,
    read_checkpoint,
    read_json_object,
    read_single,
)
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.findings import Fact
from ansible.module_utils.aerie.rope import Rope

TAP_IDS = "eagle_aux_hidden_state_layer_ids"
CONFIG = "config.json"
# The first layer's tensors, by the names that training tools give it.
FIRST_LAYER = ("midlayer.", "layers.0.")
MLA_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")

_SPECULATORS_ARCHITECTURES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
# What vLLM takes over from a speculators configuration, besides its transformer_layer_config.
_SPECULATORS_FIELDS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    TAP_IDS,
)
_SERVING_FILES = (".json", ".py", ".safetensors", ".model", ".jinja", ".tiktoken")
_TRAINING_FILE = re.compile(r"optimi[sz]er|scheduler|train(er|ing)|rng_state|random_states|pytorch_model_fsdp", re.I)
_TRAINING_SUFFIXES = (".pt", ".pth", ".ckpt", ".distcp")
_QUANTISED_PARTS = re.compile(r"\.(weight_(packed|scale|zero_point|scale_inv|scale_2)|q(weight|zeros)|scales|g_idx)$")


@dataclass(frozen=True)
class TapIds:
    """Where a configuration declares tap ids: the top level, eagle_config, and eagle_config.layer_ids."""

    top_level: list[int] | None
    nested: list[int] | None
    layer_ids: list[int] | None

    @property
    def declared(self) -> list[int] | None:
        """The ids that the drafter's author wrote down."""
        return self.top_level or self.nested or self.layer_ids

    @property
    def places(self) -> dict[str, list[int]]:
        """The declared ids by the field that declares them."""
        fields = {
            TAP_IDS: self.top_level,
            f"eagle_config.{TAP_IDS}": self.nested,
            "eagle_config.layer_ids": self.layer_ids,
        }
        return {place: ids for place, ids in fields.items() if ids}

    @property
    def contradict(self) -> bool:
        """Whether two places declare different ids."""
        return len({tuple(ids) for ids in self.places.values()}) > 1


@dataclass(frozen=True)
class Drafter:
    """A drafter's configuration and its weights' headers.

    ``document`` is config.json as it is, ``settings`` what vLLM makes of it: the same, but for a speculators
    configuration. The fields hold settings that were checked to be of their type.
    """

    root: Path
    config: str
    document: Mapping[str, object] = field(repr=False)
    settings: Mapping[str, object] = field(repr=False)
    checkpoint: Checkpoint = field(repr=False)
    declared_architecture: str
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int | None
    max_position_embeddings: int | None
    num_aux_hidden_states: int | None
    tap_ids: TapIds

    @property
    def model_type(self) -> str | None:
        """The model_type of its configuration."""
        return str(self.settings["model_type"]) if "model_type" in self.settings else None

    @property
    def architecture(self) -> str:
        """The name under which vLLM looks up a drafter that is served with method eagle3."""
        name = self.declared_architecture
        return name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"

    @property
    def is_mla(self) -> bool:
        """Whether its attention is DeepSeek's latent attention."""
        return self.architecture in MLA_ARCHITECTURES

    @property
    def is_speculators(self) -> bool:
        """Whether its configuration is in the format of the speculators library."""
        return is_speculators(self.document)

    @property
    def uses_taps(self) -> bool:
        """Whether it takes hidden states of several layers, rather than the last one's alone."""
        return eagle_config(self.settings).get("use_aux_hidden_state", True) is not False

    @property
    def rope(self) -> Rope:
        """Its rotary position embedding."""
        return Rope.read(self.settings)

    @property
    def has_own_embedding(self) -> bool:
        """Whether it brings an embedding; vLLM shares the target's otherwise."""
        return any(name.startswith("embed_tokens.") for name in self.checkpoint.tensors)

    @property
    def has_own_lm_head(self) -> bool:
        """Whether it brings an output head; vLLM shares the target's otherwise."""
        return any(name.startswith("lm_head.") for name in self.checkpoint.tensors)

    def quantised_tensors(self) -> Iterator[str]:
        """Yield the names of tensors that only a quantised layer has."""
        for name in self.checkpoint.tensors:
            tensor = self.checkpoint.tensor(name)
            assert tensor is not None
            if _QUANTISED_PARTS.search(name) or (name.endswith(".weight") and tensor.dtype.startswith("F8_")):
                yield name

    def width(self) -> Fact:
        """The hidden size that it was trained on."""
        if self.target_hidden_size is not None:
            return Fact("target_hidden_size", self.target_hidden_size, self.config)
        return Fact("hidden_size", self.hidden_size, self.config)

    def stored(self, what: str, value: object, tensor: str) -> Fact:
        """A fact about ``tensor``, in the file that holds it."""
        return Fact(what, value, str(self.checkpoint.file_of(tensor)))

    def declares_architecture(self) -> Fact:
        """The class that its configuration names."""
        return Fact("architecture", self.declared_architecture, self.config)

    def declares(self, name: str) -> Fact:
        """The configuration's field ``name``, for the fields that are integers here."""
        return Fact(name, getattr(self, name), self.config)


def default_tap_ids(num_layers: int) -> list[int]:
    """Return the ids that vLLM taps when a drafter declares none: early, middle and late."""
    return [2, num_layers // 2, num_layers - 3]


def read_drafter(path: Path) -> Drafter:
    """Read the drafter at ``path``: a directory, or its one file of weights with config.json beside it.

    Raises CheckpointError with all that cannot be read.
    """
    if not path.is_dir() and not (path.is_file() and path.suffix == ".safetensors"):
        what = (
            "neither a directory nor a safetensors file" if path.exists() else "no such directory on the control node"
        )
        raise CheckpointError([f"{path}: {what}; correct drafter_path"])
    root = path if path.is_dir() else path.parent
    problems: list[str] = []
    document: dict[str, object] = {}
    settings: dict[str, object] = {}
    checkpoint = None
    config = root / CONFIG
    try:
        document = read_json_object(config)
        settings = as_vllm_reads(config, document)
        problems += _malformed_fields(config, settings)
    except CheckpointError as error:
        problems += error.problems
    try:
        if root == path:
            checkpoint = read_checkpoint(root, ignored=[file.name for file in root.iterdir() if is_for_training(file)])
        else:
            checkpoint = read_single(path)
    except CheckpointError as error:
        problems += error.problems
    if problems or checkpoint is None:
        raise CheckpointError(problems)
    return drafter_of(root, config, document, settings, checkpoint)


def as_vllm_reads(path: Path, document: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that vLLM takes from the configuration ``document`` in the file ``path``.

    Raises CheckpointError for a speculators configuration without its parts.
    """
    if not is_speculators(document):
        return dict(document)
    layer = document.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(
            [f"{path}: transformer_layer_config is {layer!r}, expected an object beside speculators_config"]
        )
    taken = {name: document[name] for name in _SPECULATORS_FIELDS if document.get(name) is not None}
    architecture = _SPECULATORS_ARCHITECTURES.get(str(layer.get("model_type", "llama")), "Eagle3LlamaForCausalLM")
    return {**layer, **taken, "architectures": [architecture]}


def drafter_of(
    root: Path, config: Path, document: Mapping[str, object], settings: Mapping[str, object], checkpoint: Checkpoint
) -> Drafter:
    """Build the drafter whose ``settings`` have no malformed fields."""
    nested = eagle_config(settings)
    architectures = settings["architectures"]
    assert isinstance(architectures, list)
    hidden_size, vocab_size = _integer(settings, "hidden_size"), _integer(settings, "vocab_size")
    assert hidden_size is not None and vocab_size is not None
    return Drafter(
        root=root,
        config=str(config),
        document=document,
        settings=settings,
        checkpoint=checkpoint,
        declared_architecture=architectures[0],
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=_integer(settings, "draft_vocab_size") or vocab_size,
        target_hidden_size=_integer(settings, "target_hidden_size"),
        max_position_embeddings=_integer(settings, "max_position_embeddings"),
        num_aux_hidden_states=_integer(settings, "num_aux_hidden_states"),
        tap_ids=TapIds(_ids(settings, TAP_IDS), _ids(nested, TAP_IDS), _ids(nested, "layer_ids")),
    )


def travelling_files(drafter: Drafter) -> list[Path]:
    """Return the files that a host needs to serve the drafter, by name.

    Left out are what only training reads, weights that are not the drafter's, and folders. The configuration may lie
    elsewhere than the weights.
    """
    weights = set(drafter.checkpoint.shards)
    return sorted(
        (
            Path(drafter.config) if path.name == CONFIG else path
            for path in drafter.root.iterdir()
            if path.is_file()
            and path.suffix in _SERVING_FILES
            and not path.name.startswith(".")
            and not is_for_training(path)
            and (path.suffix != ".safetensors" or path.name in weights)
            and (path.name != INDEX_NAME or drafter.checkpoint.indexed)
        ),
        key=lambda path: path.name,
    )


def content_digest(files: Sequence[Mapping[str, object]]) -> str:
    """Return the SHA-256 that names a set of files, each with name, sha256 and size in bytes."""
    manifest = sorted([str(entry["name"]), str(entry["sha256"]), entry["size"]] for entry in files)
    return sha256_bytes(json.dumps(manifest, separators=(",", ":")).encode("utf-8"))


def is_for_training(path: Path) -> bool:
    """Tell by its name whether only training reads the file ``path``."""
    name = path.name
    return name != INDEX_NAME and (name.endswith(_TRAINING_SUFFIXES) or _TRAINING_FILE.search(name) is not None)


def is_speculators(document: Mapping[str, object]) -> bool:
    """Tell whether vLLM takes the configuration ``document`` for one of the speculators library."""
    return document.get("speculators_config") is not None


def eagle_config(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return the section eagle_config, empty if there is none."""
    nested = settings.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def _malformed_fields(path: Path, settings: Mapping[str, object]) -> list[str]:
    problems = []
    architectures = settings.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        problems.append(f"{path}: architectures is {architectures!r}, expected a list with the drafter's class")
    for name in ("hidden_size", "vocab_size"):
        if not _is_positive(settings.get(name)):
            problems.append(f"{path}: {name} is {settings.get(name)!r}, expected a positive integer")
    for name in ("draft_vocab_size", "target_hidden_size", "max_position_embeddings", "num_aux_hidden_states"):
        if settings.get(name) is not None and not _is_positive(settings[name]):
            problems.append(f"{path}: {name} is {settings[name]!r}, expected a positive integer or nothing")
    nested = eagle_config(settings)
    for section, name in ((settings, TAP_IDS), (nested, TAP_IDS), (nested, "layer_ids")):
        ids = section.get(name)
        if ids is not None and not (isinstance(ids, list) and ids and all(type(item) is int for item in ids)):
            problems.append(f"{path}: {name} is {ids!r}, expected a list of layer ids")
    return problems


def _integer(settings: Mapping[str, object], name: str) -> int | None:
    value = settings.get(name)
    return value if isinstance(value, int) else None


def _ids(section: Mapping[str, object], name: str) -> list[int] | None:
    value = section.get(name)
    return [int(item) for item in value] if isinstance(value, list) else None


def _is_positive(value: object) -> bool:
    return type(value) is int and value > 0
