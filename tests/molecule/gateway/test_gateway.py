# SPDX-License-Identifier: Apache-2.0
"""Clients of the gateway notice neither drains nor reloads, and a drained replica gets nothing, whatever HAProxy went
through since. Looked at from outside: over HTTP, over SSH, and by what the engines count."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import shlex
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
STATE = Path(os.environ.get("AERIE_STATE", "/var/tmp/aerie"))
HOSTS = yaml.safe_load((HERE / "inventory/hosts.yml").read_text())
GATEWAY = HOSTS["load_balancer"]["hosts"]["toy-gateway"]["ansible_host"]
ENGINES = {name: host["ansible_host"] for name, host in HOSTS["inference"]["hosts"].items()}
ASK_HAPROXY = """
import socket
connection = socket.socket(socket.AF_UNIX)
connection.connect("/run/aerie-haproxy/stats.sock")
connection.sendall(b"show servers state replicas\\n")
print(connection.makefile().read())
"""
STARTED = "systemctl show -P ExecMainStartTimestampMonotonic haproxy"
AWAIT_S = 30

Answer = tuple[int, dict[str, str], str]


# --- Tools


def ansible(program: str, *arguments: str) -> str:
    """Run one of Ansible's programs on the scenario's hosts; return what it prints."""
    command = [str(Path(sys.executable).with_name(program)), "-i", str(HERE / "inventory"), *arguments]
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
    }
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def step(name: str, replica: str, **variables: object) -> None:
    """Drain a replica, or put it back, as a rollout does."""
    extra = json.dumps({"step": name, **variables})
    ansible("ansible-playbook", str(HERE / "drain.yml"), "--limit", replica, "-e", extra)


def converge(**variables: object) -> None:
    ansible("ansible-playbook", str(HERE / "converge.yml"), "-e", json.dumps(variables))


def gateway_server(**options: object) -> dict[str, Any]:
    """Run the module on the gateway."""
    text = ansible("ansible", "toy-gateway", "-m", "gateway_server", "-a", json.dumps(options))
    result: dict[str, Any] = json.loads(text.partition("=>")[2])
    return result


def on_host(address: str, command: str) -> str:
    """Return what ``command`` prints on a host, over SSH and without Ansible."""
    known = f"UserKnownHostsFile={STATE}/known_hosts"
    ssh = ["ssh", "-i", str(STATE / "key"), "-o", known, f"ansible@{address}", command]
    return subprocess.run(ssh, capture_output=True, text=True, check=True).stdout


def servers() -> dict[str, dict[str, str]]:
    """Return what HAProxy itself says of the servers: its columns by name."""
    text = on_host(GATEWAY, f"sudo python3 -c {shlex.quote(ASK_HAPROXY)}")
    _, titles, *rows = text.strip().splitlines()
    states = [dict(zip(titles[1:].split(), row.split(), strict=True)) for row in rows]
    return {state["srv_name"]: state for state in states if state["be_name"] == "replicas"}


def is_drained(name: str) -> bool:
    return servers()[name]["srv_admin_state"] == "8"


def are_up() -> bool:
    return all(server["srv_op_state"] == "2" for server in servers().values())


def exchange(connection: http.client.HTTPConnection, method: str, path: str, body: object = None) -> Answer:
    """Return status, headers and body of one answer. ``path`` is sent as it stands."""
    data = b"" if body is None else json.dumps(body).encode()
    connection.putrequest(method, path, skip_accept_encoding=True)
    connection.putheader("Authorization", "Bearer a-key")
    if body is not None:
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(data)))
    connection.endheaders(data)
    answer = connection.getresponse()
    text = answer.read().decode()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text


def ask(method: str, path: str, body: object = None, address: str = GATEWAY, port: int = 8080) -> Answer:
    """Do one exchange over a connection of its own."""
    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=60)) as connection:
        return exchange(connection, method, path, body)


def completion(tokens: int = 1, stream: bool = False) -> dict[str, object]:
    return {"model": "toy", "prompt": "a", "max_tokens": tokens, "stream": stream}


def served_by(answer: Answer, tokens: int = 0) -> str:
    """Return the engine that gave the whole of a completion or a stream of at least so many tokens."""
    status, headers, text = answer
    assert status == 200, answer
    if headers["content-type"] == "application/json":
        body = json.loads(text)
        assert body["tokens"] >= tokens
        return str(body["engine"])
    *events, last, rest = text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [part["token"] for part in parts] == list(range(len(parts)))
    assert len(parts) >= tokens
    (engine,) = {part["engine"] for part in parts}
    return str(engine)


def count(engine: str) -> tuple[int, int]:
    """Return how many completions an engine was asked for, and how many streams are under way, as it says itself."""
    body = json.loads(ask("GET", "/count", address=ENGINES[engine], port=8000)[2])
    return body["asked"], body["running"]


@contextlib.contextmanager
def streams(number: int) -> Iterator[list[Future[Answer]]]:
    """Have streams on both replicas, which end when this block does, and must be whole then."""
    began = time.monotonic()
    with ThreadPoolExecutor() as executor:
        running = [executor.submit(ask, "POST", "/v1/completions", completion(10**6, True)) for _ in range(number)]
        try:
            wait_for(lambda: sum(count(name)[1] for name in ENGINES) >= number, "the streams")
            yield running
        finally:
            for address in ENGINES.values():
                ask("GET", "/finish", address=address, port=8000)
        lasted = time.monotonic() - began
        # A token takes a tenth of a second, and a little more on a busy machine.
        assert {served_by(stream.result(), int(lasted * 5)) for stream in running} == set(ENGINES)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + AWAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {AWAIT_S} s: {what}"


class Clients:
    """Clients that ask all the time, one of them over a connection that it keeps; each answer must be whole."""

    def __init__(self) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._running = threading.Event()
        self._running.set()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._busy = [threading.Lock() for _ in range(4)]
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(4)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        kept = http.client.HTTPConnection(GATEWAY, 8080, timeout=60)
        while not self._ended.is_set():
            if not self._running.is_set():
                kept.close()
                self._running.wait()
            with self._busy[number]:
                try:
                    body = completion(1, stream=number % 2 == 0)
                    answer = exchange(kept, "POST", "/v1/completions", body) if number == 0 else None
                    served_by(answer or ask("POST", "/v1/completions", body), tokens=1)
                except Exception as error:
                    self.failures.append(f"client {number}: {error!r}")
                    kept.close()
            with self._lock:
                self.answers += 1

    def more(self) -> None:
        """Wait for more answers to questions that were asked from now on."""
        aim = self.answers + 12
        wait_for(lambda: self.answers >= aim, "answers to the clients")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._running.clear()
        with contextlib.ExitStack() as stack:
            for lock in self._busy:
                stack.enter_context(lock)
            yield
        self._running.set()

    def end(self) -> None:
        self._ended.set()
        self._running.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def clients() -> Iterator[Clients]:
    clients = Clients()
    yield clients
    clients.end()
    assert clients.failures == []
    assert clients.answers > 50


# --- What clients get


def test_only_the_listed_routes_pass() -> None:
    status, _, text = ask("GET", "/v1/models?limit=3")
    seen = json.loads(text)
    assert (status, seen["path"], seen["authorization"]) == (200, "/v1/models?limit=3", "Bearer a-key")
    assert ask("GET", "/health")[::2] == (200, "ok")
    refused = ["/", "/metrics", "/tokenize", "/pause", "/invocations", "/start_profile", "/v1/load_lora_adapter", "/v1"]
    refused += ["/v1/models/", "/v1/models/../../metrics", "//metrics", "/v1/completions/../../metrics", "/%6detrics"]
    refused += ["/V1/models", f"http://{GATEWAY}/metrics", "/metrics?/v1/models", "/v1/models;/metrics", "/health/"]
    for path in refused:
        status, _, text = ask("GET", path)
        assert (path, status) == (path, 404)
        assert "The gateway has no such route" in text


def test_without_a_replica_clients_are_told_to_come_again() -> None:
    try:
        on_host(ENGINES["toy-a"], "sudo systemctl stop vllm")
        # The gateway's check has not noticed yet: what is sent there goes to the other one.
        for _ in range(10):
            assert served_by(ask("POST", "/v1/completions", completion())) == "toy-b"
        on_host(ENGINES["toy-b"], "sudo systemctl stop vllm")
        status, headers, text = ask("POST", "/v1/completions", completion())
        assert (status, headers["retry-after"], headers["content-type"]) == (503, "30", "application/json")
        assert json.loads(text)["error"]["code"] == "no_replica"
        wait_for(lambda: ask("GET", "/health")[0] == 503, "the gateway's own health")
    finally:
        for address in ENGINES.values():
            on_host(address, "sudo systemctl start vllm")
    wait_for(are_up, "both replicas up")


# --- Drains


def test_nothing_is_lost_and_a_drained_replica_gets_nothing(clients: Clients) -> None:
    kept = [http.client.HTTPConnection(GATEWAY, 8080, timeout=60) for _ in range(4)]
    began = time.monotonic()
    with ThreadPoolExecutor() as executor, streams(4) as running:
        for connection in kept:
            exchange(connection, "POST", "/v1/completions", completion())
        clients.more()
        on_host(GATEWAY, "sudo systemctl reload haproxy")
        clients.more()

        # The streams belong to a process that the reload replaced, and count all the same.
        drained = gateway_server(state="drained", servers=["toy-a"], timeout_s=0, fail_on_timeout=False)
        assert drained["changed"] and drained["in_flight"]["toy-a"] > 0
        assert is_drained("toy-a")
        before = count("toy-a")[0]
        # That process also has idle connections of clients, and takes a request over each.
        for connection in kept:
            assert served_by(exchange(connection, "POST", "/v1/completions", completion())) == "toy-b"
        on_host(GATEWAY, "sudo systemctl reload haproxy")
        clients.more()
        waiting = executor.submit(step, "drain", "toy-a")
        wait_for(lambda: time.monotonic() > began + 20, "20 seconds")
        assert not waiting.done() and not any(stream.done() for stream in running)
    waiting.result()
    assert count("toy-a") == (before, 0)

    # These cut what is in flight, so that nothing is.
    for command in ("restart haproxy", "kill --signal=KILL haproxy", "kill --signal=KILL --kill-whom=main haproxy"):
        with clients.paused():
            started = on_host(GATEWAY, STARTED)
            on_host(GATEWAY, f"sudo systemctl {command}")
            wait_for(functools.partial(is_restarted, started), command)
        clients.more()
        clients.more()
    assert count("toy-a") == (before, 0)

    step("undrain", "toy-a")
    wait_for(lambda: count("toy-a")[0] > before, "requests to the replica that was put back")


def is_restarted(started: str) -> bool:
    if on_host(GATEWAY, STARTED) == started:
        return False
    with contextlib.suppress(OSError):
        return ask("GET", "/health")[0] == 200
    return False


def test_requests_that_do_not_end_leave_the_replica_serving() -> None:
    with streams(2):
        with pytest.raises(
            AssertionError, match=r"toy-a was not drained, and serves on\. toy-gateway: Requests are still in flight"
        ):
            step("drain", "toy-a", load_balancer_drain_timeout=1)
        assert not is_drained("toy-a")


def test_what_a_gateway_does_not_find_is_told_while_it_is_drained() -> None:
    step("drain", "toy-a")
    try:
        # HAProxy checks those that are drained, too.
        step("find", "toy-a")
        on_host(ENGINES["toy-a"], "sudo systemctl stop vllm")
        wait_for(lambda: servers()["toy-a"]["srv_op_state"] == "0", "the gateway's check of toy-a")
        with pytest.raises(AssertionError, match="toy-gateway: HAProxy's check does not find these up after 1 s"):
            step("find", "toy-a", load_balancer_up_timeout=1)
        assert is_drained("toy-a")
        # Where nothing serves, nothing is waited for.
        step("undrain", "toy-a", load_balancer_serves=False)
        assert not is_drained("toy-a")
    finally:
        on_host(ENGINES["toy-a"], "sudo systemctl start vllm")
    step("undrain", "toy-a")
    assert are_up()


def test_a_run_without_the_gateway_finds_a_drained_replica() -> None:
    step("drain", "toy-a")
    step("resume", "toy-a", load_balancer_resumed=["toy-a", "toy-b"])
    assert not is_drained("toy-a")


# --- Configuration


def test_a_state_file_that_is_garbage_hurts_nobody() -> None:
    on_host(GATEWAY, "sudo systemctl stop haproxy; echo garbage | sudo tee /var/lib/aerie-haproxy/server-state")
    on_host(GATEWAY, "sudo systemctl start haproxy")
    wait_for(are_up, "both replicas up")
    assert not gateway_server(state="ready", servers=["toy-a", "toy-b"], wait_up=True, timeout_s=30)["changed"]


def test_who_may_change_states() -> None:
    paths = "/run/aerie-haproxy/*.sock /var/lib/aerie-haproxy/server-state"
    modes = [line.split() for line in on_host(GATEWAY, f"sudo sh -c \"stat -c '%n %a %U' {paths}\"").splitlines()]
    assert {Path(path).name: (mode, owner) for path, mode, owner in modes} == {
        "master.sock": ("600", "root"),
        "stats.sock": ("600", "root"),
        "server-state": ("600", "root"),
    }
    # The master is root, the process that clients talk to is not.
    users = on_host(GATEWAY, "ps -o user= -C haproxy").split()
    assert sorted(users) == ["haproxy", "root"]


def test_another_configuration_undrains_nobody(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=gateway", "-days", "2"]
    subprocess.run([*make, "-addext", f"subjectAltName=IP:{GATEWAY}"], capture_output=True, check=True)
    others = [
        {"name": "toy-c", "address": "10.77.4.13", "port": 8000},
        {"name": "toy-b", "address": ENGINES["toy-b"], "port": 8000},
        {"name": "toy-a", "address": ENGINES["toy-a"], "port": 8001},
    ]
    assert gateway_server(state="drained", servers=["toy-a"])["changed"]
    converge(load_balancer_servers=others, load_balancer_tls_pem=certificate.read_text() + key.read_text())
    assert {name: (server["srv_admin_state"], server["srv_port"]) for name, server in servers().items()} == {
        "toy-a": ("8", "8001"),
        "toy-b": ("0", "8000"),
        "toy-c": ("0", "8000"),
    }
    trust = ssl.create_default_context(cafile=str(certificate))
    with contextlib.closing(http.client.HTTPSConnection(GATEWAY, 8080, timeout=60, context=trust)) as connection:
        assert served_by(exchange(connection, "POST", "/v1/completions", completion())) == "toy-b"


def test_a_replica_with_tls_is_known_by_its_certificate(tmp_path: Path) -> None:
    """It changes from HTTP to TLS, which HAProxy's state file does not know of."""

    def pair(name: str) -> tuple[Path, Path]:
        key, certificate = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        make += ["-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={name}", "-days", "2"]
        subprocess.run(make, capture_output=True, check=True)
        return certificate, key

    certificate, key = pair("toy-b")
    text = shlex.quote(certificate.read_text() + key.read_text())
    engine = f"/srv/toy_engine.py toy-b {ENGINES['toy-b']} 8443 /srv/toy-b.pem"
    on_host(
        ENGINES["toy-b"], f"echo {text} | sudo tee /srv/toy-b.pem > /dev/null; sudo systemd-run --unit=toy-tls {engine}"
    )
    plain = {"name": "toy-b", "address": ENGINES["toy-b"], "port": 8000}
    converge(load_balancer_servers=[plain])
    wait_for(are_up, "toy-b is up")
    with_tls = {**plain, "port": 8443, "tls_authorities": certificate.read_text()}
    converge(load_balancer_servers=[with_tls])
    # As its check finds it, over a connection of the same kind as requests have.
    wait_for(lambda: served_if_any() == "toy-b", "toy-b serves with TLS")
    assert servers()["toy-b"]["srv_use_ssl"] == "1"
    converge(load_balancer_servers=[{**with_tls, "tls_authorities": pair("stranger")[0].read_text()}])
    wait_for(lambda: not are_up(), "toy-b is down")
    assert served_if_any() == ""
    converge(load_balancer_servers=[plain])
    wait_for(lambda: served_if_any() == "toy-b", "toy-b serves without TLS")


