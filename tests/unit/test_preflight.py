# SPDX-License-Identifier: Apache-2.0
"""What a host must have: real sockets and programs, and answers of nvidia-smi cut down to what counts."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.preflight import (
    Gpu,
    GpuReport,
    check_disk,
    check_gpus,
    check_libraries,
    check_port,
    check_python,
    parse_nvidia_smi,
)
from hypothesis import given
from hypothesis import strategies as st
from modules import run_module

ANSWERS = {path.name: path.read_text() for path in (Path(__file__).parent / "nvidia_smi").iterdir()}
RELEASE = f"{sys.version_info[0]}.{sys.version_info[1]}"
UNIT = "vllm.service"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# --------------------------------------------------------------------------------------------------------------- python


def test_the_right_python_is_no_problem() -> None:
    assert list(check_python(sys.executable, RELEASE)) == []


def test_another_release_of_python_is_named_with_both() -> None:
    (problem,) = check_python(sys.executable, "3.1")
    assert problem == (
        f"{sys.executable} is Python {RELEASE}, but the lock is for 3.1: "
        "install Python 3.1, or set ml_env_python or ml_env_python_archive"
    )


def test_a_python_that_is_missing_or_broken_is_a_problem(tmp_path: Path) -> None:
    (problem,) = check_python("/nowhere/python3.12", "3.12")
    assert problem.startswith("there is no Python at /nowhere/python3.12: install Python 3.12, or set ml_env_python")
    no_program = tmp_path / "python3.12"
    no_program.write_bytes(b"\x00not a program")
    (problem,) = check_python(str(no_program), "3.12")
    assert problem.startswith(f"there is no Python at {no_program}: ")
    no_program.chmod(0o755)
    for broken in (no_program, program(tmp_path / "exits", "echo 3.12; exit 3"), tmp_path):
        (problem,) = check_python(str(broken), "3.12")
        assert problem.startswith(f"{broken} is Python (broken), but the lock is for 3.12: ")


# ----------------------------------------------------------------------------------------------- libraries and the disk


def test_a_missing_library_is_named_with_its_package() -> None:
    (problem,) = check_libraries(["libc.so.6", "libaerie-absent.so.9"])
    assert problem.startswith("libaerie-absent.so.9 is missing")
    assert "libnuma1" in problem


def test_the_disk_is_that_of_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    root = tmp_path / "opt/aerie"
    assert list(check_disk(root, 1)) == []
    (problem,) = check_disk(root, 1 << 40)
    assert problem.startswith(f"{root} needs {1 << 40} MB for a release and its file system ({tmp_path}) has ")
    assert problem.endswith(" MB free: make room, or set aerie_root to a larger file system")
    assert not root.parent.exists()


# ------------------------------------------------------------------------------------------------------------- the port


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_port_that_this_very_process_listens_on_is_in_use(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    name = Path("/proc/self/comm").read_text().strip()
    assert list(check_port(port, UNIT)) == [
        f"port {port} is in use by {name} (process {os.getpid()}): stop it, or set vllm_service_port"
    ]
    listener.close()
    assert list(check_port(port, UNIT)) == []


def test_a_connection_is_no_listener(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as connection:
        assert list(check_port(connection.getsockname()[1], UNIT)) == []


class Proc:
    """A /proc of processes that the test names. Port 8000 is 0x1F40."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "net").mkdir()
        (root / "self").mkdir()

    def table(self, name: str, *rows: str) -> None:
        header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        (self.root / "net" / name).write_text(header + "".join(f"{row}\n" for row in rows))

    def process(self, pid: int, comm: str, group: str, *files: str) -> Path:
        directory = self.root / str(pid)
        (directory / "fd").mkdir(parents=True)
        (directory / "comm").write_text(f"{comm}\n")
        (directory / "cgroup").write_text(f"0::{group}\n")
        for number, target in enumerate(("/dev/null", *files)):
            (directory / "fd" / str(number)).symlink_to(target)
        return directory

    def problems(self, port: int = 8000) -> list[str]:
        return list(check_port(port, UNIT, self.root))


