#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Make a Python environment from a lock, with uv."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: python_env
short_description: Make a Python environment from locked requirements
description:
  - Makes O(path) with uv from O(lock), every distribution verified against the lock's SHA-256, by hard links from
    O(cache). A second environment from the same lock costs seconds and almost no disk.
  - Makes it anew when its lock or its Python differs from what it was made from, or when making it was interrupted;
    otherwise changes nothing. Another release of uv is no reason.
  - Refuses to make it anew if the release that it belongs to is current, or is run by a process.
options:
  path:
    description: The environment's directory.
    type: path
    required: true
  lock:
    description: The text of a requirements file with hashes.
    type: str
    required: true
  uv_wheel:
    description: uv's own wheel on this host; its program is unpacked into O(tools).
    type: path
    required: true
  tools:
    description: The directory for uv and for Pythons from archives.
    type: path
    required: true
  cache:
    description: uv's cache. On the file system of O(path), for hard links.
    type: path
    required: true
  python:
    description: The interpreter.
    type: path
    default: ''
  python_archive:
    description:
      - A gzipped tar archive on this host with a relocatable Python (C(python/bin/python3) or C(bin/python3) in it),
        which is used instead of O(python).
    type: path
    default: ''
  python_release:
    description: The X.Y that the interpreter must be, since the lock was resolved for it.
    type: str
    required: true
  wheelhouse:
    description: The directory with all of the lock's wheels. Nothing else is asked then.
    type: path
    default: ''
  index_url:
    description: The package index to install from, when O(wheelhouse) is empty.
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
- name: Make the environment of a release
  python_env:
    path: /opt/aerie/releases/1f0c2a9e8d7b6543/venv
    lock: "{{ lookup('ansible.builtin.file', 'requirements/vllm-0.33.0-cu130-py312.txt') }}"
    uv_wheel: /opt/aerie/wheelhouse/uv-0.13.9-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl
    tools: /opt/aerie/tools
    cache: /opt/aerie/cache
    python: /usr/bin/python3.12
    python_release: '3.12'
    wheelhouse: /opt/aerie/wheelhouse
"""

RETURN = r"""
site_packages:
  description: Where the environment's distributions are.
  type: str
  returned: success
  sample: /opt/aerie/releases/1f0c2a9e8d7b6543/venv/lib/python3.12/site-packages
"""

import os
from pathlib import Path

from ansible.module_utils.aerie.environment import PythonEnvironment, PythonEnvironmentError
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "path": {"type": "path", "required": True},
    "lock": {"type": "str", "required": True},
    "uv_wheel": {"type": "path", "required": True},
    "tools": {"type": "path", "required": True},
    "cache": {"type": "path", "required": True},
    "python": {"type": "path", "default": ""},
    "python_archive": {"type": "path", "default": ""},
    "python_release": {"type": "str", "required": True},
    "wheelhouse": {"type": "path", "default": ""},
    "index_url": {"type": "str", "default": ""},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    options = module.params
    if options["wheelhouse"] and options["index_url"]:
        module.fail_json(
            msg="wheelhouse and index_url are both set: the wheels come from one of them, so empty the other"
        )
    # The service's unprivileged user runs what is written here, whatever umask the login has.
    os.umask(0o022)
    environment = PythonEnvironment(
        path=Path(options["path"]),
        lock=options["lock"],
        python=Path(options["python"]) if options["python"] else None,
        python_archive=Path(options["python_archive"]) if options["python_archive"] else None,
        python_release=options["python_release"],
        uv_wheel=Path(options["uv_wheel"]),
        tools=Path(options["tools"]),
        cache=Path(options["cache"]),
        wheelhouse=options["wheelhouse"],
        index_url=options["index_url"],
    )
    try:
        before, changed = environment.recorded(), bool(environment.differences())
        if changed:
            environment.refuse_in_use()
        if changed and not module.check_mode:
            environment.make()
    except (PythonEnvironmentError, OSError) as error:
        module.fail_json(msg=str(error))
    after = environment.wanted() if changed else before
    module.exit_json(
        changed=changed,
        site_packages=str(environment.site_packages()),
        diff={"before": before, "after": after, "before_header": options["path"], "after_header": options["path"]},
    )


if __name__ == "__main__":
    main()
