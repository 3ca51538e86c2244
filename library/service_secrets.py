#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: files with secrets of a service, which systemd hands to it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: service_secrets
short_description: Write files with secrets of a service
description:
  - Writes texts that only root may read, for C(LoadCredential=) of the service's unit. They reach the host in the
    module's input and no other way, so no temporary file, on the host or the control node, ever has them.
  - Give a file a name that tells its content, such as its digest, so that none is changed while a service may use it.
    Those that settings name no more are removed by the switch to other settings.
options:
  files:
    description: Texts by the path of their file. The directories are made for root alone.
    type: dict
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Have the key for TLS on the host
  service_secrets:
    files:
      /etc/aerie/secrets/tls-key-7d1a54127b222502: "{{ vault_tls_key }}"
"""

RETURN = r"""
written:
  description: The files that were written, or would be.
  returned: success
  type: list
  elements: str
  sample: [/etc/aerie/secrets/tls-key-7d1a54127b222502]
"""

import os
import stat
from pathlib import Path

from ansible.module_utils.aerie.files import write_atomically
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {"files": {"type": "dict", "required": True, "no_log": True}}

_PRIVATE_FILE, _PRIVATE_DIRECTORY = 0o600, 0o700


def is_as_wanted(path: Path, text: str) -> bool:
    """Say whether a file has this text, and only its owner may read it."""
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            private = (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), _PRIVATE_FILE)
            return private and stream.read() == text.encode()
    except OSError:
        return False


def put(path: Path, text: str) -> None:
    """Write a file that only its owner may read; it is never open to others, not even for a moment."""
    path.parent.mkdir(mode=_PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    path.parent.chmod(_PRIVATE_DIRECTORY)
    write_atomically(path, text.encode(), _PRIVATE_FILE)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    files = {Path(path): str(text) for path, text in module.params["files"].items()}
    written = [path for path, text in files.items() if not is_as_wanted(path, text)]
    try:
        for path in written if not module.check_mode else ():
            put(path, files[path])
    except OSError as error:
        module.fail_json(msg=f"{error.filename} cannot be written: {error.strerror}. Run as root.")
    module.exit_json(changed=bool(written), written=list(map(str, written)))


if __name__ == "__main__":
    main()
