# SPDX-License-Identifier: Apache-2.0
"""Keys of the moment: what is in the directory while a program has one, after it, and after its death."""

from __future__ import annotations

import grp
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible.module_utils.aerie.host_key import HostKeyError, host_key

ROOT = Path(__file__).parents[2]
GROUP = grp.getgrgid(os.getgid()).gr_name


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_the_digest_is_there_exactly_as_long_as_the_key_is_used(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "api-keys.d"
    before = int(time.time())
    with host_key(GROUP, directory, lifetime_s=60) as key:
        (path,) = files(directory)
        digest, expires = path.read_text().split("  # expires ")
        assert digest == hashlib.sha256(key.encode()).hexdigest()
        assert before + 60 <= int(expires) <= time.time() + 60
        assert key not in path.read_text()
        assert key not in path.name
        assert len(key) >= 43
        assert (path.stat().st_mode & 0o7777, path.stat().st_gid) == (0o640, os.getgid())
        assert (directory.stat().st_mode & 0o7777, directory.stat().st_gid) == (0o750, os.getgid())
    assert files(directory) == []


def test_programs_have_a_key_each(tmp_path: Path) -> None:
    with host_key(GROUP, tmp_path) as one:
        with host_key(GROUP, tmp_path) as other:
            assert one != other
            assert len(files(tmp_path)) == 2
        assert hashlib.sha256(one.encode()).hexdigest() in files(tmp_path)[0].read_text()
    assert files(tmp_path) == []


def test_a_key_goes_when_its_program_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), host_key(GROUP, tmp_path):
        assert len(files(tmp_path)) == 1
        raise ZeroDivisionError
    assert files(tmp_path) == []


def test_what_a_killed_program_left_is_removed_once_it_has_expired(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import conftest
from pathlib import Path
from ansible.module_utils.aerie.host_key import host_key
with host_key({GROUP!r}, Path({str(tmp_path)!r}), lifetime_s=float(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    for lifetime in ("-5", "600"):
        ended = subprocess.run([sys.executable, "-c", program, lifetime], check=False)
        assert ended.returncode == -9
    # The second program removed what the first one left.
    (left,) = files(tmp_path)
    old = tmp_path / ".half-made.x"
    old.write_text("")
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    (tmp_path / ".half-made.y").write_text("")
    (tmp_path / "by hand").write_text("0" * 64 + "\n")
    with host_key(GROUP, tmp_path):
        assert len(files(tmp_path)) == 4
    assert {path.name for path in files(tmp_path)} == {left.name, ".half-made.y", "by hand"}


def test_a_group_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostKeyError, match="group no-such-group does not exist"), host_key("no-such-group", tmp_path):
        raise AssertionError
    assert files(tmp_path) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with (
        pytest.raises(HostKeyError, match=r"run.* cannot be written"),
        host_key(GROUP, tmp_path / "run" / "api-keys.d"),
    ):
        raise AssertionError
