# SPDX-License-Identifier: Apache-2.0
"""Releases on a host, and the module release: real directories and processes, and a systemctl that notes its calls."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.release import (
    ReleaseError,
    Releases,
    canonical,
    parse_settings,
    read_settings,
    release_id,
    running_service,
)
from hypothesis import given
from hypothesis import strategies as st
from modules import run_module

INPUTS = {"lock": "8543ce", "patches": {"models/a.py": "1", "models/b.py": "2"}, "python": "3.12", "drafter": "91be"}
FILES = {"serve.yaml": "model: /srv/kimi\n", "vllm.service": "[Unit]\n", "lib/keys.py": "KEYS = 'ö'\n"}
OTHER_FILES = {**FILES, "vllm.service": "[Unit]\n# another\n"}
SETTINGS = "# This host's settings.\nAERIE_HOST=10.0.0.1\nAERIE_PORT=8000\n"


# ------------------------------------------------------------------------------------------------------------------ ids


def test_an_id_is_the_same_everywhere() -> None:
    # From sha256sum over the text that `canonical` is to make. Another id would stage every release of every host anew.
    assert release_id({"lock": "8543ce"}, {"serve.yaml": "ö\n"}) == "2cffb10acd7640f9"


@pytest.mark.parametrize(
    ("inputs", "files"),
    [
        ({**INPUTS, "lock": "8543cf"}, FILES),
        ({**INPUTS, "patches": {"models/a.py": "1", "models/b.py": "3"}}, FILES),
        ({**INPUTS, "patches": {"models/a.py": "1"}}, FILES),
        ({**INPUTS, "patches": {}}, FILES),
        ({**INPUTS, "python": 3.12}, FILES),
        ({**INPUTS, "more": ""}, FILES),
        ({name: value for name, value in INPUTS.items() if name != "drafter"}, FILES),
        (INPUTS, {**FILES, "serve.yaml": "model: /srv/kimi"}),
        (INPUTS, {**FILES, "more": ""}),
        (INPUTS, {name: text for name, text in FILES.items() if name != "serve.yaml"}),
        ({}, {}),
        (FILES, INPUTS),
    ],
)
def test_every_input_changes_the_id(inputs: dict[str, Any], files: dict[str, str]) -> None:
    assert release_id(inputs, files) != release_id(INPUTS, FILES)


def test_the_order_of_keys_changes_nothing() -> None:
    def reversed_keys(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, dict):
            return value
        return {key: reversed_keys(value[key]) for key in reversed(value)}

    assert list(reversed_keys(INPUTS)) != list(INPUTS)
    assert release_id(reversed_keys(INPUTS), reversed_keys(FILES)) == release_id(INPUTS, FILES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=8,
)


@given(JSON, st.integers(0, 4))
def test_formatting_changes_nothing(value: object, indent: int) -> None:
    assert canonical(json.loads(json.dumps(value, indent=indent))) == canonical(value)
    assert json.loads(canonical(value)) == value


# -------------------------------------------------------------------------------------------------------------- staging


@dataclass
class Host:
    """A host below ``root`` whose systemctl is a program that notes its calls and knows one main process."""

    root: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def releases(self) -> Releases:
        return Releases(self.root)

    @property
    def unit(self) -> Path:
        return self.root / "etc/vllm.service"

    @property
    def calls(self) -> Path:
        return self.root / "systemctl.calls"

    def install_systemctl(self, pid: int, failing: str = "") -> None:
        fail = f'case "$1" in {failing}) echo "Unit is broken." >&2; exit {5 if failing == "stop" else 1};; esac\n'
        program = self.root / "bin/systemctl"
        program.write_text(
            f'#!/bin/sh\necho "$*" >> {self.calls}\n{fail if failing else ""}[ "$1" != show ] || echo {pid}\n'
        )
        program.chmod(0o755)

    def called(self) -> list[str]:
        """Return what systemctl was told, but for questions, since the last look."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        assert [call for call in calls if call.startswith("show")] == [
            "show --property=MainPID --value vllm.service"
        ] * sum(call.startswith("show") for call in calls)
        return [call for call in calls if not call.startswith("show")]

    def stage(
        self, inputs: dict[str, Any] = INPUTS, files: dict[str, str] = FILES, check_mode: bool = False
    ) -> dict[str, Any]:
        arguments = {"root": str(self.root), "state": "staged", "inputs": inputs, "files": files}
        return run_module("release", arguments, self.capsys, check_mode)

    def switch(self, identity: str, check_mode: bool = False, settings: str = SETTINGS) -> dict[str, Any]:
        arguments = {
            "root": str(self.root),
            "state": "active",
            "id": identity,
            "unit": str(self.unit),
            "settings": settings,
            "deployment": "20261129T100000Z",
            "why": "deploy",
        }
        return run_module("release", arguments, self.capsys, check_mode)

    def tree(self) -> dict[str, str]:
        """Every path but what systemctl notes, with its bytes, or where it leads."""
        paths = [path for path in self.root.rglob("*") if path != self.calls]
        return {
            str(path.relative_to(self.root)): str(path.readlink()) if path.is_symlink() else repr(path.read_bytes())
            for path in paths
            if path.is_symlink() or path.is_file()
        }

    def ledger(self) -> list[dict[str, Any]]:
        path = self.root / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Host:
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    host = Host(tmp_path, capsys)
    host.install_systemctl(pid=0)
    return host


