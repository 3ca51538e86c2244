#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the wheelhouse action; the work is done by plugins/action/wheelhouse.py on the control node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: wheelhouse
short_description: Have every wheel of a lock on the control node
description:
  - Looks in O(path) for the file of every requirement of O(lock), and downloads what is missing with pip, which
    verifies the SHA-256 digests that the lock names. Shows what it downloads while it does.
  - Runs on the control node, whatever the task's host is.
options:
  lock:
    description: A requirements file with hashes; its first line names Python and platform, see requirements/README.md.
    type: path
    required: true
  path:
    description: The directory of wheels. Locks may share it.
    type: path
    required: true
  fallback_index:
    description: Index of builds with a local version, such as C(torch==2.13.0+cpu), if the configured one lacks them.
    type: str
    default: ''
  only:
    description: Names of the requirements that are needed. Without it, all of them.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Downloads in check mode as well. The cache is not what is deployed, and the plan is made from it.
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: Have the wheels of vLLM 0.33.0
  wheelhouse:
    lock: requirements/vllm-0.33.0-cu130-py312.txt
    path: /var/tmp/aerie/cache/wheels
  register: wheels
"""

RETURN = r"""
files:
  description: A file for every requirement, as M(stage_files) takes them.
  type: list
  elements: dict
  returned: success
  sample:
    - {name: jinja2-3.1.6-py3-none-any.whl, path: /cache/jinja2-3.1.6-py3-none-any.whl, sha256: 8543..., size: 134899}
lock_sha256:
  description: SHA-256 of the lock's bytes.
  type: str
  returned: success
python:
  description: The Python release that the lock was resolved for.
  type: str
  returned: success
  sample: '3.12'
vllm_version:
  description: The vLLM release of the lock.
  type: str
  returned: success
  sample: 0.33.0
vllm_wheel:
  description: Path of the wheel that has vLLM's code.
  type: str
  returned: success
"""