def served_if_any() -> str:
    """Return the engine that answers a completion; nothing if none does."""
    answer = ask("POST", "/v1/completions", completion())
    return served_by(answer) if answer[0] == 200 else ""


def test_what_is_removed_is_gone() -> None:
    ansible("ansible-playbook", str(HERE / "remove.yml"))
    with pytest.raises(OSError):
        ask("GET", "/health")
    assert "disabled" in on_host(GATEWAY, "systemctl is-enabled haproxy || true")
    assert on_host(GATEWAY, "sudo find / -xdev -name '*aerie*' -path '*haproxy*'") == ""
    assert "changed=0" in ansible("ansible-playbook", str(HERE / "remove.yml"))
    # The package has its own file again.
    assert on_host(GATEWAY, "sudo dpkg --verify haproxy") == ""


def test_the_configuration_of_others_is_refused() -> None:
    config = "/etc/haproxy/haproxy.cfg"
    on_host(GATEWAY, f"printf 'listen shop\\n  bind :8081\\n' | sudo tee -a {config}")
    before = on_host(GATEWAY, f"sha256sum {config}")
    with pytest.raises(AssertionError, match=r"haproxy\.cfg on toy-gateway is not Aerie's, and somebody wrote it"):
        converge()
    assert on_host(GATEWAY, f"sha256sum {config}") == before
    assert "changed=0" in ansible("ansible-playbook", str(HERE / "remove.yml"))
    assert on_host(GATEWAY, f"sha256sum {config}") == before
