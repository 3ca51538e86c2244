# SPDX-License-Identifier: Apache-2.0
"""Run playbooks on the scenario's hosts, as a user would. verify.yml starts these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ansible_runner
import pytest
from scenario import INVENTORY, ROOT, Run


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
