# SPDX-License-Identifier: Apache-2.0
"""Model directories for tests: headers with real shapes over sparse files, so that 7168 x 21504 needs no disk."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

BITS = {"F4": 4, "BOOL": 8, "U8": 8, "F8_E4M3": 8, "BF16": 16, "F16": 16, "F32": 32, "I32": 32, "I64": 64}

HIDDEN, LAYERS, VOCAB, DRAFT_VOCAB = 7168, 61, 163840, 32000
TAPS = [2, 30, 58]


@dataclass
class TensorFile:
    """A tensor to write: without ``data`` its bytes are a hole."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""


def bf16(*shape: int) -> TensorFile:
    return TensorFile("BF16", shape)


def int64(values: Iterable[int]) -> TensorFile:
    elements = array("q", values)
    return TensorFile("I64", (len(elements),), elements.tobytes())


def boolean(values: Iterable[bool]) -> TensorFile:
    elements = bytes(values)
    return TensorFile("BOOL", (len(elements),), elements)


def write_safetensors(path: Path, tensors: Mapping[str, TensorFile]) -> None:
    """Write a safetensors file that has the size of its shapes and holds what little data was given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + prod(tensor.shape) * BITS[tensor.dtype] // 8
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode("utf-8")
    start = 8 + len(text)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(start + position)
        position = 0
        for tensor in tensors.values():
            stream.seek(start + position)
            stream.write(tensor.data)
            position += prod(tensor.shape) * BITS[tensor.dtype] // 8


def write_sharded(root: Path, shards: Mapping[str, Mapping[str, TensorFile]]) -> None:
    """Write the files of ``shards`` and the index that places their tensors."""
    for name, tensors in shards.items():
        write_safetensors(root / name, tensors)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    write_json(root / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


KIMI_ROPE_SCALING = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
KIMI_TEXT = {
    "model_type": "kimi_k2",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 262144,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "kv_lora_rank": 512,
    "rope_theta": 50000.0,
    "rope_scaling": KIMI_ROPE_SCALING,
    "quantization_config": {"quant_method": "compressed-tensors"},
    "dtype": "bfloat16",
}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "text_config": KIMI_TEXT,
}
KIMI_SHARDS = {
    "model-00001-of-00002.safetensors": {
        "language_model.model.embed_tokens.weight": bf16(VOCAB, HIDDEN),
        "language_model.model.layers.1.mlp.experts.0.gate_proj.weight_packed": TensorFile("I32", (2048, 896)),
    },
    "model-00002-of-00002.safetensors": {"language_model.lm_head.weight": bf16(VOCAB, HIDDEN)},
}


def write_kimi(root: Path) -> Path:
    """Write a small part of Kimi-K2.5 with its real widths into the new directory ``root``."""
    root.mkdir()
    write_json(root / "config.json", KIMI)
    write_json(root / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_kimi.Kimi", None]}})
    write_json(root / "preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "processing_kimi.Processor"}})
    for name in ("configuration_kimi_k25", "tokenization_kimi", "processing_kimi"):
        (root / f"{name}.py").write_text("# remote code\n", encoding="utf-8")
    (root / "tiktoken.model").write_bytes(b"IQ== 0\n")
    write_sharded(root, KIMI_SHARDS)
    return root


def target_facts(**text: object) -> dict[str, Any]:
    """Return what target_check says about Kimi-K2.5, with some of the text model's sizes changed."""
    return {"path": "/models/kimi", "config": "/models/kimi/config.json", "text": {**KIMI_TEXT, **text}}


def spread(draft_vocab: int = DRAFT_VOCAB, vocab: int = VOCAB) -> list[int]:
    """Return target ids for a draft vocabulary, evenly spread over the vocabulary."""
    return [draft * (vocab // draft_vocab) for draft in range(draft_vocab)]


@cache
def _common_maps() -> dict[str, TensorFile]:
    return vocabulary_maps(spread())


def vocabulary_maps(ids: list[int], vocab: int = VOCAB) -> dict[str, TensorFile]:
    """Return the d2t and t2d of a draft vocabulary that stands for ``ids``."""
    marked = set(ids)
    return {
        "d2t": int64(token - draft for draft, token in enumerate(ids)),
        "t2d": boolean(token in marked for token in range(vocab)),
    }


@dataclass
class DrafterFiles:
    """A drafter to write; tests change its parts first."""

    config: dict[str, Any]
    tensors: dict[str, TensorFile]
    others: dict[str, bytes] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        root.mkdir(exist_ok=True)
        write_json(root / "config.json", self.config)
        write_safetensors(root / "model.safetensors", self.tensors)
        for name, data in self.others.items():
            (root / name).write_bytes(data)
        return root


def _drafter(config: dict[str, Any], attention: dict[str, TensorFile]) -> DrafterFiles:
    base = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "num_hidden_layers": 1,
        "max_position_embeddings": 262144,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
    }
    tensors = {
        "fc.weight": bf16(HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": bf16(HIDDEN),
        **{f"midlayer.self_attn.{name}.weight": tensor for name, tensor in attention.items()},
        "midlayer.mlp.down_proj.weight": bf16(HIDDEN, 18432),
        "norm.weight": bf16(HIDDEN),
        "lm_head.weight": bf16(DRAFT_VOCAB, HIDDEN),
        **{name: replace(tensor) for name, tensor in _common_maps().items()},
    }
    return DrafterFiles({**base, **config}, tensors)


def llama_drafter() -> DrafterFiles:
    """Return a healthy Llama drafter for Kimi-K2.5 that shares its embedding."""
    width = 64 * 128
    return _drafter(
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "rope_theta": 1000000.0,
            "rope_scaling": None,
        },
        {
            "q_proj": bf16(width, 2 * HIDDEN),
            "k_proj": bf16(width, 2 * HIDDEN),
            "v_proj": bf16(width, 2 * HIDDEN),
            "o_proj": bf16(HIDDEN, width),
        },
    )


def speculators_drafter() -> DrafterFiles:
    """Return the healthy Llama drafter as the speculators library writes it."""
    drafter = llama_drafter()
    outside = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    layer = {name: drafter.config[name] for name in drafter.config.keys() - {*outside, "architectures", "eagle_config"}}
    drafter.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "moonshotai/Kimi-K2.5", "architectures": ["KimiK25ForConditionalGeneration"]},
        },
        "norm_before_residual": True,
        "transformer_layer_config": layer,
        **{name: drafter.config[name] for name in outside},
    }
    return drafter


def mla_drafter() -> DrafterFiles:
    """Return a healthy MLA drafter for Kimi-K2.5 that shares its embedding."""
    return _drafter(
        {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "kv_lora_rank": 512,
            "rope_theta": KIMI_TEXT["rope_theta"],
            "rope_scaling": {"mscale": 1.0, **KIMI_ROPE_SCALING},
        },
        {
            "q_a_proj": bf16(1536, 2 * HIDDEN),
            "q_b_proj": bf16(64 * 192, 1536),
            "kv_a_proj_with_mqa": bf16(576, 2 * HIDDEN),
            "kv_b_proj": bf16(64 * 256, 512),
            "o_proj": bf16(HIDDEN, 64 * 128),
        },
    )