def test_a_release_is_staged_under_its_id(host: Host) -> None:
    result = host.stage()
    identity = release_id(INPUTS, FILES)
    assert (result["changed"], result["id"], result["path"]) == (True, identity, str(host.root / "releases" / identity))
    directory = Path(result["path"])
    assert {name: (directory / name).read_text() for name in FILES} == FILES
    record = json.loads((directory / "release.json").read_text())
    assert (record["id"], record["inputs"], record["files"]) == (identity, INPUTS, sorted(FILES))
    assert host.called() == []
    assert host.releases.current() == ""


def test_staging_again_changes_nothing(host: Host) -> None:
    host.stage()
    before = host.tree()
    assert host.stage()["changed"] is False
    assert host.tree() == before


def test_check_mode_of_staging_writes_nothing_and_shows_the_files(host: Host) -> None:
    before = host.tree()
    predicted = host.stage(check_mode=True)
    assert host.tree() == before
    staged = host.stage()
    assert predicted == {name: staged[name] for name in predicted}
    assert {Path(diff["after_header"]).name: diff["after"] for diff in predicted["diff"]}["serve.yaml"] == FILES[
        "serve.yaml"
    ]
    assert host.stage(check_mode=True)["changed"] is False


def test_the_difference_is_to_what_is_active(host: Host) -> None:
    host.switch(host.stage()["id"])
    diffs = {Path(diff["after_header"]).name: diff for diff in host.stage(files=OTHER_FILES)["diff"]}
    assert (diffs["vllm.service"]["before"], diffs["vllm.service"]["after"]) == ("[Unit]\n", "[Unit]\n# another\n")
    assert diffs["serve.yaml"]["before"] == diffs["serve.yaml"]["after"]


def test_what_was_staged_half_is_completed(host: Host) -> None:
    directory = Path(host.stage()["path"])
    (directory / "serve.yaml").unlink()
    (directory / "lib/keys.py").write_text("edited")
    result = host.stage()
    assert result["changed"] is True
    assert {name: (directory / name).read_text() for name in FILES} == FILES


@pytest.mark.parametrize("check_mode", [False, True])
def test_an_edited_file_of_the_active_release_is_refused(host: Host, check_mode: bool) -> None:
    identity = host.stage()["id"]
    host.switch(identity)
    (host.root / "current/serve.yaml").write_text("edited")
    (host.root / "current/lib/keys.py").unlink()
    before = host.tree()
    refused = host.stage(check_mode=check_mode)
    assert refused["failed"] is True
    assert refused["msg"] == (
        f"release {identity} is active, but these of its files were edited or removed: lib/keys.py, serve.yaml. Put "
        "them back, or roll back to another release and remove this one's directory"
    )
    assert host.tree() == before


def test_the_service_can_read_a_release_whatever_the_umask(host: Host) -> None:
    old = os.umask(0o077)
    try:
        directory = Path(host.stage()["path"])
    finally:
        os.umask(old)
    assert [path.stat().st_mode & 0o777 for path in (directory, directory / "lib")] == [0o755, 0o755]
    assert {path.stat().st_mode & 0o777 for path in directory.rglob("*") if path.is_file()} == {0o644}


# ----------------------------------------------------------------------------------------------------------- activation