LISTENS = (
    "   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0"
)
CONNECTED = LISTENS.replace(" 0A ", " 01 ").replace("4711", "4712")
LISTENS_6 = LISTENS.replace("00000000:1F40", "00000000000000000000000000000000:1F40").replace("4711", "4713")
OURS = f"/system.slice/{UNIT}"


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.mark.parametrize(
    ("table", "row", "inode"), [("tcp", LISTENS, "socket:[4711]"), ("tcp6", LISTENS_6, "socket:[4713]")]
)
def test_a_listener_is_reported_unless_it_is_ours(proc: Proc, table: str, row: str, inode: str) -> None:
    proc.table(table, row)
    ours = proc.process(90, "vllm", OURS, inode)
    proc.process(100, "sshd", "/system.slice/ssh.service", "socket:[99]")
    assert proc.problems() == []
    assert proc.problems(port=8001) == []
    (ours / "cgroup").write_text("0::/user.slice/session-1.scope\n")
    assert proc.problems() == ["port 8000 is in use by vllm (process 90): stop it, or set vllm_service_port"]


@pytest.mark.parametrize("group", ["/system.slice/not-vllm.service", "/system.slice/nginx.service", "/"])
def test_another_unit_is_not_ours(proc: Proc, group: str) -> None:
    proc.table("tcp", LISTENS)
    proc.process(712, "nginx", group, "socket:[4711]")
    assert proc.problems() == ["port 8000 is in use by nginx (process 712): stop it, or set vllm_service_port"]


def test_one_that_shares_the_port_with_ours_is_reported(proc: Proc) -> None:
    proc.table("tcp", LISTENS, LISTENS.replace("4711", "4714"))
    proc.process(9, "vllm", OURS, "socket:[4711]")
    proc.process(10, "nginx", "/", "socket:[4714]")
    proc.process(100, "other", "/", "socket:[4714]")
    assert proc.problems() == ["port 8000 is in use by nginx (process 10): stop it, or set vllm_service_port"]


def test_connections_from_the_port_do_not_count(proc: Proc) -> None:
    proc.table("tcp", CONNECTED)
    proc.process(9, "curl", "/", "socket:[4712]")
    assert proc.problems() == []


def test_a_process_that_ends_meanwhile_is_no_obstacle(proc: Proc) -> None:
    proc.table("tcp", LISTENS)
    (proc.root / "5").mkdir()
    (proc.process(6, "ended", "/", "socket:[4711]") / "cgroup").unlink()
    proc.process(7, "nginx", "/", "socket:[4711]")
    assert proc.problems() == ["port 8000 is in use by nginx (process 7): stop it, or set vllm_service_port"]


def test_a_listener_that_cannot_be_seen_is_reported(proc: Proc) -> None:
    proc.table("tcp", LISTENS)
    proc.process(7, "sshd", "/", "socket:[1]")
    assert proc.problems() == [
        "port 8000 is in use by a process that cannot be seen: find it, or set vllm_service_port"
    ]


def test_a_host_without_ipv6_or_without_any_table(proc: Proc) -> None:
    assert proc.problems() == []


# ----------------------------------------------------------------------------------------------------------- nvidia-smi


@pytest.mark.parametrize(
    ("answer", "driver", "gpus"),
    [
        ("h100.xml", "550.54.15", [("NVIDIA H100 80GB HBM3", 81559, 0, False)] * 2),
        ("h200.xml", "580.95.05", [("NVIDIA H200", 143771, 1, False)] * 4),
        ("b200.xml", "580.105.08", [("NVIDIA B200", 183359, 0, False)] * 2),
        (
            "rtx_pro_6000.xml",
            "580.82.07",
            [
                ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, 2, False),
                ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, 0, False),
            ],
        ),
        (
            "mig.xml",
            "580.95.05",
            [("NVIDIA H100 80GB HBM3", 81559, 0, True), ("NVIDIA H100 80GB HBM3", 81559, 0, False)],
        ),
        ("no_gpu.xml", "580.95.05", []),
        ("lost.xml", "[N/A]", [("[Unknown Error]", 0, 0, False)]),
    ],
)
def test_what_nvidia_smi_reports(answer: str, driver: str, gpus: list[tuple[str, int, int, bool]]) -> None:
    assert parse_nvidia_smi(ANSWERS[answer]) == GpuReport(driver, tuple(Gpu(*gpu) for gpu in gpus))


