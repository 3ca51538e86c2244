# SPDX-License-Identifier: Apache-2.0
"""A toy `vllm` package with a model in the shape that patch sets meet, as a wheel and as an installed environment."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL = "models/toy.py"
INTERFACES = "models/interfaces.py"
RUNNER = "runner.py"

_FILES = {
    "__init__.py": "",
    INTERFACES: """\
class Mixin:
    supports_aux_hidden_states_over_pp: ClassVar[bool] = False
    AUX_HIDDEN_STATE_KEY: ClassVar[str] = "aux_"
    aux_hidden_state_layers: tuple[int, ...] = ()
    _aux_slot_base_cached: int = 0

    def _set_aux_hidden_state_layers(self, layers):
        from vllm.distributed import get_pp_group

        self.aux_hidden_state_layers = tuple(sorted(set(layers)))
        if not get_pp_group().is_first_rank:
            self._aux_slot_base_cached = len([one for one in self.aux_hidden_state_layers if one <= self.start_layer])
""",
    RUNNER: """\
def _inner_decoder(model):
    return getattr(getattr(model, "language_model", model), "model", None)


def verify_supports_aux_hidden_states_over_pp(model, method):
    if not _inner_decoder(model).supports_aux_hidden_states_over_pp:
        raise ValueError(f"{type(model).__name__} does not support {method} with pipeline parallelism")


def aux_hidden_state_relay_keys(model):
    group = get_pp_group()
    if group.is_first_rank or group.is_last_rank:
        return ()
    return tuple(f"aux_{slot}" for slot in range(_inner_decoder(model)._aux_slot_base_cached))
""",
    MODEL: """\
class Model(nn.Module, Mixin):
    supports_aux_hidden_states_over_pp = False

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        if get_pp_group().is_first_rank or get_pp_group().is_last_rank:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size)
        else:
            self.embed_tokens = PPMissingLayer()
        self.start_layer, self.end_layer, self.layers = make_layers(config.num_hidden_layers, Layer)
        self.norm = RMSNorm(config.hidden_size)

    def forward(self, input_ids, positions, intermediate_tensors):
        if get_pp_group().is_first_rank:
            hidden_states, residual = self.embed_tokens(input_ids), None
        else:
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        taps = []
        for index in range(self._aux_slot_base_cached if get_pp_group().is_last_rank else 0):
            taps.append(intermediate_tensors[f"aux_{index}"])
        if get_pp_group().is_first_rank and 0 in self.aux_hidden_state_layers:
            taps.append(hidden_states.clone())
        for idx, layer in enumerate(islice(self.layers, self.start_layer, self.end_layer), start=self.start_layer):
            hidden_states, residual = layer(positions, hidden_states, residual)
            if idx + 1 in self.aux_hidden_state_layers:
                taps.append(self.gathered(hidden_states + residual, positions))
        if not get_pp_group().is_last_rank:
            base = self._aux_slot_base_cached
            mine = {f"aux_{base + slot}": tap for slot, tap in enumerate(taps)}
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual, **mine})
        hidden_states, residual = self.gathered(hidden_states, positions), self.gathered(residual, positions)
        hidden_states, _ = self.norm(hidden_states, residual)
        if taps:
            return hidden_states, taps
        return hidden_states

    def gathered(self, tensor, positions):
        if tensor.shape[0] == positions.shape[0]:
            return tensor
        return tensor_model_parallel_all_gather(tensor, 0)[: positions.shape[0]]


class CausalLM(nn.Module):
    def set_aux_hidden_state_layers(self, layers):
        self.model._set_aux_hidden_state_layers(layers)

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.model(input_ids, positions, intermediate_tensors)


class Wrapper(nn.Module):
    def set_aux_hidden_state_layers(self, layers):
        self.language_model.set_aux_hidden_state_layers(layers)

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.language_model(input_ids, positions, intermediate_tensors)
""",
}

PROOF: dict[str, Any] = {
    "model": {"path": MODEL, "class": "Model"},
    "causal_lm": {"path": MODEL, "class": "CausalLM"},
    "wrapper": {"path": MODEL, "class": "Wrapper"},
    "sources": [
        {"path": INTERFACES, "names": ["Mixin"]},
        {
            "path": RUNNER,
            "names": ["_inner_decoder", "verify_supports_aux_hidden_states_over_pp", "aux_hidden_state_relay_keys"],
        },
    ],
    "pipeline_sizes": [1, 2, 3],
}

OPT_IN = {
    "id": "opt-in",
    "op": "replace_statement",
    "class": "Model",
    "statement": "supports_aux_hidden_states_over_pp = False",
    "code": "supports_aux_hidden_states_over_pp = True",
}


def files(**replaced: bytes) -> dict[str, bytes]:
    """Return the package's files; a key of ``replaced`` is a path with / and . written as _."""
    plain = {path: text.encode() for path, text in _FILES.items()}
    return {path: replaced.get(path.replace("/", "_").replace(".", "_"), data) for path, data in plain.items()}


def patch_set(**changes: object) -> dict[str, Any]:
    """Return a patch set for the toy package: one edit in each of two files, and a proof that holds with the first."""
    return {
        "name": "toy",
        "description": "A toy",
        "versions": ">=0.30,<0.34",
        "native": [{"path": MODEL, "class": "Model", "attribute": "native_mark"}],
        "requires": [{"path": INTERFACES, "class": "Mixin", "method": "_set_aux_hidden_state_layers"}],
        "files": [
            {"path": MODEL, "edits": [OPT_IN]},
            {
                "path": INTERFACES,
                "edits": [{"id": "also", "op": "add_class_attribute", "class": "Mixin", "code": "touched = True"}],
            },
        ],
        "proof": {**PROOF, "pipeline_sizes": [1, 2]},
        "capabilities": {"pipeline_parallel": {}},
        **changes,
    }


def record(package: Mapping[str, bytes], *, hashes: bool = True) -> str:
    rows = []
    for path, data in package.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.append(f"vllm/{path},{f'sha256={digest}' if hashes else ''},{len(data)}")
    return "\n".join([*rows, "vllm-0.33.0.dist-info/RECORD,,"]) + "\n"


def metadata(name: str = "vllm", version: str = "0.33.0") -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def wheel(folder: Path, package: Mapping[str, bytes], name: str = "vllm", version: str = "0.33.0") -> Path:
    """Write a wheel of the package and return its path."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in package.items():
            archive.writestr(f"vllm/{member}", data)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata(name, version))
        archive.writestr(f"{name}-{version}.dist-info/RECORD", record(package))
    return path


def environment(folder: Path, package: Mapping[str, bytes], name: str = "vllm", version: str = "0.33.0") -> Path:
    """Install the package under ``folder`` and return its package directory."""
    package_dir = folder / "site-packages" / "vllm"
    for member, data in package.items():
        target = package_dir / member
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    info = package_dir.with_name(f"{name}-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(metadata(name, version))
    (info / "RECORD").write_text(record(package))
    return package_dir
