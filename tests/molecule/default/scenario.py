# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: playbooks run on the scenario's hosts as a user would, and the hosts looked at from outside."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ansible_runner
import pytest
import yaml

ROOT = Path(__file__).parents[3]
INVENTORY = Path(__file__).parent / "inventory"
STATE = Path(os.environ.get("AERIE_STATE", "/var/tmp/aerie"))


@dataclass(frozen=True)
class Run:
    """How a playbook ended: ``successful`` or ``failed``; the messages of failed tasks; changed tasks by host."""

    status: str
    messages: str
    changed: dict[str, int]


@pytest.fixture
def playbook(tmp_path: Path) -> Callable[..., Run]:
    """Return a function that runs a playbook with extra variables, through ansible-runner."""

    def run(name: str, inventories: tuple[Path, ...] = (), limit: str = "", **variables: object) -> Run:
        result = ansible_runner.run(
            private_data_dir=str(tmp_path),
            project_dir=str(ROOT),
            playbook=name,
            inventory=[str(INVENTORY), *map(str, inventories)],
            limit=limit or None,
            extravars=variables,
            envvars={"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            quiet=True,
        )
        events = list(result.events)
        failures = [event["event_data"]["res"] for event in events if event["event"] == "runner_on_failed"]
        (stats,) = [event["event_data"] for event in events if event["event"] == "playbook_on_stats"]
        messages = "\n".join(str(failure.get("msg", "")) for failure in failures)
        return Run(result.status, messages, stats["changed"])

    return run


def on_host(command: str, host: str = "rot") -> str:
    """Return what ``command`` prints on a host, over SSH and without Ansible."""
    address = yaml.safe_load((INVENTORY / "hosts.yml").read_text())["inference"]["hosts"][host]["ansible_host"]
    known = f"UserKnownHostsFile={STATE}/known_hosts"
    ssh = ["ssh", "-i", str(STATE / "key"), "-o", known, f"ansible@{address}", command]
    return subprocess.run(ssh, capture_output=True, text=True, check=True).stdout
