# SPDX-License-Identifier: Apache-2.0
"""Action plugin: repeat short calls of the module service_gate, and show how the start goes."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

_SHOW_EVERY_S = 10.0
_BUDGET_VARIABLE = "vllm_service_start_budget"


class ActionModule(ActionBase):
    """Waits in windows of a few seconds, so that the control node sees every phase of a long start."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the last call's result: ready, failed at once, or failed because the budget is used up."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        try:
            budget_s = float(arguments.get("budget_s", 1800))
        except (TypeError, ValueError):
            return {
                **result,
                "failed": True,
                "msg": f"budget_s is {arguments['budget_s']!r}; give a number of seconds.",
            }
        host = str((task_vars or {}).get("inventory_hostname", ""))
        arguments.setdefault("host", host)
        began = time.monotonic()
        progress = _Progress(host)
        while True:
            called = time.monotonic()
            arguments["budget_s"] = max(budget_s - (called - began), 0.0)
            outcome: dict[str, Any] = self._execute_module("service_gate", module_args=arguments, task_vars=task_vars)
            now = time.monotonic()
            if outcome.get("failed") or outcome.get("skipped") or outcome.get("ready") or "phase" not in outcome:
                return {**result, **outcome}
            # Later calls must see the same start: another one means that this one died.
            arguments["start_id"] = outcome["start_id"]
            arguments["moved"] = outcome["moved"]
            progress.show(outcome, now, now - called)
            if now - began >= budget_s:
                return {**result, **outcome, "failed": True, "msg": _over_budget(host, outcome, budget_s)}


class _Progress:
    """Shows a line when the phase changes, and before 10 seconds pass without one."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._phase = ""
        self._shown = float("-inf")

    def show(self, outcome: dict[str, Any], now: float, call_s: float) -> None:
        # The next chance comes after another call.
        if outcome["phase"] == self._phase and now - self._shown + call_s <= _SHOW_EVERY_S:
            return
        self._phase = outcome["phase"]
        self._shown = now
        display.display(f"{self._host}: {outcome['words']} ({outcome['elapsed_s']:.0f} s)")


def _over_budget(host: str, outcome: dict[str, Any], budget_s: float) -> str:
    return (
        f"vLLM on {host} was not ready after {budget_s:g} s: it is at {outcome['words']}, {outcome['elapsed_s']:.0f} s "
        f"after its start. If it still makes progress, raise {_BUDGET_VARIABLE}; journal_tail shows what it does."
    )
