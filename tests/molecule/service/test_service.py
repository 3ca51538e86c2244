# SPDX-License-Identifier: Apache-2.0
"""The service as its unit makes it, from outside: what it lets in, what it survives, what it leaves.

In the order of the tests: those at the end leave the host without its service.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import credentials
import pytest
from fleet import SERVICE, Machine, await_that, machines

ROOT = Path(__file__).parents[3]
INVENTORY = Path(__file__).parent / "inventory"
PORT = 8000
MODEL = "kimi-k2.5-tiny"
START_S = 240.0
# The processes of the service, by the names that the kernel has for them.
API_SERVER, ENGINE, WORKER = "vllm", "VLLM::EngineCor", "VLLM::Worker"
EXPOSURE = 3.0


@pytest.fixture(scope="module")
def machine() -> Machine:
    return machines(INVENTORY / "hosts.yml")["service"]


@pytest.fixture
def serving(machine: Machine) -> Machine:
    """The host with a service that is up, and whose earlier starts do not count towards systemd's limit."""
    machine.run("systemctl", "reset-failed", SERVICE)
    await_that(machine.serves, "the service is up", START_S)
    return machine


def connect(machine: Machine) -> http.client.HTTPSConnection:
    """Return a connection to the service, which has to show its certificate, with the host's address in it."""
    context = ssl.create_default_context(cadata=credentials.load().certificate)
    return http.client.HTTPSConnection(str(machine.host.address), PORT, timeout=20, context=context)


def ask(machine: Machine, method: str, path: str, key: str | None = None, body: object = None) -> int:
    """Return the status that the service answers with; 0 without an answer."""
    connection = connect(machine)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def api_key() -> str:
    """Return the key of the moment: other tests change it."""
    return credentials.load().api_key


def complete(machine: Machine, key: str, tokens: int = 4) -> int:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "temperature": 0}
    return ask(machine, "POST", "/v1/completions", key, body)


def process(machine: Machine, name: str) -> int:
    """Return the pid, as this machine sees it, of the service's process with that name."""
    (pid,) = [pid for pid in machine.pids(SERVICE) if Path(f"/proc/{pid}/comm").read_text().strip() == name]
    return pid


def show(machine: Machine, name: str) -> str:
    return machine.run("systemctl", "show", f"--property={name}", "--value", SERVICE).strip()


def segments(machine: Machine) -> list[str]:
    return sorted(path.name for path in machine.path("/dev/shm").iterdir())


def lived(pids: list[int]) -> dict[int, str]:
    """Return processes with their start times, by which a pid that is used again is told apart."""
    return {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19] for pid in pids}


def remaining(before: dict[int, str]) -> list[int]:
    """Return which of those processes still live."""
    found = []
    for pid, started in before.items():
        try:
            if lived([pid])[pid] == started:
                found.append(pid)
        except OSError:
            continue
    return found


# --- What it lets in


def test_the_unit_is_hardened_and_systemd_has_no_complaint(machine: Machine) -> None:
    verdict = machine.run("systemd-analyze", "security", "--no-pager", SERVICE)
    exposure = re.search(r"Overall exposure level for vllm\.service: ([0-9.]+)", verdict)
    assert exposure is not None
    assert float(exposure[1]) <= EXPOSURE
    units = [SERVICE, "aerie-watchdog.service", "aerie-watchdog.timer", "aerie-gpu-devices.service"]
    result = machine.run("sh", "-c", f"cd /etc/systemd/system && systemd-analyze verify {' '.join(units)} 2>&1")
    assert result == ""


def test_every_route_but_two_needs_a_key(serving: Machine) -> None:
    routes = re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", serving.log())
    methods = {(path, method) for path, listed in routes for method in listed.split(", ")}
    assert len(methods) > 30
    assert {("/invocations", "POST"), ("/tokenize", "POST"), ("/openapi.json", "GET")} <= methods
    methods |= {("/pause", "POST"), ("/nothing", "GET"), ("/health/", "GET"), ("/", "GET"), ("/v1/models", "OPTIONS")}
    opened = {(path, method) for path, method in methods if ask(serving, method, path) != 401}
    assert opened == {("/health", "GET"), ("/metrics", "GET")}
    assert complete(serving, "not-a-key-of-anybody") == 401
    assert complete(serving, api_key()) == 200


def test_who_is_no_client_does_not_reach_it(serving: Machine) -> None:
    """The bridge gets a second address, from which nobody is allowed."""
    address = str(serving.host.network.network_address + 2)
    probe = ["curl", "--silent", "--max-time", "2", "--output", "/dev/null", "--interface", address]
    url = f"https://{serving.host.address}:{PORT}/health"
    subprocess.run(["ip", "addr", "add", f"{address}/24", "dev", serving.host.bridge], check=True)
    try:
        refused = subprocess.run([*probe, url], check=False).returncode
        ssh = f"telnet://{serving.host.address}:22"
        greeted = subprocess.run(["timeout", "2", *probe[:-2], "--interface", address, ssh], check=False).returncode
    finally:
        subprocess.run(["ip", "addr", "del", f"{address}/24", "dev", serving.host.bridge], check=True)
    # 28: no answer in time. The host itself is reached from there: curl waits for more of the greeting.
    assert refused == 28
    assert greeted in (28, 124)
    assert ask(serving, "GET", "/health") == 200


