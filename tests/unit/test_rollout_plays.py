# SPDX-License-Identifier: Apache-2.0
"""The plays of a rollout behind gateways, where something fails: what is said, who is switched, and who gets requests.

Hosts and gateways are this machine. The gateways speak like HAProxy's master; stand-ins for the modules that look at a
host and switch it answer what the test says, and note what they were told.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from haproxy_master import DRAINED, Master, Process

ROOT = Path(__file__).parents[2]
REPLICAS = ("left", "right")
# Answers from a file in the host's directory, by the state that is asked for.
STAND_IN = """\
#!/usr/bin/python
# WANT_JSON
import json, pathlib, sys
told = json.loads(pathlib.Path(sys.argv[1]).read_text())
root = pathlib.Path(told["root"])
state = told.get("state", "looked at")
with (root / "told.jsonl").open("a") as stream:
    stream.write(json.dumps([state, told.get("reason", "")]) + "\\n")
answer = json.loads((root / "answers.json").read_text()).get(state, {})
if "switch" in answer and told.get("reason"):
    answer["switch"]["reason"] = told["reason"]
print(json.dumps({"changed": False, **answer}))
"""
SWITCH = {"from": "aaaa", "to": "bbbb", "reason": "", "message": ""}
READY = {"outcome": "ready", "phase": "awaiting confirmation", "progress": {}, "switch": SWITCH}
SERVES = {"release": "aaaa", "running": "aaaa", "healthy": True, "switch": None}
# What a good release does on a host that serves.
GOOD: dict[str, Any] = {
    "looked at": SERVES,
    "started": {**READY, "outcome": "started"},
    "followed": READY,
    "confirmed": {**READY, "outcome": "confirmed"},
    "aborted": {"outcome": "restored", "switch": {**SWITCH, "message": "release aaaa serves again"}},
}
FIRST_SWITCH = {**SWITCH, "from": ""}
# The first release of a host, which fails.
BAD_FIRST: dict[str, Any] = {
    "looked at": {"release": "", "running": "", "healthy": False, "switch": None},
    "started": {**READY, "outcome": "started", "switch": FIRST_SWITCH},
    "followed": {
        "outcome": "restored",
        "switch": {
            **FIRST_SWITCH,
            "failed_gate": "health",
            "reason": "it died",
            "message": "no release serves, as before",
        },
    },
}


class Ran(NamedTuple):
    """How a run of ansible-playbook ended."""

    status: int
    output: str


class Fleet:
    """Two replicas and their gateways."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gates: dict[str, Master] = {}
        self.hosts: dict[str, dict[str, Any]] = {}
        self.gateways: dict[str, dict[str, Any]] = {}
        self.to_switch: tuple[str, ...] = REPLICAS
        self._library()
        self.gateway("gate")
        for name in REPLICAS:
            self.replica(name, GOOD)

    def _library(self) -> None:
        library = self.root / "library"
        library.mkdir()
        for name in ("switch", "release", "release_status"):
            (library / f"{name}.py").write_text(STAND_IN)
        # The real one, at another place.
        text = (ROOT / "library/gateway_server.py").read_text()
        for directory in ("/run/aerie-haproxy", "/var/lib/aerie-haproxy"):
            text = text.replace(directory, "$GATEWAY")
        (library / "gateway_server.py").write_text(text)

    def gateway(self, name: str) -> Master:
        """Add a gateway, at which both replicas are up."""
        home = self.root / name
        home.mkdir()
        python = home / "python"
        python.write_text(f'#!/bin/sh\nGATEWAY={home} exec {sys.executable} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        self.gateways[name] = {"ansible_connection": "local", "ansible_python_interpreter": str(python)}
        process = Process(100, dict.fromkeys(REPLICAS, 0), dict.fromkeys(REPLICAS, 2), {})
        self.gates[name] = Master(home / "master.sock", [process])
        return self.gates[name]

    def replica(self, name: str, answers: dict[str, Any], reasons: tuple[str, ...] = ("the drafter changed",)) -> None:
        """Have a replica that answers so, and differs from what is wanted in ``reasons``."""
        home = self.root / name
        home.mkdir(exist_ok=True)
        (home / "answers.json").write_text(json.dumps(answers))
        seen = answers["looked at"]
        probed = {"current": seen["release"], "running": seen["running"], "healthy": seen["healthy"]}
        order = {"id": "bbbb", "user": "vllm", "settings": {}, "restart": False, "address": "", "batch": "25%"}
        more = {"start_budget": 9, "stuck_after": 9, "live": {"mode": "off", "config": {}}, "numeric": {}}
        self.hosts[name] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "aerie_root": str(home),
            "aerie_deployment": "now",
            "release_probed": {**probed, "reasons": list(reasons), "last_start_s": None},
            "release_order": {**order, **more, "changes": list(reasons)},
        }

    def run(self, *playbooks: str, limit: str = "inference", check: bool = False, **variables: object) -> Ran:
        """Run playbooks of the project on them, with the replicas grouped as the plays before do."""
        groups = {
            "inference": self.hosts,
            "load_balancer": self.gateways,
            "aerie_managed": dict.fromkeys(self.hosts),
            "aerie_to_switch": dict.fromkeys(self.to_switch),
        }
        inventory = self.root / "hosts.yml"
        inventory.write_text(yaml.safe_dump({name: {"hosts": hosts} for name, hosts in groups.items()}))
        play = self.root / "play.yml"
        plays = [{"ansible.builtin.import_playbook": str(ROOT / "playbooks" / name)} for name in playbooks]
        play.write_text(yaml.safe_dump(plays))
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        command = [program, "-i", str(inventory), "--limit", limit, str(play), "-e", json.dumps(variables)]
        ran = subprocess.run(
            command + ["--check"] * check,
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_LIBRARY": f"{self.root / 'library'}:{ROOT / 'library'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        # Long messages are shown in several lines.
        return Ran(ran.returncode, " ".join((ran.stdout + ran.stderr).split()))

    def told(self, name: str) -> list[str]:
        """Return the states that the switch of a replica was told to be in."""
        path = self.root / name / "told.jsonl"
        states = [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []
        return [state for state in states if state not in ("looked at", "pruned")]

    def changes(self, gate: str = "gate") -> list[str]:
        """Return what a gateway was told of servers, in order."""
        commands = [command.partition(" set server replicas/")[2] for command in self.gates[gate].commands]
        return [command for command in commands if command]

    def drained(self, gate: str = "gate") -> set[str]:
        return {name for name, admin in self.gates[gate].processes[0].admin.items() if admin == DRAINED}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for master in fleet.gates.values():
        master.close()


def test_a_first_deploy_that_fails_is_told(fleet: Fleet) -> None:
    for name in REPLICAS:
        fleet.replica(name, BAD_FIRST)
    # Nothing listens there, before and after.
    fleet.gates["gate"].processes[0].operation.update(left=0, right=0)
    ran = fleet.run("gateway.yml", "rollout.yml")
    assert ran.status != 0
    failed = "left: the switch from no release to bbbb failed at the gate `health`: it died."
    assert f"{failed} Restored: no release serves, as before. Not touched: right." in ran.output
    assert "HAProxy's check does not find" not in ran.output
    assert (fleet.told("left"), fleet.told("right")) == (["started", "followed"], [])
    assert fleet.changes() == ["left state drain", "left state ready"]


def test_what_no_gateway_finds_goes_back_before_it_is_kept(fleet: Fleet) -> None:
    fleet.gates["gate"].processes[0].operation["left"] = 0
    ran = fleet.run("rollout.yml", load_balancer_up_timeout=1)
    assert ran.status != 0
    failed = "left: the switch from aaaa to bbbb failed: gate: HAProxy's check does not find these up after 1 s: left:"
    assert failed in ran.output
    assert "Restored: release aaaa serves again." in ran.output
    assert "Not touched: right." in ran.output
    assert (fleet.told("left"), fleet.told("right")) == (["started", "followed", "aborted"], [])
    assert fleet.drained() == set()


def test_a_gateway_that_cannot_be_reached_leaves_nobody_drained(fleet: Fleet) -> None:
    # Nothing listens on this port.
    fleet.gateways["far"] = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_retries": 0}
    ran = fleet.run("rollout.yml")
    assert ran.status != 0
    assert "left: the switch did not begin: left was not drained, and serves on. far: " in ran.output
    assert "It may be without requests from far: run again once that answers. Not touched: right." in ran.output
    assert fleet.changes() == ["left state drain", "left state ready"]
    assert (fleet.told("left"), fleet.told("right")) == ([], [])

    # Nothing would restart, but nobody knows who gets requests.
    fleet.to_switch = ()
    ran = fleet.run("gateway.yml")
    assert ran.status != 0
    assert "Nothing was restarted. These serve, and may get no requests: left, right. far: " in ran.output


def test_a_replica_that_is_not_put_back_is_told(fleet: Fleet) -> None:
    gate = fleet.gates["gate"]

    def refuse(command: str) -> None:
        if command.endswith("left state ready"):
            gate.garble["set server"] = b"Permission denied\n"

    gate.before = refuse
    # An interrupted run left it drained, and it serves what it served.
    gate.processes[0].admin["right"] = DRAINED
    ran = fleet.run("gateway.yml", "rollout.yml")
    assert ran.status != 0
    told = "left: keeps release bbbb. Not every gateway sends it requests: gate: HAProxy does not change server left:"
    assert f"{told} Permission denied. Mend that, and run again. Not touched: right." in ran.output
    assert fleet.told("left") == ["started", "followed", "confirmed"]
    # Before the first one is drained, so that somebody serves.
    assert fleet.changes() == ["right state ready", "left state drain", "left state ready"]
    assert fleet.drained() == {"left"}


def test_limited_to_replicas_a_drained_one_is_found(fleet: Fleet) -> None:
    fleet.replica("left", GOOD, reasons=())
    # Nobody looked at this one.
    del fleet.hosts["right"]["release_probed"]
    fleet.to_switch = ()
    fleet.gates["gate"].processes[0].admin.update(left=DRAINED, right=DRAINED)
    assert fleet.run("gateway.yml", limit="left").status == 0
    assert fleet.drained() == {"right"}


def test_the_last_one_that_serves_is_not_restarted_unasked(fleet: Fleet) -> None:
    fleet.replica("right", {**GOOD, "looked at": {**SERVES, "healthy": False}})
    fleet.to_switch = ("left",)
    refused = fleet.run("rollout.yml")
    assert refused.status != 0
    assert (
        "left is the only replica that serves, and has to restart: nothing serves meanwhile. If that is what you want, "
        "add -e accept_downtime=true. Everything is staged; nothing was restarted." in refused.output
    )
    assert fleet.told("left") == []

    predicted = fleet.run("rollout.yml", check=True)
    assert predicted.status == 0
    assert (
        "left is the only replica that serves, and has to restart: without -e accept_downtime=true a run is refused "
        "here, since nothing serves meanwhile." in predicted.output
    )
    assert fleet.changes() == []