def test_activation_puts_the_link_and_a_copy_of_the_unit_in_place(host: Host) -> None:
    first = host.stage()["id"]
    second = host.stage(files=OTHER_FILES)["id"]
    host.releases.activate(first, host.unit)
    assert host.releases.current() == first
    assert (host.root / "current").readlink() == Path("releases") / first
    assert (host.unit.read_text(), host.unit.is_symlink()) == (FILES["vllm.service"], False)
    assert (host.releases.is_active(first, host.unit), host.releases.is_active(second, host.unit)) == (True, False)
    host.releases.activate(second, host.unit)
    assert host.releases.current() == second
    assert host.unit.read_text() == OTHER_FILES["vllm.service"]
    host.unit.write_text("edited")
    assert host.releases.is_active(second, host.unit) is False
    host.unit.unlink()
    assert host.releases.is_active(second, host.unit) is False


def test_activation_after_one_that_was_interrupted(host: Host) -> None:
    identity = host.stage()["id"]
    (host.root / ".current").symlink_to("left-over")
    host.releases.activate(identity, host.unit)
    assert host.releases.current() == identity
    assert not (host.root / ".current").is_symlink()


def test_a_reader_of_the_link_always_finds_a_release(host: Host) -> None:
    identities = [host.stage()["id"], host.stage(files=OTHER_FILES)["id"]]
    host.releases.activate(identities[0], host.unit)
    stop = threading.Event()

    def read() -> set[str]:
        seen = set()
        while not stop.is_set():
            seen.add(json.loads((host.root / "current/release.json").read_text())["id"])
        return seen

    with ThreadPoolExecutor() as executor:
        reader = executor.submit(read)
        for number in range(60):
            host.releases.activate(identities[number % 2], host.unit)
        stop.set()
    # One that had found no file would have raised.
    assert reader.result() == set(identities)


def test_a_release_that_is_not_staged_cannot_be_activated(host: Host) -> None:
    with pytest.raises(ReleaseError, match=r"is not staged on this host: .*/vllm\.service is missing$"):
        host.releases.activate("0" * 16, host.unit)
    assert not host.unit.exists()
    assert host.releases.current() == ""


# --------------------------------------------------------------------------------------------------------------- ledger


def test_the_ledger_keeps_every_line_of_concurrent_writers(host: Host) -> None:
    def write(writer: int) -> None:
        for number in range(8):
            host.releases.append_to_ledger({"writer": writer, "number": number, "text": "x" * 500_000})

    with ThreadPoolExecutor() as executor:
        list(executor.map(write, range(5)))
    entries = host.ledger()
    assert sorted((entry["writer"], entry["number"]) for entry in entries) == [
        (w, n) for w in range(5) for n in range(8)
    ]
    assert all(entry["time"].endswith("Z") for entry in entries)
    assert host.releases.ledger() == entries


def test_a_line_that_a_crash_tore_spoils_no_other(host: Host) -> None:
    host.releases.append_to_ledger({"number": 1})
    with (host.root / "ledger.jsonl").open("a") as stream:
        stream.write('{"number": 2, "te')
    host.releases.append_to_ledger({"number": 3})
    host.releases.append_to_ledger({"number": 4})
    assert [entry["number"] for entry in host.releases.ledger()] == [1, 3, 4]


def test_the_previous_release_is_what_served_before_the_current_one(host: Host) -> None:
    assert host.releases.previous() == ""
    first, second = host.stage()["id"], host.stage(files=OTHER_FILES)["id"]
    host.switch(first)
    assert host.releases.previous() == ""
    host.switch(second)
    assert host.releases.previous() == first
    # A restart of the same release does not make it its own predecessor.
    host.switch(second)
    assert host.releases.previous() == first
    assert host.switch("previous")["id"] == first
    assert host.releases.current() == first
    assert host.releases.previous() == second


# ------------------------------------------------------------------------------------------------------------- settings


def test_settings_are_read_as_systemd_reads_them(tmp_path: Path) -> None:
    text = "# NAME=comment\n\nA=1\nB=x=y # not a comment\nC=\nno assignment\n"
    wanted = {"A": "1", "B": "x=y # not a comment", "C": ""}
    assert parse_settings(text) == wanted
    (tmp_path / "env").write_text(text)
    assert read_settings(tmp_path / "env") == wanted
    assert read_settings(tmp_path / "absent") == {}


