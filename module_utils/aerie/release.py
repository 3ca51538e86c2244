# SPDX-License-Identifier: Apache-2.0
"""Releases on a host: immutable directories named by the digest of their inputs, one of which is current."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import sha256_bytes, sync_directory, write_atomically
from ansible.module_utils.aerie.installed import faults, listing, others, stat_digest

ID_LENGTH = 16
_DOOMED = ".removed-"
_IN_PROCESS = re.compile(rf"/releases/([0-9a-f]{{{ID_LENGTH}}})/venv/")

# What a release's unit calls its directory for what is compiled.
_CACHE = re.compile(r"[0-9a-f]{16}")
# Another run may be about to switch to a release that was staged so lately.
_STAGED_LATELY_S = 24 * 3600


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
            # systemd reads it as root, and nobody else has to see what it may hold.
            write_atomically(directory / name, data, 0o600 if name == "service.env" else 0o644)

    def complete(self, identity: str, request: Mapping[str, str], made: bool = False, check: bool = False) -> bool:
        """Note that a release is wholly staged, and for which ``request``: digests of all that it was planned from.

        Return whether there was anything new to note; with ``check`` nothing is noted. The request says nothing about
        the release's content: another one may well lead to the same release. Unless the environment was just ``made``,
        raises ReleaseError if its files are others than those that were noted before.
        """
        venv = self.path(identity) / "venv"
        noted, environment = self.completion(identity), stat_digest(venv)
        known = bool(noted) and not made
        if known and environment != noted["environment"]:
            self._refuse_faults(identity, noted["others"])
        note = {
            "request": dict(request),
            "environment": environment,
            "others": noted["others"] if known else others(venv),
        }
        if noted == note:
            return False
        if not check:
            self._note_path(identity).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._note_path(identity), canonical(note))
        return True

    def _refuse_faults(self, identity: str, noted: Mapping[str, str]) -> None:
        patches = self.record(identity)["inputs"].get("patches", {})
        venv = self.path(identity) / "venv"
        # Files that the patch set writes were looked at just before, and in check mode are not as they will be.
        written = {package / path for package in venv.glob("lib/python*/site-packages/vllm") for path in patches}
        found = [fault for fault in faults(venv, patches, noted) if fault.path not in written]
        if found:
            raise ReleaseError(
                f"files of release {identity} are not as they were installed: {listing(found)}. Remove what was added. "
                "If anything was edited or is missing, roll back to another release if this one serves, remove "
                f"{self.path(identity)} and deploy again"
            )

    def completion(self, identity: str) -> dict[str, Any]:
        """Return what ``complete`` noted, or nothing for a release that is not wholly staged."""
        try:
            note = json.loads(_read(self._note_path(identity)) or b"{}")
        except ValueError:
            return {}
        return note if isinstance(note, dict) and note.keys() == {"request", "environment", "others"} else {}

    def _note_path(self, identity: str) -> Path:
        return self.root / "staged" / f"{identity}.json"

    def record(self, identity: str) -> dict[str, Any]:
        """Return the release's own record. Raises ReleaseError, naming what there is instead."""
        try:
            record: dict[str, Any] = json.loads((self.path(identity) / "release.json").read_bytes())
            if not (isinstance(record["inputs"], dict) and isinstance(record["files"], list)):
                raise TypeError
        except (OSError, ValueError, TypeError, KeyError):
            known = ", ".join(self.identities()) or "none"
            raise ReleaseError(f"release {identity} is not on this host; these are: {known}") from None
        return record

    def identities(self) -> list[str]:
        """Return the ids of the releases on this host, wholly staged or not."""
        return sorted(path.name for path in (self.root / "releases").glob("*") if not path.name.startswith("."))

    def differences(self, before: str, after: str) -> list[str]:
        """Return the names of the inputs and files that differ between two releases."""
        try:
            old, new = self.record(before), self.record(after)
        except ReleaseError:
            return []
        inputs = {
            name for name in {*old["inputs"], *new["inputs"]} if old["inputs"].get(name) != new["inputs"].get(name)
        }
        files = {
            name
            for name in {*old["files"], *new["files"]}
            if _read(self.path(before) / name) != _read(self.path(after) / name)
        }
        return sorted(inputs | files)

    def activate(self, identity: str, unit: Path) -> None:
        """Make a staged release the current one: its unit, then the link. systemd is not told.

        Writes only what is not so already: on a full disk the way back needs no space.
        """
        source = self.path(identity) / unit.name
        if not source.exists():
            raise ReleaseError(f"release {identity} is not staged on this host: {source} is missing")
        if _read(unit) != source.read_bytes():
            write_atomically(unit, source.read_bytes())
        if self.current() == identity:
            return
        temporary = self.root / ".current"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path("releases") / identity)
        temporary.replace(self.root / "current")
        sync_directory(self.root)

    def is_active(self, identity: str, unit: Path) -> bool:
        """Say whether ``identity`` is current and systemd has its unit."""
        return self.current() == identity and _read(unit) == _read(self.path(identity) / unit.name) is not None

    def deactivate(self, unit: Path) -> None:
        """Leave the host without a current release, as before its first."""
        unit.unlink(missing_ok=True)
        (self.root / "current").unlink(missing_ok=True)
        sync_directory(self.root)

    def deployments(self) -> list[dict[str, str]]:
        """Return the deployments that changed what this host serves, newest first: id, ``from``, ``to`` and ``why``.

        One that was restored changed nothing. A deployment may have activated several releases one after the other:
        ``from`` is what served before the first.
        """
        found: dict[str, dict[str, str]] = {}
        for entry in self.ledger():
            deployment = entry.get("deployment", "")
            if entry.get("action") == "activate":
                before = found.pop(deployment, entry)["from"]
                step = {"deployment": deployment, "from": before, "to": entry["to"], "why": entry.get("why", "")}
                found[deployment] = step
            elif deployment in found:
                found[deployment]["to"] = entry["to"]
        return [step for step in reversed(list(found.values())) if step["from"] != step["to"]]

    def newest_deployment(self) -> dict[str, str]:
        """Return the newest of ``deployments``, or nothing."""
        return next(iter(self.deployments()), {})

    def prune(
        self,
        keep: int,
        protected: Collection[str],
        check: bool = False,
        caches: Path | None = None,
        after: str = "",
    ) -> list[Path]:
        """Remove all but the ``keep`` releases that served last, and what in the store and in ``caches`` was theirs.

        A release that is current, that a process runs, or that is one of ``protected`` stays and counts. One that was
        staged lately and did not serve yet stays, too. A cache has the name that its release's unit gives it. Returns
        what was removed, or with ``check`` what would be once the release ``after`` serves, which may not be there yet.
        """
        protected = {self.current(), after, *protected, *releases_in_use()} - {""}
        # One that was undone did not serve.
        ledger = self.ledger()
        served = [entry["to"] for entry in ledger if entry.get("action") == "confirm"]
        served += [after] if after else []
        tried = {entry["to"] for entry in ledger if entry.get("action") == "activate"}
        since = time.time() - _STAGED_LATELY_S
        # The last to serve first; those that never served are the first to go, the oldest of them last.
        there = self.identities()
        order = sorted(
            {*there, after} - {""},
            key=lambda identity: (
                identity in protected,
                len(served) - served[::-1].index(identity) if identity in served else 0,
                self.path(identity).stat().st_mtime if identity in there else 0,
            ),
            reverse=True,
        )
        kept = [
            identity
            for place, identity in enumerate(order)
            if place < keep
            or identity in protected
            or (identity not in tried and self.path(identity).stat().st_mtime > since)
        ]
        # Notes first: what is removed in part is not wholly staged.
        notes = [*self.root.glob("staged/*.json"), *self.root.glob("proved/*.json")]
        unwanted = sorted(path for path in notes if path.stem not in kept)
        unwanted += [self.path(identity) for identity in order if identity not in kept]
        try:
            needed = {self.record(identity)["inputs"].get("drafter", "") for identity in kept if identity in there}
        except ReleaseError:
            # A release that is being staged, or damaged: what it refers to is not known.
            needed = None
        if needed is not None:
            store = (path for path in (self.root / "store").glob("*") if not path.name.startswith("."))
            unwanted += sorted(path for path in store if path.name not in needed)
            units = [_read(self.path(identity) / "vllm.service") or b"" for identity in kept]
            unwanted += [
                path
                for path in sorted(caches.glob("*") if caches else [])
                if _CACHE.fullmatch(path.name) and not any(path.name.encode() in unit for unit in units)
            ]
        kept_paths = [self.path(identity).resolve() for identity in kept]
        unwanted += sorted(
            record for record in (self.root / "patched").glob("*.json") if self._is_patched_in_vain(record, kept_paths)
        )
        if not check:
            for path in unwanted:
                _remove(path)
            for path in [*self.root.glob(f"releases/{_DOOMED}*"), *self.root.glob(f"store/{_DOOMED}*")]:
                # Of a removal that was interrupted.
                shutil.rmtree(path)
        return unwanted

    def _is_patched_in_vain(self, record: Path, kept: Collection[Path]) -> bool:
        """Say whether a record of patched files is about a release that is none of ``kept``."""
        try:
            package = Path(json.loads(record.read_bytes())["package_dir"])
        except (OSError, ValueError, KeyError, TypeError):
            # The patcher says what is wrong with it.
            return False
        ours = (self.root / "releases").resolve() in package.parents
        return ours and not any(release in package.parents for release in kept)

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
            left = b"\n" * torn + line
            try:
                while left:
                    left = left[stream.write(left) :]
                os.fsync(stream.fileno())
            except OSError:
                # A disk that becomes full takes a part of a line.
                with contextlib.suppress(OSError):
                    stream.truncate(end)
                raise


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


def releases_in_use() -> set[str]:
    """Return the releases that any process of this host runs or has mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.update(_IN_PROCESS.findall(_text(process / "cmdline") + _text(process / "maps")))
        except OSError:
            continue
    return found


def _text(path: Path) -> str:
    """Return a file of /proc; what is not UTF-8 in it is of no interest."""
    return path.read_bytes().decode(errors="replace")


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _remove(path: Path) -> None:
    """Remove a file or a directory; one that is removed only in part no longer has its name."""
    if not path.is_dir():
        path.unlink()
        return
    doomed = path.with_name(f"{_DOOMED}{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)
