# SPDX-License-Identifier: Apache-2.0
"""Where the service will listen: real sockets, and a /proc that the test writes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils.aerie.preflight_ports import check_address, check_port, own_processes
from preflight_findings_text import messages

UNIT = "vllm.service"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_port_that_this_very_process_listens_on_is_in_use(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    name = Path("/proc/self/comm").read_text().strip()
    assert messages(check_port(port, UNIT)) == [
        f"port {port} is in use by {name} (process {os.getpid()}): stop it, or set vllm_service_port"
    ]
    listener.close()
    assert messages(check_port(port, UNIT)) == []


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
        return messages(check_port(port, UNIT, self.root))


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


def test_the_processes_of_our_unit(proc: Proc) -> None:
    proc.process(5, "vllm", OURS)
    proc.process(6, "worker", f"{OURS}/payload")
    proc.process(7, "nginx", "/system.slice/not-vllm.service")
    (proc.root / "8").mkdir()
    assert own_processes(UNIT, proc.root) == {5, 6}


# ---------------------------------------------------------------------------------------------------------- the address


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])
def test_an_address_of_this_machine_is_no_problem(address: str) -> None:
    assert list(check_address(address)) == []


def test_an_address_of_another_machine_is_a_problem() -> None:
    # 192.0.2.0/24 is for documentation.
    assert messages(check_address("192.0.2.1")) == [
        "the service is to listen on 192.0.2.1, which is no address of this host: correct vllm_service_host"
    ]
    assert messages(check_address("nowhere.invalid")) == [
        "the service is to listen on nowhere.invalid, which this host cannot resolve: correct vllm_service_host"
    ]
