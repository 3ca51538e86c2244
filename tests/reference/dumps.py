#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plant faults in dumps that Hugging Face makes, and say what the comparison calls each of them.

    dumps.py      in an environment with torch and transformers, with tools/ and our package on PYTHONPATH

DeepSeek-V3 at two sizes, the reference in float32; the other dump as it is, and rounded to bfloat16. Prints JSON:
`<size> <dtype>` -> planted fault -> the name that the comparison gives, its verdict, and the noise.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ansible.module_utils.aerie.tap_dump import TAPS, compare_files
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel

dump: Any = importlib.import_module("dump_hidden_states").dump

TOKENS = [(37 * index) % 256 for index in range(48)]
SIZES = {"small": (8, 64), "large": (24, 256)}
Tensors = dict[str, Any]


def model_of(layers: int, hidden: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=1,
        max_position_embeddings=128,
        initializer_range=0.5 / hidden**0.5,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


def quantised(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """Round every matrix to integers of ``bits``, with a scale for each row."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "embed" not in name:
                step = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
                weight.copy_((weight / step).round() * step)
    return model


def planted(layers: int, hidden: int, ids: tuple[int, ...], whole: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Yield each fault's name and the deployed target's dump with it; ``whole`` has everything of every layer."""

    def taps(name: str, shift: int = 0) -> Tensors:
        # The streams at taps go by the taps' name.
        values = {**whole, **{f"streams.{id_}": whole[f"{TAPS}.{id_}"] for id_ in ids}}
        return {f"{TAPS}.{id_}": values[f"{name}.{id_ + shift}"] for id_ in ids}

    streams = taps("streams")
    yield "matches", streams
    for shift in (-2, -1, 1, 2):
        yield f"off by {shift:+d} layer{'' if abs(shift) == 1 else 's'}", taps("streams", shift)
    yield "taps permuted", dict(zip(streams, [*streams.values()][1:] + [*streams.values()][:1]))
    yield "residual missing", taps("updates")
    yield "only the residual", taps("residuals")
    yield "normalised stream", taps("normalised")
    yield "scaled by 0.5", {name: 0.5 * value for name, value in streams.items()}
    yield "other model", dump(model_of(layers, hidden, seed=7), TOKENS, ids, "none", "float32")
    for bits in (8, 4):
        noisy = dump(quantised(model_of(layers, hidden, seed=0), bits), TOKENS, ids, "none", "float32")
        yield f"quantised to {bits} bits", noisy


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        reference, deployed = Path(scratch, "reference"), Path(scratch, "deployed")
        for size, (layers, hidden) in SIZES.items():
            ids = (2, layers // 2, layers - 3)
            whole = dump(model_of(layers, hidden, seed=0), TOKENS, ids, "all", "float32")
            save_file(whole, reference)
            for dtype in (torch.float32, torch.bfloat16):
                names = found.setdefault(f"{size} {str(dtype).rpartition('.')[2]}", {})
                for fault, taps in planted(layers, hidden, ids, whole):
                    rounded = {key: taps[key].to(dtype) for key in taps if key.startswith(TAPS)}
                    save_file({**rounded, "token_ids": whole["token_ids"], "tap_ids": whole["tap_ids"]}, deployed)
                    result = compare_files(reference, deployed)
                    names[fault] = [result["fault"], result["verdict"], result["noise"]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
