# SPDX-License-Identifier: Apache-2.0
"""A Python environment made by uv from a lock, in the directory of a release."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.files import sha256_bytes, sha256_file, write_atomically
from ansible.module_utils.aerie.release import Releases, releases_in_use

# Written last: an environment without it was interrupted and is made anew.
_RECORD = "aerie.json"


class PythonEnvironmentError(RuntimeError):
    """An environment that cannot be made; the text says why and what to do."""


@dataclass(frozen=True)
class PythonEnvironment:
    """What an environment is made from; see library/python_env.py for the fields."""

    path: Path
    lock: str
    python: Path | None
    python_archive: Path | None
    python_release: str
    uv_wheel: Path
    tools: Path
    cache: Path
    wheelhouse: str
    index_url: str

    def recorded(self) -> Mapping[str, str]:
        """Return what the environment that is there was made from; empty if there is none, or half of one."""
        try:
            record = json.loads((self.path / _RECORD).read_text())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def wanted(self) -> Mapping[str, str]:
        """Return what the environment is to be made from."""
        return {
            "lock_sha256": sha256_bytes(self.lock.encode()),
            "python": f"archive {self.python_archive.name}" if self.python_archive else str(self.python),
            "python_release": self.python_release,
            "uv": self.uv_wheel.name.partition("-")[2].partition("-")[0],
        }

    def differences(self) -> list[str]:
        """Return why the environment that is there cannot stay, or none is; nothing if it can.

        It stays with another release of uv, which would unpack the same wheels.
        """
        recorded, wanted = self.recorded(), self.wanted()
        if not recorded:
            return [f"{self.path / _RECORD} is missing or damaged"]
        names = [name for name in wanted if name != "uv" and recorded.get(name) != wanted[name]]
        return [f"{name} was {recorded.get(name)}, and is {wanted[name]}" for name in names]

    def refuse_in_use(self) -> None:
        """Raise PythonEnvironmentError if the environment is that of the current release, or of a running process."""
        release = self.path.parent
        root, identity = release.parent.parent, release.name
        why = f"and its environment would be made anew, since {'; '.join(self.differences())}"
        if Releases(root).current() == identity:
            raise PythonEnvironmentError(
                f"release {identity} is active, {why}. Roll back to another release, then deploy again. If there is no "
                f"other, stop the service, remove {root / 'current'}, and deploy again"
            )
        if identity in releases_in_use():
            raise PythonEnvironmentError(
                f"release {identity} is not active, but a process still runs it, {why}. End that process (one that has "
                f"{self.path} in /proc/PID/maps), then deploy again"
            )

    def site_packages(self) -> Path:
        return self.path / "lib" / f"python{self.python_release}" / "site-packages"

    def make(self) -> None:
        """Make the environment anew. Interrupted anywhere, it has no record, and the next call starts over."""
        uv = self._uv()
        interpreter = self._interpreter()
        (self.path / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._run([str(uv), "venv", "--no-project", "--python", str(interpreter), str(self.path)])
        if not self.site_packages().is_dir():
            raise PythonEnvironmentError(
                f"{interpreter} is not Python {self.python_release}, for which the lock was resolved"
            )
        requirements = self.path / "requirements.txt"
        requirements.write_text(self.lock)
        source = ["--no-index", "--find-links", self.wheelhouse] if self.wheelhouse else []
        if self.index_url:
            source = ["--default-index", self.index_url]
        # sync installs the lock and nothing else: no resolution, nothing built from source.
        command = [str(uv), "pip", "sync", "--python", str(self.path), "--require-hashes", "--no-build"]
        self._run([*command, "--link-mode", "hardlink", *source, str(requirements)])
        write_atomically(self.path / _RECORD, json.dumps(self.wanted(), indent=1).encode())

    def _run(self, command: list[str]) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
        environment.update(UV_CACHE_DIR=str(self.cache), UV_NO_CONFIG="1", UV_PYTHON_DOWNLOADS="never")
        if self.wheelhouse:
            environment["UV_OFFLINE"] = "1"
        result = subprocess.run([*command, "--quiet"], env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise PythonEnvironmentError(f"uv {' '.join(command[1:3])} failed: {result.stderr.strip()[-1500:]}")

    def _uv(self) -> Path:
        """Return uv's program, unpacked from its wheel the first time."""
        program = self.tools / "-".join(self.uv_wheel.name.split("-")[:2])
        if not program.exists():
            self.tools.mkdir(parents=True, exist_ok=True)
            write_atomically(program, self._uv_program(), mode=0o755)
        return program

    def _uv_program(self) -> bytes:
        try:
            with zipfile.ZipFile(self.uv_wheel) as wheel:
                (member,) = [name for name in wheel.namelist() if name.endswith(".data/scripts/uv")]
                return wheel.read(member)
        except (zipfile.BadZipFile, zlib.error, ValueError) as error:
            raise PythonEnvironmentError(f"{self.uv_wheel} is damaged, or no wheel of uv: remove it") from error

    def _interpreter(self) -> Path:
        if self.python_archive is None:
            if self.python is None or not os.access(self.python, os.X_OK):
                place = f"at {self.python}" if self.python else "given"
                raise PythonEnvironmentError(
                    f"there is no Python {place}: install python{self.python_release}, or set ml_env_python or "
                    "ml_env_python_archive"
                )
            return self.python
        home = self.tools / f"python-{sha256_file(self.python_archive)[:16]}"
        if not home.exists():
            try:
                _unpack(self.python_archive, home)
            except (tarfile.TarError, EOFError, zlib.error) as error:
                raise PythonEnvironmentError(f"{self.python_archive} cannot be unpacked: {error}") from error
        for program in (home / "python/bin/python3", home / "bin/python3"):
            if program.exists():
                return program
        raise PythonEnvironmentError(f"{self.python_archive.name} has neither python/bin/python3 nor bin/python3")


def _unpack(archive: Path, home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as temporary:
        with tarfile.open(archive) as tar:
            # Older Pythons lack the filter; the archive is pinned by its digest all the same.
            with contextlib.suppress(AttributeError):
                tar.extraction_filter = tarfile.data_filter
            tar.extractall(temporary)
        Path(temporary).chmod(0o755)
        Path(temporary).rename(home)
        Path(temporary).mkdir()
