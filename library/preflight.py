#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Find what keeps a host from serving, before anything on it is changed."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: preflight
short_description: Find what keeps a host from serving
description:
  - Looks at Python, disk, port and, for CUDA builds, at driver, GPUs, compiler and device nodes. Changes nothing, and
    reports every problem instead of failing at the first.
options:
  root:
    description: Where releases will be.
    type: path
    required: true
  disk_mb:
    description: What the first release from a lock needs there, in MB. Another one needs 500.
    type: int
    required: true
  lock_sha256:
    description: The digest of the lock's text.
    type: str
    default: ''
  python:
    description: The interpreter for the release's environment; empty if it comes from an archive.
    type: path
    default: ''
  python_release:
    description: The X.Y that it must be.
    type: str
    required: true
  port:
    description: The port that the service will listen on.
    type: int
    required: true
  unit:
    description: The service's unit, whose own use of the port is fine.
    type: str
    default: vllm.service
  cuda:
    description: The major CUDA release of the build; 0 for a CPU build.
    type: int
    default: 0
  gpus:
    description: How many GPUs the service uses.
    type: int
    default: 1
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: Look at the host
  preflight:
    root: /opt/aerie
    disk_mb: 12000
    python: /usr/bin/python3.12
    python_release: '3.12'
    port: 8000
    cuda: 13
    gpus: 8
"""

RETURN = r"""
problems:
  description: What was found, each with its remedy; empty if nothing was.
  type: list
  elements: str
  returned: success
  sample: ["port 8000 is in use by nginx (process 712): stop it, or set vllm_service_port"]
gpu_memory_mb:
  description: The memory of the GPUs that the service uses, together, in MiB; 0 for a CPU build.
  type: int
  returned: success
"""

import subprocess
from pathlib import Path

from ansible.module_utils.aerie import preflight
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "root": {"type": "path", "required": True},
    "disk_mb": {"type": "int", "required": True},
    "lock_sha256": {"type": "str", "default": ""},
    "python": {"type": "path", "default": ""},
    "python_release": {"type": "str", "required": True},
    "port": {"type": "int", "required": True},
    "unit": {"type": "str", "default": "vllm.service"},
    "cuda": {"type": "int", "default": 0},
    "gpus": {"type": "int", "default": 1},
}
_ANOTHER_RELEASE_MB = 500


def gpu_report() -> preflight.GpuReport | None:
    try:
        result = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return preflight.parse_nvidia_smi(result.stdout.decode(errors="replace"))


def has_environment(root: Path, lock_sha256: str) -> bool:
    """Say whether a release below ``root`` has an environment from this lock, whose files another one shares."""
    records = root.glob("releases/*/venv/aerie.json")
    return bool(lock_sha256) and any(lock_sha256 in record.read_text() for record in records)


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    options = module.params
    problems: list[str] = []
    if options["python"]:
        problems += preflight.check_python(options["python"], options["python_release"])
    root = Path(options["root"])
    needed_mb = _ANOTHER_RELEASE_MB if has_environment(root, options["lock_sha256"]) else options["disk_mb"]
    problems += preflight.check_disk(root, needed_mb)
    problems += preflight.check_port(options["port"], options["unit"])
    report = gpu_report() if options["cuda"] else None
    if options["cuda"]:
        problems += preflight.check_gpus(report, options["cuda"], options["gpus"], options["python"])
    else:
        problems += preflight.check_libraries(["libnuma.so.1"])
    memory = sum(gpu.memory for gpu in report.gpus[: options["gpus"]]) if report else 0
    module.exit_json(changed=False, problems=problems, gpu_memory_mb=memory)


if __name__ == "__main__":
    main()
