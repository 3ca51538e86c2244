#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: files of a service with its secrets, and with what it reads again whenever it changes."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: service_files
short_description: Write files with secrets of a service, and those that it reads again
description:
  - Writes texts that only root may read, for C(LoadCredential=) of the service's unit. They reach the host in the
    module's input and no other way, so no temporary file, on the host or the control node, ever has them.
  - Give a file of O(secrets) a name that tells its content, such as its digest, so that none is changed while a service
    may use it. Those that settings name no more are removed by the switch to other settings.
  - Writes texts that the service's group may read, which may change while it runs.
options:
  secrets:
    description: Texts by the path of their file. The directories are made for root alone.
    type: dict
    default: {}
  reread:
    description: Texts by the path of their file. The directories are made for everybody to look into.
    type: dict
    default: {}
  group:
    description: The group that may read the files of O(reread).
    type: str
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    description: Digests of keys are no keys, but they tell which keys changed.
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Have the key for TLS, and the digests of the clients' keys, on the host
  service_files:
    secrets:
      /etc/aerie/secrets/tls-key-7d1a54127b222502: "{{ vault_tls_key }}"
    reread:
      /etc/aerie/api-keys: "{{ lookup('ansible.builtin.template', 'api-keys.j2') }}"
    group: vllm
"""

RETURN = r"""
written:
  description: The files that were written, or would be.
  returned: success
  type: list
  elements: str
  sample: [/etc/aerie/secrets/tls-key-7d1a54127b222502]
"""

import grp
import os
import stat
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.aerie.files import write_atomically
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "secrets": {"type": "dict", "default": {}, "no_log": True},
    "reread": {"type": "dict", "default": {}, "no_log": True},
    "group": {"type": "str", "required": True},
}


class Wanted(NamedTuple):
    """A file's text, the number of its group (None: there is no such group yet), and whether it is for root alone."""

    text: str
    group: int | None
    private: bool

    @property
    def mode(self) -> int:
        return 0o600 if self.private else 0o640


def wanted(secrets: dict[str, str], reread: dict[str, str], group: str) -> dict[Path, Wanted]:
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        number = None
    found = {Path(path): Wanted(str(text), number, private=False) for path, text in reread.items()}
    return {**found, **{Path(path): Wanted(str(text), os.getegid(), private=True) for path, text in secrets.items()}}


def is_as_wanted(path: Path, file: Wanted) -> bool:
    """Say whether a file has this text, and those may read it who should."""
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            owners = (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode))
            return owners == (os.geteuid(), file.group, file.mode) and stream.read() == file.text.encode()
    except OSError:
        return False


def put(path: Path, file: Wanted) -> None:
    """Write a file; it is never open to others than those who may read it, not even for a moment."""
    write_atomically(path, file.text.encode(), file.mode, file.group)


def directories_to_mend(files: dict[Path, Wanted]) -> dict[Path, int]:
    """Return the directories that others may look into than should, or fewer, and the mode that each is to have."""
    modes = {path.parent: 0o700 if file.private else 0o755 for path, file in files.items()}
    return {path: mode for path, mode in modes.items() if not path.is_dir() or path.stat().st_mode & 0o777 != mode}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    files = wanted(module.params["secrets"], module.params["reread"], module.params["group"])
    written = [path for path, file in files.items() if not is_as_wanted(path, file)]
    if not module.check_mode and any(files[path].group is None for path in written):
        module.fail_json(msg=f"there is no group {module.params['group']}: create it first")
    # Directories that are made here are for everybody to look into, whatever umask the login has.
    os.umask(0o022)
    try:
        directories = directories_to_mend(files)
        if not module.check_mode:
            for directory, mode in directories.items():
                directory.mkdir(parents=True, exist_ok=True)
                directory.chmod(mode)
            for path in written:
                put(path, files[path])
    except OSError as error:
        module.fail_json(msg=f"{error.filename} cannot be written: {error.strerror}. Run as root.")
    module.exit_json(changed=bool(written or directories), written=list(map(str, written)))


if __name__ == "__main__":
    main()
