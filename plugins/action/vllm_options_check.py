# SPDX-License-Identifier: Apache-2.0
"""Compare a service's options with those of its release, in Ansible's own process, which has the wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ansible.constants as C
import ansible.module_utils
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie.source import Refusal  # noqa: E402
from ansible.module_utils.aerie.vllm_options import check_options  # noqa: E402

ARGUMENT_SPEC: dict[str, Any] = {
    "wheel": {"type": "path", "required": True},
    "options": {"type": "dict", "required": True},
}


class ActionModule(ActionBase):
    """Documented in library/vllm_options_check.py."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        try:
            found = check_options(Path(arguments["wheel"]), arguments["options"])
        except Refusal as refusal:
            raise AnsibleActionFail(str(refusal)) from refusal
        if found["problems"]:
            text = f"{'. '.join(found['problems'])}. Correct the service's options."
            return {**result, **found, "changed": False, "failed": True, "msg": text}
        return {**result, **found, "changed": False}
