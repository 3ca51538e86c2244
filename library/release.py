#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Stage a release on a host, and switch the service to it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: release
short_description: Stage a release, or switch the service to one
description:
  - With O(state=staged), names a release by the digest of O(inputs) and O(files) and writes its files. The same
    inputs have the same id on every host. The service is not touched.
  - With O(state=active), makes a staged release the current one and has the service run it. It stops the service,
    puts the release's unit and the link C(current) in place, writes a line of the ledger, and starts the service.
    A service that runs this release with these settings already is left alone.
options:
  root:
    description: The directory of releases, store and ledger.
    type: path
    required: true
  state:
    description: What is wanted.
    type: str
    choices: [staged, active]
    required: true
  inputs:
    description: All that the release is made from and that is not in O(files), such as digests. For O(state=staged).
    type: dict
    default: {}
  files:
    description: Texts of the release's own files, by name. For O(state=staged).
    type: dict
    default: {}
  id:
    description:
      - The release to activate, or C(previous) for the one that served before the current one. For O(state=active).
    type: str
  unit:
    description: Where systemd looks for the service's unit. The release has a file of the same name.
    type: path
    default: /etc/systemd/system/vllm.service
  settings:
    description:
      - The text of the environment file with this host's settings. A service that runs with others is restarted.
      - The text and not the file, which in check mode still has the old ones.
    type: str
    default: ''
  restart:
    description: Restart the service even if it runs this release, since files of it were repaired.
    type: bool
    default: false
  deployment:
    description: The id of the run over the fleet, for the ledger.
    type: str
    default: ''
  why:
    description: Why the release is activated, for the ledger.
    type: str
    default: ''
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: Aerie
"""

EXAMPLES = r"""
- name: Stage the release
  release:
    root: /opt/aerie
    state: staged
    inputs: {lock: 8543ce..., drafter: 91be01...}
    files: {serve.yaml: "{{ lookup('ansible.builtin.template', 'serve.yaml.j2') }}"}
  register: staged

- name: Switch to it
  release:
    root: /opt/aerie
    state: active
    id: "{{ staged.id }}"
    settings: "{{ lookup('ansible.builtin.template', 'vllm.env.j2') }}"
    deployment: 2026-11-29T10:00:00Z
    why: deploy
"""

RETURN = r"""
id:
  description: The release's id.
  type: str
  returned: success
  sample: 1f0c2a9e8d7b6543
path:
  description: The release's directory.
  type: str
  returned: success
previous:
  description: The release that was current before, or nothing.
  type: str
  returned: success
running:
  description: The release that the service's main process had mapped before the call, or nothing.
  type: str
  returned: when O(state=active)
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.release import (
    ReleaseError,
    Releases,
    parse_settings,
    release_id,
    running_service,
)
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "root": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["staged", "active"], "required": True},
    "inputs": {"type": "dict", "default": {}},
    "files": {"type": "dict", "default": {}},
    "id": {"type": "str"},
    "unit": {"type": "path", "default": "/etc/systemd/system/vllm.service"},
    "settings": {"type": "str", "default": ""},
    "restart": {"type": "bool", "default": False},
    "deployment": {"type": "str", "default": ""},
    "why": {"type": "str", "default": ""},
}


def stage(module: AnsibleModule, releases: Releases) -> dict[str, Any]:
    inputs, files = module.params["inputs"], module.params["files"]
    identity = release_id(inputs, files)
    changes = releases.changes(inputs, files)
    if not module.check_mode:
        releases.stage(identity, changes)
    current = releases.path(releases.current()) if releases.current() else Path("/dev/null")
    diff = [
        {
            "before_header": str(current / name),
            "after_header": str(releases.path(identity) / name),
            "before": (current / name).read_text() if (current / name).is_file() else "",
            "after": data.decode(),
        }
        for name, data in sorted(changes.items())
    ]
    return {"id": identity, "changed": bool(changes), "diff": diff}


def switch(module: AnsibleModule, releases: Releases) -> dict[str, Any]:
    identity, unit = module.params["id"], Path(module.params["unit"])
    if identity == "previous":
        identity = releases.previous()
        if not identity:
            raise ReleaseError(f"the ledger of {releases.root} knows no release before {releases.current() or 'any'}")
    # Before the old release is stopped.
    if not (releases.path(identity) / unit.name).is_file() and not module.check_mode:
        known = ", ".join(sorted(path.name for path in releases.path(identity).parent.glob("*"))) or "none"
        raise ReleaseError(f"release {identity} is not on this host; these are: {known}")
    running = running_service(unit.name)
    wanted = parse_settings(module.params["settings"])
    repaired = module.params["restart"] and running.pid != 0
    serves = releases.is_active(identity, unit) and running.release == identity and running.has_settings(wanted)
    as_wanted = serves and not repaired
    if not as_wanted and not module.check_mode:
        previous = releases.current()
        systemctl(module, "stop", unit.name, missing_is_fine=True)
        releases.activate(identity, unit)
        # Before the start, which may fail: what to roll back to is known all the same.
        entry = {"deployment": module.params["deployment"], "action": "activate", "why": module.params["why"]}
        releases.append_to_ledger({**entry, "from": previous, "to": identity})
        systemctl(module, "daemon-reload")
        # A release that failed to start may have used up the starts that systemd allows.
        systemctl(module, "reset-failed", unit.name, may_fail=True)
        systemctl(module, "enable", unit.name)
        systemctl(module, "start", "--no-block", unit.name)
    before = f"release {running.release or 'none'} runs\n"
    return {
        "id": identity,
        "changed": not as_wanted,
        "running": running.release,
        "diff": {"before": before, "after": before if as_wanted else f"release {identity} runs\n"},
    }


def systemctl(module: AnsibleModule, *arguments: str, missing_is_fine: bool = False, may_fail: bool = False) -> None:
    result = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    # 5: there is no such unit, before the first deploy
    if result.returncode and not may_fail and not (missing_is_fine and result.returncode == 5):
        module.fail_json(msg=f"systemctl {' '.join(arguments)} failed: {result.stderr.strip()}")


def main() -> None:
    module = AnsibleModule(
        argument_spec=ARGUMENT_SPEC,
        required_if=[("state", "active", ["id"])],
        supports_check_mode=True,
    )
    # The service's unprivileged user reads what is written here, whatever umask the login has.
    os.umask(0o022)
    releases = Releases(Path(module.params["root"]))
    previous = releases.current()
    try:
        result = (stage if module.params["state"] == "staged" else switch)(module, releases)
    except (ReleaseError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result, path=str(releases.path(result["id"])), previous=previous)


if __name__ == "__main__":
    main()
