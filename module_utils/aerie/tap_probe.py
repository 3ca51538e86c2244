# SPDX-License-Identifier: Apache-2.0
"""The dialect probe: a drafter with its tap ids shifted by one in each direction, and what their acceptance says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ansible.module_utils.aerie.acceptance_verdict import FAILED
from ansible.module_utils.aerie.dialects import SHIFTS, VLLM, Resolution
from ansible.module_utils.aerie.doctor import derive
from ansible.module_utils.aerie.drafter import CONFIG, Drafter, travelling_files

SHIFTED_BY = (-1, 1)


class Variant(NamedTuple):
    """Tap ids to try, in vLLM's dialect: those that are served, and by how much they were shifted.

    ``path`` is the drafter that declares them, "" for the one that is served; ``left_out`` says why they are not tried.
    """

    shift: int
    tap_ids: list[int]
    path: str
    left_out: str


def variants(drafter: Drafter, served: Sequence[int], num_layers: int, proved: bool, folder: Path) -> list[Variant]:
    """Return the ids as they are ``served``, and shifted by one in each direction as drafters below ``folder``.

    Ids 0 and ``num_layers`` are lost by some releases, and are only tried where they are ``proved`` to be delivered.
    """
    lowest, highest = (0, num_layers) if proved else (1, num_layers - 1)
    found = [Variant(0, list(served), "", "")]
    for shift in SHIFTED_BY:
        ids = [item + shift for item in served]
        outside = [item for item in ids if not lowest <= item <= highest]
        if outside:
            found.append(Variant(shift, ids, "", f"{outside[0]} is outside {lowest} to {highest}"))
        else:
            found.append(Variant(shift, ids, str(write_drafter(drafter, ids, folder)), ""))
    return found


def write_drafter(drafter: Drafter, tap_ids: Sequence[int], folder: Path) -> Path:
    """Return a directory below ``folder`` with ``tap_ids`` in a config.json, and links to the drafter's other files."""
    made = derive(drafter, Resolution(VLLM, list(tap_ids), ()), folder)
    directory = Path(made.config).parent
    wanted = {path.name: path.resolve() for path in travelling_files(drafter) if path.name != CONFIG}
    # Weights that came later may have the same configuration.
    for link in directory.iterdir():
        if link.name != CONFIG and link.resolve() != wanted.get(link.name):
            link.unlink()
    for name, path in wanted.items():
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(path)
    return directory


def table(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return what was measured as lines of text.

    Each of ``measured`` has shift, tap_ids, and ``live``, the live gate's result, or ``left_out``, why there is none.
    """
    rows = [("tap ids", "shift", "acceptance length", "per position", "drafts", "verdict")]
    for item in measured:
        names = (", ".join(map(str, item["tap_ids"])), f"{item['shift']:+d}" if item["shift"] else "as served")
        live = item.get("live") or {}
        length = live.get("acceptance_length")
        if length is None:
            reason = item.get("left_out") or live.get("message") or "no result"
            rows.append((*names, f"not measured: {reason}", "", "", ""))
            continue
        low, high = _bounds(live)
        positions = " ".join(f"{rate:.2f}" for rate in live["per_position"])
        rows.append(
            (*names, f"{length:.2f} ({low:.2f} to {high:.2f})", positions, str(live["drafts"]), live["verdict"])
        )
    full = [row for row in rows if row[-1]]
    widths = [max(len(row[column]) for row in (rows if column < 2 else full)) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def recommend(measured: Sequence[Mapping[str, Any]], declared: Sequence[int] | None) -> str:
    """Say in a sentence or two what to do. ``declared`` are the ids in the drafter's own configuration, if any."""
    known = [item for item in measured if (item.get("live") or {}).get("acceptance_length") is not None]
    served = next((item for item in known if item["shift"] == 0), None)
    others = [item for item in known if item["shift"] != 0]
    if served is None or not others:
        return "There is nothing to compare: keep the tap ids, and see above why the measurement is missing."
    best = max(known, key=lambda item: float(item["live"]["acceptance_length"]))
    ids = _text(best["tap_ids"])
    if best is served:
        if served["live"]["verdict"] == FAILED:
            return (
                f"The tap ids are not the fault: {ids} accept most, and still too little. Check the drafter with `make "
                "doctor`, and that it was trained for this target."
            )
        return f"Keep the tap ids {ids}."
    if _bounds(best["live"])[0] <= _bounds(served["live"])[1]:
        return (
            f"Keep the tap ids {_text(served['tap_ids'])}: {ids} accept more, but not by more than chance. To know, "
            "measure with more prompts."
        )
    if best["live"]["verdict"] == FAILED and best["live"].get("reason") != "below_last_good":
        return (
            f"The tap ids {ids} accept more, and still too little: keep what is served, and check the drafter with "
            "`make doctor`."
        )
    return f"Use the tap ids {ids}: {_how(best['tap_ids'], declared)}, then deploy."


def _how(tap_ids: Sequence[int], declared: Sequence[int] | None) -> str:
    """Say what makes ``tap_ids`` of the ``declared`` ones."""
    dialects = [name for name, shift in SHIFTS.items() if [item + shift for item in declared or ()] == list(tap_ids)]
    if not dialects:
        return "write them into the config.json of a copy of the drafter, with drafter_tap_dialect: vllm"
    others = f" (or {' or '.join(dialects[1:])}, whichever trained it)" if dialects[1:] else ""
    return f"set drafter_tap_dialect: {dialects[0]}{others}"


def _bounds(live: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bounds of the acceptance length; a sample that was too small for bounds tells nothing."""
    low, high = (live.get("bounds") or {}).get("acceptance_length") or (1.0, 1.0 + live["speculative_tokens"])
    return float(low), float(high)


def _text(tap_ids: Sequence[int]) -> str:
    return ", ".join(map(str, tap_ids))
