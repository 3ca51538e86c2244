# SPDX-License-Identifier: Apache-2.0
"""The hosts of a replica update, roll back, fail and are mended together, whatever happens to one of them.

Two replicas of two hosts behind a gateway, with stand-ins for vLLM and Ray, and a client that must never notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import vllm_stand_in
import yaml
from ansible.module_utils.aerie.journal import CONFIRMED, CONFIRMING, REQUESTED, RESTORED, RESTORING, STARTING
from fleet import HOME, SERVICE, Machine, await_point, await_that, machines
from scenario import INVENTORY, ROOT, Run, api_key
from traffic import Traffic

REPLICAS = {"fore": ("fore-1", "fore-2"), "aft": ("aft-1", "aft-2")}
HEADS = [hosts[0] for hosts in REPLICAS.values()]
HOSTS = [host for hosts in REPLICAS.values() for host in hosts]
LABEL = "STAND_IN_RELEASE"
FULL = bool(os.environ.get("INTERRUPTED_ALL"))
# A run that was cut off ends by itself, within its own budgets (release_confirm_budget is 8 s).
RUN_S = 180.0
# What the first host of a replica takes to see that another one failed, or is gone, and the whole replica to be back:
# far less than a start may take, which is a minute.
BACK_S = 40.0


@pytest.fixture(scope="module")
def fleet() -> dict[str, Machine]:
    return machines(INVENTORY / "hosts.yml")


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((INVENTORY / "group_vars/inference/service.yml").read_text())
    return found


@pytest.fixture(scope="module")
def traffic(service: dict[str, Any], fleet: dict[str, Machine]) -> Iterator[Traffic]:
    """Run a client through the gateway all the time."""

    def expected(prompt: str, count: int) -> str:
        return "".join(vllm_stand_in.tokens(prompt, count))

    address = (str(fleet["helm"].host.address), 8080)
    with Traffic(address, api_key(), service["vllm_service_model_name"], expected, pause_s=0.1) as client:
        yield client


@pytest.fixture(autouse=True)
def unnoticed(traffic: Traffic) -> Iterator[None]:
    """No request fails in any of these tests."""
    failures, answered = len(traffic.failures), traffic.answered.total()
    yield
    assert traffic.failures[failures:] == []
    assert traffic.answered.total() > answered


def joined(machine: Machine) -> bool:
    shown = machine.run("systemctl", "show", "--property=StatusText", "--value", SERVICE)
    return shown.startswith("joined ")


def is_up(fleet: Mapping[str, Machine], replica: str) -> bool:
    """Say whether all hosts of a replica run one release, the head answers and the others are with it."""
    head, *others = (fleet[name] for name in REPLICAS[replica])
    with contextlib.suppress(AssertionError, LookupError):
        releases = {machine.served().release for machine in (head, *others)}
        return len(releases) == 1 and head.serves() and all(joined(machine) for machine in others)
    return False


def served(fleet: Mapping[str, Machine], replica: str) -> str:
    """Return the release that a replica serves; fails where its hosts differ."""
    await_that(lambda: is_up(fleet, replica), f"{replica} serves one release", BACK_S)
    (release,) = {fleet[name].served().release for name in REPLICAS[replica]}
    return release


def pids(fleet: Mapping[str, Machine], replica: str) -> list[list[int]]:
    return [fleet[name].pids(SERVICE) for name in REPLICAS[replica]]


def await_end(machine: Machine) -> None:
    await_that(lambda: not machine.journal(), f"the switch of {machine.name} ends")


def other_release(fleet: Mapping[str, Machine]) -> str:
    """Return the release that all hosts have and the first replica does not serve."""
    of = [{path.name for path in fleet[name].path(f"{HOME}/releases").iterdir()} for name in HOSTS]
    (other,) = set.intersection(*of) - {fleet["fore-1"].served().release}
    return other


@contextlib.contextmanager
def rolling_to(release: str, log: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Roll to a release that is on the hosts, in a process group of its own, which is gone afterwards."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "rollback.yml", "-i", str(INVENTORY)]
    with log.open("w") as stream:
        run = subprocess.Popen(
            [*command, "-e", json.dumps({"to": release}), *options],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            text=True,
            start_new_session=True,
        )
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def mended(fleet: Mapping[str, Machine], playbook: Callable[..., Run], release: str) -> None:
    """Run again what was cut off, and see that it ends as if nothing had happened."""
    again = playbook("rollback.yml", to=release)
    assert (again.status, again.messages) == ("successful", "")
    assert {served(fleet, replica) for replica in REPLICAS} == {release}
    assert fleet["helm"].gateway() == dict.fromkeys(HEADS, "UP")
    for name in HOSTS:
        newest = fleet[name].ledger()[-1]
        assert (newest["action"], newest["to"]) == ("confirm", release)


def test_an_update_and_a_rollback_go_replica_by_replica(
    fleet: dict[str, Machine], service: dict[str, Any], traffic: Traffic, playbook: Callable[..., Run]
) -> None:
    (before,) = {served(fleet, replica) for replica in REPLICAS}
    environment = {**service["vllm_service_environment"], LABEL: "two"}
    update = playbook("deploy.yml", vllm_service_environment=environment)
    assert (update.status, update.messages) == ("successful", "")
    (after,) = {served(fleet, replica) for replica in REPLICAS}
    assert after != before
    assert "2 batches of hosts: 2, 2." in update.said
    # Each head answered, before and after.
    assert {tuple(who.split()[::2]) for who in traffic.answered} == {
        (head, release) for head in HEADS for release in (before, after)
    }
    told = {name: {entry["action"]: entry["time"] for entry in fleet[name].ledger()[-2:]} for name in HOSTS}
    for hosts in REPLICAS.values():
        # None was activated before all were stopped, nor kept before all were.
        assert max(told[name]["activate"] for name in hosts) <= min(told[name]["confirm"] for name in hosts)
    assert max(told[name]["confirm"] for name in REPLICAS["fore"]) <= min(
        told[name]["activate"] for name in REPLICAS["aft"]
    )

    rollback = playbook("rollback.yml", to="previous")
    assert (rollback.status, rollback.messages) == ("successful", "")
    assert {served(fleet, replica) for replica in REPLICAS} == {before}
    assert fleet["helm"].gateway() == dict.fromkeys(HEADS, "UP")


FAULTS: list[tuple[str, dict[str, str]]] = [("fore-2", {"ray": "dies"}), ("fore-1", {"die": "traceback"})]


@pytest.mark.parametrize(("failed", "fault"), FAULTS if FULL else FAULTS[:1])
def test_what_fails_on_one_host_is_undone_on_all_of_its_replica(
    failed: str, fault: dict[str, str], fleet: dict[str, Machine], tmp_path: Path
) -> None:
    (before,) = {served(fleet, replica) for replica in REPLICAS}
    untouched = pids(fleet, "aft")
    struck, log = fleet[failed], tmp_path / "failed.log"
    with rolling_to(other_release(fleet), log) as run:
        try:
            await_point(lambda: bool(struck.journal()), REQUESTED, run)
            struck.order(fault)
            await_point(lambda: struck.phase() == STARTING, STARTING, run)
            began = time.monotonic()
            await_point(lambda: struck.phase() == RESTORING, RESTORING, run)
        finally:
            struck.order({})
        assert run.wait(RUN_S) != 0
    assert time.monotonic() - began < BACK_S
    assert {served(fleet, replica) for replica in REPLICAS} == {before}
    assert pids(fleet, "aft") == untouched
    assert fleet["helm"].gateway() == dict.fromkeys(HEADS, "UP")
    said = log.read_text()
    for name in REPLICAS["fore"]:
        assert f"{name}: the switch from {before} to " in said
        assert fleet[name].last()["outcome"] == RESTORED
    assert fleet[failed].last()["failed_gate"] == "health"
    assert "Not touched: aft-1, aft-2." in said


def test_what_one_host_was_told_to_keep_its_replica_keeps(
    fleet: dict[str, Machine], playbook: Callable[..., Run], tmp_path: Path
) -> None:
    """The control process is killed when it has confirmed one host and not the other."""
    before, after = served(fleet, "fore"), other_release(fleet)
    untouched = pids(fleet, "aft")
    # One host at a time.
    with rolling_to(after, tmp_path / "killed.log", "--forks=1") as run:
        await_point(lambda: fleet["fore-1"].told() == "confirm", "the first host is confirmed", run)
    assert fleet["fore-2"].told() != "confirm"
    for name in REPLICAS["fore"]:
        await_end(fleet[name])
    assert served(fleet, "fore") == after
    assert [fleet[name].last()["outcome"] for name in REPLICAS["fore"]] == [CONFIRMED] * 2
    assert (served(fleet, "aft"), pids(fleet, "aft")) == (before, untouched)
    mended(fleet, playbook, after)


@pytest.mark.skipif(not FULL, reason="INTERRUPTED_ALL=1, as in make test-all: it waits out the budgets")
@pytest.mark.parametrize("when", [STARTING, CONFIRMING])
def test_a_host_that_is_cut_off_for_longer_than_the_budget_takes_its_replica_back(
    when: str, fleet: dict[str, Machine], playbook: Callable[..., Run], tmp_path: Path
) -> None:
    head, cut = (fleet[name] for name in REPLICAS["fore"])
    before, after = served(fleet, "fore"), other_release(fleet)
    untouched = pids(fleet, "aft")
    log = tmp_path / "cut.log"
    with rolling_to(after, log, "--forks=1") as run:
        try:
            if when == STARTING:
                await_point(lambda: bool(head.journal()), REQUESTED, run)
                head.order({"start_s": 600})
                await_point(lambda: head.phase() == STARTING and joined(cut), "the hosts are together", run)
            else:
                await_point(lambda: head.told() == "confirm", "the head is confirmed", run)
            cut.cut()
            if when == STARTING:
                await_that(lambda: head.phase() == RESTORING, "the head goes back", BACK_S)
                head.order({})
                await_end(head)
            await_end(cut)
            # A head that was confirmed knows nothing of the other host, and waits.
            assert head.phase() == ("" if when == STARTING else CONFIRMING)
            assert run.wait(RUN_S) != 0
        finally:
            head.order({})
            cut.mend()
    assert f"{cut.name}: cannot be reached" in log.read_text()
    for name in REPLICAS["fore"]:
        await_end(fleet[name])
        assert fleet[name].last()["outcome"] != CONFIRMED
    assert served(fleet, "fore") == before
    assert (served(fleet, "aft"), pids(fleet, "aft")) == (before, untouched)
    mended(fleet, playbook, after)
