# SPDX-License-Identifier: Apache-2.0
"""Writes a plan's files into an installed package, all or none, and takes them back to the byte.

Every file is known by its sha256: pristine, or one that a plan of ours wrote. Anything else is refused. In ``store``:

``pristine/<sha256>``        original bytes, kept before the first write
``patched/<sha256>``         the bytes that we wrote, so that a later edit of them can be shown
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.module_utils.aerie.condition import diagnose
from ansible.module_utils.aerie.files import sha256_bytes, sync_directory, write_atomically
from ansible.module_utils.aerie.source import MARKER, Refusal, unified_diff
from ansible.module_utils.aerie.wheel import Package

Plan = Mapping[str, Any]
_DIFF_LINES = 60
# What a security module says about the old bytes, which would be wrong for the new ones.
_ATTRIBUTES_OF_CONTENT = {"security.ima", "security.evm"}


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
    """What a run has to do, and what the store says before it, meanwhile (``intent``) and after it (``outcome``).

    ``notes`` are for the user: what became of an earlier patch. ``kept`` are bytes that the store must have, by kind.
    """

    moves: Sequence[Move]
    notes: Sequence[str]
    kept: Sequence[tuple[str, bytes]]
    before: Mapping[str, Any] | None
    intent: Mapping[str, Any]
    outcome: Mapping[str, Any] | None

    @property
    def interrupted(self) -> bool:
        """Tell whether an earlier run was cut short, and this one brings it to its end."""
        return bool(self.before and not self.before["complete"])

    @property
    def changed(self) -> bool:
        """Tell whether the package changes, or an interrupted change is brought to its end."""
        return bool(self.moves) or self.interrupted

    def undone(self) -> Work:
        """Return the work that takes this one back, once it is done."""
        moves = [Move(move.path, move.after, move.before) for move in self.moves]
        return Work(moves, [], [], self.outcome, self.intent, self.before)


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
        self._locked = False
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
        if plan is None and self._record() is None:
            self._refuse_unrecorded_patch()
        return self._work(package, plan_files(plan) if plan else [], None)

    def _work(self, package: Package, files: Sequence[FileVersions], set_name: str | None) -> Work:
        record = self._record()
        planned = {file.path: file for file in files}
        ours = self._ours(package, record)
        for file in files:
            ours.setdefault(file.path, set()).add(sha256_bytes(file.patched))
        moves: list[Move] = []
        restored: list[str] = []
        found: list[str] = []
        for path in sorted(ours):
            current = self._current(package, path)
            digest, original = sha256_bytes(current), package.pristine_sha256(path)
            if digest not in {original, *ours[path]}:
                raise Refusal(self._unknown(package, path, current, ours[path], planned.get(path)))
            patched = set_name is not None and path in planned
            after = planned[path].patched if patched else self.pristine(package, path, planned.get(path))
            if current != after:
                moves.append(Move(path, current, after))
            (restored if digest == original else found).append(path)
        description = {"package_dir": str(self.package_dir), "vllm_version": package.version, "set": set_name}
        entries = {path: {"pristine": package.pristine_sha256(path), "patched": sorted(ours[path])} for path in ours}
        wanted = {path: {**entries[path], "patched": [sha256_bytes(planned[path].patched)]} for path in planned}
        return Work(
            moves,
            self._notes(package, record, restored, found),
            [
                *(("pristine", file.pristine) for file in files if set_name),
                *(("patched", file.patched) for file in files if set_name),
                *(("pristine", move.after) for move in moves if move.path not in planned),
            ],
            record,
            {**description, "complete": False, "files": entries},
            {**description, "complete": True, "files": wanted} if set_name else None,
        )

    def _ours(self, package: Package, record: Mapping[str, Any] | None) -> dict[str, set[str]]:
        """Return what we wrote into each file that we patched: nothing, where it is another release's file by now."""
        return {
            path: set(entry["patched"]) if package.recorded[path] == entry["pristine"] else set()
            for path, entry in (record["files"] if record else {}).items()
            if path in package.recorded
        }

    def _notes(
        self, package: Package, record: Mapping[str, Any] | None, pristine: Sequence[str], patched: Sequence[str]
    ) -> list[str]:
        """Say what became of an earlier patch, where that is not what its record says."""
        if record is None:
            if not patched:
                return []
            extent = "whole" if not pristine else "partly applied"
            return [f"{self._names(patched)} held this patch ({extent}), of which {self.store} had no record"]
        if not record["complete"]:
            return [f"an earlier run was interrupted: of its files, {self._names(patched)} held the patch"]
        replaced = [path for path, entry in record["files"].items() if package.recorded.get(path) != entry["pristine"]]
        if replaced:
            return [
                f"vLLM {record['vllm_version']}, which was patched with {record['set']}, was replaced by "
                f"{package.distribution} {package.version}: the patch went with it"
            ]
        restored = [path for path in pristine if path in record["files"]]
        return [f"{self._names(restored)} was patched with {record['set']} and put back by someone"] if restored else []

    @staticmethod
    def _names(paths: Sequence[str]) -> str:
        return ", ".join(paths) or "none"

    def pristine(self, package: Package, path: str, planned: FileVersions | None = None) -> bytes:
        """Return the bytes of ``path`` that RECORD names: from the environment, the plan or the store."""
        wanted = package.pristine_sha256(path)
        candidates = [package.read(path), planned.pristine if planned else b"", self._stored("pristine", wanted)]
        for data in candidates:
            if sha256_bytes(data) == wanted:
                return data
        raise Refusal(
            f"{self.package_dir / path} is not what the RECORD of {package.distribution} {package.version} names, and "
            f"{self.store / 'pristine'} has no copy of the original: install {package.distribution} "
            f"{package.version} again"
        )

    def _current(self, package: Package, path: str) -> bytes:
        if (self.package_dir / path).is_symlink():
            raise Refusal(
                f"{self.package_dir / path} is a symbolic link, so other environments may share its target: "
                "install the environment with hard links or copies"
            )
        return package.read(path)

    def _unknown(
        self, package: Package, path: str, current: bytes, ours: set[str], planned: FileVersions | None
    ) -> str:
        """Say what an unknown file is, what to do, and how it differs from the nearest version that is known."""
        release = f"{package.distribution} {package.version}"
        digest = sha256_bytes(current)
        record = self._record()
        entry = record["files"].get(path) if record else None
        if record and entry and digest in {entry["pristine"], *entry["patched"]}:
            return (
                f"{self.package_dir / path} is still the file of vLLM {record['vllm_version']}"
                f"{'' if digest == entry['pristine'] else ', as Aerie patched it'}, but the RECORD is that of "
                f"{release}: the upgrade did not replace it, so nothing was written; install {release} again"
            )
        patched = (
            planned.patched if planned else next(filter(None, (self._stored("patched", one) for one in ours)), b"")
        )
        pristine = planned.pristine if planned else self._stored("pristine", package.pristine_sha256(path))
        condition = diagnose(current, release, pristine, patched)
        message = (
            f"{self.package_dir / path} {condition.what}, so nothing was written (sha256 {digest}): {condition.remedy}"
        )
        if not condition.nearest:
            return message
        lines = unified_diff(f"vllm/{path}", condition.nearest, current).splitlines()
        if len(lines) > _DIFF_LINES:
            lines[_DIFF_LINES:] = [f"({len(lines) - _DIFF_LINES} more lines)"]
        return "\n".join([message, f"How it differs from {condition.nearest_name}:", *lines])

    def _refuse_unrecorded_patch(self) -> None:
        """Nothing is known to undo: make sure that nothing is there to undo."""
        for path in sorted(self.package_dir.rglob("*.py")):
            if path.is_file() and MARKER.encode() in path.read_bytes():
                raise Refusal(
                    f"{path} carries Aerie's marks, but {self.store} has no record of a patch: name the store that it "
                    "was patched with, give the plan or the patch sets to undo, or install vLLM again"
                )

    def _record(self) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = json.loads(self._record_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise Refusal(
                f"{self._record_path} cannot be read ({error}): restore it, or remove it and install vLLM again"
            ) from error
        return record

    def _stored(self, kind: str, sha256: str) -> bytes:
        try:
            return (self.store / kind / sha256).read_bytes()
        except FileNotFoundError:
            return b""

    def write(self, work: Work, package: Package) -> None:
        """Do ``work``: keep the originals, note the intent, stage all files, rename, drop old byte code, note the end.

        Until the first rename nothing of the package has changed. An error after it takes the renamed files back; a
        kill, or an error that cannot be taken back, leaves the noted intent, which the next run brings to its end.
        """
        if not work.changed and work.before == work.outcome:
            return
        with self.lock():
            self.refuse_stale(work, package)
            with self._writing():
                self._write(work)

    def refuse_stale(self, work: Work, package: Package) -> None:
        """Refuse ``work`` that was planned from what is not there any more; that holds for as long as ``lock``."""
        if self._record() != work.before:
            raise Refusal(f"{self.package_dir} was patched by another run meanwhile: run again")
        for move in work.moves:
            if package.read(move.path) != move.before:
                raise Refusal(f"{self.package_dir / move.path} changed while this ran: run again")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename2 or error.filename or self.package_dir
            raise Refusal(
                f"cannot write {where}: {error.strerror}; mend that and run again, which completes the work"
            ) from error

    def _write(self, work: Work) -> None:
        for kind in ("pristine", "patched"):
            _remove(self.store.glob(f"{kind}/.*"))
        for kind, data in work.kept:
            self._keep(kind, data)
        targets = [self.package_dir / path for path in work.intent["files"]]
        if work.changed:
            self._write_record(work.intent)
            self._replace(work, targets)
            for target in targets:
                sync_directory(target.parent)
                _remove_byte_code(target)
        self._write_record(work.outcome)

    def _replace(self, work: Work, targets: Sequence[Path]) -> None:
        """Stage every file, then rename every file; on an error have them all as they were."""
        renamed = []
        try:
            _remove_staged(targets)
            staged = [(_staged(self.package_dir / move.path, move.after), move) for move in work.moves]
            for temporary, move in staged:
                temporary.replace(self.package_dir / move.path)
                renamed.append(move)
        except BaseException:
            for move in renamed:
                target = self.package_dir / move.path
                _staged(target, move.before).replace(target)
            _remove_staged(targets)
            self._write_record(work.before)
            raise

    def _keep(self, kind: str, data: bytes) -> None:
        sha256 = sha256_bytes(data)
        if sha256_bytes(self._stored(kind, sha256)) != sha256:
            self._put(self.store / kind / sha256, data)

    def _write_record(self, record: Mapping[str, Any] | None) -> None:
        """Make ``record`` the store's record of this package; None is none."""
        if record is None:
            self._record_path.unlink(missing_ok=True)
        elif self._record() != record:
            self._put(self._record_path, json.dumps(record, indent=1, sort_keys=True).encode() + b"\n")

    @staticmethod
    def _put(path: Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        write_atomically(path, data)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep out other runs on this package, whatever their store, and on this store. ``write`` may be within."""
        if self._locked:
            yield
            return
        with ExitStack() as stack:
            with self._writing():
                self.store.mkdir(mode=0o755, parents=True, exist_ok=True)
                self._take_locks(stack)
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    def _take_locks(self, stack: ExitStack) -> None:
        for path, flags in (
            (self.package_dir, os.O_DIRECTORY),
            (self.store / "patch.lock", os.O_RDWR | os.O_CREAT),
        ):
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Refusal(f"another run is patching ({path} is locked): wait for it and run again") from error
            except OSError as error:
                # NFS locks no directory; there the store's lock has to do.
                if error.errno != errno.EBADF:
                    raise


def _remove_staged(targets: Iterable[Path]) -> None:
    """Remove what a failed or killed run has staged beside ``targets``."""
    for target in targets:
        _remove(target.parent.glob(f".{target.name}.aerie-*"))


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        path.unlink()


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
    for name in set(names) - _ATTRIBUTES_OF_CONTENT:
        os.setxattr(descriptor, name, os.getxattr(source, name))


def _remove_byte_code(target: Path) -> None:
    _remove((target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"))
