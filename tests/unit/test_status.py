# SPDX-License-Identifier: Apache-2.0
"""What is told of a host, and of what was done to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.journal import AWAITING
from modules import run_module
from switched_host import Host, host_below


class Watched(Host):
    """A host whose status is asked for."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(directory, capsys)
        self._reader = capsys

    def status(self, entries: int = 0) -> dict[str, Any]:
        arguments = {"root": str(self.root), "unit": str(self.unit), "settings": list(self.settings())}
        before = self.tree()
        found = run_module("release_status", {**arguments, "entries": entries}, self._reader)
        assert (self.tree(), found["changed"]) == (before, False)
        return found


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with host_below(tmp_path, capsys, monkeypatch, Watched) as made:
        yield made


def test_a_host_without_a_release(host: Watched) -> None:
    found = host.status(entries=5)
    assert (found["release"], found["running"], found["service"], found["uptime_s"]) == ("", "", "inactive", None)
    assert (found["acceptance"], found["switch"], found["ledger"]) == (None, None, [])
    assert found["problems"] == ["no release serves here: run deploy.yml"]


def test_a_host_that_serves(host: Watched) -> None:
    identity = host.stage("one", depth=3, more={"vllm": "0.32.0", "patches": {"b.py": "1", "a.py": "2"}})
    host.serve(identity)
    found = host.status(entries=1)
    names = ("release", "running", "healthy", "service", "deployment", "vllm", "patched", "problems")
    assert {name: found[name] for name in names} == {
        "release": identity,
        "running": identity,
        "healthy": True,
        "service": "active",
        "deployment": "first",
        "vllm": "0.32.0",
        "patched": ["a.py", "b.py"],
        "problems": [],
    }
    assert found["uptime_s"] >= 0
    # No draft yet, so there is no length.
    assert found["acceptance"] == {"drafts": 0, "accepted_tokens": 0, "length": None}
    assert [entry["action"] for entry in found["ledger"]] == ["confirm"]


def test_a_release_without_speculation_has_no_acceptance(host: Watched) -> None:
    host.serve(host.stage("one"))
    assert host.status()["acceptance"] is None


def test_a_service_that_was_stopped_is_a_problem(host: Watched) -> None:
    host.serve(host.stage("one"))
    host.power_cut()
    found = host.status()
    assert (found["service"], found["running"], found["healthy"]) == ("inactive", "", False)
    assert found["problems"] == ["vllm.service does not run: run deploy.yml"]


def test_a_unit_that_was_edited_is_a_problem(host: Watched) -> None:
    identity = host.stage("one")
    host.serve(identity)
    host.unit.write_text(f"{host.unit.read_text()}# edited\n")
    assert host.status()["problems"] == [f"{host.unit} is not the unit of release {identity}: run deploy.yml"]


def test_settings_that_the_service_does_not_have_are_a_problem(host: Watched) -> None:
    host.serve(host.stage("one"))
    settings = host.etc / "vllm.env"
    settings.write_text(f"{settings.read_text()}MORE=1\n")
    assert host.status()["problems"] == ["vllm.service runs with other settings: run deploy.yml"]


@pytest.mark.parametrize("content", [b"AERIE_PORT=\xff\n", b"AERIE_PORT=none\n", b""])
def test_settings_that_are_none_are_no_obstacle(host: Watched, content: bytes) -> None:
    host.serve(host.stage("one"))
    (host.etc / "vllm.env").write_bytes(content)
    found = host.status()
    assert (found["healthy"], len(found["problems"])) == (False, 1)


def test_a_file_that_is_no_text_is_a_problem(host: Watched) -> None:
    identity = host.stage("one")
    host.serve(identity)
    (host.releases.path(identity) / "serve.yaml").write_bytes(b"\xff\xfe")
    (problem,) = host.status()["problems"]
    assert problem.startswith(f"a file of {host.releases.path(identity)} was edited or removed: ")


def test_a_switch_that_is_under_way_is_told(host: Watched) -> None:
    host.serve(host.stage("one"))
    new = host.stage("two")
    host.start(new, who="somebody")
    program = host.program()
    host.awaits(AWAITING)
    found = host.status()
    assert found["switch"]["to"] == new
    assert (found["switch"]["who"], found["switch"]["phase"]) == ("somebody", AWAITING)
    assert found["problems"] == [f"a switch to {new} is under way (deployment second: {AWAITING})"]
    host.switch("confirmed")
    assert program.wait() == 0
    assert (host.status()["switch"], host.status()["deployment"]) == (None, "second")
