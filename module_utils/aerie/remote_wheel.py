# SPDX-License-Identifier: Apache-2.0
"""A few files of a released wheel without downloading the wheel. For the control node: it needs uv and Python 3.11.

uv says where the wheel is (so its own configuration of indexes applies); HTTP byte ranges fetch the central directory
and the members. They are kept as a *partial wheel*: a zip with the wheel's name, its dist-info and those members.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Collection
from pathlib import Path
from urllib.parse import unquote

import tomllib
from ansible.module_utils.aerie.files import write_atomically

CACHE = Path(os.environ.get("AERIE_CACHE", "/var/tmp/aerie/cache")) / "partial-wheels"
_TIMEOUT_S = 60


class RemoteWheelError(RuntimeError):
    """A wheel that cannot be had; the text says why and what to do."""


class RangeFile(io.RawIOBase):
    """A remote file as a seekable stream; blocks are fetched once each. Raises OSError like a local file."""

    BLOCK = 1 << 18

    def __init__(self, url: str) -> None:
        super().__init__()
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_S) as answer:
            self._size = int(answer.headers["Content-Length"])
        self._url = url
        self._position = 0
        self._blocks: dict[int, bytes] = {}
        # A zip's directory is at its end; zipfile would take a failure to read it for a file that is no zip.
        self._block((self._size - 1) // self.BLOCK)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence] + offset
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
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                data: bytes = answer.read(last - first + 1)
            if answer.status != 206 or len(data) != last - first + 1:
                raise OSError(f"{self._url} does not answer byte ranges (status {answer.status}, {len(data)} bytes)")
            self._blocks[number] = data
        return self._blocks[number]


def partial_wheel(distribution: str, version: str, members: Collection[str], cache: Path = CACHE) -> Path:
    """Return a partial wheel of ``distribution`` with its dist-info and those of ``members`` that the release has.

    It is kept in ``cache``, and fetched again only for members that it does not hold yet.
    """
    wanted = set(members)
    for found in cache.glob(f"{distribution.replace('-', '_')}-{version}-*.whl"):
        with zipfile.ZipFile(found) as wheel:
            held = set(wheel.namelist())
            if not (wanted & _recorded(wheel)) - held:
                return found
            wanted |= held
    url = _wheel_url(distribution, version)
    target = cache / unquote(url.rpartition("/")[2].partition("#")[0])
    buffer = io.BytesIO()
    try:
        with zipfile.ZipFile(RangeFile(url)) as remote, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as local:
            for name in remote.namelist():
                if name in wanted or name.partition("/")[0].endswith(".dist-info"):
                    local.writestr(zipfile.ZipInfo(name), remote.read(name))
    except (OSError, zipfile.BadZipFile) as error:
        raise RemoteWheelError(
            f"{url} cannot be read: {error}; check the network, or the index that uv uses"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, buffer.getvalue())
    return target


def _recorded(wheel: zipfile.ZipFile) -> set[str]:
    """Return the paths of all files of the release, which the partial wheel's RECORD lists."""
    (record,) = [name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")]
    return {row[0] for row in csv.reader(io.StringIO(wheel.read(record).decode())) if row}


def _wheel_url(distribution: str, version: str) -> str:
    """Ask uv where the wheel is; nothing is installed, and only its metadata is read."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-deps", "--only-binary", ":all:"]
    # Without the first option uv tries to download that Python, for seconds.
    command += ["--no-python-downloads", "--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_40"]
    command += ["--format", "pylock.toml", "-"]
    run = subprocess.run(command, input=f"{distribution}=={version}", capture_output=True, text=True, check=False)
    if run.returncode:
        raise RemoteWheelError(
            f"uv finds no wheel of {distribution} {version}: check the version, and the index that uv uses. "
            f"It says: {run.stderr.strip()[-400:]}"
        )
    (package,) = tomllib.loads(run.stdout)["packages"]
    url: str = package["wheels"][0]["url"]
    return url
