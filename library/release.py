#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Stage releases on a host, and remove those that nobody needs."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: release
short_description: Stage releases on a host, and remove those that nobody needs
description:
  - With O(state=staged), names a release by the digest of O(inputs) and O(files) and writes its files. The same
    inputs have the same id on every host.
  - With O(state=complete), notes that a release is wholly staged, with its environment and its weights. Only such a
    release can be switched to.
  - With O(state=pruned), removes old releases, and what nothing in the store refers to then.
  - The service is not touched; the switch to a release is M(switch)'s.
options:
  root:
    description: The directory of releases, store and ledger.
    type: path
    required: true
  state:
    description: What is wanted.
    type: str
    choices: [staged, complete, pruned]
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
    description: The release that is complete. For O(state=complete).
    type: str
  request:
    description: Digests of all that the release was planned from, as M(release_probe) returns them.
    type: dict
    default: {}
  made:
    description:
      - Whether the environment was made just now. Otherwise, where its files are others than those that were noted
        before, each is compared with what was installed, and one that differs fails. For O(state=complete).
    type: bool
    default: false
  keep:
    description:
      - How many releases stay, those that served last first. One that is current, that a process runs or that would be
        rolled back to always stays, and so does one that was staged within a day and not tried yet.
    type: int
    default: 3
  after:
    description:
      - The release that this run has serve. In check mode, what is removed once it does is predicted. For
        O(state=pruned).
    type: str
    default: ''
  caches:
    description: Where releases keep what they compile, each in a directory that its unit names.
    type: path
    default: /var/cache/vllm
  units:
    description: Where the units of Aerie's programs lie. What none of them names below O(root)/tools is removed.
    type: path
    default: /etc/systemd/system
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

- name: Keep three releases
  release:
    root: /opt/aerie
    state: pruned
    keep: 3
"""

RETURN = r"""
id:
  description: The release's id.
  type: str
  returned: when O(state=staged) or O(state=complete)
  sample: 1f0c2a9e8d7b6543
path:
  description: The release's directory.
  type: str
  returned: when O(state=staged) or O(state=complete)
previous:
  description: The release that was current before, or nothing.
  type: str
  returned: when O(state=staged)
complete:
  description: Whether it was wholly staged before, with its environment and its weights.
  type: bool
  returned: when O(state=staged)
removed:
  description: What was removed.
  type: list
  elements: str
  returned: when O(state=pruned)
"""

import os
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import read_text
from ansible.module_utils.aerie.journal import Journal
from ansible.module_utils.aerie.program import unused
from ansible.module_utils.aerie.release import ReleaseError, Releases, release_id
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "root": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["staged", "complete", "pruned"], "required": True},
    "inputs": {"type": "dict", "default": {}},
    "files": {"type": "dict", "default": {}},
    "id": {"type": "str"},
    "request": {"type": "dict", "default": {}},
    "made": {"type": "bool", "default": False},
    "keep": {"type": "int", "default": 3},
    "after": {"type": "str", "default": ""},
    "caches": {"type": "path", "default": "/var/cache/vllm"},
    "units": {"type": "path", "default": "/etc/systemd/system"},
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
            "before": read_text(current / name) or "",
            "after": data.decode(),
        }
        for name, data in sorted(changes.items())
    ]
    return {
        "id": identity,
        "path": str(releases.path(identity)),
        "previous": releases.current(),
        "complete": bool(releases.completion(identity)),
        "changed": bool(changes),
        "diff": diff,
    }


def complete(module: AnsibleModule, releases: Releases) -> dict[str, Any]:
    identity = module.params["id"]
    # What was planned is no change of the host's: nothing is reported for the note of it.
    releases.complete(identity, module.params["request"], module.params["made"], check=module.check_mode)
    return {"id": identity, "path": str(releases.path(identity)), "changed": False}


def prune(module: AnsibleModule, releases: Releases) -> dict[str, Any]:
    journal = Journal(releases.root)
    aimed_at = [journal.state[side]["id"] for side in ("from", "to")] if journal.load() else []
    current, after = releases.current(), module.params["after"]
    # One that is about to serve will be gone back from to what serves now.
    previous = releases.newest_deployment().get("from", "") if after in ("", current) else current
    unwanted = releases.prune(
        module.params["keep"],
        [*aimed_at, previous],
        check=module.check_mode,
        caches=Path(module.params["caches"]),
        after=after,
    )
    programs = unused(releases.root / "tools", Path(module.params["units"]))
    if not module.check_mode:
        for path in programs:
            shutil.rmtree(path)
    removed = [str(path) for path in (*unwanted, *programs)]
    diff = {"before": "".join(f"{path}\n" for path in removed), "after": ""}
    return {"removed": removed, "changed": bool(removed), "diff": diff}


def main() -> None:
    module = AnsibleModule(
        argument_spec=ARGUMENT_SPEC,
        required_if=[("state", "complete", ["id"])],
        supports_check_mode=True,
    )
    if module.params["keep"] < 1:
        module.fail_json(msg=f"keep is {module.params['keep']}: at least one release must stay")
    # The service's unprivileged user reads what is written here, whatever umask the login has.
    os.umask(0o022)
    act = {"staged": stage, "complete": complete, "pruned": prune}[module.params["state"]]
    try:
        result = act(module, Releases(Path(module.params["root"])))
    except (ReleaseError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
