# SPDX-License-Identifier: Apache-2.0
"""What the processes of a service do at this moment, seen from outside: for a start that is stuck, or an engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

# py-spy stops a process for a moment; a process that hangs in the kernel cannot be looked into.
_DUMP_S = "20"
_DUMPED_PROCESSES = 6
_DUMP_LINES = 40
_NAME = 80


def processes(control_group: str, proc: Path = PROC, cgroups: Path = _CGROUPS) -> list[int]:
    """Return the process ids of a control group and those below it, ascending; none if there is no such group."""
    if not control_group.strip("/"):
        return []
    found: set[int] = set()
    for hierarchy in (cgroups, cgroups / "unified", cgroups / "systemd"):
        for listing in (hierarchy / control_group.lstrip("/")).rglob("cgroup.procs"):
            found.update(int(line) for line in _text(listing).split() if line.isdigit())
    return sorted(pid for pid in found if (proc / str(pid)).exists())


def bytes_read(control_group: str, proc: Path = PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes that the living processes of a control group had from storage. 0 without root."""
    total = 0
    for pid in processes(control_group, proc, cgroups):
        for line in _text(proc / str(pid) / "io").splitlines():
            key, _, value = line.partition(": ")
            if key == "read_bytes" and value.isdigit():
                total += int(value)
    return total


def stack_lines(
    control_group: str, run: Callable[[list[str]], str], proc: Path = PROC, cgroups: Path = _CGROUPS
) -> Iterator[str]:
    """Yield a line for each process with its state, and its Python stack where py-spy is installed.

    ``run`` executes an argument list and returns its standard output, "" where it fails.
    """
    for number, pid in enumerate(processes(control_group, proc, cgroups)):
        process = proc / str(pid)
        command = [word for word in _text(process / "cmdline").split("\0") if word]
        name = " ".join(command)[:_NAME] or _text(process / "comm").strip()
        waits_in = _text(process / "wchan").strip().strip("0") or "nothing"
        yield f"pid {pid} ({name}): state {_state(process)}, waits in the kernel for {waits_in}"
        if number < _DUMPED_PROCESSES and (spy := _py_spy(process)):
            dump = run(["timeout", _DUMP_S, spy, "dump", "--pid", str(pid)])
            yield from (f"  {line}" for line in dump.splitlines()[:_DUMP_LINES] if line.strip())


def _state(process: Path) -> str:
    """Return the letter of /proc/<pid>/stat: R runs, S sleeps, D is in the kernel, T is stopped, Z is dead."""
    return _text(process / "stat").rpartition(") ")[2][:1] or "gone"


def _py_spy(process: Path) -> str | None:
    """Return py-spy of the process's own environment, or the system's."""
    try:
        interpreter = (process / "exe").readlink()
    except OSError:
        interpreter = Path("/nowhere")
    command = _text(process / "cmdline").split("\0")[0]
    for program in (Path(command).parent / "py-spy", interpreter.parent / "py-spy"):
        if program.is_absolute() and program.exists():
            return str(program)
    return shutil.which("py-spy")


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
