# SPDX-License-Identifier: Apache-2.0
"""One replica over two hosts: whatever ends on one of them, requests end in bounded time and the service comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import SERVICE, Machine, await_that, machines
from scenario import Run

HOSTS = machines(Path(__file__).parent / "inventory/hosts.yml")
HEAD, OTHER, GATEWAY = HOSTS["bow"], HOSTS["stern"], HOSTS["pilot"]
REPLICA = (HEAD, OTHER)
ENGINE = f"http://{HEAD.host.address}:8000"
URL = f"http://{GATEWAY.host.address}:8080"
MODEL = "kimi-k2.5-tiny"
# What docs/scaling.md promises, on this machine with its two cores: a request ends, and the service is back.
ENDED_S = 45.0
BACK_S = 240.0
FULL = bool(os.environ.get("INTERRUPTED_ALL"))
RAY_PORT = 6379
RAY_PORTS = range(RAY_PORT, RAY_PORT + 100)
# Another address on the network of the hosts.
ALIAS = "10.77.11.99"
TRIED_S = 15
RAY = "/opt/aerie/current/venv/bin/ray"
# What a third party, without the firewall, would need no more for than the address.
ORDERS = {
    "join": ("start", f"--address={HEAD.host.address}:{RAY_PORT}", f"--node-ip-address={HEAD.host.gateway}"),
    "look": ("status", f"--address={HEAD.host.address}:{RAY_PORT}"),
    "submit a job": ("job", "submit", f"--address=http://{HEAD.host.address}:8265", "--", "true"),
}


class Request:
    """A long completion through the gateway, streamed: whether it has begun, and when and how it ended."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended: float | None = None
        self.error = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"model": MODEL, "prompt": "a b c d", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
        whole = False
        try:
            with ask("/v1/completions", {**body, "stream": True}, timeout=300) as response:
                for line in response:
                    if line.startswith(b"data:"):
                        self.begun.set()
                    if b'"error"' in line:
                        self.error = line.decode()
                    whole = whole or b"[DONE]" in line
            if not whole:
                self.error = self.error or "it was cut"
        except (OSError, urllib.error.URLError, ValueError) as error:
            self.error = f"{error}"
        self.ended = time.monotonic()
        self.begun.set()

    def ends(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert self.ended is not None, f"a request hangs for more than {seconds:g} s"


def ask(path: str, body: object = None, timeout: float = 10, base: str = URL) -> Any:  # noqa: ANN401
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['API_KEY']}"}
    request = urllib.request.Request(f"{base}{path}", None if body is None else json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=timeout)


def is_healthy() -> bool:
    with contextlib.suppress(OSError, urllib.error.URLError), ask("/health", timeout=2, base=ENGINE) as response:
        return bool(response.status == 200)
    return False


def is_sent_to() -> bool:
    return GATEWAY.gateway()[HEAD.name].startswith("UP")


def counters() -> dict[str, float]:
    with ask("/metrics", base=ENGINE) as response:
        text = response.read().decode()
    pattern = r"^vllm:spec_decode_num_(draft_tokens|accepted_tokens)_total\{[^}]*\} ([0-9.e+]+)$"
    return {name: float(value) for name, value in re.findall(pattern, text, re.M)}


def serves_as_before() -> None:
    """Compare what is served with the Hugging Face model's tokens, and every draft is accepted."""
    entry = json.loads(Path(os.environ["REFERENCE"]).read_text())["prompts"][1]
    body = {"model": MODEL, "prompt": entry["prompt_token_ids"], "max_tokens": len(entry["token_ids"])}
    before = counters()
    with ask("/v1/completions", {**body, "temperature": 0, "ignore_eos": True, "return_token_ids": True}, 60) as answer:
        assert json.loads(answer.read())["choices"][0]["token_ids"] == entry["token_ids"]
    moved = {name: value - before.get(name, 0) for name, value in counters().items()}
    assert moved["draft_tokens"] == moved["accepted_tokens"] > 0


