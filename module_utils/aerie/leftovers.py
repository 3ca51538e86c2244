# SPDX-License-Identifier: Apache-2.0
"""What a stopped service left behind on its host: processes, a port, shared memory, the memory of GPUs."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.1
_NVIDIA_SMI_S = 20


@dataclass(frozen=True)
class Service:
    """What belongs to a service: all that its user runs, and where it listens (port 0: nowhere yet).

    ``user`` runs nothing else. It does not exist before the first deploy. What containers run by the same number is not
    its own.
    """

    user: str
    address: str
    port: int
    proc: Path = Path("/proc")
    shared_memory: Path = Path("/dev/shm")

    def remains(self, before: Collection[int] = ()) -> list[str]:
        """Return what is still there, one phrase each; ``before`` are the processes that it had before its stop."""
        return [
            *(f"process {pid} ({_command(self.proc / str(pid))})" for pid in self.processes()),
            *([f"somebody listens on {self.address}:{self.port}"] if self._is_listened_to() else []),
            *(f"shared memory {path}" for path in self._segments()),
            *(f"process {pid} holds memory of a GPU" for pid in _on_gpus(before)),
        ]

    def clear(self, seconds: float, before: Collection[int] = ()) -> list[str]:
        """Kill and remove what is still there; return what remains after ``seconds``, as ``remains`` does.

        Shared memory is removed once no process of the user is left that could have it mapped.
        """
        deadline = time.monotonic() + seconds
        while True:
            processes = list(self.processes())
            for pid in processes:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not processes:
                for path in self._segments():
                    with contextlib.suppress(OSError):
                        path.unlink()
            remains = self.remains(before)
            if not remains or time.monotonic() >= deadline:
                return remains
            time.sleep(_POLL_S)

    def processes(self) -> Iterator[int]:
        """Yield the processes of the service's user."""
        uid = self._uid()
        for process in self.proc.glob("[0-9]*"):
            with contextlib.suppress(OSError):
                status = _status(process)
                # A zombie holds nothing, and is gone once its parent asks for it.
                ours = status["Uid"].split()[0] == str(uid) and not status["State"].startswith("Z")
                if ours and _namespace(process) == _namespace(self.proc / "self"):
                    yield int(process.name)

    def _uid(self) -> int | None:
        try:
            return pwd.getpwnam(self.user).pw_uid
        except KeyError:
            return None

    def _is_listened_to(self) -> bool:
        # A program that listens on the same port of another address is no obstacle.
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.address, self.port))
            except OSError as error:
                return error.errno == errno.EADDRINUSE
        return False

    def _segments(self) -> Iterator[Path]:
        uid = self._uid()
        with contextlib.suppress(OSError):
            for path in sorted(self.shared_memory.iterdir()):
                with contextlib.suppress(OSError):
                    if path.lstat().st_uid == uid and not path.is_dir():
                        yield path


def _on_gpus(pids: Collection[int]) -> list[int]:
    # The driver gives memory back a moment after a process has ended, and lists the process until then.
    return sorted(set(pids) & compute_processes()) if pids else []


def compute_processes() -> set[int]:
    """Return the processes that hold memory of NVIDIA GPUs; none where there is no driver or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return set()
    command = [program, "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_NVIDIA_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(_numbers(result.stdout.splitlines()))


def _numbers(lines: Iterable[str]) -> Iterator[int]:
    for line in lines:
        if line.strip().isdecimal():
            yield int(line)


def _status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _namespace(process: Path) -> str:
    return str((process / "ns/pid").readlink())


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    except OSError:
        return "ended meanwhile"
