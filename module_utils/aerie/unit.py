# SPDX-License-Identifier: Apache-2.0
"""What systemd says of a unit, and what is wrong with one that does not run."""

from __future__ import annotations

import re
from typing import NamedTuple

# What `systemctl show` is asked for.
UNIT_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "MainPID",
    "NRestarts",
    "InvocationID",
    "Result",
    "ExecMainCode",
    "ExecMainStatus",
    "ExecMainStartTimestampMonotonic",
    "ControlGroup",
    "StatusText",
)

# siginfo's codes for a process that a signal ended, as ExecMainCode gives them.
_CLD_KILLED = 2
_CLD_DUMPED = 3


class Unit(NamedTuple):
    """State of a systemd unit.

    ``start_id`` is systemd's invocation id, one for each start. ``started_at`` is the start of its main process in
    seconds of the monotonic clock, None if there was none. ``status`` is what the process told systemd.
    """

    load: str
    active: str
    sub: str
    main_pid: int
    restarts: int
    start_id: str
    result: str
    exit_code: int
    exit_status: int
    started_at: float | None
    control_group: str
    status: str = ""


def parse_unit(text: str) -> Unit:
    """Read the `KEY=value` lines of `systemctl show`; what is missing or no number counts as empty or 0."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def number(key: str) -> int:
        value = values.get(key, "")
        return int(value) if re.fullmatch(r"-?\d{1,18}", value, re.ASCII) else 0

    started = number("ExecMainStartTimestampMonotonic")
    return Unit(
        load=values.get("LoadState", ""),
        active=values.get("ActiveState", ""),
        sub=values.get("SubState", ""),
        main_pid=number("MainPID"),
        restarts=number("NRestarts"),
        start_id=values.get("InvocationID", ""),
        result=values.get("Result", ""),
        exit_code=number("ExecMainCode"),
        exit_status=number("ExecMainStatus"),
        started_at=started / 1e6 if started else None,
        control_group=values.get("ControlGroup", ""),
        status=values.get("StatusText", ""),
    )


def unit_fault(unit: Unit, start_id: str) -> str | None:
    """Say why ``unit`` cannot become ready in the start that ``start_id`` names ("" for whichever is running).

    None while it is starting or running. The sentence fragment fits after "the unit ".
    """
    if unit.load not in ("loaded", "stub", "merged"):
        return f"cannot be used: systemd reports it as {unit.load or 'unknown'}"
    if start_id and unit.start_id and unit.start_id != start_id:
        return f"was started again meanwhile (restarts by systemd: {unit.restarts})"
    if unit.sub == "auto-restart":
        return f"{exit_words(unit)} and waits for its restart"
    if unit.active == "failed":
        return exit_words(unit)
    if unit.active == "inactive":
        if unit.started_at is not None:
            return exit_words(unit)
        # systemd forgets a unit that ended well.
        return "ended by itself with exit status 0" if start_id else "is not running"
    return None


def exit_words(unit: Unit) -> str:
    """Say how the unit's main process ended, as a sentence fragment."""
    if unit.result == "oom-kill":
        return "was killed by the OOM killer"
    if unit.exit_code in (_CLD_KILLED, _CLD_DUMPED):
        return f"was ended by signal {unit.exit_status}"
    if unit.started_at is None:
        return f"failed before its process ran (result: {unit.result or 'unknown'})"
    return f"exited with status {unit.exit_status}"