def named(machine: Machine, words: str) -> list[int]:
    """Return the processes of a host's part whose command line has ``words``."""
    found = []
    for pid in machine.pids(SERVICE):
        with contextlib.suppress(OSError):
            if words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                found.append(pid)
    return found


def kill(machine: Machine, words: str) -> None:
    (pids := named(machine, words)) or pytest.fail(f"{machine.name} runs no {words}")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def cut_off() -> None:
    """Pull the other host's cable for longer than anybody waits for it."""
    OTHER.cut()
    try:
        await_that(lambda: not is_healthy(), "the head gives up what it cannot reach", ENDED_S)
    finally:
        OTHER.mend()


def reboot_both() -> None:
    both = [threading.Thread(target=machine.reboot) for machine in REPLICA]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()


STRIKES: dict[str, Callable[[], None]] = {
    "the other host's Ray": lambda: kill(OTHER, "raylet"),
    "the head's engine": lambda: kill(HEAD, "VLLM::EngineCore"),
    "the other host's network": cut_off,
    "the other host": OTHER.reboot,
    "the head's host": HEAD.reboot,
    "both hosts": reboot_both,
}


@pytest.fixture(autouse=True)
def serving() -> Iterator[None]:
    await_that(lambda: is_healthy() and is_sent_to(), "it serves", BACK_S, every=0.5)
    yield


def test_both_stages_have_taps_and_one_is_on_their_boundary() -> None:
    log = HEAD.log()
    assert "Using Eagle3 auxiliary layers from config: (2, 4, 6)" in log
    assert re.search(rf"ip={OTHER.host.address}\).*Worker_PP1", log), "the other host has the second stage"
    configuration = json.loads(HEAD.text("/srv/models/rot/target/config.json"))
    assert configuration["text_config"]["num_hidden_layers"] == 2 * 4
    # What one stage accepts was what the live gate compared with.
    (live,) = (gate for gate in HEAD.ledger()[-1]["gates"] if gate["gate"] == "live")
    assert live["thresholds"]["source"].startswith("the drafter's baseline")


# A process, a host that is gone at once, and all of them: each is noticed in another way.
SOME = ("the head's engine", "the other host's network", "both hosts")


@pytest.mark.parametrize("strike", STRIKES if FULL else SOME)
def test_requests_end_and_the_service_comes_back(strike: str) -> None:
    before = {machine.name: set(machine.pids(SERVICE)) for machine in REPLICA}
    running = Request()
    assert running.begun.wait(60) and not running.error
    struck = time.monotonic()
    STRIKES[strike]()
    # One more, which the gateway may or may not send on.
    late = Request()
    running.ends(ENDED_S)
    late.ends(ENDED_S)
    assert running.error
    await_that(lambda: not is_sent_to(), "the gateway sends no more", ENDED_S)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        ask("/v1/models", timeout=ENDED_S)
    silent = time.monotonic() - struck
    await_that(is_healthy, "it serves again", BACK_S - silent, every=0.5)
    ended, back = (running.ended or struck) - struck, time.monotonic() - struck
    print(f"{strike}: the request ended after {ended:.1f} s, the service was back after {back:.0f} s")
    # Nothing of the earlier start is left on any host.
    for machine in REPLICA:
        assert not before[machine.name] & set(machine.pids(SERVICE))
    await_that(is_sent_to, "the gateway sends again")
    serves_as_before()


@contextlib.contextmanager
def faults_between_the_hosts() -> Iterator[None]:
    """Have all at once that the preflight is to find; what is open already goes on."""
    hosts = HEAD.path("/etc/hosts")
    before = hosts.read_text()
    translate = f"add rule ip astray out ip daddr {OTHER.host.address} tcp dport {RAY_PORT + 9} snat to {ALIAS}"
    try:
        hosts.write_text(f"192.0.2.7 {OTHER.name}\n{before}")
        OTHER.run("ip", "link", "set", "eth0", "mtu", "1400")
        HEAD.run("ip", "address", "add", f"{ALIAS}/32", "dev", "eth0")
        # As before the first deploy, when no rules of Aerie's keep a stranger out.
        OTHER.run("nft", f"insert rule inet aerie_replica input ip saddr {ALIAS} accept")
        HEAD.run("nft", "add table ip astray")
        HEAD.run("nft", "add chain ip astray out { type nat hook postrouting priority srcnat ; }")
        HEAD.run("nft", translate)
        yield
    finally:
        hosts.write_text(before)
        OTHER.run("ip", "link", "set", "eth0", "mtu", "1500")
        OTHER.run("nft", "--file", "/etc/aerie/replica.nft")
        HEAD.run("nft", "delete table ip astray")
        HEAD.run("ip", "address", "delete", f"{ALIAS}/32", "dev", "eth0")


