# SPDX-License-Identifier: Apache-2.0
"""Show what the preflight of all hosts found, and stop if there is a problem."""

from __future__ import annotations

from typing import Any

import ansible.constants as C
import ansible.module_utils
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie.findings import ERROR  # noqa: E402
from ansible.module_utils.aerie.preflight_report import HostReport, combine, finding_table, host_table  # noqa: E402

ARGUMENT_SPEC: dict[str, Any] = {
    "reached": {"type": "dict", "required": True},
    "looked": {"type": "dict", "default": {}},
    "control": {"type": "list", "elements": "dict", "default": []},
}


class ActionModule(ActionBase):
    """Documented in library/preflight_report.py."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        hosts = combine(options["reached"], options["looked"])
        reports = [HostReport("inventory", tuple(options["control"]), {}), *hosts]
        display = Display()
        display.display(host_table(hosts))
        notes = finding_table([_only(report, problems=False) for report in reports])
        if notes:
            display.display(f"\n{notes}")
        result["changed"] = False
        if table := finding_table([_only(report, problems=True) for report in reports]):
            result.update(failed=True, msg=f"Nothing was changed. Mend these and run again:\n{table}")
        return result


def _only(report: HostReport, problems: bool) -> HostReport:
    """Return the report with its problems alone, or with its notes alone."""
    findings = tuple(finding for finding in report.findings if (finding["severity"] == ERROR) is problems)
    return HostReport(report.name, findings, report.facts)
