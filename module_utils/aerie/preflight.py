# SPDX-License-Identifier: Apache-2.0
"""What a host must have before anything on it is changed. Every check returns problems; none raises for one."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The first driver branch of each CUDA major release.
_DRIVER_FOR_CUDA = {11: 450, 12: 525, 13: 580}
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi reports it; ``memory`` in MiB; ``mig`` if it is divided into MIG slices."""

    name: str
    memory: int
    processes: int
    mig: bool


@dataclass(frozen=True)
class GpuReport:
    """The GPUs of a host and its driver's release, such as ``580.95``."""

    driver: str
    gpus: tuple[Gpu, ...]


def check_python(python: str, release: str) -> Iterator[str]:
    """Yield a problem unless ``python`` is an interpreter of ``release`` (X.Y)."""
    remedy = f"install Python {release}, or set ml_env_python or ml_env_python_archive"
    if not os.access(python, os.X_OK):
        yield f"there is no Python at {python}: {remedy}"
        return
    found = _ask_python(python, "import sys; print('%d.%d' % sys.version_info[:2])")
    if found != release:
        yield f"{python} is Python {found or '(broken)'}, but the lock is for {release}: {remedy}"


def check_libraries(names: Iterable[str]) -> Iterator[str]:
    """Yield a problem for each shared library of ``names`` that the loader does not find."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            yield f"{name} is missing, which vLLM's build for CPUs needs: install the package that has it (libnuma1)"


def check_disk(directory: Path, needed_mb: int) -> Iterator[str]:
    """Yield a problem unless the file system that ``directory`` is, or will be, on has ``needed_mb`` free."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    free_mb = shutil.disk_usage(existing).free >> 20
    if free_mb < needed_mb:
        yield (
            f"{directory} needs {needed_mb} MB for a release and its file system ({existing}) has {free_mb} MB free: "
            "make room, or set aerie_root to a larger file system"
        )


def check_port(port: int, unit: str, proc: Path = Path("/proc")) -> Iterator[str]:
    """Yield a problem if anything that is not of ``unit`` listens on ``port``."""
    sockets = _listening(port, proc)
    if not sockets:
        return
    pids = sorted((entry for entry in proc.iterdir() if entry.name.isdigit()), key=lambda entry: int(entry.name))
    holders = [pid for pid in pids if _holds(pid, sockets)]
    for pid in holders:
        try:
            name, group = (pid / "comm").read_text().strip(), (pid / "cgroup").read_text()
        except OSError:
            continue  # it ended just now
        if f"/{unit}" not in group:
            yield f"port {port} is in use by {name} (process {pid.name}): stop it, or set vllm_service_port"
            return
    if not holders:
        yield f"port {port} is in use by a process that cannot be seen: find it, or set vllm_service_port"


def _listening(port: int, proc: Path) -> set[str]:
    """Return the sockets that listen on ``port``, as links in /proc/<pid>/fd name them."""
    sockets = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    return sockets


def _holds(pid: Path, sockets: set[str]) -> bool:
    try:
        return any(str(link.readlink()) in sockets for link in (pid / "fd").iterdir())
    except OSError:
        return False


def parse_nvidia_smi(text: str) -> GpuReport | None:
    """Parse ``nvidia-smi -q -x``; nothing if it is not that."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    if root.tag != "nvidia_smi_log":
        return None
    gpus = []
    for gpu in root.iter("gpu"):
        total = re.match(r"(\d+)", gpu.findtext("fb_memory_usage/total", ""))
        processes = sum(1 for _ in gpu.iter("process_info"))
        mig = gpu.findtext("mig_mode/current_mig") == "Enabled"
        gpus.append(Gpu(gpu.findtext("product_name", "unknown"), int(total.group(1)) if total else 0, processes, mig))
    return GpuReport(root.findtext("driver_version", ""), tuple(gpus))


def check_gpus(report: GpuReport | None, cuda: int, count: int, python: str, dev: Path = Path("/dev")) -> Iterator[str]:
    """Yield what keeps a CUDA build (major release ``cuda``) from running on ``count`` GPUs of this host."""
    if report is None:
        yield "nvidia-smi does not answer: install the NVIDIA driver (Aerie does not), or use a lock of a CPU build"
        return
    needed = _DRIVER_FOR_CUDA.get(cuda, max(_DRIVER_FOR_CUDA.values()))
    major = re.match(r"(\d+)", report.driver)
    if not major or int(major.group(1)) < needed:
        yield f"the driver is {report.driver or 'unknown'} and a CUDA {cuda} build needs {needed} or newer: update it"
    divided = sum(gpu.mig for gpu in report.gpus)
    # CUDA gives a process one MIG slice, whatever there is.
    usable = len(report.gpus) - divided or min(divided, 1)
    if usable < count:
        slices = f" ({divided} are in MIG mode: `nvidia-smi -mig 0` makes them whole)" if divided else ""
        yield f"{usable} GPUs are usable and tensor-parallel-size is {count}: lower it, or see nvidia-smi{slices}"
    for node in ("nvidia-uvm", "nvidia-uvm-tools"):
        if not (dev / node).exists():
            # The service may not gain privileges, so the setuid helper cannot make them at its start.
            yield f"/dev/{node} is missing: run `nvidia-modprobe -u -c=0` at boot"
    if not any(shutil.which(compiler) for compiler in ("gcc", "cc", "clang")):
        yield "there is no C compiler, which Triton needs when vLLM runs: install gcc"
    headers = _ask_python(python, "import sysconfig; print(sysconfig.get_paths()['include'])") if python else ""
    if headers and not (Path(headers) / "Python.h").exists():
        yield f"Python.h of {python} is missing, which Triton needs when vLLM runs: install its development package"


def _ask_python(python: str, code: str) -> str:
    """Return what ``python`` prints; nothing if it does not run."""
    try:
        result = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
