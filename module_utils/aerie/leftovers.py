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
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.nvidia_smi import Gpu, parse_nvidia_smi

_POLL_S = 0.1
# As long as the preflight gives it.
_NVIDIA_SMI_S = 60
# What a driver takes and gives back by itself, in MiB; a model is far larger.
_DRIVERS_OWN = 1024
_SEE = " (see the kernel log: journalctl -k -g NVRM)"


@dataclass(frozen=True)
class Held:
    """What a service had before its stop: its processes, and the GPUs that these used, as nvidia-smi told them.

    Where the driver hides processes or their memory, as it does in some containers, nothing can be told apart from what
    others use, and nothing is said of it.
    """

    processes: Collection[int] = ()
    gpus: tuple[Gpu, ...] = ()

    def still(self) -> Iterator[str]:
        """Yield what GPUs have not given back, one phrase each."""
        if not self.gpus:
            return
        now = gpus()
        if now is None:
            yield f"perhaps memory of GPUs, since nvidia-smi does not answer any more{_SEE}"
            return
        # The driver gives memory back a moment after a process has ended, and lists the process until then.
        for pid in sorted(set(self.processes) & {process.pid for gpu in now for process in gpu.processes}):
            yield f"process {pid} holds memory of a GPU"
        for before in self.gpus:
            after = next((gpu for gpu in now if _same(gpu, before)), None)
            if after is None or after.lost or (before.memory and not after.memory):
                yield f"perhaps memory of GPU {before.index}, which does not answer any more{_SEE}"
            elif before.memory and (more := _hidden(after) - _hidden(before)) > _DRIVERS_OWN:
                yield f"{more} MiB of GPU {before.index} that no process holds{_SEE}"


_NOTHING = Held()


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

    def held(self) -> Held:
        """Return what it has, to be compared after its stop."""
        processes = set(self.processes())
        found = (gpus() or ()) if processes else ()
        used = [gpu for gpu in found if any(process.pid in processes for process in gpu.processes)]
        return Held(processes, tuple(used))

    def remains(self, before: Held = _NOTHING) -> list[str]:
        """Return what is still there, one phrase each; ``before`` is what it had before its stop."""
        return [
            *(f"process {pid} ({_command(self.proc / str(pid))})" for pid in self.processes()),
            *([f"somebody listens on {self.address}:{self.port}"] if self._is_listened_to() else []),
            *(f"shared memory {path}" for path in self._segments()),
            *before.still(),
        ]

    def clear(self, seconds: float, before: Held = _NOTHING) -> list[str]:
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


def gpus() -> tuple[Gpu, ...] | None:
    """Return the host's NVIDIA GPUs: none where there is no driver, nothing where it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        result = subprocess.run([program, "-q", "-x"], capture_output=True, check=False, timeout=_NVIDIA_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    report = parse_nvidia_smi(result.stdout.decode(errors="replace"))
    return None if report is None else report.gpus


def _same(gpu: Gpu, other: Gpu) -> bool:
    return (gpu.uuid, gpu.bus) == (other.uuid, other.bus)


def _hidden(gpu: Gpu) -> int:
    """Return the memory that is used and that no process accounts for; other users' processes come and go."""
    return max(gpu.used - sum(process.memory for process in gpu.processes), 0)


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
