# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: playbooks run on the scenario's hosts as a user would, and the hosts looked at from outside."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import VaultLib, VaultSecret

ROOT = Path(__file__).parents[3]
INVENTORY = Path(os.environ.get("MOLECULE_SCENARIO_DIRECTORY", Path(__file__).parent)) / "inventory"
STATE = Path(os.environ.get("AERIE_STATE", "/var/tmp/aerie"))
_DEBUG = "ansible.builtin.debug"


@dataclass(frozen=True)
class Run:
    """How a playbook ended: ``successful`` or ``failed``; the messages of failed tasks; changed tasks by host; diffs.

    ``ok`` has the number of tasks that each host did. ``diffs`` has a host, a file and its text before and after for
    each file that a task changed, or would change. ``said`` is what the playbook showed with debug tasks.
    """

    status: str
    messages: str
    changed: dict[str, int]
    diffs: list[tuple[str, str, str, str]]
    said: str = ""
    ok: dict[str, int] = field(default_factory=dict)


@pytest.fixture
def playbook(tmp_path: Path) -> Callable[..., Run]:
    """Return a function that runs a playbook with extra variables, through ansible-runner."""

    def run(
        name: str, inventories: tuple[Path, ...] = (), limit: str = "", check: bool = False, **variables: object
    ) -> Run:
        return run_playbook(tmp_path, name, inventories, limit, check, **variables)

    return run


def run_playbook(
    scratch: Path,
    name: str,
    inventories: tuple[Path, ...] = (),
    limit: str = "",
    check: bool = False,
    **variables: object,
) -> Run:
    result = ansible_runner.run(
        # Of its own: ansible-runner finds there what an earlier run was given.
        private_data_dir=tempfile.mkdtemp(dir=scratch),
        project_dir=str(ROOT),
        playbook=name,
        inventory=[str(INVENTORY), *map(str, inventories)],
        limit=limit or None,
        cmdline="--check --diff" if check else None,
        extravars=variables,
        envvars={"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        quiet=True,
    )
    events = list(result.events)
    failures = [event["event_data"]["res"] for event in events if event["event"] == "runner_on_failed"]
    (stats,) = [event["event_data"] for event in events if event["event"] == "playbook_on_stats"]
    messages = "\n".join(str(failure.get("msg", "")) for failure in failures)
    done = [event["event_data"] for event in events if event["event"] == "runner_on_ok"]
    said = "\n".join(str(data["res"].get("msg", "")) for data in done if data["resolved_action"] == _DEBUG)
    diffs = [
        (data["host"], diff.get("after_header", ""), diff["before"], diff["after"])
        for data in done
        if data["res"].get("changed")
        for diff in _list(data["res"].get("diff"))
        if "after" in diff
    ]
    return Run(result.status, messages, stats["changed"], diffs, said, stats["ok"])


def _list(diff: object) -> list[dict[str, str]]:
    """Return the diffs of one task's result, which may be one, several or none."""
    return [diff] if isinstance(diff, dict) else diff if isinstance(diff, list) else []


def on_host(command: str, host: str = "rot") -> str:
    """Return what ``command`` prints on a host, over SSH and without Ansible."""
    address = yaml.safe_load((INVENTORY / "hosts.yml").read_text())["inference"]["hosts"][host]["ansible_host"]
    known = f"UserKnownHostsFile={STATE}/known_hosts"
    ssh = ["ssh", "-i", str(STATE / "key"), "-o", known, f"ansible@{address}", command]
    return subprocess.run(ssh, capture_output=True, text=True, check=True).stdout


def observe(file: str, host: str = "rot") -> dict[str, Any]:
    """Return what tests/reference/observe.py sees of a host's service."""
    seen: dict[str, Any] = json.loads(on_host(f"sudo python3 /srv/reference/observe.py {file} </dev/null", host))
    return seen


def api_key() -> str:
    """Return the service's API key, from the vault."""
    secret = VaultSecret((STATE / "vault-password").read_text().strip().encode())
    loader = DataLoader()
    loader.set_vault_secrets([("default", secret)])
    variables = loader.load_from_file(str(INVENTORY / "group_vars" / "inference" / "vault.yml"))
    return str(VaultLib([("default", secret)]).decrypt(variables["vault_demo_key"]._ciphertext).decode())