def test_faults_between_the_hosts_are_named(playbook: Callable[..., Run]) -> None:
    # Without them the deploy went on.
    with faults_between_the_hosts():
        found = playbook("tests/molecule/multi_host/fabric.yml", multi_node_least_bandwidth=100000)
    for words in (
        f"stern sees bow as {ALIAS} and not as {HEAD.host.address}: there must be no NAT between them",
        "bow has MTU 1500 and stern 1400 on the fabric: give both the same",
        f"on bow the name stern of stern leads to 192.0.2.7 and not to {OTHER.host.address}",
    ):
        assert words in found.messages
    assert re.search(r"bow sends [0-9.]+ Gbit/s to stern, and multi_node_least_bandwidth is 100000", found.messages)


def test_a_part_of_a_replica_is_refused_as_such(playbook: Callable[..., Run]) -> None:
    found = playbook("playbooks/preflight.yml", limit=HEAD.name)
    assert found.status == "failed"
    assert f"are one replica, and this run leaves out {OTHER.name}: name all of them with --limit." in found.messages
    assert "cannot reach" not in found.messages


def from_outside(*command: str) -> subprocess.Popen[str]:
    """Run a program of the other host's files in this machine's network: on that of both hosts, and none of them."""
    namespaces = ("--mount", "--uts", "--ipc", "--pid", "--root", "--wdns=/")
    environment = (
        "env",
        "HOME=/tmp",
        "RAY_TMPDIR=/tmp",
        "PYTHONDONTWRITEBYTECODE=1",
        f"PATH={Path(RAY).parent}:/usr/bin:/bin",
    )
    return subprocess.Popen(
        ["nsenter", f"--target={OTHER.init()}", *namespaces, "--", *environment, "timeout", f"{TRIED_S}", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def from_the_other_host(*command: str) -> str:
    """Run a program on the other host as the service's account."""
    return OTHER.run("setpriv", "--reuid=vllm", "--regid=vllm", "--clear-groups", "env", "HOME=/tmp", *command)


def test_a_third_party_neither_joins_nor_commands_the_cluster() -> None:
    before = {machine.name: set(machine.pids(SERVICE)) for machine in REPLICA}
    for what, process in {what: from_outside(RAY, *order) for what, order in ORDERS.items()}.items():
        said, _ = process.communicate()
        # Ray is there, and gets no connection, however long it tries.
        assert process.returncode != 0, (what, said)
        assert re.search("Failed to connect to (GCS|Ray) at address", said), (what, said)
    # The same program gets one from a host of the replica, at once, and there are no more nodes than these.
    began = time.monotonic()
    seen = from_the_other_host(RAY, *ORDERS["look"])
    assert time.monotonic() - began < TRIED_S
    assert len(re.findall("^ 1 node_", seen, re.M)) == len(REPLICA), seen
    assert {machine.name: set(machine.pids(SERVICE)) for machine in REPLICA} == before


def test_a_host_that_is_new_in_a_replica_gets_through_the_rules_of_the_old_one(playbook: Callable[..., Run]) -> None:
    # What each has were its rules if the other one had had another address before.
    rules = OTHER.text("/etc/aerie/replica.nft")
    OTHER.path("/run/old.nft").write_text(rules.replace(f"saddr {HEAD.host.address} ", f"saddr {ALIAS} "))
    listed = ("nft", "list", "set", "inet", "aerie_replica", "newcomers")
    try:
        OTHER.run("nft", "--file", "/run/old.nft")
        foretold = playbook("tests/molecule/multi_host/fabric.yml", check=True)
        untouched = OTHER.run(*listed)
        found = playbook("tests/molecule/multi_host/fabric.yml")
        let_in = OTHER.run(*listed)
    finally:
        OTHER.run("nft", "--file", "/etc/aerie/replica.nft")
    assert (found.status, found.messages) == ("successful", "")
    assert "not measured" not in found.said
    # Not for good, to one port, and in check mode not at all.
    assert re.search(rf"{HEAD.host.address} \. {RAY_PORT + 9} timeout [0-9ms]+ expires ", let_in), let_in
    assert str(HEAD.host.address) not in untouched
    assert (foretold.status, foretold.messages) == ("successful", "")
    assert f"{HEAD.name} to {OTHER.name}: not measured" in foretold.said
    assert f"{OTHER.name} to {HEAD.name}: not measured" not in foretold.said


@pytest.mark.parametrize("order", ["restart", "reload", "stop"])
def test_the_rules_outlive_those_of_the_host(order: str) -> None:
    OTHER.run("systemctl", "start", "nftables.service")
    OTHER.run("systemctl", order, "nftables.service")
    assert knock((str(OTHER.host.address), RAY_PORT + 2)) == "timed out"


def test_rules_that_are_gone_are_told_and_others_would_get_in(playbook: Callable[..., Run]) -> None:
    OTHER.run("nft", "delete table inet aerie_replica")
    try:
        found = playbook("playbooks/status.yml")
        assert knock((str(OTHER.host.address), RAY_PORT + 2)) == "let in"
    finally:
        OTHER.run("nft", "--file", "/etc/aerie/replica.nft")
    assert found.status == "failed"
    assert f"{OTHER.name}: others may connect to the replica's ports: run nft -f" in found.messages


def test_a_third_party_reaches_the_service_and_nothing_else() -> None:
    doors = [(str(machine.host.address), port) for machine in REPLICA for port in listening(machine) - {22, 8000}]
    with ThreadPoolExecutor(len(doors)) as pool:
        assert set(pool.map(knock, doors)) == {"timed out"}
    # The hosts themselves reach each other.
    command = f"import socket; socket.create_connection(('{HEAD.host.address}', {RAY_PORT}), 5)"
    from_the_other_host("python3", "-c", command)
    # Another account of a host does not, though its packets come from there.
    with pytest.raises(Exception, match="Connection refused"):
        OTHER.run("setpriv", "--reuid=ansible", "--clear-groups", "python3", "-c", command)


def knock(door: tuple[str, int]) -> str:
    """Try to connect from this machine; return what comes of it."""
    try:
        with socket.create_connection(door, 2):
            return "let in"
    except OSError as error:
        return str(error)


def listening(machine: Machine) -> set[int]:
    """Return the ports that others than the host itself could reach, if nothing forbade it."""
    lines = machine.run("ss", "--no-header", "--listening", "--tcp", "--numeric").splitlines()
    addresses = [line.split()[3] for line in lines]
    found = {int(address.rpartition(":")[2]) for address in addresses if not address.startswith(("127.", "[::1]"))}
    assert {port for port in found if port in RAY_PORTS}, "Ray listens"
    return found


# Two more starts of the real engine take minutes: multi_host_rolling has every turn of a switch, on stand-ins.
if FULL:

    def test_the_replica_is_updated_and_goes_back(playbook: Callable[..., Run]) -> None:
        first = {machine.current() for machine in REPLICA}
        updated = playbook("deploy.yml", speculation="off", accept_downtime="true")
        assert updated.status == "successful", updated.messages
        second = {machine.current() for machine in REPLICA}
        assert len(second) == 1 and second.isdisjoint(first)
        await_that(is_sent_to, "the gateway sends again")
        assert counters() == {}
        back = playbook("rollback.yml", to="previous", accept_downtime="true")
        assert back.status == "successful", back.messages
        assert {machine.current() for machine in REPLICA} == first
        await_that(is_sent_to, "the gateway sends again")
        serves_as_before()
