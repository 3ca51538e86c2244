#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""The host's half of staging files; plugins/action/stage_files.py sends them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: stage_files
short_description: Put files of the control node into a directory of the host, verified, and only those that it lacks
description:
  - Asks the host which of O(files) O(dest) lacks, sends those over Ansible's own connection, verifies their SHA-256
    there, and renames them into place. What an interrupted run has sent completely is not sent again.
  - Needs neither rsync nor room in the login's home, and uses no memory in proportion to the files.
options:
  dest:
    description: The directory on the host. Made if it is missing.
    type: path
    required: true
  files:
    description: The files.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: The file's name in O(dest), without a directory.
        type: str
        required: true
      path:
        description: Where it is on the control node.
        type: path
        required: true
      sha256:
        description: The digest that it must have, in hexadecimal.
        type: str
        required: true
      size:
        description: Its size in bytes. Without it, that of the file on the control node.
        type: int
  reuse:
    description:
      - A directory on the host. What any directory in it has already, by name and digest, is not sent but linked from
        there.
      - It must be on the file system of O(dest).
    type: path
  step:
    description: Which half the action asks for. Not for playbooks.
    type: str
    choices: [query, accept]
    default: query
  login:
    description: The user that the action sends files as. Not for playbooks.
    type: str
    default: ''
attributes:
  check_mode:
    support: full
    description: Says what would be sent, and writes nothing.
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: Send the wheels
  stage_files:
    files: "{{ wheels.files }}"
    dest: /opt/aerie/wheelhouse
"""

RETURN = r"""
missing:
  description: The names of the files that the host lacked.
  type: list
  elements: str
  returned: success
unsent:
  description: Those of RV(missing) that an interrupted run had not sent completely.
  type: list
  elements: str
  returned: success
"""

import os
from pathlib import Path

from ansible.module_utils.aerie.staging import (
    ExpectedFile,
    StagingError,
    accept_incoming,
    link_from,
    missing_files,
    open_incoming,
)
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "dest": {"type": "path", "required": True},
    "files": {
        "type": "list",
        "elements": "dict",
        "required": True,
        "options": {
            "name": {"type": "str", "required": True},
            "path": {"type": "path", "required": True},
            "sha256": {"type": "str", "required": True},
            "size": {"type": "int"},
        },
    },
    "reuse": {"type": "path"},
    "step": {"type": "str", "choices": ["query", "accept"], "default": "query"},
    "login": {"type": "str", "default": ""},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    directory = Path(module.params["dest"])
    # The login must be able to reach what it sends, and the service to read it, whatever umask the login has.
    os.umask(0o022)
    try:
        expected = [ExpectedFile(file["name"], file["sha256"], file["size"]) for file in module.params["files"]]
        missing = missing_files(directory, expected, remember=not module.check_mode)
        unsent = missing
        if missing and not module.check_mode:
            if module.params["step"] == "query":
                reuse = module.params["reuse"]
                unsent = link_from(Path(reuse), directory, missing) if reuse else missing
                unsent = open_incoming(directory, unsent, module.params["login"])
            else:
                accept_incoming(directory, missing)
    except (StagingError, OSError, KeyError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=bool(missing), missing=[file.name for file in missing], unsent=[file.name for file in unsent]
    )


if __name__ == "__main__":
    main()
