# SPDX-License-Identifier: Apache-2.0
"""Writes a plan's files into an installed package, all or none, and takes them back to the byte.

Every file is known by its sha256: pristine, or one that a plan of ours wrote. Anything else is refused. In ``store``:

``pristine/<sha256>``        original bytes, kept before the first write
``patched/<digest>.json``    per package directory: which files we changed, and whether the change is complete

That record is written before the first file and again after the last one, so an interruption between two files is seen
and finished (or undone) by the next run. A file is replaced by a new inode: other hard links keep their bytes.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.module_utils.aerie.files import sha256_bytes, sync_directory, write_atomically
from ansible.module_utils.aerie.source import MARKER, Refusal, unified_diff
from ansible.module_utils.aerie.wheel import Package

Plan = Mapping[str, Any]
_DIFF_LINES = 60


@dataclass(frozen=True)
class FileVersions:
    """The two versions of one file that a plan speaks of."""

    path: str
    pristine: bytes
    patched: bytes


@dataclass(frozen=True)
class Move:
    """One file to write: what is there and what will be there."""

    path: str
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Work:
    """What a run has to do, and what the store will say meanwhile (``intent``) and after it (``outcome``)."""

    moves: Sequence[Move]
    interrupted: bool
    intent: Mapping[str, Any]
    outcome: Mapping[str, Any] | None

    @property
    def changed(self) -> bool:
        """Tell whether the package changes, or an interrupted change is brought to its end."""
        return bool(self.moves) or self.interrupted


def plan_files(plan: Plan) -> list[FileVersions]:
    """Unpack the files of a plan made by ``patchset.make_plan``; refuse one whose bytes are not what it says."""
    return [
        FileVersions(
            _checked_path(file["path"]),
            _decoded(file["pristine"], file["pristine_sha256"], file["path"]),
            _decoded(file["content"], file["patched_sha256"], file["path"]),
        )
        for file in plan["files"]
    ]


def _checked_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise Refusal(f"{path!r} is no path inside the package: make the plan again")
    return path


def _decoded(content: str, sha256: str, path: str) -> bytes:
    data = base64.b64decode(content)
    if sha256_bytes(data) != sha256:
        raise Refusal(f"the plan's bytes of {path} have sha256 {sha256_bytes(data)}, not {sha256}: make the plan again")
    return data


class Patcher:
    """The package directory of one environment, with the store that remembers what was done to it."""

    def __init__(self, package_dir: Path, store: Path) -> None:
        self.package_dir = package_dir.resolve()
        self.store = store
        key = sha256_bytes(os.fsencode(self.package_dir))[:32]
        self._record_path = store / "patched" / f"{key}.json"

    def present(self, package: Package, plan: Plan) -> Work:
        """Work out what it takes to have exactly the files of ``plan`` patched; refuse unknown bytes."""
        files = plan_files(plan)
        for file in files:
            recorded = package.pristine_sha256(file.path)
            if recorded != sha256_bytes(file.pristine):
                raise Refusal(
                    f"{self.package_dir / file.path} belongs to {package.distribution} {package.version} (sha256 "
                    f"{recorded}), the plan is for vLLM {plan['vllm_version']} (sha256 {sha256_bytes(file.pristine)}): "
                    "plan with the wheel that is installed here"
                )
        return self._work(package, files, plan["set"])

    def absent(self, package: Package, plan: Plan | None = None) -> Work:
        """Work out what it takes to have every file that we patched pristine again; refuse edited ones.

        ``plan`` says what the patched files look like where the store no longer does.
        """
        return self._work(package, plan_files(plan) if plan else [], None)

    def _work(self, package: Package, files: Sequence[FileVersions], set_name: str | None) -> Work:
        record = self._record()
        planned = {file.path: file for file in files}
        ours = {path: set(digests) for path, digests in record["files"].items()} if record else {}
        for file in files:
            ours.setdefault(file.path, set()).add(sha256_bytes(file.patched))
        moves = []
        for path in sorted(ours):
            current = self._current(package, path)
            if sha256_bytes(current) not in {package.pristine_sha256(path), *ours[path]}:
                raise Refusal(self._drift(package, path, current, planned.get(path)))
            patched = set_name is not None and path in planned
            after = planned[path].patched if patched else self.pristine(package, path, planned.get(path))
            if current != after:
                moves.append(Move(path, current, after))
        description = {"package_dir": str(self.package_dir), "vllm_version": package.version, "set": set_name}
        return Work(
            moves,
            bool(record and not record["complete"]),
            {**description, "complete": False, "files": {path: sorted(digests) for path, digests in ours.items()}},
            {**description, "complete": True, "files": {file.path: [sha256_bytes(file.patched)] for file in files}}
            if set_name
            else None,
        )

    def pristine(self, package: Package, path: str, planned: FileVersions | None = None) -> bytes:
        """Return the bytes of ``path`` that RECORD names: from the environment, the plan or the store."""
        wanted = package.pristine_sha256(path)
        candidates = [package.read(path), planned.pristine if planned else b"", self._stored(wanted)]
        for data in candidates:
            if sha256_bytes(data) == wanted:
                return data
        raise Refusal(
            f"{self.package_dir / path} is not what the RECORD of {package.distribution} {package.version} names, and "
            f"{self.store / 'pristine'} has no copy of the original: install the wheel again"
        )

    def _current(self, package: Package, path: str) -> bytes:
        if (self.package_dir / path).is_symlink():
            raise Refusal(
                f"{self.package_dir / path} is a symbolic link, so other environments may share its target: "
                "install the environment with hard links or copies"
            )
        return package.read(path)

    def _drift(self, package: Package, path: str, current: bytes, planned: FileVersions | None) -> str:
        """Say how a file in an unknown state differs from the nearest state that is known."""
        marked = MARKER.encode() in current
        origin = "our patched file" if marked and planned else f"the file of {package.distribution} {package.version}"
        near = (
            (planned.patched if marked else planned.pristine)
            if planned
            else self._stored(package.pristine_sha256(path))
        )
        message = (
            f"{self.package_dir / path} was changed by someone else (sha256 {sha256_bytes(current)}), so nothing was "
            f"written: keep the change elsewhere and install vLLM {package.version} again"
        )
        lines = unified_diff(f"vllm/{path}", near, current).splitlines() if near else []
        if len(lines) > _DIFF_LINES:
            lines[_DIFF_LINES:] = [f"({len(lines) - _DIFF_LINES} more lines)"]
        return "\n".join([message, f"How it differs from {origin}:", *lines] if lines else [message])

    def _record(self) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = json.loads(self._record_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise Refusal(
                f"{self._record_path} cannot be read ({error}): restore it, or install the wheel again"
            ) from error
        return record

    def _stored(self, sha256: str) -> bytes:
        try:
            return (self.store / "pristine" / sha256).read_bytes()
        except FileNotFoundError:
            return b""

    def write(self, work: Work, package: Package) -> None:
        """Do ``work``: keep the originals, note the intent, stage all files, rename, drop old byte code, note the end.

        Until the first rename nothing of the package has changed; after it, the noted intent makes the next run finish.
        """
        try:
            self.store.mkdir(mode=0o755, parents=True, exist_ok=True)
            with self._lock():
                self._write(work, package)
        except OSError as error:
            where = error.filename or self.package_dir
            raise Refusal(
                f"cannot write {where}: {error.strerror}; mend that and run again, which completes the work"
            ) from error

    def _write(self, work: Work, package: Package) -> None:
        for move in work.moves:
            if package.read(move.path) != move.before:
                raise Refusal(f"{self.package_dir / move.path} changed while this ran: run again")
            self._keep_pristine(package, move)
        before = self._record()
        if work.changed:
            self._write_record(work.intent)
        targets = [self.package_dir / path for path in work.intent["files"]]
        self._remove_leftovers(targets)
        try:
            staged = [(_staged(self.package_dir / move.path, move.after), move.path) for move in work.moves]
        except BaseException:
            self._remove_leftovers(targets)
            self._write_record(before)
            raise
        for temporary, path in staged:
            temporary.replace(self.package_dir / path)
        if work.changed:
            for target in targets:
                sync_directory(target.parent)
                _remove_byte_code(target)
        self._write_record(work.outcome)

    def _keep_pristine(self, package: Package, move: Move) -> None:
        recorded = package.pristine_sha256(move.path)
        kept = self.store / "pristine" / recorded
        if sha256_bytes(self._stored(recorded)) == recorded:
            return
        for data in (move.before, move.after):
            if sha256_bytes(data) == recorded:
                kept.parent.mkdir(mode=0o755, exist_ok=True)
                write_atomically(kept, data)

    def _write_record(self, record: Mapping[str, Any] | None) -> None:
        """Make ``record`` the store's record of this package; None is none."""
        if record is None:
            self._record_path.unlink(missing_ok=True)
        elif self._record() != record:
            self._record_path.parent.mkdir(mode=0o755, exist_ok=True)
            write_atomically(self._record_path, json.dumps(record, indent=1, sort_keys=True).encode() + b"\n")

    def _remove_leftovers(self, targets: Sequence[Path]) -> None:
        """Remove what a failed or killed run has staged."""
        for target in targets:
            for leftover in target.parent.glob(f".{target.name}.aerie-*"):
                leftover.unlink()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.store / "patch.lock").open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Refusal(
                    f"another run is patching with the store {self.store}: wait for it and run again"
                ) from error
            yield


def _staged(target: Path, data: bytes) -> Path:
    """Write ``data`` beside ``target`` with its mode, owner and extended attributes; the caller renames it."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.aerie-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            _copy_metadata(target, stream.fileno())
            os.fsync(stream.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _copy_metadata(source: Path, descriptor: int) -> None:
    status = source.stat()
    os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, status.st_mode & 0o7777)
    try:
        names = os.listxattr(source)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        names = []
    for name in names:
        os.setxattr(descriptor, name, os.getxattr(source, name))


def _remove_byte_code(target: Path) -> None:
    for cached in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        cached.unlink()
