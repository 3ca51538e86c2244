# SPDX-License-Identifier: Apache-2.0
"""HAProxy's outputs, recorded from 2.6.12, and what else may come; the program of HAProxy's unit."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from ansible.module_utils.aerie import haproxy
from ansible.module_utils.aerie.haproxy import Gateway, GatewayError, Load, Server, Worker
from haproxy_master import DRAINED, Master, Process
from hypothesis import given
from hypothesis import strategies as st

DATA = Path(__file__).parent / "haproxy"
PROCESSES, STATES, STATISTICS = (
    (DATA / name).read_text() for name in ("processes.txt", "states.txt", "statistics.csv")
)


# --- Outputs


def test_the_newest_process_is_first() -> None:
    assert haproxy.parse_workers(PROCESSES) == [Worker(1591, 0), Worker(1552, 1), Worker(1501, 2)]


def test_after_a_reload_that_failed_the_old_process_serves() -> None:
    text = "\n".join(line for line in PROCESSES.splitlines() if not line.startswith("1591"))
    assert haproxy.parse_workers(text)[0] == Worker(1552, 1)


def test_haproxy_2_4_has_another_column() -> None:
    text = """\
#<PID>          <type>          <relative PID>  <reloads>       <uptime>        <version>
10              master          0               1               0d00h00m08s     2.4.24
# workers
12              worker          1               0               0d00h00m02s     2.4.24
# old workers
11              worker          [was: 1]        1               0d00h00m08s     2.4.24
"""
    assert haproxy.parse_workers(text) == [Worker(12, 0), Worker(11, 1)]


def test_states() -> None:
    assert haproxy.parse_state(STATES, "replicas") == {
        "toy-a": Server("toy-a", "10.77.4.11", 8000, drained=True, maintenance=False, up=False),
        "toy-b": Server("toy-b", "10.77.4.12", 8000, drained=False, maintenance=False, up=True),
    }
    assert haproxy.parse_state(STATES, "others") == {}


@pytest.mark.parametrize(("admin", "state"), [(0, "ready"), (8, "drained"), (1, "maintenance"), (9, "maintenance")])
def test_what_an_administrator_set(admin: int, state: str) -> None:
    text = STATES.replace("10.77.4.12 2 0 ", f"10.77.4.12 2 {admin} ")
    assert haproxy.parse_state(text, "replicas")["toy-b"].state == state


def test_statistics() -> None:
    loads = haproxy.parse_statistics(STATISTICS, "replicas")
    assert loads["toy-b"] == Load(0, "L7OK 200")
    assert loads["toy-a"] == Load(0, "L4CON Connection refused")
    queued = STATISTICS.replace("toy-b,0,0,0,1,", "toy-b,2,2,3,3,")
    assert haproxy.parse_statistics(queued, "replicas")["toy-b"].in_flight == 5


PARSERS: list[tuple[Callable[[str], object], str]] = [
    (haproxy.parse_workers, PROCESSES),
    (lambda text: haproxy.parse_state(text, "replicas"), STATES),
    (lambda text: haproxy.parse_statistics(text, "replicas"), STATISTICS),
]


@pytest.mark.parametrize(("parse", "text"), PARSERS, ids=["processes", "states", "statistics"])
@pytest.mark.parametrize("garbage", ["", "\n", "Unknown command.\n", "\0\x7f", "1\n2\n3\n", "# pxname\n"])
def test_garbage_is_named(parse: Callable[[str], object], text: str, garbage: str) -> None:
    with pytest.raises(GatewayError):
        parse(garbage)


@given(st.data())
def test_a_damaged_output_is_read_or_refused(data: st.DataObject) -> None:
    parse, text = data.draw(st.sampled_from(PARSERS))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    try:
        parse(text[:start] + data.draw(st.text(max_size=20)) + text[end:])
    except GatewayError as error:
        assert str(error)


# --- Ports and TLS


def test_a_state_file_gets_the_configurations_ports_and_tls() -> None:
    servers = haproxy.configured(
        "backend replicas\n    default-server check\n    server toy-a 10.77.4.99:8001\n"
        "    server toy-b [fd00::1]:8000 ssl verify required ca-file /a.pem\n#   server toy-c 10.77.4.13:1\n"
        "backend b\n    server s abns@name\n"
    )
    assert servers == {"toy-a": (8001, False), "toy-b": (8000, True)}
    after = haproxy.as_configured(STATES, {**servers, "toy-z": haproxy.Configured(1, False)})
    toy_a, _, toy_b = STATES.partition("3 replicas 2")
    assert after.split() == (toy_a.replace("- 8000 -", "- 8001 -") + _ + toy_b.replace("8000 - 0", "8000 - 1")).split()
    assert haproxy.as_configured(after, servers) == after
    for garbage in ("", "1\n", "garbage", "1\n# be_id\n"):
        assert haproxy.as_configured(garbage, servers) == garbage


# --- The unit's program


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    servers = ("a", "b")
    first = Process(100, dict.fromkeys(servers, 0), dict.fromkeys(servers, 2), {})
    master = Master(tmp_path / "master.sock", [first])
    yield master
    master.close()


@pytest.fixture
def gateway(tmp_path: Path, master: Master) -> Gateway:
    return Gateway(tmp_path / "master.sock", tmp_path / "state", patience_s=0)


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    path = tmp_path / "haproxy.cfg"
    path.write_text("server a 10.77.4.1:8000\nserver b 10.77.4.2:9000\n")
    return path


def reloading(master: Master, state_file: Path) -> Callable[[int, FrameType | None], None]:
    """Return what the master does at SIGUSR2: the new process reads the state file."""

    def reload(signum: int, frame: FrameType | None) -> None:
        servers = haproxy.parse_state(state_file.read_text(), "replicas")
        master.replace({name: DRAINED if server.drained else 0 for name, server in servers.items()})

    return reload


def test_a_reload_keeps_what_somebody_else_drained(
    gateway: Gateway, master: Master, configuration: Path, tmp_path: Path
) -> None:
    master.processes[0].admin["b"] = DRAINED
    before = signal.signal(signal.SIGUSR2, reloading(master, tmp_path / "state"))
    try:
        gateway.reload(os.getpid(), configuration)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [process.pid for process in master.processes] == [101, 100]
    assert master.processes[0].admin == {"a": 0, "b": DRAINED}
    recorded = haproxy.parse_state((tmp_path / "state").read_text(), "replicas")
    assert (recorded["b"].port, recorded["b"].state) == (9000, "drained")


def test_a_reload_without_a_new_process_is_an_error(
    gateway: Gateway, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "_RELOAD_S", 0.2)
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: None)
    try:
        with pytest.raises(GatewayError, match="kept its old process"):
            gateway.reload(os.getpid(), configuration)
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("answer", [b"", b"garbage\n", b"1\n# be_id be_name\n", b"Unknown command.\n"])
def test_a_bad_answer_does_not_reach_the_state_file(
    gateway: Gateway, master: Master, tmp_path: Path, answer: bytes
) -> None:
    gateway.save()
    known = (tmp_path / "state").read_text()
    master.garble["show servers state"] = answer
    with pytest.raises(GatewayError):
        gateway.save()
    assert (tmp_path / "state").read_text() == known


def test_the_file_is_the_owners(gateway: Gateway, tmp_path: Path) -> None:
    gateway.save()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600


def test_another_change_is_waited_for(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "_LOCK_S", 0.2)
    with (tmp_path / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(GatewayError, match="did not end"):
            gateway.change(["a"], drained=True)
    assert gateway.change(["a"], drained=True) == ["a"]


def test_without_haproxy_the_program_says_so_at_once(tmp_path: Path) -> None:
    package = tmp_path / "ansible/module_utils/aerie"
    package.mkdir(parents=True)
    for name in ("files.py", "haproxy.py"):
        source = (Path(haproxy.__file__).parent / name).read_text()
        (package / name).write_text(
            source.replace("/run/aerie-haproxy", str(tmp_path)).replace("/var/lib/aerie-haproxy", str(tmp_path))
        )
    command = [sys.executable, "-S", str(package / "haproxy.py"), "save"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=4, check=False)
    assert result.returncode == 1
    assert "HAProxy does not answer" in result.stderr and "Traceback" not in result.stderr
    usage = subprocess.run(command[:-1], env=environment, capture_output=True, text=True, check=False)
    assert usage.returncode == 1 and "usage" in usage.stderr
