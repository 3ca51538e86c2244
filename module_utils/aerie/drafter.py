# SPDX-License-Identifier: Apache-2.0
"""Whether an EAGLE-3 drafter fits its target, found from both configurations and the drafter's headers alone.

What vLLM does with a field was read in its releases 0.18 to 0.33: the drafter classes in llama_eagle3.py and
deepseek_eagle3.py, and the two model runners' ways to the tap ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ansible.module_utils.aerie.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    CheckpointError,
    read_checkpoint,
    read_json_object,
)
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.safetensors_header import SafetensorsError, read_small_tensor

ERROR, WARNING, NOTE = "error", "warning", "note"

Version = tuple[int, ...]

# The first vLLM release that serves each drafter architecture.
_ARCHITECTURES: dict[str, Version] = {
    "LlamaForCausalLMEagle3": (0,),
    "Eagle3LlamaForCausalLM": (0,),
    "Eagle3DeepseekV2ForCausalLM": (0, 18),
    "Eagle3DeepseekV3ForCausalLM": (0, 18),
}
_MLA = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
# vLLM takes these for the target's own multi-token prediction heads and replaces the architecture.
_MTP_MODEL_TYPES = ("deepseek_v3", "deepseek_v32")
_TAP_IDS = "eagle_aux_hidden_state_layer_ids"
_FIRST_LAYER = ("midlayer.", "layers.0.")

# Releases that changed how a field is read.
_MLA_COUNTS_TAPS = (0, 22)
_LAST_BOUNDARY_CAPTURED = (0, 25)
_RUNNER_V2_BY_DEFAULT = (0, 29)
_SHORT_DRAFTER_SHORTENS_TARGET = (0, 33)

_SERVING_FILES = (".json", ".py", ".safetensors", ".model", ".jinja", ".tiktoken")
_TRAINING_FILE = re.compile(r"optimi[sz]er|scheduler|train(er|ing)|rng_state|random_states|pytorch_model_fsdp", re.I)
_TRAINING_SUFFIXES = (".pt", ".pth", ".ckpt", ".distcp")


@dataclass(frozen=True)
class Fact:
    """A value, what it is the value of, and the file that states it."""

    what: str
    value: object
    file: str

    def __str__(self) -> str:
        return f"{self.what} {self.value} in {self.file}"


@dataclass(frozen=True)
class Finding:
    """One thing that does not fit: the facts that disagree, what follows from that, and what to do."""

    id: str
    severity: str
    facts: tuple[Fact, ...]
    consequence: str
    remedy: str

    @property
    def message(self) -> str:
        """The facts and the consequence in one sentence."""
        return ": ".join(filter(None, (", but ".join(map(str, self.facts)), self.consequence)))

    def as_dict(self) -> dict[str, object]:
        """Return the finding as JSON-able data."""
        return {
            "id": self.id,
            "severity": self.severity,
            "message": self.message,
            "remedy": self.remedy,
            "facts": [{"what": fact.what, "value": fact.value, "file": fact.file} for fact in self.facts],
        }


@dataclass(frozen=True)
class Target:
    """The facts of target_check that a drafter must fit."""

    config: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int

    @classmethod
    def from_facts(cls, facts: Mapping[str, object]) -> Target:
        """Read the ``target`` that target_check returned. Raises ValueError naming what is missing from it."""
        text = facts.get("text")
        numbers = {}
        for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
            value = text.get(name) if isinstance(text, dict) else None
            if type(value) is not int:
                raise ValueError(f"text.{name} is {value!r}, expected an integer")
            numbers[name] = value
        return cls(config=str(facts.get("config", facts.get("path"))), **numbers)


@dataclass(frozen=True)
class Service:
    """How the drafter will be served.

    ``taps_proved``: a patch set whose proof covers the ids 0 and num_layers is part of the release.
    """

    vllm_version: str
    model_runner: str = "auto"
    max_model_len: int | None = None
    taps_proved: bool = False
    release: Version = field(init=False)

    def __post_init__(self) -> None:
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.vllm_version)
        if match is None:
            raise ValueError(f"{self.vllm_version!r} is not a vLLM version such as 0.33.0")
        object.__setattr__(self, "release", tuple(int(part or 0) for part in match.groups()))

    @property
    def runner(self) -> str:
        """The model runner that will read the tap ids: v1 or v2."""
        if self.model_runner != "auto":
            return self.model_runner
        return "v2" if self.release >= _RUNNER_V2_BY_DEFAULT else "v1"


@dataclass(frozen=True)
class TapIds:
    """Where a configuration declares tap ids: the top level, eagle_config, and eagle_config.layer_ids."""

    top_level: list[int] | None
    nested: list[int] | None
    layer_ids: list[int] | None

    def used_by(self, runner: str, num_layers: int) -> list[int]:
        """Return the ids that ``runner`` taps in a target of ``num_layers`` layers, as they are declared."""
        nested = self.layer_ids if runner == "v2" else self.nested
        return self.top_level or nested or default_tap_ids(num_layers)

    @property
    def declared(self) -> list[int] | None:
        """The ids that the drafter's author wrote down."""
        return self.top_level or self.nested or self.layer_ids


