#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Tell what a host serves, and what was done to it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: release_status
short_description: Tell what a host serves, and what was done to it
description:
  - Looks at the current release, its service, its counters and its files by signs that are cheap to read, and reads
    the ledger. Changes nothing.
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
    description: The files with this host's settings.
    type: list
    elements: path
    default: [/etc/aerie/vllm.env]
  entries:
    description: How many of the ledger's newest entries to return.
    type: int
    default: 0
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: See what the host serves
  release_status:
    root: /opt/aerie
    entries: 20
  register: status
"""

RETURN = r"""
release:
  description: The current release, or nothing.
  type: str
  returned: success
running:
  description: The release that the service's main process runs, or nothing.
  type: str
  returned: success
healthy:
  description: Whether the service answers /health.
  type: bool
  returned: success
worker:
  description: Whether this host is a part of a replica that answers on another host.
  type: bool
  returned: success
deployment:
  description: The deployment that brought the current release.
  type: str
  returned: success
deployed:
  description: When it did.
  type: str
  returned: success
vllm:
  description: The version of vLLM.
  type: str
  returned: success
patched:
  description: The files of vLLM that the release's patch set wrote.
  type: list
  elements: str
  returned: success
drafter:
  description: The drafter's digest, or nothing without speculation.
  type: str
  returned: success
serves:
  description: The model's name, the number of speculative tokens and the tap ids.
  type: dict
  returned: success
service:
  description: The state of the unit.
  type: str
  returned: success
uptime_s:
  description: Seconds since its process was started, or none.
  type: int
  returned: success
restarts:
  description: How often systemd restarted it by itself.
  type: int
  returned: success
acceptance:
  description: Drafts, accepted tokens and acceptance length of all traffic since the start, or none.
  type: dict
  returned: success
switch:
  description: The switch that is under way, or none.
  type: dict
  returned: success
problems:
  description: All that somebody should look at.
  type: list
  elements: str
  returned: success
ledger:
  description: The ledger's newest entries, oldest first.
  type: list
  elements: dict
  returned: success
"""

from pathlib import Path

from ansible.module_utils.aerie.release import Releases
from ansible.module_utils.aerie.status import status
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "root": {"type": "path", "required": True},
    "unit": {"type": "path", "default": "/etc/systemd/system/vllm.service"},
    "settings": {"type": "list", "elements": "path", "default": ["/etc/aerie/vllm.env"]},
    "entries": {"type": "int", "default": 0},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    root, entries = Path(module.params["root"]), module.params["entries"]
    found = status(root, Path(module.params["unit"]), [Path(path) for path in module.params["settings"]])
    ledger = Releases(root).ledger()[-entries:] if entries else []
    module.exit_json(changed=False, ledger=ledger, **found)


if __name__ == "__main__":
    main()
