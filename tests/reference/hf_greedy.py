#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face transformers generates greedily: the reference that a served model is compared with.

    hf_greedy.py TARGET_DIR [--max-tokens 32] < prompts.json > reference.json

Runs in a release's own environment (torch and transformers, nothing of vLLM), in float32 with eager attention and
without a KV cache. prompts.json is a list of prompts, each a text or a list of token ids. The answer is an object:
`prompts`, in order, each with `prompt_token_ids`, `token_ids` (always --max-tokens of them: the end-of-turn token does
not stop it, so ask the server with `ignore_eos`) and `smallest_gap`, the smallest difference between the two largest
logits of any step, below which a difference between two implementations proves nothing; and the smallest of all gaps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

TEXT = "language_model."


def write_text_model(target: Path, directory: Path) -> None:
    """Write the text model inside a Kimi-K2.5 checkpoint to `directory` as the DeepSeek-V3 checkpoint that it is."""
    config = json.loads((target / "config.json").read_text())
    text_config = {**config["text_config"], "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(text_config))
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(target.glob("*.safetensors")):
        loaded = load_file(shard)
        tensors |= {name.removeprefix(TEXT): loaded[name] for name in loaded if name.startswith(TEXT)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_model(target: Path) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as scratch:
        source = target
        if json.loads((target / "config.json").read_text())["model_type"] == "kimi_k25":
            source = Path(scratch)
            write_text_model(target, source)
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise SystemExit(f"{target}: {problem} {sorted(map(str, report[problem]))}: not a checkpoint of this model")
    return model.eval()


def generate(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    tokens, smallest_gap = list(prompt), float("inf")
    for _ in range(max_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        values, indices = logits.topk(2)
        smallest_gap = min(smallest_gap, float(values[0] - values[1]))
        tokens.append(int(indices[0]))
    return {"prompt_token_ids": prompt, "token_ids": tokens[len(prompt) :], "smallest_gap": smallest_gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="TARGET_DIR")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)  # for matrices this small, sharing the work costs more than it saves
    prompts = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    encoded = [tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt for prompt in prompts]
    model = load_model(options.target)
    results = [generate(model, prompt, options.max_tokens) for prompt in encoded]
    json.dump({"prompts": results, "smallest_gap": min(result["smallest_gap"] for result in results)}, sys.stdout)


if __name__ == "__main__":
    main()