@pytest.mark.parametrize(
    "text",
    [
        "",
        ANSWERS["no_driver.txt"],
        ANSWERS["no_devices.txt"],
        ANSWERS["h200.xml"][:-20],
        "<html><body>502</body></html>",
        "\x00",
    ],
)
def test_anything_else_is_no_report(text: str) -> None:
    assert parse_nvidia_smi(text) is None


def problems_of(report: GpuReport | None, count: int = 2, cuda: int = 13) -> list[str]:
    return list(check_gpus(report, cuda, count, python="", dev=Path("/nowhere")))


XML = [text for name, text in ANSWERS.items() if name.endswith(".xml")]


@given(st.text() | st.tuples(st.sampled_from(XML), st.integers(0), st.integers(0), st.text(max_size=20)))
def test_no_answer_of_nvidia_smi_raises(answer: str | tuple[str, int, int, str]) -> None:
    if not isinstance(answer, str):
        text, start, length, inserted = answer
        start %= len(text)
        answer = text[:start] + inserted + text[start + length % 200 :]
    report = parse_nvidia_smi(answer)
    problems = problems_of(report)
    if report is None:
        assert len(problems) == 1
    else:
        assert all(gpu.memory >= 0 for gpu in report.gpus)
        assert len([problem for problem in problems if "is missing: run `nvidia-modprobe" in problem]) == 2


# ----------------------------------------------------------------------------------------------------------------- GPUs


@pytest.fixture
def gpu_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with the device nodes, a compiler, and a Python with headers; its directory of devices."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    program(tmp_path / "bin/gcc", "")
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    program(tmp_path / "bin/python", f"echo {tmp_path / 'include'}")
    (tmp_path / "dev").mkdir()
    for node in ("nvidia-uvm", "nvidia-uvm-tools"):
        (tmp_path / "dev" / node).touch()
    return tmp_path


def check(host: Path, answer: str = "h200.xml", cuda: int = 13, count: int = 4) -> list[str]:
    report = parse_nvidia_smi(ANSWERS[answer])
    return list(check_gpus(report, cuda, count, str(host / "bin/python"), host / "dev"))


def test_a_host_that_has_everything_has_no_problem(gpu_host: Path) -> None:
    assert check(gpu_host) == []
    assert check(gpu_host, "b200.xml", count=2) == []
    assert check(gpu_host, "rtx_pro_6000.xml", count=2) == []
    assert check(gpu_host, "h100.xml", cuda=12, count=1) == []


@pytest.mark.parametrize(
    ("driver", "cuda", "needed"),
    [
        ("550.54.15", 13, 580),
        ("579.99", 13, 580),
        ("515.65.01", 12, 525),
        ("", 13, 580),
        ("[N/A]", 12, 525),
        ("580", 99, 0),
    ],
)
def test_a_driver_that_is_too_old_is_named_with_what_is_needed(
    gpu_host: Path, driver: str, cuda: int, needed: int
) -> None:
    report = GpuReport(driver, (Gpu("NVIDIA H200", 143771, 0, False),))
    wanted = f"the driver is {driver or 'unknown'} and a CUDA {cuda} build needs {needed} or newer: update it"
    assert list(check_gpus(report, cuda, 1, "", gpu_host / "dev")) == ([wanted] if needed else [])


def test_too_few_gpus_are_counted(gpu_host: Path) -> None:
    assert check(gpu_host, count=8) == ["4 GPUs are usable and tensor-parallel-size is 8: lower it, or see nvidia-smi"]
    assert check(gpu_host, "no_gpu.xml", count=1) == [
        "0 GPUs are usable and tensor-parallel-size is 1: lower it, or see nvidia-smi"
    ]


