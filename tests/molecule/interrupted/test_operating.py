# SPDX-License-Identifier: Apache-2.0
"""What operators run day by day: with nothing to be done, to see how a fleet stands, and without the drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fleet import SERVICE, Machine, await_that
from scenario import Run
from traffic import Traffic

# So many tasks at most where nothing is to be done.
IDLE_TASKS = 5


def test_without_speculation_the_same_model_is_served(
    fleet: dict[str, Machine], served: str, traffic: Traffic, playbook: Callable[..., Run]
) -> None:
    failures = len(traffic.failures)
    run = playbook("deploy.yml", speculation="off")
    assert (run.status, run.messages) == ("successful", "")
    assert "This release serves without speculation: speculation is off." in run.said
    for name in ("left", "right"):
        machine = fleet[name]
        release = machine.served().release
        assert release != served
        assert "speculative-config" not in machine.text(f"/opt/aerie/releases/{release}/serve.yaml")
        (live,) = [gate for gate in machine.ledger()[-1]["gates"] if gate["gate"] == "live"]
        assert live["verdict"] == "not_applicable"

    # One that got no further than the first replica is finished when it is run again.
    canary = playbook("rollback.yml", limit="left,gate", to="previous")
    assert (canary.status, canary.messages) == ("successful", "")
    assert (fleet["left"].served().release, fleet["right"].served().release != served) == (served, True)
    before = fleet["left"].pids(SERVICE)
    back = playbook("rollback.yml", to="previous")
    assert (back.status, back.messages) == ("successful", "")
    assert "did not reach right, and is finished there." in back.said
    assert f"left is left alone and serves {served}" in back.said
    assert {fleet[name].served().release for name in ("left", "right")} == {served}
    assert fleet["left"].pids(SERVICE) == before
    assert traffic.failures[failures:] == []


def test_a_fleet_where_nothing_is_to_be_done_is_left_in_a_few_tasks(
    fleet: dict[str, Machine], served: str, playbook: Callable[..., Run]
) -> None:
    before = {name: fleet[name].pids(SERVICE) for name in ("left", "right")}
    environment = {"STAND_IN_RELEASE": "idle"}
    assert playbook("deploy.yml", vllm_service_environment=environment).status == "successful"
    serving = {name: fleet[name].pids(SERVICE) for name in before}
    assert all(serving[name] != before[name] for name in before)
    run = playbook("deploy.yml", vllm_service_environment=environment)
    assert (run.status, run.messages, run.changed) == ("successful", "", {})
    assert "Nothing is to be done." in run.said
    assert all(0 < run.ok[name] <= IDLE_TASKS for name in before), run.ok
    assert {name: fleet[name].pids(SERVICE) for name in before} == serving


def test_status_and_history_tell_what_a_fleet_serves_and_what_is_wrong(
    fleet: dict[str, Machine], served: str, playbook: Callable[..., Run], tmp_path: Path
) -> None:
    table = tmp_path / "status.json"
    run = playbook("playbooks/status.yml", json=str(table))
    assert (run.status, run.messages) == ("successful", "")
    rows = {row["host"]: row for row in json.loads(table.read_text())}
    assert rows.keys() == {"left", "right"}
    for row in rows.values():
        assert (row["release"], row["service"], row["problems"]) == (served, "active", [])
    assert run.said.count(served) == len(rows)

    history = playbook("playbooks/history.yml")
    assert history.status == "successful"
    newest = fleet["left"].ledger()[-1]
    assert any(newest["deployment"] in line and "left" in line for line in history.said.splitlines())

    # In a way that systemd does not mend.
    fleet["right"].run("systemctl", "stop", SERVICE)
    try:
        stopped = playbook("playbooks/status.yml", json=str(table))
    finally:
        fleet["right"].run("systemctl", "start", SERVICE)
        await_that(fleet["right"].is_quiet, "right serves again")
    assert stopped.status == "failed"
    assert f"right: {SERVICE} does not run: run deploy.yml" in stopped.messages
    assert {row["host"] for row in json.loads(table.read_text()) if row["problems"]} == {"right"}
