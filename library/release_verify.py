#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Compare a host with what its current release says."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: release_verify
short_description: Compare a host with what its current release says
description:
  - Hashes the release's own files, every file of its environment (against the RECORD of its distribution, and patched
    files against what the patch set wrote) and the drafter, and looks at what the service's process really runs.
    Reads gigabytes; changes nothing.
options:
  root:
    description: The directory of releases, store and ledger.
    type: path
    required: true
  unit:
    description: Where systemd looks for the service's unit.
    type: path
    default: /etc/systemd/system/vllm.service
  settings:
    description: The environment file with this host's settings.
    type: path
    default: /etc/aerie/vllm.env
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: Compare the host with its release
  release_verify:
    root: /opt/aerie
  register: verified
"""

RETURN = r"""
release:
  description: The current release's id, or nothing.
  type: str
  returned: success
inputs:
  description: The digests of what the release is made from.
  type: dict
  returned: success
problems:
  description: What differs, each with its remedy; empty if nothing does.
  type: list
  elements: str
  returned: success
"""

from pathlib import Path

from ansible.module_utils.aerie.verification import verify
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "root": {"type": "path", "required": True},
    "unit": {"type": "path", "default": "/etc/systemd/system/vllm.service"},
    "settings": {"type": "path", "default": "/etc/aerie/vllm.env"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    record, problems = verify(*(Path(module.params[name]) for name in ("root", "unit", "settings")))
    module.exit_json(changed=False, release=record.get("id", ""), inputs=record.get("inputs", {}), problems=problems)


if __name__ == "__main__":
    main()
