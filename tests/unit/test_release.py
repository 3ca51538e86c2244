# SPDX-License-Identifier: Apache-2.0
"""Releases on a host, and the module release: real directories and processes, and a systemctl that knows one."""

from __future__ import annotations

import json
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.endpoint import parse_settings
from ansible.module_utils.aerie.installed import stat_digest
from ansible.module_utils.aerie.journal import Journal
from ansible.module_utils.aerie.release import (
    ReleaseError,
    Releases,
    canonical,
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

    def install_systemctl(self, pid: int) -> None:
        program = self.root / "bin/systemctl"
        program.write_text(f"#!/bin/sh\necho {pid}\n")
        program.chmod(0o755)

    def stage(
        self, inputs: dict[str, Any] = INPUTS, files: dict[str, str] = FILES, check_mode: bool = False
    ) -> dict[str, Any]:
        arguments = {"root": str(self.root), "state": "staged", "inputs": inputs, "files": files}
        return run_module("release", arguments, self.capsys, check_mode)

    def activate(self, identity: str, deployment: str = "one") -> str:
        """Have a release serve, as the switch leaves it; return its id."""
        before = self.releases.current()
        self.releases.activate(identity, self.unit)
        entry = {"deployment": deployment, "action": "activate", "from": before, "to": identity}
        self.releases.append_to_ledger(entry)
        self.releases.append_to_ledger({**entry, "action": "confirm", "gates": []})
        return identity

    def tree(self) -> dict[str, str]:
        """Every path with its bytes, or where it leads."""
        paths = list(self.root.rglob("*"))
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
    host.activate(host.stage()["id"])
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
    identity = host.activate(host.stage()["id"])
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


def test_a_line_that_does_not_fit_is_not_there_at_all(host: Host) -> None:
    host.releases.append_to_ledger({"number": 1})
    before = (host.root / "ledger.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Of the line, 20 bytes fit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            host.releases.append_to_ledger({"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (host.root / "ledger.jsonl").read_bytes() == before
    host.releases.append_to_ledger({"number": 3})
    assert [entry["number"] for entry in host.releases.ledger()] == [1, 3]


def test_readers_of_the_ledger_see_whole_lines(host: Host) -> None:
    done = threading.Event()

    def read() -> int:
        seen = 0
        while not done.is_set():
            numbers = [entry["number"] for entry in host.releases.ledger()]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) >= seen
            seen = len(numbers)
        return seen

    with ThreadPoolExecutor() as executor:
        readers = [executor.submit(read) for _ in range(3)]
        for number in range(40):
            host.releases.append_to_ledger({"number": number, "text": "x" * 100_000})
        done.set()
    assert all(reader.result() <= 40 for reader in readers)


def entry(deployment: str, action: str, before: str, after: str, why: str = "") -> dict[str, str]:
    return {"deployment": deployment, "action": action, "from": before, "to": after, **({"why": why} if why else {})}


def step(deployment: str, before: str, after: str, why: str = "") -> dict[str, str]:
    return {"deployment": deployment, "from": before, "to": after, "why": why}


FIRST = [entry("d1", "activate", "", "a"), entry("d1", "confirm", "", "a")]
LEDGERS = {
    "nothing yet": ([], []),
    "the first": (FIRST, [step("d1", "", "a")]),
    "an update": (
        [*FIRST, entry("d2", "activate", "a", "b", "deploy"), entry("d2", "confirm", "a", "b")],
        [step("d2", "a", "b", "deploy"), step("d1", "", "a")],
    ),
    "one that was restored": (
        [*FIRST, entry("d2", "activate", "a", "b"), entry("d2", "restore", "b", "a", "it did not start")],
        [step("d1", "", "a")],
    ),
    "a restart of the same release": (
        [*FIRST, entry("d2", "activate", "a", "b"), entry("d3", "activate", "b", "b")],
        [step("d2", "a", "b"), step("d1", "", "a")],
    ),
    "a rollback": (
        [*FIRST, entry("d2", "activate", "a", "b", "deploy"), entry("d3", "activate", "b", "a", "rollback to a")],
        [step("d3", "b", "a", "rollback to a"), step("d2", "a", "b", "deploy"), step("d1", "", "a")],
    ),
    "a rollback of a rollback": (
        [
            *FIRST,
            entry("d2", "activate", "a", "b"),
            entry("d3", "activate", "b", "a"),
            entry("d4", "activate", "a", "b"),
        ],
        [step("d4", "a", "b"), step("d3", "b", "a"), step("d2", "a", "b"), step("d1", "", "a")],
    ),
    "a rollback that was restored": (
        [
            *FIRST,
            entry("d2", "activate", "a", "b"),
            entry("d3", "activate", "b", "a"),
            entry("d3", "restore", "a", "b"),
        ],
        [step("d2", "a", "b"), step("d1", "", "a")],
    ),
    "several releases in one deployment": (
        [*FIRST, entry("d2", "activate", "a", "b"), entry("d2", "activate", "b", "c")],
        [step("d2", "a", "c"), step("d1", "", "a")],
    ),
    "there and back in one deployment": (
        [*FIRST, entry("d2", "activate", "a", "b"), entry("d2", "activate", "b", "a")],
        [step("d1", "", "a")],
    ),
    "other lines": (
        [*FIRST, {"action": "patch"}, {"deployment": "d2", "action": "patch"}],
        [step("d1", "", "a")],
    ),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_the_deployments_that_changed_what_is_served(host: Host, name: str) -> None:
    entries, changes = LEDGERS[name]
    for line in entries:
        host.releases.append_to_ledger(line)
    assert host.releases.deployments() == changes
    assert host.releases.newest_deployment() == (changes[0] if changes else {})


# ------------------------------------------------------------------------------------------------------------- complete


def complete(host: Host, identity: str, request: dict[str, str], check_mode: bool = False) -> dict[str, Any]:
    arguments = {"root": str(host.root), "state": "complete", "id": identity, "request": request}
    return run_module("release", arguments, host.capsys, check_mode)


def test_a_release_is_whole_once_that_was_noted(host: Host) -> None:
    identity = host.stage()["id"]
    assert host.releases.completion(identity) == {}
    before = host.tree()
    assert complete(host, identity, {"lock": "1"}, check_mode=True)["changed"] is False
    assert host.tree() == before
    assert complete(host, identity, {"lock": "1"})["changed"] is False
    assert host.releases.completion(identity)["request"] == {"lock": "1"}
    # Another request may lead to the same release: the last one is what it is compared with.
    complete(host, identity, {"lock": "2"})
    assert host.releases.completion(identity)["request"] == {"lock": "2"}
    before = host.tree()
    complete(host, identity, {"lock": "2"})
    assert host.tree() == before
    (host.root / f"staged/{identity}.json").write_text('{"request": {')
    assert host.releases.completion(identity) == {}


def test_an_environment_is_known_by_every_file_in_it(host: Host) -> None:
    venv = host.root / "venv"
    (venv / "lib/a").mkdir(parents=True)
    (venv / "lib/a/x.py").write_text("1")
    (venv / "bin").symlink_to("lib")
    seen = [stat_digest(venv)]
    assert stat_digest(venv) == seen[0]
    for change in (
        lambda: (venv / "lib/a/x.py").write_text("22"),
        lambda: os.utime(venv / "lib/a/x.py", (1, 1)),
        lambda: (venv / "lib/a/y.py").write_text(""),
        lambda: (venv / "lib/a/y.py").rename(venv / "lib/y.py"),
        lambda: (venv / "bin").unlink(),
    ):
        change()
        assert stat_digest(venv) not in seen
        seen.append(stat_digest(venv))
    assert stat_digest(host.root / "absent") == stat_digest(host.root / "absent, too")


# -------------------------------------------------------------------------------------------------------------- pruning


def staged(host: Host, number: int, drafter: str = "") -> str:
    """Stage a release of its own, with a drafter in the store; return its id."""
    identity: str = host.stage(inputs={"number": number, "drafter": drafter})["id"]
    complete(host, identity, {})
    os.utime(host.releases.path(identity), (number, number))
    if drafter:
        (host.root / "store" / drafter).mkdir(parents=True, exist_ok=True)
        (host.root / "store" / drafter / "model.safetensors").write_text("weights")
    return identity


def prune(host: Host, keep: int, check_mode: bool = False, after: str = "") -> list[str]:
    arguments = {"root": str(host.root), "state": "pruned", "keep": keep, "caches": str(host.root / "caches")}
    arguments.update(units=str(host.root / "units"), after=after)
    before = host.tree()
    result = run_module("release", arguments, host.capsys, check_mode)
    assert result["failed"] is False
    assert result["changed"] is bool(result["removed"])
    if check_mode:
        assert host.tree() == before
    return [str(Path(path).relative_to(host.root)) for path in result["removed"]]


def test_the_releases_that_served_last_stay(host: Host) -> None:
    served = [staged(host, number, drafter=f"drafter{number}") for number in range(5)]
    for number, identity in enumerate(served):
        host.activate(identity, deployment=str(number))
    never = staged(host, 9, drafter="drafter9")
    expected = [f"staged/{identity}.json" for identity in sorted([*served[:2], never])]
    expected += [f"releases/{identity}" for identity in (served[1], served[0], never)]
    expected += ["store/drafter0", "store/drafter1", "store/drafter9"]
    assert prune(host, 3, check_mode=True) == expected
    assert prune(host, 3) == expected
    assert host.releases.identities() == sorted(served[2:])
    assert sorted(path.name for path in (host.root / "store").iterdir()) == ["drafter2", "drafter3", "drafter4"]
    assert prune(host, 3) == []


def test_what_is_known_about_a_release_goes_with_it(host: Host) -> None:
    kept, doomed = host.activate(staged(host, 2)), staged(host, 1)
    packages = {
        "kept": host.releases.path(kept).resolve() / "venv/vllm",
        "doomed": host.releases.path(doomed).resolve() / "venv/vllm",
        "gone": host.root.resolve() / "releases" / ("0" * 16) / "venv/vllm",
        # An environment of others, which may be on a file system that is not mounted now.
        "adopted": Path("/srv/venv/vllm"),
    }
    (host.root / "patched").mkdir()
    for name, package in packages.items():
        (host.root / "patched" / f"{name}.json").write_text(json.dumps({"package_dir": str(package)}))
    (host.root / "patched" / "damaged.json").write_text("{")
    (host.root / "proved").mkdir()
    for name in (kept, doomed):
        (host.root / "proved" / f"{name}.json").write_text("{}")
    records = ["patched/doomed.json", "patched/gone.json"]
    assert prune(host, 1) == [f"proved/{doomed}.json", f"staged/{doomed}.json", f"releases/{doomed}", *records]


def test_what_removed_releases_compiled_goes_with_them(host: Host) -> None:
    kept = host.activate(staged(host, 1))
    unit = host.releases.path(kept) / "vllm.service"
    unit.write_text(f"{unit.read_text()}Environment=TRITON_CACHE_DIR=%C/vllm/{'a' * 16}/triton\n")
    for name in ("a" * 16, "b" * 16, "pycache"):
        (host.root / "caches" / name).mkdir(parents=True)
    assert prune(host, 1) == [f"caches/{'b' * 16}"]


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("new_drafter", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
def test_what_goes_once_another_serves_is_predicted(host: Host, keep: int, new_drafter: bool, is_there: bool) -> None:
    for number in range(4):
        host.activate(staged(host, number, drafter=f"drafter{number}"), deployment=str(number))
    identity = staged(host, 9, drafter="drafter9" if new_drafter else "drafter3")
    elsewhere = host.root / "elsewhere"
    parts = [host.root / "staged" / f"{identity}.json", host.releases.path(identity)]
    # In check mode nothing was staged, unless an earlier run did.
    if not is_there:
        elsewhere.mkdir()
        for path in parts:
            path.rename(elsewhere / path.name)
        if new_drafter:
            (host.root / "store/drafter9").rename(elsewhere / "drafter9")
    predicted = prune(host, keep, check_mode=True, after=identity)
    if not is_there:
        for path in parts:
            (elsewhere / path.name).rename(path)
        if new_drafter:
            (elsewhere / "drafter9").rename(host.root / "store/drafter9")
    host.activate(identity, deployment="last")
    assert prune(host, keep, after=identity) == predicted
    # What served before always stays.
    assert len(host.releases.identities()) == max(keep, 2)


def test_at_least_one_release_stays(host: Host) -> None:
    arguments = {"root": str(host.root), "state": "pruned", "keep": 0}
    assert "at least one" in run_module("release", arguments, host.capsys)["msg"]


def test_a_release_that_served_again_is_not_old(host: Host) -> None:
    first, second, third = (staged(host, number) for number in range(3))
    for identity in (first, second, first, third):
        host.activate(identity, deployment=identity)
    prune(host, 2)
    assert host.releases.identities() == sorted([first, third])


def test_a_release_that_was_undone_did_not_serve(host: Host) -> None:
    first, current, undone = (staged(host, number) for number in range(3))
    for identity in (first, current):
        host.activate(identity, deployment=identity)
    # It was tried again and again.
    for action in ("activate", "restore"):
        host.releases.append_to_ledger(entry("d", action, current, undone))
    prune(host, 2)
    assert host.releases.identities() == sorted([first, current])


def test_of_releases_that_never_served_the_newest_stays(host: Host) -> None:
    current = host.activate(staged(host, 1))
    older, newer = staged(host, 2), staged(host, 3)
    prune(host, 2)
    assert host.releases.identities() == sorted([current, newer])
    assert older not in host.releases.identities()


def test_what_was_staged_lately_stays_until_it_was_tried(host: Host) -> None:
    current = host.activate(staged(host, 1))
    tried, old, lately = staged(host, 2), staged(host, 3), staged(host, 4, drafter="drafter4")
    host.releases.append_to_ledger(entry("d", "activate", current, tried))
    for identity in (tried, lately):
        os.utime(host.releases.path(identity))
    prune(host, 1)
    # What was tried, and undone since, is what one would go back from.
    assert host.releases.identities() == sorted([current, lately])
    assert (host.root / "store/drafter4").is_dir()
    assert old not in host.releases.identities()


def test_programs_that_no_unit_names_go(host: Host) -> None:
    host.activate(staged(host, 1))
    tools, units = host.root / "tools", host.root / "units"
    for name, days in (("aerie-named", 9), ("aerie-old", 9), ("aerie-new", 0), ("uv-0.9", 9)):
        (tools / name).mkdir(parents=True)
        (tools / name / "file").touch()
        then = time.time() - days * 86400
        os.utime(tools / name, (then, then))
    units.mkdir()
    (units / "aerie-switch.service").write_text(f"[Service]\nEnvironment=PYTHONPATH={tools}/aerie-named\n")
    assert prune(host, 1, check_mode=True) == prune(host, 1) == ["tools/aerie-old"]
    assert sorted(path.name for path in tools.iterdir()) == ["aerie-named", "aerie-new", "uv-0.9"]


def test_what_is_needed_stays_however_little_is_to_be_kept(host: Host) -> None:
    previous, current, used, unneeded = (staged(host, number, drafter=f"drafter{number}") for number in range(4))
    aimed = [staged(host, number) for number in (5, 6)]
    for identity in (unneeded, previous, current):
        host.activate(identity, deployment=identity)
    journal = Journal(host.root)
    journal.directory.mkdir()
    journal.open({"from": {"id": aimed[0]}, "to": {"id": aimed[1]}, "together": {}})
    python = f"{host.releases.path(used)}/venv/bin/python"
    with process([python, "-c", WAIT]):
        removed = prune(host, 1)
    assert removed == [f"staged/{unneeded}.json", f"releases/{unneeded}", "store/drafter3"]
    assert host.releases.identities() == sorted([previous, current, used, *aimed])


def test_a_drafter_that_two_releases_share_stays_with_the_last(host: Host) -> None:
    for number in range(2):
        host.activate(staged(host, number, drafter="shared"), deployment=str(number))
    prune(host, 1)
    # What is about to be sent there is no concern of it.
    (host.root / "store/.incoming").mkdir()
    assert sorted(path.name for path in (host.root / "store").iterdir()) == [".incoming", "shared"]
    assert prune(host, 1) == []


def test_nothing_leaves_the_store_while_a_release_cannot_be_read(host: Host) -> None:
    identity = host.activate(staged(host, 1, drafter="drafter1"))
    (host.root / "store/other").mkdir()
    (host.releases.path(identity) / "release.json").write_text("{")
    assert prune(host, 1) == []


@pytest.mark.parametrize("step", range(1, 6))
def test_a_removal_that_is_interrupted_is_finished_by_the_next(host: Host, step: int) -> None:
    old, current = (staged(host, number, drafter=f"drafter{number}") for number in range(2))
    for identity in (old, current):
        host.activate(identity, deployment="one")
    pid = os.fork()
    if pid == 0:
        left = [step]

        def die(event: str, _: tuple[Any, ...]) -> None:
            left[0] -= event in ("os.remove", "os.rename", "os.rmdir")
            if not left[0]:
                os._exit(9)

        sys.addaudithook(die)
        host.releases.prune(1, [])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    # Whatever is left of it, it is not taken for a release that is whole.
    assert not (host.releases.path(old) / "serve.yaml").exists() or host.releases.completion(old) == {} or step == 1
    prune(host, 1)
    assert sorted(path.name for path in (host.root / "releases").iterdir()) == [current]
    assert [path.name for path in (host.root / "staged").iterdir()] == [f"{current}.json"]
    assert [path.name for path in (host.root / "store").iterdir()] == ["drafter1"]


# ------------------------------------------------------------------------------------------------------------- settings


def test_settings_are_read_as_systemd_reads_them() -> None:
    text = "# NAME=comment\n\nA=1\nB=x=y # not a comment\nC=\nno assignment\n"
    wanted = {"A": "1", "B": "x=y # not a comment", "C": ""}
    assert parse_settings(text) == wanted


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
