#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin plugins/action/ssh_check.py, which does the work on the control node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: ssh_check
short_description: Reach a host, or say why not
description:
  - Logs in over Ansible's own connection, with all its options, and asks what modules need there - Python, directories
    for temporary files, privileges - and the time. Runs no module and changes nothing.
  - Where the login fails, goes the same way step by step with paramiko and names the step that fails, such as the port,
    the host key or the login. The host stays in the play, so that all hosts' causes can be shown at once.
options: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: Reach the host
  ssh_check: {}
"""

RETURN = r"""
reached:
  description: Whether the login works.
  type: bool
  returned: always
usable:
  description: Whether modules can run there.
  type: bool
  returned: always
login:
  description: The user and the file of the key that the inventory names, each empty if it names none.
  type: dict
  returned: always
  sample: {user: deploy, key: ~/.ssh/id_ed25519}
findings:
  description: What is wrong, each with id, severity (error or note), message and remedy.
  type: list
  elements: dict
  returned: always
"""
