# SPDX-License-Identifier: Apache-2.0
"""One replica over two hosts: whatever ends on one of them, requests end in bounded time and the service comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet import SERVICE, Machine, await_that, machines

HOSTS = machines(Path(__file__).parent / "inventory/hosts.yml")
HEAD, OTHER = HOSTS["bow"], HOSTS["stern"]
URL = f"http://{HEAD.host.address}:8000"
MODEL = "kimi-k2.5-tiny"
# What docs/scaling.md promises, on this machine with its two cores: a request ends, and the service is back.
ENDED_S = 30.0
BACK_S = 240.0
RAY_PORTS = range(6379, 6379 + 100)


class Request:
    """A long completion, streamed: whether it has begun, and when and how it ended."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended: float | None = None
        self.error = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"model": MODEL, "prompt": "a b c d", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
        try:
            with ask("/v1/completions", {**body, "stream": True}, timeout=300) as response:
                for line in response:
                    if line.startswith(b"data:"):
                        self.begun.set()
                    if b'"error"' in line:
                        self.error = line.decode()
        except (OSError, urllib.error.URLError, ValueError) as error:
            self.error = f"{error}"
        self.ended = time.monotonic()
        self.begun.set()

    def ends(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert self.ended is not None, f"a request hangs for more than {seconds:g} s"


def ask(path: str, body: object = None, timeout: float = 10) -> Any:  # noqa: ANN401
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['API_KEY']}"}
    request = urllib.request.Request(f"{URL}{path}", None if body is None else json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=timeout)


def is_healthy() -> bool:
    with contextlib.suppress(OSError, urllib.error.URLError), ask("/health", timeout=2) as response:
        return bool(response.status == 200)
    return False


def counters() -> dict[str, float]:
    with ask("/metrics") as response:
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
    both = [threading.Thread(target=machine.reboot) for machine in (HEAD, OTHER)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()


STRIKES: dict[str, Callable[[], None]] = {
    "the other host's Ray": lambda: kill(OTHER, "raylet"),
    "the head's engine": lambda: kill(HEAD, "VLLM::EngineCore"),
    "the other host's network": cut_off,
    "the other host": OTHER.reboot,
    "both hosts": reboot_both,
}


@pytest.mark.parametrize("strike", STRIKES)
def test_requests_end_and_the_service_comes_back(strike: str) -> None:
    await_that(is_healthy, "it serves", BACK_S)
    before = {machine.name: set(machine.pids(SERVICE)) for machine in HOSTS.values()}
    request = Request()
    assert request.begun.wait(60) and not request.error
    struck = time.monotonic()
    STRIKES[strike]()
    request.ends(ENDED_S)
    await_that(is_healthy, "it serves again", BACK_S, every=0.5)
    ended, back = (request.ended or struck) - struck, time.monotonic() - struck
    print(f"{strike}: the request ended after {ended:.1f} s, the service was back after {back:.0f} s")
    # Nothing of the earlier start is left on any host.
    for machine in HOSTS.values():
        assert not before[machine.name] & set(machine.pids(SERVICE))
    serves_as_before()


def test_a_third_party_reaches_the_service_and_nothing_else() -> None:
    await_that(is_healthy, "it serves", BACK_S)
    # This machine is on the network of both hosts, and none of them.
    for machine in HOSTS.values():
        for port in listening(machine) - {22, 8000}:
            with pytest.raises(TimeoutError), socket.create_connection((str(machine.host.address), port), 0.5):
                pass
    # The hosts themselves reach each other.
    command = f"import socket; socket.create_connection(('{HEAD.host.address}', 6379), 5)"
    OTHER.run("setpriv", "--reuid=vllm", "--clear-groups", "python3", "-c", command)
    # Another account of a host does not, though its packets come from there.
    with pytest.raises(Exception, match="Connection refused"):
        OTHER.run("setpriv", "--reuid=ansible", "--clear-groups", "python3", "-c", command)


def listening(machine: Machine) -> set[int]:
    """Return the ports that others than the host itself could reach, if nothing forbade it."""
    lines = machine.run("ss", "--no-header", "--listening", "--tcp", "--numeric").splitlines()
    addresses = [line.split()[3] for line in lines]
    found = {int(address.rpartition(":")[2]) for address in addresses if not address.startswith(("127.", "[::1]"))}
    assert {port for port in found if port in RAY_PORTS}, "Ray listens"
    return found