@dataclass(frozen=True)
class Drafter:
    """A drafter's configuration, as vLLM reads it, and its weights' headers."""

    root: Path
    config: str
    declared_architecture: str
    model_type: str | None
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int | None
    max_position_embeddings: int | None
    num_aux_hidden_states: int | None
    tap_ids: TapIds
    checkpoint: Checkpoint

    @property
    def architecture(self) -> str:
        """The name under which vLLM looks up a drafter that is served with method eagle3."""
        name = self.declared_architecture
        return name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"

    @property
    def is_mla(self) -> bool:
        """Whether its attention is DeepSeek's latent attention."""
        return self.architecture in _MLA

    @property
    def has_own_embedding(self) -> bool:
        """Whether it brings an embedding; vLLM shares the target's otherwise."""
        return "embed_tokens.weight" in self.checkpoint.tensors

    @property
    def has_own_lm_head(self) -> bool:
        """Whether it brings an output head; vLLM shares the target's otherwise."""
        return any(name.startswith("lm_head.") for name in self.checkpoint.tensors)

    def width(self) -> Fact:
        """The hidden size that it was trained on."""
        if self.target_hidden_size is not None:
            return Fact("target_hidden_size", self.target_hidden_size, self.config)
        return Fact("hidden_size", self.hidden_size, self.config)

    def stored(self, what: str, value: object, tensor: str) -> Fact:
        """A fact about ``tensor``, in the file that holds it."""
        return Fact(what, value, str(self.checkpoint.file_of(tensor)))

    def declares(self, name: str) -> Fact:
        """The configuration's field ``name``, for the fields that are integers here."""
        return Fact(name, getattr(self, name), self.config)


