# SPDX-License-Identifier: Apache-2.0
"""Action plugin: follow the switch program of a host, show its phases, and bear with a host that is out of reach."""

from __future__ import annotations

import getpass
import socket
import time
from typing import Any

import ansible.constants as C
import ansible.module_utils
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie.waiting import Lines  # noqa: E402

display = Display()

_RETRY_S = 2.0
# The module's default.
_WINDOW_S = 5.0
_GOES_ON = ("under way", "in progress")


class ActionModule(ActionBase):
    """Calls the module `switch` in windows of a few seconds until the program needs an answer or has ended."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the last call's result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        state = arguments.get("state")
        lines = Lines(str((task_vars or {}).get("inventory_hostname", "")), display.display)
        began = time.monotonic()
        patience = began + float(arguments.get("patience_s", 300))
        follow_s = float(arguments.get("follow_s", 0)) or float("inf")
        arguments["window_s"] = min(float(arguments.get("window_s", _WINDOW_S)), follow_s)
        if state == "started":
            arguments.setdefault("who", f"{getpass.getuser()}@{socket.gethostname()}")
        while True:
            with lines.kept():
                outcome = self._call(arguments, task_vars, lines, patient=state != "started")
            goes_on = outcome.get("outcome") in _GOES_ON and state != "proceeded"
            if outcome.get("failed") or self._task.check_mode or not goes_on or "phase" not in outcome:
                return {**result, **outcome}
            # It waits for another host of its replica, however long that cannot be reached.
            if outcome["switch"].get("waits_for") and state == "confirmed" and time.monotonic() > patience:
                return {**result, **outcome}
            _show(lines, outcome)
            if state == "followed" and time.monotonic() - began > follow_s:
                return {**result, **outcome}

    def _call(
        self, arguments: dict[str, Any], task_vars: dict[str, Any] | None, lines: Lines, patient: bool
    ) -> dict[str, Any]:
        """Call the module; with ``patient``, again and again for a while if the host cannot be reached."""
        deadline = time.monotonic() + float(arguments.get("patience_s", 300))
        while True:
            over = not patient or time.monotonic() > deadline
            try:
                outcome: dict[str, Any] = self._execute_module("switch", module_args=arguments, task_vars=task_vars)
            except AnsibleConnectionFailure:
                if over:
                    raise
            else:
                # A host that goes down kills the module before it takes the connection away.
                if over or "module_stdout" not in outcome:
                    return outcome
            lines.say("out of reach", "cannot be reached; the switch goes on by itself")
            time.sleep(_RETRY_S)
            # A connection that was kept open is of no use after a reboot.
            self._connection.reset()


def _show(lines: Lines, outcome: dict[str, Any]) -> None:
    progress = outcome["progress"]
    phase = progress.get("phase", "")
    inside = f": {progress.get('words', phase)}" if phase else ""
    full = ", and there is no room on the disk" if outcome.get("disk_full") else ""
    lines.say(f"{outcome['phase']}: {phase}{full}", f"{outcome['phase']}{inside}{full}", progress.get("elapsed_s"))