class Client:
    """Asks for completions one after the other; `key` may be replaced at any time."""

    def __init__(self, machine: Machine) -> None:
        self.key = api_key()
        self.statuses: list[int] = []
        self._machine = machine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            self.statuses.append(complete(self._machine, self.key))

    def await_answers(self, count: int) -> None:
        """Return after ``count`` more answers."""
        enough = len(self.statuses) + count
        await_that(lambda: len(self.statuses) >= enough, "answers")


def set_keys(directory: Path, keys: dict[str, str]) -> None:
    """Change the inventory's API keys, and have Ansible write them."""
    variables = directory / "keys.json"
    variables.write_text(json.dumps({"vllm_service_api_keys": keys}))
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    playbook = str(Path(__file__).with_name("keys.yml"))
    command = [program, playbook, "-i", str(INVENTORY), "-i", str(credentials.INVENTORY), "-e", f"@{variables}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert not any(key in result.stdout for key in keys.values())


def test_keys_change_under_load_without_a_failed_request(serving: Machine, tmp_path: Path) -> None:
    start = show(serving, "InvocationID")
    new = "a-new-key-of-the-demo-0123456789"
    with Client(serving) as client:
        client.await_answers(3)
        assert complete(serving, new) == 401
        set_keys(tmp_path, {"demo": api_key(), "new": new})
        client.key = new
        client.await_answers(3)
        client.key = api_key()
        # The last that was asked with the other key is answered.
        client.await_answers(2)
        set_keys(tmp_path, {"demo": api_key()})
        assert complete(serving, new) == 401
        client.await_answers(3)
    assert set(client.statuses) == {200}
    assert show(serving, "InvocationID") == start


# --- What it survives


@pytest.mark.parametrize("victim", [API_SERVER, ENGINE, WORKER])
def test_any_process_that_is_killed_ends_with_a_clean_start(serving: Machine, victim: str) -> None:
    start, restarts = show(serving, "InvocationID"), int(show(serving, "NRestarts"))
    before = lived(serving.pids(SERVICE))
    os.kill(process(serving, victim), signal.SIGKILL)
    await_that(lambda: show(serving, "InvocationID") != start, f"a new start after {victim} was killed", 90)
    assert remaining(before) == []
    assert segments(serving) == []
    assert int(show(serving, "NRestarts")) == restarts + 1
    await_that(lambda: ask(serving, "GET", "/health") == 200, "the service is up again", START_S)
    assert complete(serving, api_key()) == 200


def test_an_engine_that_is_stuck_is_found_and_started_again(serving: Machine) -> None:
    assert complete(serving, api_key()) == 200
    start = show(serving, "InvocationID")
    before = lived(serving.pids(SERVICE))
    os.kill(process(serving, ENGINE), signal.SIGSTOP)
    # This is all that vLLM itself shows.
    assert ask(serving, "GET", "/health") == 200
    await_that(lambda: show(serving, "InvocationID") != start, "a new start of a service that is stuck", 120)
    assert remaining(before) == []
    said = serving.run("journalctl", "--unit", SERVICE, "--output=cat", "--lines=2000")
    assert "vllm.service is ended, to be started again: for " in said
    assert re.search(r"pid \d+ \(VLLM::EngineCore\): state T", said)
    await_that(lambda: ask(serving, "GET", "/health") == 200, "the service is up again", START_S)
    assert complete(serving, api_key()) == 200


def test_an_idle_service_is_left_alone(serving: Machine) -> None:
    """Its engine makes no progress, and answers the watchdog: for twice the time that is allowed for silence."""
    start = show(serving, "InvocationID")
    asked = '"POST /v1/completions HTTP/1.1" 200'
    await_that(lambda: serving.log().count(asked) >= 8, "the watchdog's requests", 60)
    assert show(serving, "InvocationID") == start


def test_a_host_that_reboots_serves_again(serving: Machine) -> None:
    serving.reboot()
    await_that(serving.serves, "the service is up after the reboot", START_S)
    assert complete(serving, api_key()) == 200


# --- What it leaves


class Stopped(NamedTuple):
    """A host whose service was stopped while it was answering: its processes before, and that answer's status."""

    machine: Machine
    before: dict[int, str]
    status: int


@pytest.fixture(scope="module")
def stopped(machine: Machine) -> Stopped:
    await_that(machine.serves, "the service is up", START_S)
    before = lived(machine.pids(SERVICE))
    machine.run("systemctl", "stop", "aerie-watchdog.timer")
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(complete(machine, api_key(), tokens=400)))
    asking.start()
    await_that(lambda: requests_running(machine) > 0, "the request runs", every=0.01)
    machine.run("systemctl", "stop", SERVICE)
    asking.join()
    return Stopped(machine, before, statuses[0])


def requests_running(machine: Machine) -> float:
    connection = connect(machine)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(float(value) for value in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE))


def test_a_stop_lets_a_running_request_finish(stopped: Stopped) -> None:
    assert stopped.status == 200
    assert show(stopped.machine, "Result") == "success"


def test_a_stop_leaves_nothing(stopped: Stopped) -> None:
    machine = stopped.machine
    assert len(stopped.before) >= 3
    assert remaining(stopped.before) == []
    assert segments(machine) == []
    assert machine.run("sh", "-c", "ps -u vllm -o pid= || true") == ""
    assert machine.run("ss", "--no-header", "--listening", "--tcp", f"sport = :{PORT}") == ""
    # Private files of the service went with it.
    assert not list(machine.path("/tmp").glob("systemd-private-*-vllm.service-*"))