# ---------------------------------------------------------------------------------------------------- running processes


@contextmanager
def process(arguments: list[str], **environment: str) -> Iterator[int]:
    """Run this Python with ``arguments`` as its command line says, until the test is done; yield its process id."""
    # It says when it is ready and ends when its input does.
    with subprocess.Popen(
        arguments, executable=sys.executable, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == b"ready\n"
        try:
            yield child.pid
        finally:
            assert child.stdin
            child.stdin.close()


WAIT = "print('ready', flush=True); input()"
MAP = f"import mmap, sys; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); {WAIT}"


def runs(host: Host, identity: str, settings: str = SETTINGS) -> Any:  # noqa: ANN401
    """Return a context with a main process of the unit that runs the release ``identity``."""

    @contextmanager
    def running() -> Iterator[int]:
        python = f"{host.releases.path(identity)}/venv/bin/python"
        with process([python, "-c", WAIT], **parse_settings(settings)) as pid:
            host.install_systemctl(pid)
            yield pid
        host.install_systemctl(0)

    return running()


def test_a_release_is_recognised_by_what_the_process_runs(host: Host) -> None:
    identity = host.stage()["id"]
    with runs(host, identity) as pid:
        found = running_service("vllm.service")
    assert (found.pid, found.release) == (pid, identity)
    assert found.has_settings({"AERIE_HOST": "10.0.0.1", "AERIE_PORT": "8000"}) is True
    assert found.has_settings({"AERIE_HOST": "10.0.0.1", "AERIE_PORT": "8001"}) is False
    assert found.has_settings({"AERIE_KEYS": ""}) is False


def test_a_release_is_recognised_by_what_the_process_maps(host: Host) -> None:
    library = host.root / "releases/0123456789abcdef/venv/lib/vllm.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"x" * mmap.PAGESIZE)
    # Through the link, as the service starts it: only the map has the real path.
    (host.root / "current").symlink_to("releases/0123456789abcdef")
    with process(["python", "-c", MAP, f"{host.root}/current/venv/lib/vllm.so"]) as pid:
        host.install_systemctl(pid)
        assert running_service("vllm.service").release == "0123456789abcdef"


@pytest.mark.parametrize(
    "argument", ["/srv/releases/latest/venv/bin/python", "/x/releases/0123456789abcdef/serve.yaml"]
)
def test_a_process_of_another_origin_has_no_release(host: Host, argument: str) -> None:
    with process(["python", "-c", WAIT, argument], ODD="a=b") as pid:
        host.install_systemctl(pid)
        found = running_service("vllm.service")
    assert (found.pid, found.release, found.environment["ODD"]) == (pid, "", "a=b")


def test_a_command_line_that_is_not_utf_8_is_no_obstacle(host: Host) -> None:
    argument = b"\xff\xfe".decode(errors="surrogateescape")
    python = "/opt/aerie/releases/0123456789abcdef/venv/bin/python"
    with process([python, "-c", WAIT, argument], NAME=argument) as pid:
        host.install_systemctl(pid)
        assert running_service("vllm.service").release == "0123456789abcdef"


def test_a_unit_without_a_process_runs_nothing(host: Host) -> None:
    found = running_service("vllm.service")
    assert (found.pid, found.release, found.environment) == (0, "", {})
    with process(["python", "-c", WAIT]) as pid:
        host.install_systemctl(pid)
    # It has ended since systemd was asked.
    assert running_service("vllm.service").pid == 0


# --------------------------------------------------------------------------------------------------------------- switch

START = [
    "stop vllm.service",
    "daemon-reload",
    "reset-failed vllm.service",
    "enable vllm.service",
    "start --no-block vllm.service",
]


def test_the_first_activation_starts_the_service(host: Host) -> None:
    identity = host.stage()["id"]
    result = host.switch(identity)
    assert (result["failed"], result["changed"], result["id"]) == (False, True, identity)
    assert (result["previous"], result["running"], result["path"]) == ("", "", str(host.releases.path(identity)))
    assert host.called() == START
    assert host.releases.is_active(identity, host.unit) is True
    (entry,) = host.ledger()
    assert {name: entry[name] for name in ("action", "deployment", "from", "to", "why")} == {
        "action": "activate",
        "deployment": "20261129T100000Z",
        "from": "",
        "to": identity,
        "why": "deploy",
    }


def test_a_host_where_systemd_does_not_know_the_unit_yet(host: Host) -> None:
    identity = host.stage()["id"]
    host.install_systemctl(0, failing="stop")
    assert host.switch(identity)["failed"] is False
    assert host.called() == START


def test_a_service_that_runs_the_release_with_these_settings_is_left_alone(host: Host) -> None:
    identity = host.stage()["id"]
    host.switch(identity)
    host.called()
    before = host.tree()
    with runs(host, identity):
        result = host.switch(identity)
        assert (result["failed"], result["changed"], result["running"]) == (False, False, identity)
        assert host.switch(identity, check_mode=True)["changed"] is False
    assert host.called() == []
    assert {**host.tree(), "bin/systemctl": ""} == {**before, "bin/systemctl": ""}


def other_settings(host: Host, identity: str) -> dict[str, Any]:
    return {"identity": identity, "settings": SETTINGS.replace("8000", "8001")}


def edited_unit(host: Host, identity: str) -> dict[str, Any]:
    host.unit.write_text("edited")
    return {"identity": identity}


def another_release(host: Host, identity: str) -> dict[str, Any]:
    return {"identity": host.stage(files=OTHER_FILES)["id"]}


@pytest.mark.parametrize("change", [other_settings, edited_unit, another_release])
def test_a_service_that_runs_anything_else_is_restarted(
    host: Host, change: Callable[[Host, str], dict[str, Any]]
) -> None:
    identity = host.stage()["id"]
    host.switch(identity)
    host.called()
    with runs(host, identity):
        arguments = change(host, identity)
        before = host.tree()
        predicted = host.switch(**arguments, check_mode=True)
        assert host.called() == []
        assert host.tree() == before
        result = host.switch(**arguments)
        assert host.called() == START
    assert predicted == result
    assert (result["changed"], result["running"], result["previous"]) == (True, identity, identity)
    assert host.releases.is_active(result["id"], host.unit) is True
    assert [(entry["from"], entry["to"]) for entry in host.ledger()] == [("", identity), (identity, result["id"])]


def test_a_service_that_still_runs_another_release_is_restarted(host: Host) -> None:
    identity, other = host.stage()["id"], host.stage(files=OTHER_FILES)["id"]
    host.switch(identity)
    host.called()
    with runs(host, other):
        result = host.switch(identity)
    assert (result["changed"], result["running"]) == (True, other)
    assert host.called() == START


def test_check_mode_on_an_empty_host_predicts_the_activation_of_what_would_be_staged(host: Host) -> None:
    before = host.tree()
    predicted = host.switch(host.stage(check_mode=True)["id"], check_mode=True)
    assert (predicted["failed"], predicted["changed"]) == (False, True)
    assert host.called() == []
    assert host.tree() == before


def test_a_release_that_is_not_there_is_refused_while_the_old_one_serves(host: Host) -> None:
    identity = host.stage()["id"]
    host.switch(identity)
    host.called()
    refused = host.switch("0" * 16)
    assert refused["failed"] is True
    assert refused["msg"] == f"release {'0' * 16} is not on this host; these are: {identity}"
    # Staged half: its directory is there, but not its unit.
    (host.root / "releases" / ("0" * 16)).mkdir()
    assert host.switch("0" * 16)["failed"] is True
    assert host.called() == []
    assert host.releases.current() == identity


def test_there_is_no_previous_release_to_go_back_to(host: Host) -> None:
    host.switch(host.stage()["id"])
    host.called()
    assert "knows no release before" in host.switch("previous")["msg"]
    assert host.called() == []


@pytest.mark.parametrize("command", ["daemon-reload", "enable", "start"])
def test_a_systemctl_that_fails_is_quoted_and_the_way_back_is_known(host: Host, command: str) -> None:
    first, second = host.stage()["id"], host.stage(files=OTHER_FILES)["id"]
    host.switch(first)
    host.install_systemctl(0, failing=command)
    refused = host.switch(second)
    assert refused["failed"] is True
    assert refused["msg"].startswith(f"systemctl {command}")
    assert refused["msg"].endswith(" failed: Unit is broken.")
    assert host.releases.previous() == first


def test_an_id_is_needed_to_activate(host: Host) -> None:
    arguments = {"root": str(host.root), "state": "active"}
    assert "id" in run_module("release", arguments, host.capsys)["msg"]
