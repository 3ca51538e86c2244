# SPDX-License-Identifier: Apache-2.0
"""Files on their way to a host: what is missing there, and putting what arrived in its place once it is verified."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.digest_cache import cached_sha256
from ansible.module_utils.aerie.files import sha256_file, sync_directory

# Inside the destination, so that what arrives is on the right file system and a rename puts it in place.
INCOMING = ".incoming"


class StagingError(RuntimeError):
    """A file that cannot be staged; the text says which and why."""


@dataclass(frozen=True)
class ExpectedFile:
    """A file that a directory must have: its ``name`` there, SHA-256, and ``size`` in bytes."""

    name: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise StagingError(f"'{self.name}' is no plain file name")


def missing_files(directory: Path, expected: Sequence[ExpectedFile], *, remember: bool) -> list[ExpectedFile]:
    """Return the files that ``directory`` lacks or has with other bytes.

    With ``remember``, the digests that were computed are kept there and not computed again while a file is untouched.
    """
    candidates = [path for file in expected if (path := directory / file.name).is_file()]
    digests = cached_sha256(candidates, directory / ".sha256.json" if remember and candidates else None)
    return [file for file in expected if digests.get(directory / file.name) != file.sha256]


def link_from(siblings: Path, directory: Path, missing: Sequence[ExpectedFile]) -> list[ExpectedFile]:
    """Link files that some directory in ``siblings`` has already into ``directory``; return those that none has.

    Digests are kept beside the files that they are of, so that large ones are read once.
    """
    still = []
    for file in missing:
        for other in sorted(path for path in siblings.glob("*") if path.is_dir() and path != directory):
            if _is_expected(other / file.name, file):
                directory.mkdir(parents=True, exist_ok=True)
                link = directory / f".{file.name}.link"
                link.unlink(missing_ok=True)
                os.link(other / file.name, link)
                link.replace(directory / file.name)
                break
        else:
            still.append(file)
    return still


def open_incoming(directory: Path, missing: Sequence[ExpectedFile], login: str) -> list[ExpectedFile]:
    """Make the directory where ``login`` may put ``missing``; return those that an interrupted run did not bring."""
    incoming = directory / INCOMING
    incoming.mkdir(parents=True, exist_ok=True)
    wanted = [file for file in missing if not _arrived(incoming, file)]
    arrived = {file.name for file in missing} - {file.name for file in wanted}
    # Halves of files take the room that the whole ones need.
    for path in incoming.iterdir():
        if path.name not in arrived:
            path.unlink()
    file_system = os.statvfs(incoming)
    free = file_system.f_bavail * file_system.f_frsize
    needed = sum(file.size for file in wanted)
    if needed > free:
        raise StagingError(
            f"{directory} needs {needed >> 20} MB and its file system has {free >> 20} MB free: make room there"
        )
    incoming.chmod(0o700)
    # Without a configured login, SSH has chosen it, and sudo knows it.
    login = login or os.environ.get("SUDO_USER", "")
    if os.geteuid() == 0 and login:
        owner = pwd.getpwnam(login)
        os.chown(incoming, owner.pw_uid, owner.pw_gid)
    return wanted


def accept_incoming(directory: Path, missing: Sequence[ExpectedFile]) -> None:
    """Put what arrived in its place, verified; what is damaged is removed, so that the next run sends it again."""
    incoming = directory / INCOMING
    if os.geteuid() == 0:
        os.chown(incoming, 0, 0)
    for file in missing:
        path = incoming / file.name
        if not _arrived(incoming, file):
            path.unlink(missing_ok=True)
            raise StagingError(
                f"{file.name} arrived in {directory} with other bytes than SHA-256 {file.sha256}: run again; if that "
                "does not help, the file on the control node is not the one that this digest names"
            )
        if os.geteuid() == 0:
            os.chown(path, 0, 0)
        path.chmod(0o644)
        path.replace(directory / file.name)
    for path in incoming.iterdir():
        path.unlink()
    incoming.rmdir()
    sync_directory(directory)


def _is_expected(path: Path, file: ExpectedFile) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
        return False
    return cached_sha256([path], path.parent / ".sha256.json")[path] == file.sha256


def _arrived(incoming: Path, file: ExpectedFile) -> bool:
    path = incoming / file.name
    if path.is_symlink() or not path.is_file():
        return False
    return path.stat().st_size == file.size and sha256_file(path) == file.sha256
