#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write hidden states as a training tool may have kept them: a reference made with Hugging Face, and nothing of Aerie.

    training_dump.py TARGET_DIR --ids 2,4,6 > reference.safetensors

Runs in a release's own environment (torch, transformers and safetensors), in float32. Tap k is the stream entering
layer k. The file has what docs/hidden-states.md asks for, and no stream besides the taps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from hf_greedy import load_model
from safetensors.torch import save

# Printable characters, in no order that a model could know.
TOKENS = [33 + (37 * index) % 94 for index in range(48)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="TARGET_DIR")
    parser.add_argument("--ids", type=lambda text: [int(part) for part in text.split(",")], required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.target)
    entering: list[torch.Tensor] = []
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0][0].clone()))
    with torch.inference_mode():
        model(torch.tensor([TOKENS]), use_cache=False)
    tensors = {f"hidden_states.{id_}": entering[id_] for id_ in options.ids}
    tensors |= {"token_ids": torch.tensor(TOKENS), "tap_ids": torch.tensor(options.ids)}
    sys.stdout.buffer.write(save(tensors))


if __name__ == "__main__":
    main()
