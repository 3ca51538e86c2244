#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the taps of vLLM's own model classes with Hugging Face's hidden states, at every id, without an engine.

    taps.py TARGET_DIR      TARGET_DIR: a Kimi-K2.5 checkpoint; its text model is also loaded as DeepSeek-V3

Runs in an environment with vLLM's CPU build, in float32, one prompt through one pipeline stage. Tap i is the residual
stream in front of layer i: 0 is the embedding, and the number of layers is the last layer's output before the final
norm. Prints the largest difference of each id, and exits with 1 naming those above the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What vLLM's CPU build takes from the environment it takes when it is imported.
os.environ.update(
    {"VLLM_MLA_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
)

import torch
from hf_greedy import load_model, write_text_model
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata

TOLERANCE = 1e-4
PROMPT = torch.arange(40, 51)


def hugging_face_streams(target: Path, prompt: torch.Tensor) -> list[torch.Tensor]:
    """Return the residual stream (tokens, hidden) in front of every layer and of the final norm."""
    model = load_model(target)
    streams: list[torch.Tensor] = []
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0][0].clone()))
    with torch.inference_mode():
        model(prompt[None], use_cache=False)
    return streams


def engine_config(target: Path) -> VllmConfig:
    return EngineArgs(
        model=str(target),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=1,
        enforce_eager=True,
        trust_remote_code=True,
        skip_tokenizer_init=True,
        # vLLM's rotary kernel for CPUs is not exact.
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
    ).create_engine_config()


def one_request(tokens: int, block_size: int) -> CommonAttentionMetadata:
    """Return the metadata for the first step of one request, whose keys and values go to block 1."""
    starts, length = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=length,
        num_reqs=1,
        num_actual_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens,
        block_table_tensor=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.arange(block_size, block_size + tokens),
        causal=True,
    )


def attention(config: VllmConfig, tokens: int) -> dict[str, Any]:
    """Give every attention layer a KV cache, and return what the forward context needs for one request."""
    layers = config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in layers.items() if hasattr(layer, "get_kv_cache_spec")}
    first = next(iter(layers.values()))
    spec, backend = first.get_kv_cache_spec(config), first.get_attn_backend()
    config.cache_config.block_size = spec.block_size
    # Two blocks, with a key and a value side by side in each row.
    shape = (2, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    for layer in layers.values():
        layer.kv_cache = torch.zeros(shape, dtype=spec.dtype)
    common = one_request(tokens, spec.block_size)
    metadata = backend.get_builder_cls()(spec, list(layers), config, torch.device("cpu")).build(0, common)
    return {
        "attn_metadata": dict.fromkeys(layers, metadata),
        "slot_mapping": dict.fromkeys(layers, common.slot_mapping),
    }


def vllm_taps(target: Path, prompt: torch.Tensor, ids: Sequence[int]) -> list[torch.Tensor]:
    """Return the taps (tokens, hidden) at ``ids`` that the model's own interface declares and its forward gives."""
    config = engine_config(target)
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
        model.set_aux_hidden_state_layers(tuple(ids))
        context = attention(config, len(prompt))
        with torch.inference_mode(), set_forward_context(vllm_config=config, num_tokens=len(prompt), **context):
            _, taps = model(prompt, torch.arange(len(prompt)))
    return list(taps)


def compare(name: str, taps: Sequence[torch.Tensor], streams: Sequence[torch.Tensor]) -> list[str]:
    if len(taps) != len(streams):
        return [f"{name}: {len(taps)} taps for the ids 0 to {len(streams) - 1}"]
    differences = [float((tap - stream).abs().max()) for tap, stream in zip(taps, streams)]
    print(json.dumps({name: differences}))
    # Written so that a NaN is a problem too.
    wrong = [(tap, value) for tap, value in enumerate(differences) if not value <= TOLERANCE]
    return [
        f"{name}: tap {tap} differs from Hugging Face by {value:.2g}, more than {TOLERANCE}" for tap, value in wrong
    ]


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="TARGET_DIR")
    target = parser.parse_args().target
    torch.set_num_threads(1)
    # As vLLM's worker for CPUs does: torch refuses to empty the cache of an accelerator that is not there.
    torch.accelerator.empty_cache = lambda: None
    streams = hugging_face_streams(target, PROMPT)
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "text")
        text.mkdir()
        write_text_model(target, text)
        with set_current_vllm_config(engine_config(text)):
            init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
            initialize_model_parallel(1, 1)
        problems = []
        for name, path in (("DeepSeek-V3", text), ("Kimi-K2.5", target)):
            problems += compare(name, vllm_taps(path, PROMPT, range(len(streams))), streams)
    return problems


if __name__ == "__main__":
    sys.exit("\n".join(main()) or 0)
