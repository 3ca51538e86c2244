# SPDX-License-Identifier: Apache-2.0
"""The counters of speculative decoding that a vLLM service shows in its metrics."""

from __future__ import annotations

import re
from typing import NamedTuple

# Prometheus text of vLLM 0.10 to 0.33: all are there from the start when speculation is on, none when it is off.
_SPECULATION_PREFIX = "vllm:spec_decode_num_"
_SAMPLE = re.compile(
    r"^vllm:spec_decode_num_(?P<name>drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total"
    r"(?:\{(?P<labels>.{0,1000})\})? (?P<value>[0-9.eE+]{1,30})$"
)
_POSITION = re.compile(r'position="(\d{1,4})"')


class Speculation(NamedTuple):
    """Counters of speculative decoding, summed over engines; ``accepted_per_position`` from draft position 0."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    def since(self, earlier: Speculation) -> Speculation:
        """Return what was counted after ``earlier``."""
        before = earlier.accepted_per_position
        return Speculation(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(
                now - (before[position] if position < len(before) else 0)
                for position, now in enumerate(self.accepted_per_position)
            ),
        )


def parse_speculation(metrics: str) -> Speculation | None:
    """Read the speculation counters of a /metrics text, or None where it has none."""
    totals = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    positions: dict[int, float] = {}
    found = False
    for line in metrics.splitlines():
        if not line.startswith(_SPECULATION_PREFIX):
            continue
        match = _SAMPLE.match(line)
        value = _number(match["value"]) if match else None
        if match is None or value is None:
            continue
        found = True
        if match["name"] in totals:
            totals[match["name"]] += value
        elif position := _POSITION.search(match["labels"] or ""):
            index = int(position[1])
            positions[index] = positions.get(index, 0.0) + value
    if not found:
        return None
    return Speculation(
        int(totals["drafts"]),
        int(totals["draft_tokens"]),
        int(totals["accepted_tokens"]),
        tuple(int(positions.get(index, 0.0)) for index in range(max(positions, default=-1) + 1)),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value < float("inf") else None
