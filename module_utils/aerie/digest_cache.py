# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests of large files, remembered while the files stay untouched."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ansible.module_utils.aerie.files import sha256_file, write_atomically


def cached_sha256(paths: Iterable[Path], cache: Path | None, *, remember: bool = True) -> dict[Path, str]:
    """Return the SHA-256 of each of ``paths``, read anew only where device, inode, size or mtime changed.

    ``cache`` is a JSON file that is made if need be; one caller at a time works on it, so that many processes that
    ask for the same file read it once. Without a cache every file is read; with ``remember`` off it is only looked at.
    """
    if cache is None:
        return {path: sha256_file(path) for path in paths}
    if not remember:
        known = _load(cache)
        return {path: _known(known, path) or sha256_file(path) for path in paths}
    cache.parent.mkdir(parents=True, exist_ok=True)
    with _locked(cache.with_name(f"{cache.name}.lock")):
        known = _load(cache)
        digests: dict[Path, str] = {}
        entries = dict(known)
        for path in paths:
            digests[path] = _known(known, path) or sha256_file(path)
            entries[str(path.resolve())] = {"stamp": _stamp(path), "sha256": digests[path]}
        if entries != known:
            write_atomically(cache, json.dumps(entries, indent=1, sort_keys=True).encode("utf-8"))
    return digests


def _known(entries: dict[str, dict[str, str]], path: Path) -> str:
    entry = entries.get(str(path.resolve()), {})
    return entry["sha256"] if entry.get("stamp") == _stamp(path) else ""


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _load(cache: Path) -> dict[str, dict[str, str]]:
    """Return what the cache knows; a damaged cache knows nothing."""
    try:
        entries = json.loads(cache.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: entry for key, entry in entries.items() if isinstance(entry, dict) and "sha256" in entry}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
