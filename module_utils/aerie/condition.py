# SPDX-License-Identifier: Apache-2.0
"""What became of a file of vLLM that is neither pristine nor what Aerie wrote, told from its bytes.

A user can do something about a state only when it is named: each has its own words and its own remedy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ansible.module_utils.aerie.source import MARKER

TRUNCATED, PARTLY, FOREIGN, OTHER_AERIE, EDITED_PATCH, EDITED = (
    "truncated",
    "partly patched",
    "foreign patch",
    "patched by another Aerie",
    "edited after the patch",
    "edited",
)
_EDIT = re.compile(re.escape(MARKER) + r"(\S+:\S+)\s*$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w+")
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Condition:
    """``kind``, what happened in words, the remedy, and the known version that the file is nearest to."""

    kind: str
    what: str
    remedy: str
    nearest: bytes
    nearest_name: str


def edits_in(data: bytes) -> list[str]:
    """Return the edits (``<set>:<id>``) whose markers ``data`` carries, each once, in the file's order."""
    return list(dict.fromkeys(_EDIT.findall(_text(data))))


def diagnose(current: bytes, release: str, pristine: bytes, patched: bytes) -> Condition:
    """Say what happened to a file of ``release`` (such as ``vllm 0.33.0``) that now holds ``current``.

    ``pristine`` and ``patched`` are its known versions; an empty one is not known.
    """
    known = [(pristine, f"the file of {release}"), (patched, "the patched file")]
    reinstall = f"install {release} again"
    for data, name in known:
        if data.startswith(current) and len(current) < len(data):
            what = f"is cut off: it holds the first {len(current)} of {len(data)} bytes of {name}"
            return Condition(TRUNCATED, what, f"{reinstall}; a copy or a repair was interrupted", data, name)
    have, wanted = edits_in(current), edits_in(patched)
    if not have:
        shared = _names_added(pristine, current) & _names_added(pristine, patched) if pristine and patched else set()
        if shared:
            shown = ", ".join(sorted(shared, key=lambda name: (-len(name), name))[:_NAMES_SHOWN])
            what = f"holds another patch for the same thing, not Aerie's (it brings {shown})"
            remedy = f"keep that patch and drop the patch set, or take it out ({reinstall})"
            return Condition(FOREIGN, what, remedy, *known[0])
        remedy = f"keep the change elsewhere and {reinstall}"
        return Condition(EDITED, "was edited by someone else", remedy, *known[0])
    missing = [edit for edit in wanted if edit not in have]
    if missing and set(have) < set(wanted):
        what = f"is patched in part: {len(missing)} of Aerie's {len(wanted)} edits are missing ({', '.join(missing)})"
        return Condition(PARTLY, what, reinstall, *known[1])
    if (not wanted or set(have) != set(wanted)) and pristine and _only_marked_lines_added(pristine, current):
        what = f"was patched by another Aerie, or with another store (edits {', '.join(have)})"
        remedy = f"take the patch out with the Aerie and the store that wrote it, or {reinstall}"
        return Condition(OTHER_AERIE, what, remedy, *known[0])
    remedy = f"take that edit out, or keep it elsewhere and {reinstall}"
    return Condition(EDITED_PATCH, "was edited after Aerie patched it", remedy, *known[1 if patched else 0])


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _added(before: bytes, after: bytes) -> Sequence[str]:
    """Return the lines that ``after`` has and ``before`` has not."""
    old, new = _text(before).splitlines(), _text(after).splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [line for tag, _, _, start, end in matcher.get_opcodes() if tag != "equal" for line in new[start:end]]


def _names_added(before: bytes, after: bytes) -> set[str]:
    """Return the names that ``after`` brings into a file which has none of them in ``before``."""
    lines = (line.partition("#")[0] for line in _added(before, after))
    return {name for line in lines for name in _NAME.findall(line)} - set(_NAME.findall(_text(before)))


def _only_marked_lines_added(before: bytes, after: bytes) -> bool:
    return all(_EDIT.search(line) or not line.strip() for line in _added(before, after))
