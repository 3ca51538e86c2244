# SPDX-License-Identifier: Apache-2.0
"""How a real run of ansible-playbook follows the switches of a batch, on hosts that are below a directory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.aerie.journal import AWAITING, STARTING
from switched_host import Host, host_below

ROOT = Path(__file__).parents[2]
FOLLOW = {"name": "Follow", "ansible.builtin.include_role": {"name": "release", "tasks_from": "follow"}}
TELL = {"name": "Tell", "ansible.builtin.debug": {"msg": "{{ inventory_hostname }} is {{ release_followed.outcome }}."}}
_LIMIT_S = 100
# So often is a host looked after that is ready, before the other one starts.
_LOOKS = 3

Hosts = dict[str, Host]


@pytest.fixture
def hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """The hosts of two replicas."""
    with contextlib.ExitStack() as stack:
        made = {}
        for name in ("warm", "cold"):
            (tmp_path / name).mkdir()
            made[name] = stack.enter_context(host_below(tmp_path / name, capsys, monkeypatch, Host))
        yield made


def followed(hosts: Hosts, directory: Path) -> subprocess.Popen[str]:
    """Have the role follow the switches of a batch; who is ready is looked after every second."""
    variables = {
        name: {
            "aerie_root": str(host.root),
            # Each with its own systemd.
            "ansible_python_interpreter": str(python(host)),
            "ansible_connection": "local",
            "release_started": {"outcome": "started"},
        }
        for name, host in hosts.items()
    }
    common = {"aerie_deployment": "second", "release_deployment": "second", "release_confirm_budget": 3}
    (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": variables, "vars": common}}))
    play = {"hosts": "all", "gather_facts": False, "tasks": [FOLLOW, TELL]}
    (directory / "play.yml").write_text(yaml.safe_dump([play]))
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    return subprocess.Popen(
        [program, "-i", str(directory / "hosts.yml"), str(directory / "play.yml")],
        cwd=ROOT,
        env={**os.environ, "HOME": str(directory), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def python(host: Host) -> Path:
    path = host.state.parent / "bin/python3"
    path.write_text(f'#!/bin/sh\nPATH={path.parent}:$PATH exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def test_a_host_that_is_ready_is_looked_after_while_its_batch_mate_starts(hosts: Hosts, tmp_path: Path) -> None:
    for name, phase in (("warm", AWAITING), ("cold", STARTING)):
        hosts[name].start(hosts[name].stage("new"))
        hosts[name].journal.load()
        hosts[name].journal.enter(phase)
    output, looks = "", []
    with followed(hosts, tmp_path) as run:
        assert run.stdout is not None
        limit = threading.Timer(_LIMIT_S, run.kill)
        limit.start()
        for line in run.stdout:
            output += line
            if line.startswith(f"cold: {STARTING}"):
                looks.append(hosts["warm"].journal.followed())
                if len(looks) == _LOOKS:
                    hosts["cold"].journal.enter(AWAITING)
        limit.cancel()
    assert run.returncode == 0, output
    assert len(set(looks[:_LOOKS])) == _LOOKS, output
    assert [f"{name} is ready." in output for name in hosts] == [True, True], output
