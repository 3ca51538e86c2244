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
from ansible.module_utils.aerie import leftovers
from ansible.module_utils.aerie.leftovers import Held, Service, gpus

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


def report(*cards: tuple[str, dict[int, int]], lost: str = "") -> str:
    """Return what nvidia-smi tells of GPUs with this much memory in use, and by which processes."""
    text = ""
    for number, (used, holders) in enumerate(cards):
        total = "GPU is lost" if str(number) == lost else "143771 MiB"
        processes = "".join(
            f"<process_info><pid>{pid}</pid><type>C</type><used_memory>{memory} MiB</used_memory></process_info>"
            for pid, memory in holders.items()
        )
        text += (
            f'<gpu id="00000000:0{number}:00.0"><uuid>GPU-{number}</uuid><fb_memory_usage><total>{total}</total>'
            f"<used>{used}</used></fb_memory_usage><processes>{processes}</processes></gpu>"
        )
    return f"<nvidia_smi_log>{text}</nvidia_smi_log>"


class Smi:
    """nvidia-smi, which gives each of its answers once, and the last one as often as it is asked; "" is none."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        program = directory / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncd {directory}\necho "$*" >> asked\nset -- answer-*\ncat "$1"\n[ $# = 1 ] || rm "$1"\n'
        )
        program.chmod(0o755)

    def answers(self, *texts: str) -> None:
        for path in self._directory.glob("answer-*"):
            path.unlink()
        for number, text in enumerate(texts):
            (self._directory / f"answer-{number}").write_text(text)

    def asked(self) -> list[str]:
        path = self._directory / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    directory = tmp_path / "smi"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return Smi(directory)


SEE = " (see the kernel log: journalctl -k -g NVRM)"
# A process of somebody else's on the first of two GPUs.
THEIRS = {99: 9000}


def held(proc: Path, shared_memory: Path, smi: Smi) -> tuple[Service, Held, int]:
    """Return a service, what it had while its one process, which has ended, held 100000 MiB of GPU 0, and that one."""
    service = Service(USER, "127.0.0.1", 0, proc, shared_memory)
    with process(proc) as child:
        smi.answers(report(("109500 MiB", {child.pid: 100_000, **THEIRS}), ("9000 MiB", THEIRS)))
        had = service.held()
    return service, had, child.pid


def test_memory_of_gpus_is_asked_for_until_it_is_back(proc: Path, shared_memory: Path, smi: Smi) -> None:
    service, had, pid = held(proc, shared_memory, smi)
    listed = report(("109500 MiB", {pid: 100_000, **THEIRS}), ("9000 MiB", THEIRS))
    hidden = report(("109500 MiB", THEIRS), ("9000 MiB", THEIRS))
    smi.answers(listed)
    assert service.remains(had) == [f"process {pid} holds memory of a GPU"]
    smi.answers(hidden)
    assert service.remains(had) == [f"100000 MiB of GPU 0 that no process holds{SEE}"]
    before = len(smi.asked())
    smi.answers(listed, hidden, report(("9500 MiB", THEIRS), ("9000 MiB", THEIRS)))
    assert service.clear(20, had) == []
    assert smi.asked()[before:] == ["-q -x"] * 3


@pytest.mark.parametrize(
    "after",
    [
        # Somebody else took what it gave back, on that GPU and another.
        report(("130500 MiB", {99: 120_000, 100: 10_000}), ("140000 MiB", {101: 140_000})),
        # Others' memory may be hidden, where it did not use the GPU.
        report(("9500 MiB", THEIRS), ("140000 MiB", {})),
        # A driver has some for itself.
        report(("1500 MiB", {}), ("0 MiB", {})),
    ],
)
def test_memory_that_others_use_is_let_be(proc: Path, shared_memory: Path, smi: Smi, after: str) -> None:
    service, had, _ = held(proc, shared_memory, smi)
    smi.answers(after)
    assert service.remains(had) == []


@pytest.mark.parametrize(
    ("after", "remains"),
    [
        ("", "perhaps memory of GPUs, since nvidia-smi does not answer any more"),
        ("NVIDIA-SMI has failed", "perhaps memory of GPUs, since nvidia-smi does not answer any more"),
        (report(("N/A", {}), lost="0"), "perhaps memory of GPU 0, which does not answer any more"),
        (report(), "perhaps memory of GPU 0, which does not answer any more"),
    ],
)
def test_memory_that_nobody_tells_of_any_more_is_not_known_to_be_back(
    proc: Path, shared_memory: Path, smi: Smi, after: str, remains: str
) -> None:
    service, had, _ = held(proc, shared_memory, smi)
    smi.answers(after)
    assert service.clear(0, had) == [f"{remains}{SEE}"]


def test_a_driver_that_takes_too_long_does_not_answer(
    proc: Path, shared_memory: Path, smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, had, _ = held(proc, shared_memory, smi)
    (tmp_path / "smi/nvidia-smi").write_text("#!/bin/sh\nexec cat /dev/zero\n")
    monkeypatch.setattr(leftovers, "_NVIDIA_SMI_S", 0.05)
    assert service.remains(had) == [f"perhaps memory of GPUs, since nvidia-smi does not answer any more{SEE}"]


@pytest.mark.parametrize("before", ["", report(("N/A", {}), lost="0"), report(("9000 MiB", THEIRS))])
def test_nothing_is_said_of_gpus_that_the_service_was_not_seen_on(
    proc: Path, shared_memory: Path, smi: Smi, before: str
) -> None:
    service = Service(USER, "127.0.0.1", 0, proc, shared_memory)
    smi.answers(before)
    with process(proc):
        had = service.held()
    assert smi.asked() == ["-q -x"]
    smi.answers("")
    assert service.remains(had) == []
    assert smi.asked() == ["-q -x"]


def test_a_service_without_processes_holds_no_gpu(proc: Path, shared_memory: Path, smi: Smi) -> None:
    service = Service(USER, "127.0.0.1", 0, proc, shared_memory)
    assert service.remains(service.held()) == []
    assert smi.asked() == []


def test_a_host_without_a_driver_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == ()
