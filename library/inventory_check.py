#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Find mistakes in an inventory that Ansible itself ignores."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: inventory_check
short_description: Find misspelt variables and addresses that two hosts have
description:
  - Compares the names of an inventory's variables with those that the argument specifications of roles know, since
    Ansible ignores a variable that nothing reads; and the hosts' addresses with each other. Runs on the control node.
  - Names that are neither close to one of these nor start with a role's name are the user's own, and left alone.
options:
  variables:
    description: The names of each host's variables.
    type: dict
    required: true
  addresses:
    description: The address of each host; empty if it is reached by its name.
    type: dict
    required: true
  roles:
    description: The directory of roles.
    type: path
    required: true
  playbooks:
    description: The directory of playbooks. What they and the roles pass to each other is known as well.
    type: path
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: Look at the inventory
  inventory_check:
    variables: {gpu-01: [vllm_service_prot]}
    addresses: {gpu-01: 10.1.0.1, gpu-02: 10.1.0.1}
    roles: roles
    playbooks: playbooks
  delegate_to: localhost
"""

RETURN = r"""
problems:
  description: What was found, each with its remedy; empty if nothing was.
  type: list
  elements: str
  returned: success
  sample: ["variable 'vllm_service_prot' of gpu-01 is unknown: did you mean 'vllm_service_port'?"]
"""

import re
from pathlib import Path

import yaml
from ansible.module_utils.aerie.inventory import misspelt, shared_addresses
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "variables": {"type": "dict", "required": True},
    "addresses": {"type": "dict", "required": True},
    "roles": {"type": "path", "required": True},
    "playbooks": {"type": "path", "required": True},
}
_NAME = re.compile(r"[A-Za-z_]\w*")


def known_variables(roles: Path) -> set[str]:
    known: set[str] = set()
    for path in roles.glob("*/meta/argument_specs.yml"):
        for entry_point in yaml.safe_load(path.read_text())["argument_specs"].values():
            known.update(entry_point.get("options", {}))
    return known


def mentioned_names(*directories: Path) -> set[str]:
    """Return every name in YAML files: the facts that roles and playbooks set are there when a play follows another."""
    files = [path for directory in directories for path in directory.rglob("*.yml")]
    return {name for path in files for name in _NAME.findall(path.read_text())}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    roles, playbooks = Path(module.params["roles"]), Path(module.params["playbooks"])
    hosts_of: dict[str, list[str]] = {}
    for host, names in module.params["variables"].items():
        for name in names:
            hosts_of.setdefault(name, []).append(host)
    suspects = hosts_of.keys() - mentioned_names(roles, playbooks)
    found = misspelt(suspects, known_variables(roles), [path.name for path in roles.iterdir()])
    problems = [
        f"variable '{name}' of {', '.join(hosts_of[name])} is unknown: did you mean '{close}'?"
        for name, close in found.items()
    ]
    problems += [
        f"{' and '.join(hosts)} have the same address {address}: give each host its own, or remove one"
        for address, hosts in shared_addresses(module.params["addresses"]).items()
    ]
    module.exit_json(changed=False, problems=problems)


if __name__ == "__main__":
    main()
