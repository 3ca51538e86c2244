#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin plugins/action/preflight_report.py, which does the work on the control node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: preflight_report
short_description: Show what the preflight of all hosts found
description:
  - Shows a table of hosts and one of notes, and fails with a table of problems if there are any. Runs on the control
    node, once for all hosts.
options:
  reached:
    description: What C(ssh_check) returned, by host.
    type: dict
    required: true
  looked:
    description: What C(preflight) returned, by host; nothing for hosts that were only to be reached.
    type: dict
    default: {}
  control:
    description: Findings that are no single host's.
    type: list
    elements: dict
    default: []
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: Stop if there is any problem
  preflight_report:
    reached: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'preflight_ssh'))) }}"
    looked: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'preflight_host'))) }}"
  run_once: true
"""

RETURN = r"""
msg:
  description: The table of problems.
  type: str
  returned: when there are any
"""
