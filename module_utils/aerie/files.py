# SPDX-License-Identifier: Apache-2.0
"""Digests, and writes that never leave half a file behind."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_CHUNK = 1 << 20


def sha256_bytes(data: bytes) -> str:
    """Return the hexadecimal SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of the file at ``path``, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_text(path: Path) -> str | None:
    try:
        # With its line ends as they are.
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return None


def write_atomically(path: Path, data: bytes, mode: int = 0o644, group: int | None = None) -> None:
    """Put ``data`` at ``path`` by a synced temporary file in the same directory and a rename.

    A reader sees the old bytes or the new ones. Other hard links to the old file keep the old bytes. ``group`` is the
    number of the file's group, which is otherwise that of the process.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            if group is not None:
                os.fchown(stream.fileno(), -1, group)
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make a rename in the directory ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
