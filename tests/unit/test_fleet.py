# SPDX-License-Identifier: Apache-2.0
"""The table of status.yml and the lines of history.yml, from what hosts and gateways tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.fleet import duration, fleet, history

ROOT = Path(__file__).parents[2]
HEALTHY: dict[str, Any] = {
    "release": "1f0c2a9e8d7b6543",
    "deployment": "20261129T100000Z",
    "vllm": "0.33.0",
    "patched": ["model_executor/models/deepseek_v2.py"],
    "drafter": "91be",
    "service": "active",
    "uptime_s": 7260,
    "acceptance": {"drafts": 100, "accepted_tokens": 194, "length": 2.94},
    "switch": None,
    "problems": [],
}


def server(name: str, state: str = "ready", up: bool = True) -> dict[str, Any]:
    return {"name": name, "state": state, "up": up}


def gateway(*servers: dict[str, Any]) -> dict[str, Any]:
    return {"running": True, "servers": list(servers)}


def test_a_healthy_host_has_no_problem() -> None:
    (row,) = fleet(["a"], {"a": HEALTHY}, {"gate": gateway(server("a"))})
    assert row["problems"] == []
    assert (row["release"], row["uptime"], row["length"], row["gateway"]) == (
        HEALTHY["release"],
        "2 h 1 min",
        "2.94",
        "up",
    )


def test_a_fleet_without_a_gateway_has_no_problem_with_it() -> None:
    (row,) = fleet(["a"], {"a": HEALTHY}, {})
    assert (row["problems"], row["gateway"]) == ([], "none")


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        (gateway(server("a", state="drained")), "a: gets no requests from gate: drained"),
        (gateway(server("a", up=False)), "a: gets no requests from gate: down"),
        (gateway(server("b")), "a: gets no requests from gate: not in its configuration"),
        ({"running": False, "servers": []}, "a: gets no requests from gate: HAProxy does not run"),
        ({"unreachable": True, "msg": "no route"}, "a: gets no requests from gate: gateway unreachable"),
        ({"failed": True, "msg": "socket closed"}, "a: gets no requests from gate: gateway failed: socket closed"),
    ],
)
def test_what_keeps_requests_away_is_a_problem(listed: dict[str, Any], problem: str) -> None:
    assert fleet(["a"], {"a": HEALTHY}, {"gate": listed})[0]["problems"] == [problem]


@pytest.mark.parametrize(
    ("state", "problem", "service"),
    [
        ({"unreachable": True, "msg": "no route"}, "a: cannot be reached: no route", "unreachable"),
        ({}, "a: cannot be reached", "unreachable"),
        ({"failed": True, "msg": "ledger.jsonl: Permission denied"}, "a: could not be looked at: {msg}", "unknown"),
        # That a result is no failure of the play does not make it one that tells anything.
        ({"failed": False, "msg": "no ledger"}, "a: could not be looked at: no ledger", "unknown"),
    ],
)
def test_a_host_that_nothing_is_known_of_is_a_row_with_a_problem(
    state: dict[str, Any], problem: str, service: str
) -> None:
    (row,) = fleet(["a"], {"a": state}, {})
    assert row["problems"] == [problem.format(**state)]
    assert (row["service"], row["release"], row["length"]) == (service, "", "-")


def test_a_part_that_no_client_asks_needs_no_gateway() -> None:
    gateways: dict[str, Any] = {"gate": gateway()}
    head, worker = fleet(["a", "b"], {"a": HEALTHY, "b": {**HEALTHY, "worker": True}}, gateways)
    assert head["problems"] == ["a: gets no requests from gate: not in its configuration"]
    assert (worker["problems"], worker["gateway"]) == ([], "none")


def test_problems_name_their_host() -> None:
    states = {"a": HEALTHY, "b": {**HEALTHY, "problems": ["x was edited", "y is down"]}}
    assert [row["problems"] for row in fleet(["a", "b"], states, {})] == [[], ["b: x was edited", "b: y is down"]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (90061, "1 d 1 h"),
    ],
)
def test_durations_have_their_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_history_tells_of_adopted_hosts_too() -> None:
    patched = {"time": "1", "deployment": "D", "action": "patch", "from": "", "to": "eagle3-pp", "why": "deploy"}
    back = {**patched, "time": "2", "action": "unpatch", "from": "eagle3-pp", "to": "", "why": "rollback to unpatched"}
    first, second = history({"a": [patched, back]})
    assert first.endswith("a                patch set nothing -> eagle3-pp, deploy")
    assert second.endswith("a                patch set eagle3-pp -> nothing, rollback to unpatched")


def test_history_is_in_the_order_of_time_over_all_hosts() -> None:
    gates = [{"gate": "health", "verdict": "passed"}, {"gate": "live", "verdict": "warned"}]
    ledgers: dict[str, list[dict[str, Any]]] = {
        "b": [{"time": "2", "deployment": "D", "action": "confirm", "to": "r2", "gates": gates}],
        "a": [
            {"time": "1", "deployment": "D", "action": "activate", "from": "", "to": "r2", "why": "deploy"},
            {"time": "3", "deployment": "D", "action": "restore", "from": "r2", "to": "r1", "why": "it died"},
        ],
    }
    lines = history(ledgers)
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert lines[0].endswith("a                nothing -> r2, deploy")
    assert lines[1].endswith("b                r2 confirmed (health passed; live warned)")
    assert lines[2].endswith("a                r1 restored instead of r2: it died")


# ----------------------------------------------------------------------------------------------------------- status.yml


def test_adopted_hosts_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    inventory, table = tmp_path / "hosts.yml", tmp_path / "status.json"
    # No address of theirs is asked.
    hosts = {"gpu-1": None, "gpu-2": None}
    variables = {"aerie_env_mode": "adopted", "ansible_host": "192.0.2.1"}
    inventory.write_text(yaml.safe_dump({"inference": {"hosts": hosts, "vars": variables}}))
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "playbooks/status.yml", "-i", str(inventory)]
    run = subprocess.run(
        [*command, "-e", json.dumps({"json": str(table), "ansible_python_interpreter": sys.executable})],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    said = " ".join(run.stdout.split())
    assert "gpu-1, gpu-2: adopted, and not in this table. playbooks/verify.yml looks at them" in said
    assert json.loads(table.read_text()) == []
