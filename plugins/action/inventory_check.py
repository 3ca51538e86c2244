# SPDX-License-Identifier: Apache-2.0
"""Look at the inventory, in Ansible's own process: to start a module for it takes longer than it does."""

from __future__ import annotations

from typing import Any

import ansible.constants as C
import ansible.module_utils
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie.inventory import look_at_inventory  # noqa: E402

ARGUMENT_SPEC: dict[str, Any] = {
    "variables": {"type": "dict", "required": True},
    "addresses": {"type": "dict", "required": True},
    "roles": {"type": "path", "required": True},
    "playbooks": {"type": "path", "required": True},
    "drafters": {"type": "dict", "default": {}},
    "certificates": {"type": "list", "elements": "path", "default": []},
}


class ActionModule(ActionBase):
    """Documented in library/inventory_check.py."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        try:
            return {**result, "changed": False, **look_at_inventory(options)}
        except OSError as error:
            raise AnsibleActionFail(f"{error.filename} cannot be read: {error.strerror}") from error
