# SPDX-License-Identifier: Apache-2.0
"""Releases on a host: immutable directories named by the digest of their inputs, one of which is current."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import sha256_bytes, sync_directory, write_atomically

ID_LENGTH = 16
_IN_PROCESS = re.compile(rf"/releases/([0-9a-f]{{{ID_LENGTH}}})/venv/")


class ReleaseError(RuntimeError):
    """A release that cannot be staged or activated; the text says why and what to do."""


def canonical(value: object) -> bytes:
    """Return the one JSON text of ``value``: neither key order nor formatting makes a difference."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def release_id(inputs: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Return the id of the release that these inputs and files make, on whatever host."""
    return sha256_bytes(canonical({"inputs": inputs, "files": files}))[:ID_LENGTH]


@dataclass(frozen=True)
class Releases:
    """The releases below ``root`` (such as /opt/aerie) and the one that is current."""

    root: Path

    def path(self, identity: str) -> Path:
        return self.root / "releases" / identity

    def current(self) -> str:
        """Return the id that the link ``current`` names, or nothing."""
        try:
            return Path((self.root / "current").readlink()).name
        except OSError:
            return ""

    def changes(self, inputs: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, bytes]:
        """Return the files of a release, by name, that are not there yet.

        Raises ReleaseError if the release is current, since it is never modified then.
        """
        identity = release_id(inputs, files)
        facts = {"id": identity, "inputs": inputs, "files": sorted(files)}
        record = json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        wanted = {**{name: text.encode() for name, text in files.items()}, "release.json": record.encode()}
        directory = self.path(identity)
        changes = {name: data for name, data in wanted.items() if _read(directory / name) != data}
        if changes and self.current() == identity:
            names = ", ".join(sorted(changes))
            raise ReleaseError(
                f"release {identity} is active, but these of its files were edited or removed: {names}. Put them back, "
                "or roll back to another release and remove this one's directory"
            )
        return changes

    def stage(self, identity: str, changes: Mapping[str, bytes]) -> None:
        """Write ``changes`` into the directory of a release."""
        directory = self.path(identity)
        for name, data in changes.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(directory / name, data)

    def activate(self, identity: str, unit: Path) -> None:
        """Make a staged release the current one: its unit, then the link. systemd is not told."""
        source = self.path(identity) / unit.name
        if not source.exists():
            raise ReleaseError(f"release {identity} is not staged on this host: {source} is missing")
        if _read(unit) != source.read_bytes():
            write_atomically(unit, source.read_bytes())
        temporary = self.root / ".current"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path("releases") / identity)
        temporary.replace(self.root / "current")
        sync_directory(self.root)

    def is_active(self, identity: str, unit: Path) -> bool:
        """Say whether ``identity`` is current and systemd has its unit."""
        return self.current() == identity and _read(unit) == _read(self.path(identity) / unit.name) is not None

    def previous(self) -> str:
        """Return the release that served before the current one was activated last, or nothing."""
        current = self.current()
        for entry in reversed(self.ledger()):
            if entry.get("action") == "activate" and entry["to"] == current and entry["from"] != current:
                return str(entry["from"])
        return ""

    def ledger(self) -> list[dict[str, Any]]:
        """Return the ledger's entries, oldest first. A last line that was torn by a crash is left out."""
        entries = []
        for line in (_read(self.root / "ledger.jsonl") or b"").splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        return entries

    def append_to_ledger(self, entry: Mapping[str, Any]) -> None:
        """Append one line to the ledger. Lines of several writers do not mix."""
        line = canonical({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **entry}) + b"\n"
        with (self.root / "ledger.jsonl").open("ab+", buffering=0) as stream:
            # Without the lock, a line that another is writing looks like one that a crash tore.
            fcntl.flock(stream, fcntl.LOCK_EX)
            end = stream.seek(0, os.SEEK_END)
            torn = end > 0 and os.pread(stream.fileno(), 1, end - 1) != b"\n"
            stream.write(b"\n" * torn + line)
            os.fsync(stream.fileno())


@dataclass(frozen=True)
class RunningService:
    """What systemd and /proc say of a unit's main process. ``pid`` is 0 if there is none."""

    pid: int
    release: str
    environment: Mapping[str, str]

    def has_settings(self, settings: Mapping[str, str]) -> bool:
        return all(self.environment.get(name) == value for name, value in settings.items())


def running_service(unit: str) -> RunningService:
    """Look at the main process of ``unit``. Its release is read from what it runs and maps, not from any record."""
    result = subprocess.run(
        ["systemctl", "show", "--property=MainPID", "--value", unit], capture_output=True, text=True, check=False
    )
    pid = int(result.stdout.strip() or 0)
    try:
        process = Path(f"/proc/{pid}")
        found = _IN_PROCESS.search(_text(process / "cmdline") + _text(process / "maps"))
        variables = _text(process / "environ").split("\0")
    except OSError:
        return RunningService(0, "", {})
    return RunningService(
        pid, found.group(1) if found else "", dict(entry.split("=", 1) for entry in variables if "=" in entry)
    )


def parse_settings(text: str) -> dict[str, str]:
    """Parse an environment file of systemd as Aerie writes it: one NAME=value a line, nothing quoted."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def read_settings(path: Path) -> dict[str, str]:
    """Parse the environment file at ``path``; nothing is set if it is missing."""
    return parse_settings(path.read_text() if path.exists() else "")


def _text(path: Path) -> str:
    """Return a file of /proc; what is not UTF-8 in it is of no interest."""
    return path.read_bytes().decode(errors="replace")


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
