#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare what staged.py left of two runs with different numbers of pipeline stages: the same to the bit.

    compare_stages.py ONE OTHER --ids 2,4,6      ids: the taps that the drafter declares

Every step of the engine must have had the same tokens at the same positions, the same taps and the same final hidden
states, and the counters of speculative decoding must be equal. Exits with 1 and names the differences otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch


def steps(directory: Path) -> list[dict[str, Any]]:
    return [torch.load(path) for path in sorted((directory / "taps").glob("*.pt"))]


def differences(step: int, one: dict[str, Any], other: dict[str, Any], ids: list[int]) -> list[str]:
    for name in ("input_ids", "positions"):
        if one[name].tolist() != other[name].tolist():
            return [f"step {step} had the {name} {one[name].tolist()} and {other[name].tolist()}"]
    if not len(one["taps"]) == len(other["taps"]) == len(ids):
        return [f"step {step} had {len(one['taps'])} and {len(other['taps'])} taps, the ids are {ids}"]
    streams = {f"tap {tap}": pair for tap, pair in zip(ids, zip(one["taps"], other["taps"]))}
    streams["the final hidden state"] = (one["hidden"], other["hidden"])
    return [
        f"step {step}: {name} differs by up to {float((left - right).abs().max()):.3g}"
        for name, (left, right) in streams.items()
        if not torch.equal(left, right)
    ]


def distinct(step: dict[str, Any], ids: list[int]) -> list[str]:
    """Taps that were equal among themselves would prove nothing."""
    pairs = [(i, j) for i in range(len(ids)) for j in range(i)]
    return [f"taps {ids[i]} and {ids[j]} are equal" for i, j in pairs if torch.equal(step["taps"][i], step["taps"][j])]


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--ids", type=lambda text: [int(part) for part in text.split(",")], required=True)
    options = parser.parse_args()
    problems = []

    counters = [json.loads((run / "answers.json").read_text()) for run in (options.one, options.other)]
    if counters[0] != counters[1]:
        problems.append(f"the counters are {counters[0]} and {counters[1]}")
    one, other = steps(options.one), steps(options.other)
    if not one or len(one) != len(other):
        return [*problems, f"{len(one)} and {len(other)} steps were dumped"]
    for step, pair in enumerate(zip(one, other)):
        problems += differences(step, *pair, options.ids)
    if not problems:
        problems += distinct(one[0], options.ids)
    tokens = sum(len(step["input_ids"]) for step in one)
    print(f"{len(one)} steps with {tokens} tokens, taps {options.ids}: {len(problems)} differences")
    return problems[:20]


if __name__ == "__main__":
    sys.exit("\n".join(main()) or 0)
