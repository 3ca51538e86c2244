# SPDX-License-Identifier: Apache-2.0
"""What an operator sees: the tables, and the actions in one real run of ansible-playbook on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.preflight_findings import note, problem
from ansible.module_utils.aerie.preflight_report import combine, finding_table, host_table

ROOT = Path(__file__).parents[2]
PORT = problem("port", "port 8000 is in use by nginx (process 712)", "stop it").as_dict()
PROXY = note("proxy", "https_proxy is set in /etc/environment").as_dict()
LOGIN = {"user": "deploy", "key": "/keys/one"}
REACHED = {"reached": True, "usable": True, "login": LOGIN, "findings": []}
FACTS = {
    "system": "Ubuntu 24.04",
    "memory_mb": 2_000_000,
    "disk_mb": 51_200,
    "driver": "580.95",
    "gpus": [{"name": "NVIDIA H200", "memory_mb": 143771}] * 8,
}


def refused(user: str, key: str) -> dict[str, Any]:
    finding = problem("ssh-login", f"it refuses {user}", "correct ansible_user").as_dict()
    return {"reached": False, "usable": False, "login": {"user": user, "key": key}, "findings": [finding]}


def test_a_line_per_host_and_one_per_finding() -> None:
    looked = {"gpu-01": {"findings": [PROXY, PORT], "facts": FACTS}, "gpu-02": {"skipped": True}}
    reports = combine({"gpu-01": REACHED, "gpu-02": refused("deploy", "/keys/two")}, looked)
    assert host_table(reports).splitlines() == [
        "host    system        gpus                       driver  memory    disk free  problems  notes",
        "gpu-01  Ubuntu 24.04  8 x NVIDIA H200 (140 GiB)  580.95  1953 GiB  50 GiB     1         1",
        "gpu-02  -             -                          -       -         -          1         0",
    ]
    assert finding_table(reports).splitlines() == [
        "gpu-01  problem  port 8000 is in use by nginx (process 712): stop it",
        "gpu-02  problem  it refuses deploy; gpu-01 takes another key (/keys/one) for this user: correct ansible_user",
        "gpu-01  note     https_proxy is set in /etc/environment",
    ]


def test_a_host_that_was_not_looked_at_says_why() -> None:
    lost = {"msg": "Failed to connect to the host via ssh: Broken pipe\n", "unreachable": True}
    crashed = {"msg": "MODULE FAILURE", "module_stderr": "Traceback ...\nModuleNotFoundError: No module named 'x'\n"}
    reports = combine({"a": REACHED, "b": REACHED, "c": REACHED}, {"a": lost, "b": crashed, "c": {"msg": ""}})
    assert finding_table(reports).splitlines() == [
        "a  problem  the host could not be looked at: Failed to connect to the host via ssh: Broken pipe: "
        "run again with -vvv",
        "b  problem  the host could not be looked at: ModuleNotFoundError: No module named 'x': run again with -vvv",
        "c  problem  the host could not be looked at: no reason given: run again with -vvv",
    ]


@pytest.mark.parametrize(
    ("user", "key", "hint"),
    [
        ("root", "/keys/one", "it refuses root; good takes this key for the user deploy"),
        ("deploy", "/keys/two", "it refuses deploy; good takes another key (/keys/one) for this user"),
        ("deploy", "", "it refuses deploy; good takes another key (/keys/one) for this user"),
        # Nothing that another host does says which of the two is wrong.
        ("root", "/keys/two", "it refuses root"),
        ("deploy", "/keys/one", "it refuses deploy"),
    ],
)
def test_another_host_tells_a_wrong_user_from_a_wrong_key(user: str, key: str, hint: str) -> None:
    (_, bad) = combine({"good": REACHED, "bad": refused(user, key)}, {"good": {"findings": []}})
    assert [finding["message"] for finding in bad.findings] == [hint]


def test_a_host_that_was_only_to_be_reached() -> None:
    (report,) = combine({"adopted": REACHED}, {})
    assert (report.findings, report.facts) == ((), {})


def test_nothing_to_show_is_an_empty_table() -> None:
    assert finding_table(combine({"a": REACHED}, {"a": {"findings": [], "facts": FACTS}})) == ""


# -------------------------------------------------------------------------------------------------------------- actions


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Play both actions; return the output, and the results by name."""
    root = tmp_path_factory.mktemp("actions")
    reached, looked = {"gpu-01": REACHED}, {"gpu-01": {"findings": [PROXY, PORT], "facts": FACTS}}
    good = {"gpu-01": {"findings": [PROXY], "facts": FACTS}}
    calls: dict[str, dict[str, Any]] = {
        "here": {"ssh_check": {}},
        "no_python": {"ssh_check": {}, "vars": {"ansible_python_interpreter": "/nowhere/python3"}},
        "no_become": {"ssh_check": {}, "become": True, "become_exe": "/nowhere/sudo", "become_user": "nobody"},
        "problems": {"preflight_report": {"reached": reached, "looked": looked, "control": [PORT]}},
        "notes": {"preflight_report": {"reached": reached, "looked": good}},
    }
    tasks: list[dict[str, Any]] = [
        {**call, "register": name, "ignore_errors": True, "check_mode": number % 2 == 0}
        for number, (name, call) in enumerate(calls.items())
    ]
    results = "{{ {" + ", ".join(f"'{name}': {name}" for name in calls) + "} | to_json }}"
    tasks.append({"ansible.builtin.copy": {"content": results, "dest": f"{root}/results.json", "mode": "0600"}})
    play = [{"hosts": "all", "gather_facts": False, "connection": "local", "tasks": tasks}]
    (root / "play.yml").write_text(yaml.safe_dump(play))
    hosts = {"this-host": {"ansible_python_interpreter": sys.executable}}
    (root / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [str(program), "-i", str(root / "hosts.yml"), str(root / "play.yml")]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout, json.loads((root / "results.json").read_text())


def test_a_host_that_can_be_reached(played: tuple[str, dict[str, Any]]) -> None:
    here = played[1]["here"]
    assert (here["reached"], here["usable"], here["findings"], here["changed"]) == (True, True, [], False)


def test_a_host_without_pythons_or_privileges(played: tuple[str, dict[str, Any]]) -> None:
    for name, message in {
        "no_python": "the host has no Python that Ansible can use",
        "no_become": "there is no sudo on the host",
    }.items():
        found = played[1][name]
        assert (found["reached"], found["usable"]) == (True, False)
        assert [finding["message"] for finding in found["findings"]] == [message]


def test_problems_stop_and_notes_do_not(played: tuple[str, dict[str, Any]]) -> None:
    output, results = played
    assert results["problems"]["failed"] is True and results["problems"]["changed"] is False
    assert results["problems"]["msg"].splitlines() == [
        "Nothing was changed. Mend these and run again:",
        "inventory  problem  port 8000 is in use by nginx (process 712): stop it",
        "gpu-01     problem  port 8000 is in use by nginx (process 712): stop it",
    ]
    assert not results["notes"].get("failed") and results["notes"]["changed"] is False
    assert output.count("gpu-01  note  https_proxy is set in /etc/environment\n") == 2
    assert "gpu-01  Ubuntu 24.04  8 x NVIDIA H200 (140 GiB)  580.95  1953 GiB  50 GiB     0         1\n" in output
