# SPDX-License-Identifier: Apache-2.0
"""What processes do, read from a tree in /proc's and /sys/fs/cgroup's shapes, and from this very process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible.module_utils.aerie.evidence import bytes_read, processes, stack_lines

GROUP = "/system.slice/vllm.service"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Processes 10 and 11, of which 11 stands still in the kernel."""
    root = tmp_path / "proc"
    for pid, state, name, waits, read in (
        (10, "S", "VLLM::API) server", "0", 4096),
        (11, "D", "VLLM::Worker", "nfs_wait", 8192),
    ):
        process = root / str(pid)
        process.mkdir(parents=True)
        (process / "stat").write_text(f"{pid} ({name}) {state} 1 1\n")
        (process / "cmdline").write_text(f"{name}\0")
        (process / "comm").write_text(f"{name}\n")
        (process / "wchan").write_text(waits)
        (process / "io").write_text(f"rchar: 9\nread_bytes: {read}\nwrite_bytes: 1\n")
    return root


@pytest.fixture(params=["", "unified", "systemd"])
def cgroups(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    group = root / request.param / GROUP[1:]
    (group / "below").mkdir(parents=True)
    (group / "cgroup.procs").write_text("10\n12\n")
    (group / "below" / "cgroup.procs").write_text("11\n")
    return root


def test_processes_of_a_group_and_below_that_still_live(proc: Path, cgroups: Path) -> None:
    assert processes(GROUP, proc, cgroups) == [10, 11]
    assert processes("/", proc, cgroups) == []
    assert processes("", proc, cgroups) == []
    assert processes("/system.slice/other.service", proc, cgroups) == []


def test_what_they_read_is_summed(proc: Path, cgroups: Path) -> None:
    assert bytes_read(GROUP, proc, cgroups) == 12288
    (proc / "11" / "io").unlink()
    assert bytes_read(GROUP, proc, cgroups) == 4096


def test_states_and_stacks(proc: Path, cgroups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = []

    def run(command: list[str]) -> str:
        asked.append(command)
        return "Thread 1 (idle)\n\n    wait (threading.py:359)\n"

    assert list(stack_lines(GROUP, run, proc, cgroups)) == [
        "pid 10 (VLLM::API) server): state S, waits in the kernel for nothing",
        "pid 11 (VLLM::Worker): state D, waits in the kernel for nfs_wait",
    ]
    assert asked == []
    # py-spy of the process's own environment.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "py-spy").touch()
    (proc / "11" / "cmdline").write_text(f"{tmp_path}/bin/python\0-c\0x\0")
    name = f"{tmp_path}/bin/python -c x"[:80]
    assert list(stack_lines(GROUP, run, proc, cgroups))[1:] == [
        f"pid 11 ({name}): state D, waits in the kernel for nfs_wait",
        "  Thread 1 (idle)",
        "      wait (threading.py:359)",
    ]
    assert asked == [["timeout", "20", f"{tmp_path}/bin/py-spy", "dump", "--pid", "11"]]


def test_a_real_process_has_a_state() -> None:
    own_group = Path("/proc/self/cgroup").read_text().splitlines()[0].split(":", 2)[2]
    lines = list(stack_lines(own_group, lambda command: ""))
    assert all(line.startswith("pid ") for line in lines)
    assert own_group == "/" or any(f"pid {os.getpid()} " in line for line in lines)
