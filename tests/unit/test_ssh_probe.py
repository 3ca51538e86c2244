# SPDX-License-Identifier: Apache-2.0
"""What a login can do: the script run by this machine's shell, and every check of its answer."""

from __future__ import annotations

import getpass
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.aerie.ssh_probe import (
    Directory,
    Probe,
    check_clock,
    check_directories,
    check_probe,
    check_python,
    explain_become,
    parse,
    script,
)
from hypothesis import given
from hypothesis import strategies as st
from preflight_findings_text import messages

RELEASE = f"{sys.version_info[0]}.{sys.version_info[1]}"
HOME = Directory("/home/deploy", True, 5000, 90_000)
GOOD = Probe("deploy", 1000.0, (HOME, replace(HOME, path="/tmp")), ("3.12", "/usr/bin/python3.12"))


def run(home: Path, remote_tmp: str, pythons: list[str]) -> Probe:
    command = script(remote_tmp, pythons)
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin:/usr/local/bin"}
    result = subprocess.run(["/bin/bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    probe = parse(f"a banner that the login prints\n{result.stdout}and a farewell\n")
    assert probe is not None
    return probe


@pytest.mark.parametrize("remote_tmp", ["~/.ansible/tmp", "$HOME/.ansible/tmp", "${HOME}/.ansible/tmp"])
def test_the_script_finds_what_is_there_and_makes_nothing(tmp_path: Path, remote_tmp: str) -> None:
    began = time.time()
    probe = run(tmp_path, remote_tmp, ["/nowhere/python3", sys.executable])
    assert probe.user == getpass.getuser()
    assert probe.clock is not None and began - 1 < probe.clock < time.time() + 1
    assert [(directory.path, directory.writable) for directory in probe.directories] == [
        (str(tmp_path), True),
        ("/tmp", True),
    ]
    assert all(directory.free_mb for directory in probe.directories)
    assert probe.python == (RELEASE, sys.executable)
    assert list(tmp_path.iterdir()) == []


def test_awkward_names_reach_the_script_unharmed(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s "a" $dir'
    (odd / "there").mkdir(parents=True)
    assert run(tmp_path, f"{odd}/there/not yet", []).directories[0].path == str(odd / "there")
    assert run(tmp_path, str(tmp_path / "a file"), []).directories[0].path == str(tmp_path)


def test_what_is_in_the_way_of_a_directory_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run(tmp_path, f"{tmp_path}/file/tmp", []).directories[0].writable is False


def test_a_python_that_does_not_run_is_broken(tmp_path: Path) -> None:
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert run(tmp_path, "/tmp", [str(broken)]).python == ("broken", str(broken))
    assert run(tmp_path, "/tmp", ["/nowhere/python3"]).python == ("", "")


@given(st.text() | st.text().map(lambda text: f"aerie-probe\n{text}\nend=aerie-probe"))
def test_no_answer_raises(answer: str) -> None:
    probe = parse(answer)
    assert probe is None or list(check_probe(probe, 0.0, 1.0))


@given(
    st.lists(
        st.sampled_from(["directory=yes 1 2 3 /tmp", "directory=no", "directory=yes - - - /", "clock=1.5", "python="])
    )
)
def test_no_part_of_an_answer_raises(lines: list[str]) -> None:
    probe = parse("\n".join(["aerie-probe", *lines, "end=aerie-probe"]))
    assert probe is not None
    assert len(probe.directories) == len([line for line in lines if line.startswith("directory")])


def test_a_shell_that_says_something_else_is_no_answer() -> None:
    assert parse("This account is currently not available.\n") is None
    assert parse("aerie-probe\nclock=1.0\n") is None  # it ended in the middle


# --------------------------------------------------------------------------------------------------------------- checks


def test_a_login_that_can_do_everything_has_no_findings() -> None:
    assert list(check_probe(GOOD, 999.9, 1000.1)) == []


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        (
            replace(HOME, writable=False),
            "/home/deploy is not writable for deploy: change its mode or owner, or set ansible_remote_tmp",
        ),
        (
            replace(HOME, free_mb=3),
            "/home/deploy has 3 MB free, and Ansible needs 64 MB there: make room there",
        ),
        (replace(HOME, inodes=0), "/home/deploy has 0 inodes free (df -i): make room there"),
        (replace(HOME, inodes=None, free_mb=None), ""),
    ],
)
def test_a_directory_for_temporary_files(directory: Directory, message: str) -> None:
    assert messages(check_directories(replace(GOOD, directories=(directory,)))) == ([message] if message else [])


@pytest.mark.parametrize(
    ("python", "message"),
    [
        (("", ""), "the host has no Python that Ansible can use"),
        (("broken", "/usr/bin/python3"), "/usr/bin/python3, which Ansible would use, does not run"),
        (
            ("3.6", "/usr/bin/python3"),
            "/usr/bin/python3, which Ansible would use, is Python 3.6, and Aerie's modules need 3.9 or newer",
        ),
        (("3.9", "/usr/bin/python3"), ""),
        (("3.14", "/usr/bin/python3"), ""),
    ],
)
def test_the_python_that_ansible_uses(python: tuple[str, str], message: str) -> None:
    remedy = "install Python 3.9 or newer there, or set ansible_python_interpreter"
    assert messages(check_python(replace(GOOD, python=python))) == ([f"{message}: {remedy}"] if message else [])


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        (1000.0, ""),
        # The answer took 2 s: anything in between may be right.
        (999.0, ""),
        (1003.5, ""),
        (1008.0, "note: the host's clock is 6 s ahead of the control node's"),
        (940.0, "the host's clock is 60 s behind the control node's"),
        (4602.0, "the host's clock is 3600 s ahead of the control node's"),
        (None, ""),
    ],
)
def test_a_clock_that_is_off(clock: float | None, message: str) -> None:
    remedy = "set both by NTP (timedatectl set-ntp true)"
    found = messages(check_clock(replace(GOOD, clock=clock), asked=1000.0, answered=1002.0))
    assert found == ([f"{message}: {remedy}"] if message else [])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "Missing sudo password",
            "sudo asks deploy for a password, and the inventory has none: "
            "set ansible_become_password (Vault), or allow NOPASSWD",
        ),
        ("Incorrect sudo password", "sudo refuses the password of deploy: correct ansible_become_password"),
        (
            "\r\ndeploy is not in the sudoers file.\r\nShared connection to 10.0.0.1 closed.",
            "deploy may not use sudo: let deploy run everything as root (sudo)",
        ),
        (
            "/bin/sh: 1: sudo: not found",
            "there is no sudo on the host: install sudo, or set ansible_become_method",
        ),
        (
            "sudo: no tty present\nShared connection to 10.0.0.1 closed.\n",
            "sudo fails for deploy: sudo: no tty present: let deploy run everything as root (sudo)",
        ),
        ("", "sudo fails for deploy: it says nothing: let deploy run everything as root (sudo)"),
    ],
)
def test_privileges_that_are_not_given(said: str, message: str) -> None:
    assert messages([explain_become("sudo", "deploy", "root", said)]) == [message]
