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
  sources:
    description: Directories and files of the inventory, beside which variables of groups and hosts are.
    type: list
    elements: str
    default: []
  names:
    description: The groups and hosts that there are.
    type: list
    elements: str
    default: []
  needed:
    description: Variables that every host must have, with a value that can be read.
    type: list
    elements: str
    default: []
  requirements:
    description: The directory of locks, one of which the variable C(ml_env_lock) of each host must name.
    type: path
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
