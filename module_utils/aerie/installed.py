# SPDX-License-Identifier: Apache-2.0
"""What is in an environment: the files of its distributions, as their RECORDs have them, and all others."""

from __future__ import annotations

import base64
import contextlib
import csv
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.aerie.files import sha256_bytes, sha256_file

EDITED, MISSING, ADDED = "was edited", "is missing", "was added"
# How many files a sentence names.
_NAMED = 5


class Fault(NamedTuple):
    """A file that is not as it was installed; ``what`` is EDITED, MISSING or ADDED."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def listing(found: Sequence[Fault]) -> str:
    """Name some of them, and say how many there are more: of bytecode, there may be thousands."""
    more = len(found) - _NAMED
    return ", ".join(map(str, found[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def files_below(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all below ``directory`` that is no directory; what a link points to is not looked at."""
    pending = [str(directory)]
    while pending:
        try:
            found = list(os.scandir(pending.pop()))
        except OSError:
            continue
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            else:
                yield entry


def stat_digest(directory: Path) -> str:
    """Return a digest of the paths, sizes and times of all files below ``directory``.

    It costs a fraction of a second where reading every file costs a minute, and shows what was edited, added or removed
    by anybody who does not set times back. Files that an environment writes to itself as it runs are elsewhere.
    """
    entries = []
    for entry in files_below(directory):
        status = entry.stat(follow_symlinks=False)
        entries.append(f"{entry.path[len(str(directory)) :]}\0{status.st_size}\0{status.st_mtime_ns}")
    return sha256_bytes("\n".join(sorted(entries)).encode(errors="surrogateescape"))


def others(environment: Path) -> dict[str, str]:
    """Return the digests of the files that no distribution has a digest of, by their path in the environment.

    These are the RECORDs, and what uv made before it installed anything. A link is what it points to.
    """
    known: set[str] = set()
    for record in _records(environment):
        known.update(_installed_at(record))
    return _others(environment, known)


def faults(environment: Path, patches: Mapping[str, str], noted: Mapping[str, str]) -> Iterator[Fault]:
    """Yield the files that are not as they were installed, or as the patch set wrote them, from reading every file.

    ``patches`` are digests of vLLM's files, ``noted`` is what ``others`` returned when the environment was made.
    """
    if not environment.is_dir():
        yield Fault(environment, MISSING)
        return
    recorded = _recorded(environment)
    expected = dict(recorded)
    for package in environment.glob("lib/python*/site-packages/vllm"):
        expected.update({package / path: digest for path, digest in patches.items()})
    # hashlib works beside other threads.
    with ThreadPoolExecutor() as executor:
        for path, actual in zip(expected, executor.map(_digest, expected)):
            if actual != expected[path]:
                yield Fault(path, MISSING if actual is None else EDITED)
    found = _others(environment, set(map(str, recorded)))
    lost = [name for name in noted if found.get(name) != noted[name]]
    yield from (Fault(environment / name, EDITED if name in found else MISSING) for name in sorted(lost))
    # Where a RECORD is not as it was, it is not known what was.
    if not any(name.endswith("/RECORD") for name in lost):
        yield from (Fault(environment / name, ADDED) for name in sorted(found.keys() - noted.keys()))


def _recorded(environment: Path) -> dict[Path, str]:
    """Return the digests that the RECORDs of the environment's distributions have, by file."""
    recorded: dict[Path, str] = {}
    for record in _records(environment):
        for name, digest in _rows(record):
            recorded[Path(os.path.normpath(record.parent.parent / name))] = _hexadecimal(digest)
    return recorded


def _installed_at(record: Path) -> Iterator[str]:
    """Yield the paths of what a RECORD has a digest of."""
    packages = str(record.parent.parent)
    for name, _ in _rows(record):
        path = f"{packages}/{name}"
        # Of 57,000 files a few are programs.
        yield os.path.normpath(path) if "/.." in path else path


def _records(environment: Path) -> Iterator[Path]:
    return environment.glob("lib/python*/site-packages/*.dist-info/RECORD")


def _rows(record: Path) -> Iterator[tuple[str, str]]:
    # One that somebody damaged is itself not as it was, which is said.
    with contextlib.suppress(csv.Error, ValueError):
        for name, digest, _ in csv.reader(record.read_bytes().decode(errors="replace").splitlines()):
            if digest.startswith("sha256="):
                yield name, digest[len("sha256=") :]


def _others(environment: Path, recorded: Collection[str]) -> dict[str, str]:
    unknown = (Path(entry.path) for entry in files_below(environment) if entry.path not in recorded)
    return {_text(path.relative_to(environment)): _content(path) for path in unknown}


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"-> {_text(path.readlink())}"
    # What is no file, such as a pipe, may have no end.
    return (path.is_file() and _digest(path)) or "cannot be read"


def _text(path: Path) -> str:
    """Return a path as a text that JSON can have."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _digest(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except (OSError, ValueError):
        # A damaged RECORD may name what no file can be named.
        return None


def _hexadecimal(urlsafe: str) -> str:
    try:
        return base64.urlsafe_b64decode(urlsafe + "=" * (-len(urlsafe) % 4)).hex()
    except ValueError:
        # A damaged RECORD's; no file has it.
        return urlsafe
