# SPDX-License-Identifier: Apache-2.0
"""Look at the inventory, in Ansible's own process: to start a module for it takes longer than it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ansible.constants as C
import ansible.module_utils
from ansible.errors import AnsibleActionFail, AnsibleUndefinedVariable
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
    "sources": {"type": "list", "elements": "str", "default": []},
    "names": {"type": "list", "elements": "str", "default": []},
    "needed": {"type": "list", "elements": "str", "default": []},
    "requirements": {"type": "path"},
}


class ActionModule(ActionBase):
    """Documented in library/inventory_check.py."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        hosts = {host: (task_vars or {})["hostvars"][host] for host in options["variables"]}
        missing = list(_missing(hosts, options["needed"]))
        if not missing and options["requirements"]:
            missing = list(_without_lock(hosts, Path(options["requirements"])))
        if missing:
            raise AnsibleActionFail("Nothing was changed. " + "\n".join(missing))
        try:
            return {**result, "changed": False, **look_at_inventory(options)}
        except OSError as error:
            raise AnsibleActionFail(f"{error.filename} cannot be read: {error.strerror}") from error


def _missing(hosts: Mapping[str, Any], needed: list[str]) -> Iterator[str]:
    """Yield a sentence for each of the ``needed`` variables that hosts do not have, or not in full.

    No later task can say it: most of what is looked at on a host is derived from these.
    """
    for name in needed:
        without: dict[str, list[str]] = {}
        for host, variables in hosts.items():
            try:
                if variables.get(name) in (None, ""):
                    without.setdefault("is not set: inventory/sample shows what it is", []).append(host)
            except AnsibleUndefinedVariable as error:
                remedy = "define it, in group_vars/inference/vault.yml if it is a secret (see vault.yml.example there)"
                without.setdefault(f"cannot be read, {error.message}: {remedy}", []).append(host)
        for what, names in without.items():
            yield f"{name} of {', '.join(names)} {what}."


def _without_lock(hosts: Mapping[str, Any], requirements: Path) -> Iterator[str]:
    for lock in sorted({str(variables["ml_env_lock"]) for variables in hosts.values()}):
        path = Path(lock).expanduser() if "/" in lock else requirements / f"{lock}.txt"
        # Ansible looks for a relative one in several places.
        if not path.is_file() and (path.is_absolute() or "/" not in lock):
            known = ", ".join(sorted(file.stem for file in requirements.glob("vllm-*.txt")))
            yield f"ml_env_lock is {lock}, and there is no {path}: make that lock, or take one of {known}."
