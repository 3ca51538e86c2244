# SPDX-License-Identifier: Apache-2.0
"""The few files that a contract test needs from a released wheel, without downloading the wheel.

uv says where the wheel is (so its own configuration of indexes applies); HTTP byte ranges fetch the central directory
and the members. They are kept as a *partial wheel*: a zip with the wheel's name, its dist-info and those members.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Collection
from io import SEEK_CUR, SEEK_END, SEEK_SET, BytesIO, RawIOBase
from pathlib import Path

import tomllib

CACHE = Path(os.environ.get("AERIE_CACHE", "/var/tmp/aerie/cache")) / "partial-wheels"


class RangeFile(RawIOBase):
    """A remote file as a seekable stream; blocks are fetched once each."""

    BLOCK = 1 << 18

    def __init__(self, url: str) -> None:
        super().__init__()
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self._size = int(answer.headers["Content-Length"])
        self._url = url
        self._position = 0
        self._blocks: dict[int, bytes] = {}

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._position = {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._size}[whence] + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._size, self._position + size)
        parts = []
        while self._position < end:
            number, start = divmod(self._position, self.BLOCK)
            part = self._block(number)[start : start + end - self._position]
            parts.append(part)
            self._position += len(part)
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            first = number * self.BLOCK
            last = min(first + self.BLOCK, self._size) - 1
            request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                data: bytes = answer.read(last - first + 1)
            if answer.status != 206 or len(data) != last - first + 1:
                raise OSError(f"{self._url} does not answer byte ranges (status {answer.status}, {len(data)} bytes)")
            self._blocks[number] = data
        return self._blocks[number]


def partial_wheel(distribution: str, version: str, members: Collection[str]) -> Path:
    """Return a partial wheel of ``distribution`` with its dist-info and ``members``, from the cache or the index."""
    for found in CACHE.glob(f"{distribution.replace('-', '_')}-{version}-*.whl"):
        with zipfile.ZipFile(found) as wheel:
            if set(members) <= set(wheel.namelist()):
                return found
    url = _wheel_url(distribution, version)
    target = CACHE / url.rpartition("/")[2].partition("#")[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    buffer = BytesIO()
    with zipfile.ZipFile(RangeFile(url)) as remote, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as local:
        for name in remote.namelist():
            if name in members or name.partition("/")[0].endswith(".dist-info"):
                local.writestr(zipfile.ZipInfo(name), remote.read(name))
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as stream:
        stream.write(buffer.getvalue())
    Path(stream.name).replace(target)
    return target


def _wheel_url(distribution: str, version: str) -> str:
    """Ask uv where the wheel is; nothing is installed, and only its metadata is read."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-deps", "--only-binary", ":all:"]
    # Without the first option uv tries to download that Python, for seconds.
    command += ["--no-python-downloads", "--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_40"]
    command += ["--format", "pylock.toml", "-"]
    run = subprocess.run(command, input=f"{distribution}=={version}", capture_output=True, text=True, check=False)
    if run.returncode:
        raise LookupError(f"uv finds no wheel of {distribution} {version}: {run.stderr.strip()[-400:]}")
    url: str = tomllib.loads(run.stdout)["packages"][0]["wheels"][0]["url"]
    return url