def default_tap_ids(num_layers: int) -> list[int]:
    """Return the ids that vLLM taps when a drafter declares none: early, middle and late."""
    return [2, num_layers // 2, num_layers - 3]


def read_drafter(root: Path) -> Drafter:
    """Read the drafter in the directory ``root``. Raises CheckpointError with all that cannot be read."""
    if not root.is_dir():
        what = "not a directory" if root.exists() else "no such directory on the control node"
        raise CheckpointError([f"{root}: {what}; correct drafter_path"])
    problems: list[str] = []
    config: dict[str, object] = {}
    checkpoint = None
    path = root / "config.json"
    try:
        config = read_json_object(path)
        problems += _malformed_fields(path, config)
    except CheckpointError as error:
        problems += error.problems
    try:
        checkpoint = read_checkpoint(
            root, ignored=[name.name for name in root.iterdir() if _is_for_training(name.name)]
        )
    except CheckpointError as error:
        problems += error.problems
    if problems or checkpoint is None:
        raise CheckpointError(problems)
    return _drafter(root, config, checkpoint)


def check(drafter: Drafter, target: Target, service: Service) -> list[Finding]:
    """Return everything about ``drafter`` that does not fit ``target`` or ``service``, worst first."""
    findings = [finding for part in _CHECKS for finding in part(drafter, target, service)]
    return sorted(findings, key=lambda finding: (ERROR, WARNING, NOTE).index(finding.severity))


def unreadable(error: CheckpointError) -> list[Finding]:
    """Return what kept a drafter from being read as findings."""
    remedy = "fetch the drafter again, or correct drafter_path"
    return [Finding("unreadable", ERROR, (), problem, remedy) for problem in error.problems]


def travelling_files(drafter: Drafter) -> list[Path]:
    """Return the files that a host needs to serve the drafter, by name.

    Left out are what only training reads, weights that the index does not name, and folders.
    """
    weights = set(drafter.checkpoint.shards)
    return sorted(
        path
        for path in drafter.root.iterdir()
        if path.is_file()
        and path.suffix in _SERVING_FILES
        and not path.name.startswith(".")
        and not _is_for_training(path.name)
        and (path.suffix != ".safetensors" or path.name in weights)
    )


def content_digest(files: Sequence[Mapping[str, object]]) -> str:
    """Return the SHA-256 that names a set of files, each with name, sha256 and size in bytes."""
    manifest = sorted([str(entry["name"]), str(entry["sha256"]), entry["size"]] for entry in files)
    return sha256_bytes(json.dumps(manifest, separators=(",", ":")).encode("utf-8"))


def _is_for_training(name: str) -> bool:
    return name != INDEX_NAME and (name.endswith(_TRAINING_SUFFIXES) or _TRAINING_FILE.search(name) is not None)


def _malformed_fields(path: Path, config: Mapping[str, object]) -> list[str]:
    problems = []
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        problems.append(f"{path}: architectures is {architectures!r}, expected a list with the drafter's class")
    for name in ("hidden_size", "vocab_size"):
        if not _is_positive(config.get(name)):
            problems.append(f"{path}: {name} is {config.get(name)!r}, expected a positive integer")
    for name in ("draft_vocab_size", "target_hidden_size", "max_position_embeddings", "num_aux_hidden_states"):
        if config.get(name) is not None and not _is_positive(config[name]):
            problems.append(f"{path}: {name} is {config[name]!r}, expected a positive integer or nothing")
    for section, name in ((config, _TAP_IDS), (_eagle_config(config), _TAP_IDS), (_eagle_config(config), "layer_ids")):
        ids = section.get(name)
        if ids is not None and not (isinstance(ids, list) and ids and all(type(item) is int for item in ids)):
            problems.append(f"{path}: {name} is {ids!r}, expected a list of layer ids")
    return problems


def _drafter(root: Path, config: Mapping[str, object], checkpoint: Checkpoint) -> Drafter:
    """Build the drafter from a configuration without malformed fields."""
    eagle_config = _eagle_config(config)
    architectures = config["architectures"]
    assert isinstance(architectures, list)
    hidden_size, vocab_size = _integer(config, "hidden_size"), _integer(config, "vocab_size")
    assert hidden_size is not None and vocab_size is not None
    return Drafter(
        root=root,
        config=str(root / "config.json"),
        declared_architecture=architectures[0],
        model_type=str(config["model_type"]) if "model_type" in config else None,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=_integer(config, "draft_vocab_size") or vocab_size,
        target_hidden_size=_integer(config, "target_hidden_size"),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        num_aux_hidden_states=_integer(config, "num_aux_hidden_states"),
        tap_ids=TapIds(_ids(config, _TAP_IDS), _ids(eagle_config, _TAP_IDS), _ids(eagle_config, "layer_ids")),
        checkpoint=checkpoint,
    )


def _eagle_config(config: Mapping[str, object]) -> Mapping[str, object]:
    nested = config.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def _integer(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) else None


def _ids(config: Mapping[str, object], name: str) -> list[int] | None:
    value = config.get(name)
    return [int(item) for item in value] if isinstance(value, list) else None


def _is_positive(value: object) -> bool:
    return type(value) is int and value > 0


def _architecture_of(drafter: Drafter) -> Fact:
    return Fact("architecture", drafter.declared_architecture, drafter.config)


def _check_architecture(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    since = _ARCHITECTURES.get(drafter.architecture)
    fact = _architecture_of(drafter)
    if since is None:
        known = ", ".join(_ARCHITECTURES)
        looked_up = f"vLLM looks for {drafter.architecture}, which is none of {known}"
        yield Finding("architecture", ERROR, (fact,), looked_up, "choose a drafter of a known architecture")
    elif service.release < since:
        needed = ".".join(map(str, (*since, 0)))
        yield Finding(
            "architecture",
            ERROR,
            (fact,),
            f"vLLM {service.vllm_version} does not know it, {needed} is the first that does",
            f"deploy vLLM {needed} or newer, or choose a Llama drafter",
        )
    elif drafter.is_mla and drafter.model_type in _MTP_MODEL_TYPES:
        yield Finding(
            "model_type",
            ERROR,
            (fact, Fact("model_type", drafter.model_type, drafter.config)),
            "vLLM takes that model_type for the target's own prediction heads and loads another class",
            'set "model_type": "kimi_k2" in a copy of the drafter',
        )


def _check_hidden_size(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    if drafter.width().value != target.hidden_size:
        yield Finding(
            "hidden_size",
            ERROR,
            (drafter.width(), Fact("hidden_size", target.hidden_size, target.config)),
            "the drafter was trained on another target's hidden states",
            "choose a drafter made for this target",
        )


def _check_fc(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    fc = drafter.checkpoint.tensor("fc.weight")
    if fc is None:
        return
    if len(fc.shape) != 2 or fc.shape[0] != drafter.hidden_size:
        yield Finding(
            "fc_output",
            ERROR,
            (drafter.stored("fc.weight shape", list(fc.shape), "fc.weight"), drafter.declares("hidden_size")),
            "fc must have one row per hidden unit of the drafter",
            "choose weights and config.json of one revision",
        )
        return
    # Whether the runner taps the declared ids, and whether the width is this target's, are other checks' questions.
    ids = drafter.tap_ids.declared or default_tap_ids(target.num_hidden_layers)
    width = drafter.width()
    expected = len(ids) * (drafter.target_hidden_size or drafter.hidden_size)
    if fc.shape[1] != expected:
        file = target.config if width.value == target.hidden_size else width.file
        yield Finding(
            "fc_width",
            ERROR,
            (
                drafter.stored("fc.weight columns", fc.shape[1], "fc.weight"),
                Fact(f"{len(ids)} taps x hidden_size {width.value} =", expected, file),
            ),
            f"fc takes the taps {ids} of {drafter.config} side by side, and their widths do not add up",
            f"correct {_TAP_IDS} in a copy of the drafter, or choose a drafter made for this target",
        )
        return
    counted = _taps_that_vllm_counts(drafter, service)
    if counted.value != len(ids):
        yield Finding(
            "tap_count",
            ERROR,
            (Fact(f"{len(ids)} tap ids", ids, drafter.config), counted),
            f"vLLM {service.vllm_version} builds fc for {counted.value} taps and gets {len(ids)}",
            f'set "num_aux_hidden_states": {len(ids)} in a copy of the drafter',
        )


def _taps_that_vllm_counts(drafter: Drafter, service: Service) -> Fact:
    """Return how many taps the drafter's class is built for: it does not look where the runner looks."""
    if drafter.is_mla and service.release < _MLA_COUNTS_TAPS:
        return Fact("fixed number of taps", 3, f"vLLM {service.vllm_version}")
    if drafter.num_aux_hidden_states is not None:
        return drafter.declares("num_aux_hidden_states")
    if drafter.tap_ids.nested:
        return Fact(f"number of eagle_config.{_TAP_IDS}", len(drafter.tap_ids.nested), drafter.config)
    return Fact("number of taps, for want of num_aux_hidden_states,", 3, drafter.config)


def _check_tensors(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    attention = ("kv_a_proj_with_mqa.",) if drafter.is_mla else ("k_proj.", "qkv_proj.")
    needed = (
        ("fc.",),
        ("norm.weight",),
        tuple(f"{layer}self_attn.{projection}" for layer in _FIRST_LAYER for projection in attention),
    )
    for prefixes in needed:
        if not any(name.startswith(prefixes) for name in drafter.checkpoint.tensors):
            yield Finding(
                "tensor_missing",
                ERROR,
                (
                    _architecture_of(drafter),
                    Fact("no tensor", " or ".join(f"{prefix}*" for prefix in prefixes), str(drafter.root)),
                ),
                "the weights are not those of an EAGLE-3 drafter of this architecture",
                "choose weights and config.json of one revision",
            )
    experts = [name for name in drafter.checkpoint.tensors if ".mlp.experts." in name]
    if experts:
        yield Finding(
            "mixture_of_experts",
            ERROR,
            (
                _architecture_of(drafter),
                drafter.stored("tensor", min(experts), min(experts)),
            ),
            "vLLM's EAGLE-3 drafters have a dense MLP and cannot load experts",
            "choose a drafter with a dense MLP",
        )


def _check_attention_input(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    projections = ("kv_a_proj_with_mqa", "q_a_proj") if drafter.is_mla else ("q_proj", "k_proj", "v_proj")
    for name in [f"{layer}self_attn.{projection}.weight" for layer in _FIRST_LAYER for projection in projections]:
        tensor = drafter.checkpoint.tensor(name)
        if tensor is not None and len(tensor.shape) == 2 and tensor.shape[1] != 2 * drafter.hidden_size:
            yield Finding(
                "attention_width",
                ERROR,
                (
                    drafter.stored(f"{name} columns", tensor.shape[1], name),
                    Fact("2 x hidden_size =", 2 * drafter.hidden_size, drafter.config),
                ),
                "an EAGLE-3 drafter's first layer takes the embedding and the hidden state side by side",
                "choose an EAGLE-3 drafter (EAGLE-1 and MTP weights have other shapes)",
            )
            return


def _check_vocabulary(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    if drafter.vocab_size != target.vocab_size:
        yield Finding(
            "vocab_size",
            ERROR,
            (drafter.declares("vocab_size"), Fact("vocab_size", target.vocab_size, target.config)),
            "drafter and target do not share a tokenizer",
            "choose a drafter made for this target",
        )
    if drafter.draft_vocab_size > drafter.vocab_size:
        yield Finding(
            "draft_vocab_size",
            ERROR,
            (drafter.declares("draft_vocab_size"), drafter.declares("vocab_size")),
            "a draft vocabulary is a part of the vocabulary",
            "choose weights and config.json of one revision",
        )


def _check_embedding(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    tensor = drafter.checkpoint.tensor("embed_tokens.weight")
    if tensor is None:
        if drafter.hidden_size != target.hidden_size and drafter.target_hidden_size is not None:
            yield Finding(
                "embedding_missing",
                ERROR,
                (drafter.declares("hidden_size"), Fact("hidden_size", target.hidden_size, target.config)),
                f"{drafter.root} has no embed_tokens.weight, and the target's embedding is of another width",
                "choose weights that bring their own embedding",
            )
    elif tensor.shape != (drafter.vocab_size, drafter.hidden_size):
        yield Finding(
            "embedding_shape",
            ERROR,
            (
                drafter.stored("embed_tokens.weight shape", list(tensor.shape), "embed_tokens.weight"),
                Fact("vocab_size and hidden_size", [drafter.vocab_size, drafter.hidden_size], drafter.config),
            ),
            "an embedding has a row per token and a column per hidden unit",
            "choose weights and config.json of one revision",
        )


def _check_lm_head(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    tensor = drafter.checkpoint.tensor("lm_head.weight")
    if not drafter.has_own_lm_head and drafter.draft_vocab_size != target.vocab_size:
        yield Finding(
            "lm_head_missing",
            ERROR,
            (drafter.declares("draft_vocab_size"), Fact("vocab_size", target.vocab_size, target.config)),
            f"{drafter.root} has no lm_head.weight, and the target's head has other rows",
            "choose weights that bring their own lm_head (some drafters gained one in a later revision)",
        )
    elif tensor is not None and tensor.shape[:1] != (drafter.draft_vocab_size,):
        yield Finding(
            "lm_head_rows",
            ERROR,
            (
                drafter.stored("lm_head.weight shape", list(tensor.shape), "lm_head.weight"),
                drafter.declares("draft_vocab_size"),
            ),
            "the head must have a row per token of the draft vocabulary",
            "correct draft_vocab_size in a copy of the drafter, or choose weights and config.json of one revision",
        )
    elif tensor is not None and tensor.shape[1:] != (drafter.hidden_size,):
        yield Finding(
            "lm_head_width",
            ERROR,
            (
                drafter.stored("lm_head.weight shape", list(tensor.shape), "lm_head.weight"),
                drafter.declares("hidden_size"),
            ),
            "the head must have a column per hidden unit of the drafter",
            "choose weights and config.json of one revision",
        )


def _check_vocabulary_maps(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    """Check d2t (draft id i stands for the target id i + d2t[i]) and t2d (which target ids have a draft id)."""
    d2t, t2d = drafter.checkpoint.tensor("d2t"), drafter.checkpoint.tensor("t2d")
    sizes = (drafter.declares("draft_vocab_size"), drafter.declares("vocab_size"))
    if drafter.draft_vocab_size >= drafter.vocab_size:
        if d2t is not None and drafter.draft_vocab_size == drafter.vocab_size:
            yield Finding(
                "d2t_unexpected",
                ERROR,
                (drafter.stored("d2t shape", list(d2t.shape), "d2t"), *sizes[:1]),
                "vLLM has no place for a d2t when the draft vocabulary is the whole vocabulary",
                "remove d2t and t2d from a copy of the drafter",
            )
        return
    if d2t is None:
        yield Finding(
            "d2t_missing",
            ERROR,
            sizes,
            f"{drafter.root} has no d2t, so the draft ids would be taken for target ids",
            "choose weights that hold d2t",
        )
        return
    if d2t.shape != (drafter.draft_vocab_size,):
        yield Finding(
            "d2t_length",
            ERROR,
            (drafter.stored("d2t shape", list(d2t.shape), "d2t"), sizes[0]),
            "d2t must have one entry per token of the draft vocabulary",
            "choose weights and config.json of one revision",
        )
        return
    if t2d is not None and t2d.shape != (drafter.vocab_size,):
        yield Finding(
            "t2d_length",
            ERROR,
            (drafter.stored("t2d shape", list(t2d.shape), "t2d"), sizes[1]),
            "t2d must have one entry per token of the target",
            "choose weights and config.json of one revision",
        )
        t2d = None
    try:
        deltas = read_small_tensor(drafter.checkpoint.shards[drafter.checkpoint.tensors["d2t"]], "d2t")
        marks = read_small_tensor(drafter.checkpoint.shards[drafter.checkpoint.tensors["t2d"]], "t2d") if t2d else None
    except SafetensorsError as error:
        fact = Fact("d2t and t2d", "unreadable", str(error.path))
        yield Finding("vocabulary_map", ERROR, (fact,), error.problem, "choose weights whose d2t is int64 and t2d bool")
        return
    drafted = None if marks is None else {token for token, mark in enumerate(marks) if mark}
    yield from _check_map_contents(drafter, deltas, drafted)


def _check_map_contents(drafter: Drafter, deltas: list[int], drafted: set[int] | None) -> Iterator[Finding]:
    """Check the target ids that ``deltas`` lead to, and that they are the ``drafted`` ones that t2d marks."""
    ids = [draft + delta for draft, delta in enumerate(deltas)]
    last = len(ids) - 1
    if _holds_target_ids(deltas, ids, drafted, drafter.vocab_size):
        yield Finding(
            "d2t_absolute",
            ERROR,
            (
                drafter.stored(f"d2t[{last}] + {last} =", ids[last], "d2t"),
                drafter.stored("the entry", deltas[last], "d2t"),
            ),
            "d2t holds target ids, and vLLM adds the draft id to each",
            "subtract 0, 1, 2, ... from d2t in a copy of the drafter",
        )
        return
    outside = next((draft for draft, token in enumerate(ids) if not 0 <= token < drafter.vocab_size), None)
    if outside is not None:
        yield Finding(
            "d2t_range",
            ERROR,
            (
                drafter.stored(f"d2t[{outside}] + {outside} =", ids[outside], "d2t"),
                drafter.declares("vocab_size"),
            ),
            "d2t leads outside the vocabulary",
            "choose a drafter made for this target, or repair d2t",
        )
        return
    first_draft: dict[int, int] = {}
    for draft, token in enumerate(ids):
        other = first_draft.setdefault(token, draft)
        if other != draft:
            yield Finding(
                "d2t_duplicate",
                ERROR,
                (
                    drafter.stored(f"d2t[{other}] + {other} =", token, "d2t"),
                    drafter.stored(f"d2t[{draft}] + {draft} =", token, "d2t"),
                ),
                "two draft ids stand for one target id",
                "repair d2t, or choose a drafter made for this target",
            )
            return
    if drafted is not None and len(drafted) != drafter.draft_vocab_size:
        yield Finding(
            "t2d_count",
            ERROR,
            (
                drafter.stored("number of tokens marked by t2d", len(drafted), "t2d"),
                drafter.declares("draft_vocab_size"),
            ),
            "t2d must mark as many tokens as the draft vocabulary has",
            "choose d2t, t2d and config.json of one training run",
        )
    elif drafted is not None and drafted != first_draft.keys():
        token = min(drafted.symmetric_difference(ids))
        yield Finding(
            "t2d_mismatch",
            ERROR,
            (
                drafter.stored(f"t2d[{token}]", token in drafted, "t2d"),
                drafter.stored(f"number of d2t entries for token {token}:", int(token in first_draft), "d2t"),
            ),
            "d2t and t2d describe two vocabularies",
            "choose d2t and t2d of one training run",
        )


def _holds_target_ids(deltas: list[int], ids: list[int], drafted: set[int] | None, vocab_size: int) -> bool:
    """Tell whether d2t's entries are target ids themselves, rather than differences that lead to ``ids``."""
    if drafted is not None:
        return set(deltas) == drafted and set(ids) != drafted
    return ids[-1] >= vocab_size > deltas[-1] and all(low < high for low, high in zip(deltas, deltas[1:]))


def _check_tap_ids(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    taps, layers = drafter.tap_ids, target.num_hidden_layers
    default, declared = default_tap_ids(layers), drafter.tap_ids.declared
    used = taps.used_by(service.runner, layers)
    n_layers = Fact("num_hidden_layers", layers, target.config)
    if declared is None:
        yield Finding(
            "tap_ids_undeclared",
            NOTE,
            (Fact(_TAP_IDS, "not declared", drafter.config), n_layers),
            f"vLLM taps its default {default}",
            f"write the ids that the drafter was trained on as {_TAP_IDS} into a copy of it",
        )
        return
    if taps.top_level and taps.nested and taps.top_level != taps.nested:
        yield Finding(
            "tap_ids_conflict",
            ERROR,
            (
                Fact(_TAP_IDS, taps.top_level, drafter.config),
                Fact(f"eagle_config.{_TAP_IDS}", taps.nested, drafter.config),
            ),
            "the drafter was trained on one of them",
            "keep the ids of the training run, in both places, in a copy of the drafter",
        )
        return
    if taps.top_level is None:
        yield from _check_nested_ids(drafter, declared, used, n_layers, service)
    yield from _check_id_values(drafter, declared, n_layers, service)


def _check_nested_ids(
    drafter: Drafter, declared: list[int], used: list[int], n_layers: Fact, service: Service
) -> Iterator[Finding]:
    """Model Runner V2 looks for ids in eagle_config under another name than V1."""
    if declared == (drafter.tap_ids.layer_ids if service.runner == "v2" else drafter.tap_ids.nested):
        return
    same = sorted(declared) == sorted(used)
    yield Finding(
        "tap_ids_nested",
        NOTE if same else ERROR,
        (Fact("tap ids in eagle_config", declared, drafter.config), n_layers),
        f"Model Runner {service.runner.upper()} of vLLM {service.vllm_version} does not read them there and taps {used}"
        + (", which are the same" if same else ""),
        f"write them at the top level as well ({_TAP_IDS}) in a copy of the drafter",
    )


def _check_id_values(drafter: Drafter, declared: list[int], n_layers: Fact, service: Service) -> Iterator[Finding]:
    layers = n_layers.value
    assert isinstance(layers, int)
    ids = Fact("tap ids", declared, drafter.config)
    outside = [item for item in declared if not 0 <= item <= layers]
    if outside:
        yield Finding(
            "tap_ids_range",
            ERROR,
            (ids, n_layers),
            f"{outside[0]} is outside 0 to {layers}, so no such hidden state exists",
            "choose a drafter made for this target, or correct the ids in a copy of it",
        )
    elif len(set(declared)) != len(declared):
        yield Finding(
            "tap_ids_duplicate",
            ERROR,
            (ids, Fact("distinct ids", sorted(set(declared)), drafter.config)),
            "vLLM delivers each tap once",
            "correct the ids in a copy of the drafter",
        )
    elif declared != sorted(declared):
        yield Finding(
            "tap_ids_order",
            ERROR,
            (ids, Fact("ids in ascending order", sorted(declared), drafter.config)),
            "vLLM delivers taps in ascending order whatever order is declared",
            "sort the ids, and fc.weight's columns if training concatenated them as declared, in a copy of the drafter",
        )
    if not service.taps_proved:
        lost = [0] if 0 in declared else []
        if layers in declared and service.release < _LAST_BOUNDARY_CAPTURED:
            lost.append(layers)
        for item in lost:
            yield Finding(
                "tap_id_lost",
                ERROR,
                (ids, n_layers),
                f"vLLM {service.vllm_version} as released does not deliver tap {item} of this model family",
                "deploy with a patch set that delivers it" + (", or vLLM 0.25.0 or newer" if item else ""),
            )


def _check_max_position(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    if service.max_model_len is not None:
        needed, served = service.max_model_len, Fact("max_model_len", service.max_model_len, "the service's options")
    else:
        needed = target.max_position_embeddings
        served = Fact("max_position_embeddings", needed, target.config)
    length = drafter.max_position_embeddings
    if length is None or length >= needed:
        return
    shortens = service.release >= _SHORT_DRAFTER_SHORTENS_TARGET and service.runner == "v2"
    yield Finding(
        "max_position",
        ERROR if shortens else WARNING,
        (drafter.declares("max_position_embeddings"), served),
        f"vLLM {service.vllm_version} would silently cut the target's context to {length} tokens"
        if shortens
        else f"nothing is drafted beyond {length} tokens",
        f"set max_model_len to {length} or less, or choose a drafter made for the longer context",
    )


def _check_training_files(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    names = sorted(path.name for path in drafter.root.iterdir() if path.is_file() and _is_for_training(path.name))
    if names:
        size = sum((drafter.root / name).stat().st_size for name in names)
        yield Finding(
            "training_files",
            NOTE,
            (Fact(f"{', '.join(names)} of together", f"{size} bytes", str(drafter.root)),),
            "only training reads them, they are not sent to hosts",
            "nothing to do",
        )


_CHECKS: tuple[Callable[[Drafter, Target, Service], Iterator[Finding]], ...] = (
    _check_architecture,
    _check_hidden_size,
    _check_fc,
    _check_tensors,
    _check_attention_input,
    _check_vocabulary,
    _check_embedding,
    _check_lm_head,
    _check_vocabulary_maps,
    _check_tap_ids,
    _check_max_position,
    _check_training_files,
)
