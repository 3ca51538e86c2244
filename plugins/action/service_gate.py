# SPDX-License-Identifier: Apache-2.0
"""Action plugin: repeat short calls of the module service_gate, and show how the start goes."""

from __future__ import annotations

import time
from typing import Any

import ansible.constants as C
import ansible.module_utils
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie.waiting import Lines  # noqa: E402

display = Display()

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
        lines = Lines(host, display.display)
        while True:
            arguments["budget_s"] = max(budget_s - (time.monotonic() - began), 0.0)
            with lines.kept():
                outcome: dict[str, Any] = self._execute_module(
                    "service_gate", module_args=arguments, task_vars=task_vars
                )
            if outcome.get("failed") or outcome.get("skipped") or outcome.get("ready") or "phase" not in outcome:
                return {**result, **outcome}
            # Later calls must see the same start: another one means that this one died.
            arguments["start_id"] = outcome["start_id"]
            arguments["moved"] = outcome["moved"]
            lines.say(outcome["phase"], outcome["words"], outcome["elapsed_s"])
            if time.monotonic() - began >= budget_s:
                return {**result, **outcome, "failed": True, "msg": _over_budget(host, outcome, budget_s)}


def _over_budget(host: str, outcome: dict[str, Any], budget_s: float) -> str:
    return (
        f"vLLM on {host} was not ready after {budget_s:g} s: it is at {outcome['words']}, {outcome['elapsed_s']:.0f} s "
        f"after its start. If it still makes progress, raise {_BUDGET_VARIABLE}; journal_tail shows what it does."
    )
