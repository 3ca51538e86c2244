# SPDX-License-Identifier: Apache-2.0
"""What `rollback.yml -e to=...` finds and refuses before anything is drained, from real releases and ledgers.

The role's own tasks run on this machine, with a directory for each host, and a systemctl that knows no service.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.journal import AWAITING
from ansible.module_utils.aerie.release import Releases, release_id
from ansible.module_utils.aerie.rollback import TO_PREVIOUS
from switched_host import Host, host_below

ROOT = Path(__file__).parents[2]
# What was done on each host to the release that it is to go back to, and what is said of it.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pruned": (shutil.rmtree, "release {old} is not on this host; these are: {new}."),
    "edited": (
        lambda release: (release / "serve.yaml").write_text("# else\n"),
        "a file of {release} was edited or removed",
    ),
    "added": (
        lambda release: (release / "venv/sitecustomize.py").write_text(""),
        "files of {release}/venv were edited, added or removed: {release}/venv/sitecustomize.py was added.",
    ),
}


def stage(root: Path, number: int) -> str:
    inputs = {"number": number, "serves": {"model": "kimi", "speculative_tokens": 0}}
    files = {"vllm.service": "# Written by Aerie\n", "serve.yaml": f"# {number}\n"}
    releases, identity = Releases(root), release_id(inputs, files)
    releases.stage(identity, releases.changes(inputs, files))
    (releases.path(identity) / "venv").mkdir(exist_ok=True)
    releases.complete(identity, {})
    return identity


class Fleet:
    """Hosts that served the release ``old`` and were updated to ``new``."""

    def __init__(self, directory: Path, *hosts: str) -> None:
        self.directory = directory
        self.roots = {host: directory / host for host in hosts}
        for host, root in self.roots.items():
            self.old, self.new = stage(root, 1), stage(root, 2)
            self.activate(host, "2026-1", "", self.old, "deploy")
            self.activate(host, "2026-2", self.old, self.new, "deploy")
        (directory / "bin").mkdir()
        (directory / "bin/systemctl").write_text("#!/bin/sh\n")
        (directory / "bin/systemctl").chmod(0o755)

    def activate(self, host: str, deployment: str, before: str, after: str, why: str) -> None:
        releases = Releases(self.roots[host])
        releases.activate(after, self.roots[host] / "vllm.service")
        entry = {"deployment": deployment, "from": before, "to": after}
        releases.append_to_ledger({**entry, "action": "activate", "why": why})
        releases.append_to_ledger({**entry, "action": "confirm", "gates": []})

    def release(self, host: str, identity: str) -> Path:
        return self.roots[host] / "releases" / identity

    def aim(self, to: str, in_progress: str = "fail", **variables_of: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Run the role's tasks; return what is said, and which hosts would be switched to which release, if any.

        ``variables_of`` has hosts with variables of their own.
        """
        order = self.directory / "order.json"
        tasks = [
            {"ansible.builtin.import_role": {"name": "release", "tasks_from": "aim"}},
            {
                "ansible.builtin.copy": {
                    "content": "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars) "
                    "| map(attribute='release_order.id'))) | to_json }}",
                    "dest": str(order),
                    "mode": "0600",
                },
                "run_once": True,
            },
        ]
        variables = {
            "ansible_python_interpreter": sys.executable,
            "aerie_root": f"{self.directory}/{{{{ inventory_hostname }}}}",
            "release_aim": to,
            "release_deployment": "2026-9",
            "release_settings": {},
            "release_target": str(self.directory),
            "release_in_progress": in_progress,
            "release_user": "nobody",
            "release_address": "",
            "release_start_budget": 1,
            "release_stuck_after": 1,
            "release_live": {},
            "release_numeric": {},
        }
        play = {"hosts": "all", "connection": "local", "gather_facts": False, "any_errors_fatal": True}
        playbook = self.directory / "play.yml"
        playbook.write_text(yaml.safe_dump([{**play, "vars": variables, "tasks": tasks}], sort_keys=False))
        inventory = self.directory / "hosts.yml"
        inventory.write_text(yaml.safe_dump({"all": {"hosts": {**dict.fromkeys(self.roots), **variables_of}}}))
        order.unlink(missing_ok=True)
        run = subprocess.run(
            [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(playbook)],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (run.returncode == 0) is order.exists(), run.stdout + run.stderr
        return " ".join(run.stdout.split()), json.loads(order.read_text()) if order.exists() else {}


def test_a_rollback_that_was_cut_off_is_finished_and_hosts_that_are_left_alone_are_told(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "done", "pending", "other")
    fleet.activate("done", "2026-3", fleet.new, fleet.old, TO_PREVIOUS)
    # What this one would go back to is of no interest.
    (fleet.roots["other"] / "ledger.jsonl").unlink()
    shutil.rmtree(fleet.release("other", fleet.old))
    # Nothing is under way that would be waited for.
    said, switched = fleet.aim("previous", in_progress="wait")
    assert switched == {"pending": fleet.old}
    assert "Rollback 2026-3 did not reach pending, and is finished there." in said
    alone = "is left alone and serves {}: deployment 2026-3 is finished, and"
    assert f"done {alone.format(fleet.old)} the newest one here is 2026-3." in said
    assert f"other {alone.format(fleet.new)} none changed anything here." in said


@pytest.mark.parametrize("to", ["previous", "id"])
def test_a_release_that_was_pruned_or_tampered_with_is_refused_before_anything_is_done(tmp_path: Path, to: str) -> None:
    fleet = Fleet(tmp_path, "whole", *DAMAGES)
    for host, (damage, _) in DAMAGES.items():
        damage(fleet.release(host, fleet.old))
    said, switched = fleet.aim(fleet.old if to == "id" else to)
    # Nor on the host where it is whole.
    assert switched == {}
    assert "whole cannot go back" not in said
    for host, (_, what) in DAMAGES.items():
        release = fleet.release(host, fleet.old)
        told = what.format(release=release, old=fleet.old, new=fleet.new)
        assert f"Nothing was changed. {host} cannot go back to release {fleet.old}: {told}" in said
        assert f"Name another release with -e to=<id>, or remove {release} if it is there, and deploy again" in said


def test_hosts_without_a_way_back_are_refused_and_said_what_to_do(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "alone", "new", "head", "worker")
    for host, before in (("new", ""), ("worker", "0" * 16)):
        (fleet.roots[host] / "ledger.jsonl").unlink()
        fleet.activate(host, "2026-2", before, fleet.new, "deploy")
    replica = {"aerie_replica": "big"}
    said, switched = fleet.aim("previous", head=replica, worker=replica)
    assert switched == {}
    assert "Before deployment 2026-2 nothing served on new; leave it out with --limit, or name a release" in said
    assert f"The hosts of replica big served different releases before ({fleet.old}, {'0' * 16}), and serve" in said


# ------------------------------------------------------------------------------------- where a switch is under way


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with host_below(tmp_path, capsys, monkeypatch, Host) as made:
        yield made


@pytest.mark.parametrize("kept", [True, False])
def test_what_served_before_is_known_once_a_switch_under_way_has_ended(host: Host, kept: bool) -> None:
    old, new = host.stage("old"), host.stage("new")
    host.serve(old)
    host.start(new)
    program = host.program()
    host.awaits(AWAITING)
    # Whoever waits for it does not decide how it ends.
    ours: dict[str, Any] = {"deployment": "third", "window_s": 0}
    assert host.switch("followed", **ours)["outcome"] == "in progress"
    if kept:
        host.switch("confirmed", window_s=0)
    else:
        assert host.switch("aborted", **ours, reason="deployment third took over")["outcome"] == "in progress"
    assert program.wait() == 0
    assert host.switch("followed" if kept else "aborted", **ours)["outcome"] == "none"
    assert host.releases.newest_deployment()["to"] == (new if kept else old)
