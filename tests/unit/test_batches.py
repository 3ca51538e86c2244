# SPDX-License-Identifier: Apache-2.0
"""What the hosts of one batch do where one of them fails, as the role's own expressions and Ansible decide it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
# Two hosts of a replica whose name is a number, and two replicas of one host each; `bad` is the one that fails.
REPLICAS: dict[str, int | str] = {"a1": 7, "a2": 7, "b": "b", "bad": "bad"}
CASES: dict[str, dict[str, str]] = {
    "all are ready": {},
    "one failed": {"bad": "restored"},
    "one was not reached": {"bad": "none"},
    "a host of a replica failed": {"a2": "restored"},
}
DECIDED = ("together", "ready", "idle", "restarts")


@functools.cache
def decided(keep: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what each host decides in each case, of one run of ansible-playbook."""
    hosts = {
        host: {"aerie_replica": replica, "ends": {case: ends.get(host, "ready") for case, ends in CASES.items()}}
        for host, replica in REPLICAS.items()
    }
    with TemporaryDirectory() as directory:
        inventory = Path(directory) / "hosts.yml"
        inventory.write_text(yaml.safe_dump({"inference": {"hosts": hosts}}))
        told = {name: f"{{{{ _release_{name} }}}}" for name in DECIDED}
        rounds = [
            [
                {
                    "ansible.builtin.set_fact": {
                        "release_followed": {"outcome": f"{{{{ ends['{case}'] }}}}", "phase": "", "switch": {}},
                        "release_started": {"outcome": "started"},
                        "release_probed": {"reasons": ["lock changed"] if case == "one failed" else []},
                        "release_predicted": {"outcome": "started" if case == "one failed" else "unchanged"},
                    }
                },
                {
                    "ansible.builtin.copy": {
                        "content": "{{ told | to_json }}",
                        "dest": f"{directory}/{{{{ inventory_hostname }}}}-{number}",
                        "mode": "0600",
                    },
                    "vars": {"told": told},
                },
            ]
            for number, case in enumerate(CASES)
        ]
        play = {
            "hosts": "all",
            "gather_facts": False,
            "connection": "local",
            "vars_files": [str(ROOT / "roles/release/vars/main.yml")],
            "vars": {
                "ansible_python_interpreter": sys.executable,
                "release_keep_batch_mates": keep,
                "release_aim": "",
                "role_path": str(ROOT / "roles/release"),
            },
            "tasks": [task for tasks in rounds for task in tasks],
        }
        playbook = Path(directory) / "play.yml"
        playbook.write_text(yaml.safe_dump([play], sort_keys=False))
        command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(playbook)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return {
            case: {host: json.loads((Path(directory) / f"{host}-{number}").read_text()) for host in REPLICAS}
            for number, case in enumerate(CASES)
        }


def keeping(case: str, keep: bool) -> set[str]:
    """Return the hosts that keep their new release."""
    return {host for host, told in decided(keep)[case].items() if told["ready"]}


@pytest.mark.parametrize("keep", [False, True])
def test_where_all_are_ready_all_keep_their_release(keep: bool) -> None:
    assert keeping("all are ready", keep) == set(REPLICAS)


@pytest.mark.parametrize("case", ["one failed", "one was not reached"])
def test_batch_mates_of_a_replica_that_failed_go_back_unless_they_are_to_be_kept(case: str) -> None:
    assert keeping(case, keep=False) == set()
    assert keeping(case, keep=True) == {"a1", "a2", "b"}


def test_the_hosts_of_one_replica_are_never_kept_apart() -> None:
    assert keeping("a host of a replica failed", keep=True) == {"b", "bad"}


def test_hosts_are_together_where_they_are_one_replica_whatever_its_name_is() -> None:
    found = decided(keep=False)["all are ready"]
    assert {host for host, told in found.items() if told["together"]} == {"a1", "a2"}


def test_a_replica_is_left_where_nothing_is_to_be_done_on_any_of_its_hosts() -> None:
    assert all(told["idle"] and not told["restarts"] for told in decided(keep=False)["all are ready"].values())
    assert all(not told["idle"] and told["restarts"] for told in decided(keep=False)["one failed"].values())
