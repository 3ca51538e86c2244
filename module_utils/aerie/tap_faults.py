# SPDX-License-Identifier: Apache-2.0
"""The name of what is wrong with taps, from what each of them turned out to hold.

A tap of id k must hold the residual stream that enters layer k. What it holds instead is one of FORMS, at a layer of
its own. The programs that find this out (by comparing arrays) and the ones that show it share the words here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# What a layer's entrance holds: the residual stream; the output of the previous layer's MLP, which vLLM keeps apart and
# adds to the residual later; that residual alone; and the stream after the layer's input norm.
STREAM, UPDATE, RESIDUAL, NORMALISED = FORMS = ("stream", "update", "residual", "normalised")

MATCHES = "matches"
PERMUTED = "taps permuted"
RESIDUAL_MISSING = "residual missing"
UPDATE_MISSING = "only the residual"
NORMALISED_STREAM = "normalised stream"
SCALED = "scaled"
OTHER_MODEL = "other model"
MIXED = "several faults"

_FAULT_OF_FORM = {UPDATE: RESIDUAL_MISSING, RESIDUAL: UPDATE_MISSING, NORMALISED: NORMALISED_STREAM}
# Taps of one scale are scaled alike up to this, relative.
_SAME_SCALE = 0.01


class Held(NamedTuple):
    """What the tap of ``id`` holds: ``form`` at ``layer``, times ``scale``. An empty ``form`` is nothing known."""

    id: int
    form: str
    layer: int
    scale: float = 1.0

    @property
    def is_right(self) -> bool:
        """Whether the tap holds what its id says."""
        return self.form == STREAM and self.layer == self.id and abs(self.scale - 1.0) <= _SAME_SCALE

    def __str__(self) -> str:
        if not self.form:
            return f"tap {self.id} holds no stream of this model"
        what = {
            STREAM: f"stream {self.layer}",
            UPDATE: f"stream {self.layer} without the residual",
            RESIDUAL: f"the residual of stream {self.layer} without what the last layer added",
            NORMALISED: f"stream {self.layer} after the norm",
        }[self.form]
        scaled = "" if abs(self.scale - 1.0) <= _SAME_SCALE else f" times {self.scale:.3g}"
        return f"tap {self.id} holds {what}{scaled}"


class Fault(NamedTuple):
    """A fault's ``name`` (MATCHES where there is none) and one clause that says which taps show it."""

    name: str
    detail: str


def off_by(layers: int) -> str:
    """Return the name for taps that are ``layers`` later than their ids say."""
    return f"off by {layers:+d} layer{'' if abs(layers) == 1 else 's'}"


def name_fault(taps: Sequence[Held]) -> Fault:
    """Return the one fault that explains every wrong tap, or MIXED.

    Where some taps are right, the others name the fault: without the residual, for example, id 0 is still right.
    """
    wrong = [tap for tap in taps if not tap.is_right]
    if not wrong:
        return Fault(MATCHES, f"{len(taps)} of {len(taps)} taps hold the stream that their id names")
    if not any(tap.form for tap in taps):
        return Fault(OTHER_MODEL, _detail(wrong, len(taps)))
    return Fault(_common(wrong), _detail(wrong, len(taps)))


def _common(wrong: Sequence[Held]) -> str:
    forms = {tap.form for tap in wrong}
    shifts = {tap.layer - tap.id for tap in wrong}
    scales = [tap.scale for tap in wrong]
    if forms <= set(_FAULT_OF_FORM) and len(forms) == 1 and shifts == {0}:
        return _FAULT_OF_FORM[forms.pop()]
    if forms == {STREAM}:
        if shifts == {0} and max(scales) - min(scales) <= _SAME_SCALE * abs(max(scales)):
            return f"{SCALED} by {sum(scales) / len(scales):.3g}"
        if any(abs(scale - 1.0) > _SAME_SCALE for scale in scales):
            return MIXED
        if len(wrong) > 1 and sorted(tap.layer for tap in wrong) == sorted(tap.id for tap in wrong):
            return PERMUTED
        if len(shifts) == 1:
            return off_by(shifts.pop())
    return MIXED


def _detail(wrong: Sequence[Held], total: int, shown: int = 3) -> str:
    more = f" and {len(wrong) - shown} more" if len(wrong) > shown else ""
    return f"{len(wrong)} of {total} taps are wrong: {'; '.join(map(str, wrong[:shown]))}{more}"