def test_slices_of_a_gpu_are_no_gpus_to_share_a_model(gpu_host: Path) -> None:
    assert check(gpu_host, "mig.xml", count=2) == [
        "1 GPUs are usable and tensor-parallel-size is 2: lower it, or see nvidia-smi "
        "(1 are in MIG mode: `nvidia-smi -mig 0` makes them whole)"
    ]
    assert check(gpu_host, "all_mig.xml", count=2)[0].startswith("1 GPUs are usable and tensor-parallel-size is 2")
    # A process gets one slice, which is enough for a small model.
    assert check(gpu_host, "all_mig.xml", count=1) == []


@pytest.mark.parametrize("node", ["nvidia-uvm", "nvidia-uvm-tools"])
def test_a_missing_device_node_is_named_with_the_command_that_makes_it(gpu_host: Path, node: str) -> None:
    (gpu_host / "dev" / node).unlink()
    assert check(gpu_host) == [f"/dev/{node} is missing: run `nvidia-modprobe -u -c=0` at boot"]


def test_triton_needs_a_compiler_and_headers(gpu_host: Path) -> None:
    (gpu_host / "bin/gcc").rename(gpu_host / "bin/clang")
    assert check(gpu_host) == []
    (gpu_host / "bin/clang").unlink()
    (gpu_host / "include/Python.h").unlink()
    compiler, headers = check(gpu_host)
    assert compiler == "there is no C compiler, which Triton needs when vLLM runs: install gcc"
    assert headers.startswith(f"Python.h of {gpu_host / 'bin/python'} is missing")


def test_a_python_that_does_not_run_is_not_asked_for_its_headers(gpu_host: Path) -> None:
    (gpu_host / "bin/python").unlink()
    assert check(gpu_host) == []


def test_without_an_answer_of_nvidia_smi_the_driver_is_missing(gpu_host: Path) -> None:
    assert check(gpu_host, "no_driver.txt") == [
        "nvidia-smi does not answer: install the NVIDIA driver (Aerie does not), or use a lock of a CPU build"
    ]


# --------------------------------------------------------------------------------------------------------------- module


def preflight(root: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:  # noqa: ANN401
    arguments = {
        "root": str(root),
        "disk_mb": 1,
        "python": sys.executable,
        "python_release": RELEASE,
        "port": free_port(),
        **options,
    }
    result = run_module("preflight", arguments, capsys)
    assert (result["failed"], result["changed"]) == (False, False)
    return list(result["problems"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_host_for_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Whether this machine has the library is its own affair.
    assert preflight(tmp_path, capsys) == list(check_libraries(["libnuma.so.1"]))


def test_all_problems_are_reported_at_once(
    tmp_path: Path,
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = tmp_path / "answer.xml"
    answer.write_text(ANSWERS["h100.xml"])
    program(tmp_path / "bin/nvidia-smi", f'[ "$*" = "-q -x" ] && /bin/cat {answer}')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    problems = preflight(
        tmp_path,
        capsys,
        disk_mb=1 << 40,
        python="/nowhere/python3.12",
        python_release="3.12",
        port=listener.getsockname()[1],
        cuda=13,
        gpus=8,
    )
    # The device nodes are those of this machine.
    assert [problem.split()[:4] for problem in problems if not problem.startswith("/dev/")] == [
        ["there", "is", "no", "Python"],
        [str(tmp_path), "needs", str(1 << 40), "MB"],
        ["port", str(listener.getsockname()[1]), "is", "in"],
        ["the", "driver", "is", "550.54.15"],
        ["2", "GPUs", "are", "usable"],
        ["there", "is", "no", "C"],
    ]


@pytest.mark.parametrize("answer", [b"", b"\xff\xfe not text", b"No devices were found\n"])
def test_an_nvidia_smi_that_answers_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    (tmp_path / "answer").write_bytes(answer)
    program(tmp_path / "bin/nvidia-smi", f"/bin/cat {tmp_path / 'answer'}; exit 6")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (problem,) = preflight(tmp_path, capsys, cuda=13, python="")
    assert problem.startswith("nvidia-smi does not answer")


def test_a_host_without_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = preflight(tmp_path, capsys, cuda=12, python="")
    assert problem.startswith("nvidia-smi does not answer")
