# SPDX-License-Identifier: Apache-2.0
"""What a stopped service left behind: real processes, ports and files, of which no others are in sight.

`clear` kills all that a user runs: it is shown a directory of the processes that a test made, and never /proc itself.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible.module_utils.aerie.leftovers import Service, compute_processes

USER = pwd.getpwuid(os.getuid()).pw_name
WAIT = "echo ready; read line"


def other_user() -> str:
    """Return a user that is not this process's: one that it may become if it is root."""
    return next(entry.pw_name for entry in pwd.getpwall() if entry.pw_uid not in (0, os.getuid()))


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    directory = tmp_path / "proc"
    directory.mkdir()
    (directory / "self").symlink_to("/proc/self")
    return directory


@pytest.fixture
def shared_memory(tmp_path: Path) -> Path:
    directory = tmp_path / "shm"
    directory.mkdir()
    return directory


@contextmanager
def process(proc: Path, program: str = WAIT, user: str = USER) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of the shell as ``user`` and show it in ``proc``, until the test is done."""
    arguments = ["/bin/sh", "-c", program]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == b"ready\n"
        (proc / str(child.pid)).symlink_to(f"/proc/{child.pid}")
        try:
            yield child
        finally:
            child.kill()


def test_processes_of_the_user_are_killed(proc: Path, shared_memory: Path) -> None:
    service = Service(USER, "127.0.0.1", 0, proc, shared_memory)
    # One that does not end when it is asked to.
    stubborn = f"trap '' TERM; {WAIT}"
    with process(proc) as first, process(proc, stubborn) as second:
        assert sorted(service.processes()) == sorted([first.pid, second.pid])
        assert sorted(service.remains()) == sorted(
            [f"process {first.pid} (/bin/sh -c {WAIT})", f"process {second.pid} (/bin/sh -c {stubborn})"]
        )
        assert service.clear(10) == []
        assert (first.wait(), second.wait()) == (-9, -9)


def test_processes_of_others_are_let_be(proc: Path, shared_memory: Path) -> None:
    # As root, run one as another user; otherwise look for another user's, and find none of one's own.
    ours, theirs = (other_user(), USER) if os.getuid() == 0 else (USER, USER)
    looked_for = ours if os.getuid() == 0 else other_user()
    with process(proc, user=ours) as mine, process(proc, user=theirs) as other:
        expected = [mine.pid] if os.getuid() == 0 else []
        service = Service(looked_for, "127.0.0.1", 0, proc, shared_memory)
        assert list(service.processes()) == expected
        assert service.clear(10) == []
        assert other.poll() is None
        assert (mine.poll() is None) is (os.getuid() != 0)


def test_a_container_s_processes_are_let_be_although_their_user_has_the_same_number(
    proc: Path, shared_memory: Path
) -> None:
    with process(proc) as child:
        entry = proc / str(child.pid)
        entry.unlink()
        (entry / "ns").mkdir(parents=True)
        (entry / "status").write_text(Path(f"/proc/{child.pid}/status").read_text())
        (entry / "ns/pid").symlink_to("pid:[1]")
        service = Service(USER, "127.0.0.1", 0, proc, shared_memory)
        assert service.clear(10) == []
        assert child.poll() is None
        (entry / "ns/pid").unlink()
        (entry / "ns/pid").symlink_to(Path("/proc/self/ns/pid").readlink())
        assert list(service.processes()) == [child.pid]


def test_a_process_that_has_ended_is_none(proc: Path, shared_memory: Path) -> None:
    service = Service(USER, "127.0.0.1", 0, proc, shared_memory)
    with process(proc) as child:
        assert list(service.processes()) == [child.pid]
        child.kill()
        # Not waited for: a zombie.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{child.pid}").exists()
        assert list(service.processes()) == []
    assert list(service.processes()) == []


def test_nothing_belongs_to_a_user_that_there_is_not_yet(proc: Path, shared_memory: Path) -> None:
    (shared_memory / "psm_1").write_text("")
    with process(proc) as child:
        assert Service("no-such-user", "", 0, proc, shared_memory).clear(0) == []
        assert child.poll() is None
    assert (shared_memory / "psm_1").exists()


@pytest.mark.parametrize(("address", "other"), [("127.0.0.1", "127.0.0.2"), ("::1", None)])
def test_a_port_that_somebody_listens_on_is_said(
    proc: Path, shared_memory: Path, address: str, other: str | None
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        service = Service(USER, address, port, proc, shared_memory)
        assert service.clear(0) == [f"somebody listens on {address}:{port}"]
        if other is not None:
            assert Service(USER, other, port, proc, shared_memory).remains() == []
        assert Service(USER, address, 0, proc, shared_memory).remains() == []
        # A connection that ends on this side keeps the port for a minute, but nobody listens there.
        with socket.create_connection((address, port)):
            server.accept()[0].close()
    assert service.remains() == []


def test_everybody_s_address_is_the_service_s_too(proc: Path, shared_memory: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert Service(USER, "127.0.0.1", port, proc, shared_memory).remains() != []


def test_shared_memory_goes_with_the_last_process(proc: Path, shared_memory: Path) -> None:
    segments = [shared_memory / "psm_1", shared_memory / "sem.mp-x"]
    for segment in segments:
        segment.write_text("")
    (shared_memory / "directory").mkdir()
    service = Service(USER, "127.0.0.1", 0, proc, shared_memory)
    assert service.remains() == [f"shared memory {segment}" for segment in segments]
    with process(proc) as child:
        assert service.clear(10) == []
        assert child.wait() == -9
    assert [path.name for path in shared_memory.iterdir()] == ["directory"]


def test_shared_memory_of_others_is_let_be(proc: Path, shared_memory: Path) -> None:
    segment = shared_memory / "psm_1"
    segment.write_text("")
    assert Service(other_user(), "127.0.0.1", 0, proc, shared_memory).clear(0) == []
    assert segment.exists()


def smi(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_memory_of_gpus_is_asked_for_until_it_is_back(
    proc: Path, shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The driver lists 4711 twice more, and a process of somebody else all the time.
    smi(
        tmp_path,
        monkeypatch,
        f'echo "$*" > {tmp_path}/asked; echo 99; [ -e {tmp_path}/2 ] || echo 4711\n'
        f"[ ! -e {tmp_path}/1 ] || touch {tmp_path}/2; touch {tmp_path}/1",
    )
    service = Service(USER, "127.0.0.1", 0, proc, shared_memory)
    assert service.remains([4711, 4712]) == ["process 4711 holds memory of a GPU"]
    assert service.clear(20, [4711, 4712]) == []
    assert (tmp_path / "asked").read_text() == "--query-compute-apps=pid --format=csv,noheader\n"


@pytest.mark.parametrize(
    ("text", "found"), [("echo 1; echo; echo [N/A]; echo 22", {1, 22}), ("exit 9", set()), ("kill $$", set())]
)
def test_a_driver_that_does_not_answer_knows_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: set[int]
) -> None:
    smi(tmp_path, monkeypatch, text)
    assert compute_processes() == found


def test_a_host_without_a_driver_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compute_processes() == set()
