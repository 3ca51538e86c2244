# SPDX-License-Identifier: Apache-2.0
"""Has systemd run the switch program while a switch is under way: it may have been stopped, or never been started.

What the program then does is in its journal: a switch that changed anything is undone, unless it was confirmed.
"""

from __future__ import annotations

import subprocess
import time

from ansible.module_utils.aerie.journal import REQUESTED, Journal, SwitchError
from ansible.module_utils.aerie.unit import UNIT_PROPERTIES, parse_unit

UNIT = "aerie-switch.service"

# systemd starts it at once. A host that goes down refuses to, and before long ends whoever asks.
_COMES_UP_S = 30.0
_POLL_S = 0.2
# One that crashes is started again every two seconds.
_MOST_CRASHES = 10
_UP = ("active", "activating", "reloading")
_REMEDY = f"A switch is under way there, and does not end before it runs: see journalctl -u {UNIT}, and run again"


def resume(journal: Journal, unbegun: str = "") -> None:
    """Have systemd run the program if a switch is under way.

    Whoever did not ask for that switch says with ``unbegun`` why it is undone if it has not begun, since nobody follows
    it. Raises SwitchError if the program does not come up.
    """
    deadline = time.monotonic() + _COMES_UP_S
    while journal.load() and not _is_up():
        if unbegun and journal.state["phase"] == REQUESTED:
            journal.tell("abort", journal.state["deployment"], unbegun)
        said = _systemctl("start", "--no-block", UNIT).stderr.strip()
        if time.monotonic() > deadline:
            why = f" ({said})" if said else ""
            raise SwitchError(f"{UNIT} did not come up within {_COMES_UP_S:g} s{why}. {_REMEDY}")
        time.sleep(_POLL_S)


def _is_up() -> bool:
    unit = parse_unit(_systemctl("show", UNIT, f"--property={','.join(UNIT_PROPERTIES)}").stdout)
    if unit.sub.startswith("auto-restart") and unit.restarts >= _MOST_CRASHES:
        raise SwitchError(f"{UNIT} failed {unit.restarts} times in a row. {_REMEDY}")
    return unit.active in _UP


def _systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
