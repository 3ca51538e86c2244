#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what a release's environment has of all that the hosts of one replica must have alike."""

from __future__ import annotations

DOCUMENTATION = r"""
module: replica_versions
short_description: Read what the hosts of a replica must have alike from a release's environment
description:
  - Asks the environment's own interpreter for the versions that are installed, and digests patched files. The lock and
    the release's id are the same on hosts that differ in the last part of Python's version, or where somebody changed
    the environment.
  - Changes nothing. Returns nothing from an environment that is not there.
options:
  python:
    description: The environment's interpreter.
    type: path
    required: true
  package_dir:
    description: The installed C(vllm) package.
    type: path
    required: true
  files:
    description: Files that a patch set changed, with paths inside the package.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Read what is installed
  replica_versions:
    python: /opt/aerie/current/venv/bin/python
    package_dir: /opt/aerie/current/venv/lib/python3.12/site-packages/vllm
    files: [model_executor/models/deepseek_v2.py]
"""

RETURN = r"""
versions:
  description: Names with versions, and files with their sha256.
  returned: success
  type: list
  elements: str
  sample: [nvidia-nccl-cu13 2.28.9, python 3.12.3, ray 2.60.0, torch 2.13.0, vllm 0.33.0]
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import sha256_file
from ansible.module_utils.aerie.versions import VersionsError, installed
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "python": {"type": "path", "required": True},
    "package_dir": {"type": "path", "required": True},
    "files": {"type": "list", "elements": "str", "default": []},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    python, package = module.params["python"], Path(module.params["package_dir"])
    if not os.path.lexists(python):
        module.exit_json(changed=False, versions=[])
    try:
        digests = [f"vllm/{name} {sha256_file(package / name)}" for name in module.params["files"]]
        module.exit_json(changed=False, versions=[*installed(python), *digests])
    except VersionsError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename} cannot be read ({error.strerror}): remove the release and deploy again")


if __name__ == "__main__":
    main()
