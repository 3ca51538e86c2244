#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Find mistakes in an inventory that Ansible itself ignores, and what the control node lacks."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: inventory_check
short_description: Find misspelt variables and addresses that two hosts have
description:
  - Compares the names of an inventory's variables with those that the argument specifications of roles know, since
    Ansible ignores a variable that nothing reads; and the hosts' addresses with each other. Runs on the control node.
  - Names that are neither close to one of these nor start with a role's name are the user's own, and left alone.
  - Looks at what the control node itself must have, drafters and certificates.
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
  drafters:
    description: The drafter of each host, a directory or a file on the control node; empty if there is none to look at.
    type: dict
    default: {}
  certificates:
    description: Files of certificates on the control node whose end is to be looked at.
    type: list
    elements: path
    default: []
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
findings:
  description: What was found, each with id, severity (error or note), message and remedy; empty if nothing was.
  type: list
  elements: dict
  returned: success
  sample:
    - id: variable
      severity: error
      message: variable 'vllm_service_prot' of gpu-01 is unknown
      remedy: did you mean 'vllm_service_port'?
      facts: []
drafter_mb:
  description: The size of each host's drafter, in MB.
  type: dict
  returned: success
  sample: {gpu-01: 6030}
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import yaml
from ansible.module_utils.aerie.findings import Finding
from ansible.module_utils.aerie.inventory import misspelt, shared_addresses
from ansible.module_utils.aerie.preflight_certificate import check_certificate
from ansible.module_utils.aerie.preflight_findings import problem
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "variables": {"type": "dict", "required": True},
    "addresses": {"type": "dict", "required": True},
    "roles": {"type": "path", "required": True},
    "playbooks": {"type": "path", "required": True},
    "drafters": {"type": "dict", "default": {}},
    "certificates": {"type": "list", "elements": "path", "default": []},
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


def check_names(variables: Mapping[str, list[str]], roles: Path, playbooks: Path) -> Iterator[Finding]:
    hosts_of: dict[str, list[str]] = {}
    for host, names in variables.items():
        for name in names:
            hosts_of.setdefault(name, []).append(host)
    suspects = hosts_of.keys() - mentioned_names(roles, playbooks)
    found = misspelt(suspects, known_variables(roles), [path.name for path in roles.iterdir()])
    for name, close in found.items():
        message = f"variable '{name}' of {', '.join(hosts_of[name])} is unknown"
        yield problem("variable", message, f"did you mean '{close}'?")


def check_addresses(addresses: Mapping[str, str]) -> Iterator[Finding]:
    for address, hosts in shared_addresses(addresses).items():
        message = f"{' and '.join(hosts)} have the same address {address}"
        yield problem("address-shared", message, "give each host its own, or remove one")


def check_drafters(drafters: Mapping[str, str]) -> Iterator[Finding]:
    for path in sorted(set(filter(None, drafters.values()))):
        if not Path(path).exists():
            yield problem("drafter", f"there is no drafter at {path} on the control node", "correct drafter_path")


def size_mb(path: Path) -> int:
    """Return the size of a file, or of all files below a directory."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) >> 20


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    options = module.params
    findings = [
        *check_names(options["variables"], Path(options["roles"]), Path(options["playbooks"])),
        *check_addresses(options["addresses"]),
        *check_drafters(options["drafters"]),
    ]
    now = datetime.now(timezone.utc)
    for path in options["certificates"]:
        findings += check_certificate(Path(path), now, " on the control node")
    sizes = {path: size_mb(Path(path)) for path in set(filter(None, options["drafters"].values()))}
    module.exit_json(
        changed=False,
        findings=[finding.as_dict() for finding in findings],
        drafter_mb={host: sizes.get(path, 0) for host, path in options["drafters"].items()},
    )


if __name__ == "__main__":
    main()
