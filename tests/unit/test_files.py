# SPDX-License-Identifier: Apache-2.0
"""Digests, and writes that never leave half a file behind."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ansible.module_utils.aerie.files import sha256_bytes, sha256_file, write_atomically


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    assert sha256_file(tmp_path / "file") == sha256_bytes(data) == hashlib.sha256(data).hexdigest()


def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        write_atomically(tmp_path / "text", b"x")
        write_atomically(tmp_path / "program", b"x", mode=0o755)
    finally:
        os.umask(old)
    assert (tmp_path / "text").stat().st_mode & 0o7777 == 0o644
    assert (tmp_path / "program").stat().st_mode & 0o7777 == 0o755


def test_other_links_to_the_old_file_keep_the_old_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "other").hardlink_to(tmp_path / "file")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "file", b"new")
    assert ((tmp_path / "file").read_bytes(), (tmp_path / "other").read_bytes()) == (b"new", b"old")
    write_atomically(tmp_path / "link", b"newer")
    assert ((tmp_path / "link").is_symlink(), (tmp_path / "file").read_bytes()) == (False, b"new")


def test_a_write_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "directory", b"x")
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "absent/file", b"x")
    assert [path.name for path in tmp_path.rglob("*")] == ["directory"]


def test_a_reader_sees_the_old_bytes_or_the_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = [b"a" * 300_000, b"b" * 200_000]
    write_atomically(path, texts[0])
    stop = threading.Event()

    def read() -> set[bytes]:
        seen = set()
        while not stop.is_set():
            seen.add(path.read_bytes())
        return seen

    with ThreadPoolExecutor() as executor:
        reader = executor.submit(read)
        for number in range(40):
            write_atomically(path, texts[number % 2])
        stop.set()
    assert reader.result() == set(texts)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
