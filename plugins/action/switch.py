# SPDX-License-Identifier: Apache-2.0
"""Action plugin: follow the switch program of a host, show its phases, and bear with a host that is out of reach."""

from __future__ import annotations

import getpass
import socket
import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

_SHOW_EVERY_S = 10.0
_RETRY_S = 2.0
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
        progress = _Progress(str((task_vars or {}).get("inventory_hostname", "")))
        patience = time.monotonic() + float(arguments.get("patience_s", 300))
        if state == "started":
            arguments.setdefault("who", f"{getpass.getuser()}@{socket.gethostname()}")
        while True:
            outcome = self._call(arguments, task_vars, patient=state != "started")
            goes_on = outcome.get("outcome") in _GOES_ON and state != "proceeded"
            if outcome.get("failed") or self._task.check_mode or not goes_on or "phase" not in outcome:
                return {**result, **outcome}
            # It waits for another host of its replica, however long that cannot be reached.
            if outcome["switch"].get("waits_for") and state == "confirmed" and time.monotonic() > patience:
                return {**result, **outcome}
            progress.show(outcome)

    def _call(self, arguments: dict[str, Any], task_vars: dict[str, Any] | None, patient: bool) -> dict[str, Any]:
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
            time.sleep(_RETRY_S)
            # A connection that was kept open is of no use after a reboot.
            self._connection.reset()


class _Progress:
    """Shows a line when the phase changes, and every few seconds while one lasts."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._text = ""
        self._shown = float("-inf")

    def show(self, outcome: dict[str, Any]) -> None:
        progress = outcome["progress"]
        percent = f" {progress['percent']} %" if progress.get("percent") is not None else ""
        inside = f": {progress['phase']}{percent}" if progress.get("phase") else ""
        full = ", and there is no room on the disk" if outcome.get("disk_full") else ""
        text = f"{self._host}: {outcome['phase']}{inside}{full}"
        now = time.monotonic()
        if text != self._text or now - self._shown >= _SHOW_EVERY_S:
            self._text, self._shown = text, now
            display.display(f"{text} ({progress['elapsed_s']:.0f} s)" if progress.get("elapsed_s") else text)
