# SPDX-License-Identifier: Apache-2.0
"""The host's half of staging files: the module stage_files, with a test that puts files where the action sends them."""

from __future__ import annotations

import hashlib
import os
import pwd
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.staging import ExpectedFile, StagingError
from hypothesis import given
from hypothesis import strategies as st
from modules import run_module

FILES = {"a.bin": b"first" * 1000, "b.bin": b"second" * 1000, "c.bin": b""}


@dataclass
class Host:
    """A host that is to have FILES in ``dest``."""

    dest: Path
    capsys: pytest.CaptureFixture[str]
    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))

    @property
    def incoming(self) -> Path:
        return self.dest / ".incoming"

    def call(
        self, step: str, check_mode: bool = False, login: str = "", reuse: str | None = None, **sizes: int
    ) -> dict[str, Any]:
        files = [
            {
                "name": name,
                "path": f"/control/{name}",
                "sha256": hashlib.sha256(data).hexdigest(),
                "size": sizes.get(name.split(".")[0], len(data)),
            }
            for name, data in self.files.items()
        ]
        arguments = {"dest": str(self.dest), "files": files, "step": step, "login": login, "reuse": reuse}
        return run_module("stage_files", arguments, self.capsys, check_mode)

    def query(self, **options: Any) -> dict[str, Any]:  # noqa: ANN401
        return self.call("query", **options)

    def accept(self) -> dict[str, Any]:
        return self.call("accept")

    def send(self, names: list[str]) -> None:
        for name in names:
            (self.incoming / name).write_bytes(self.files[name])

    def staged(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.dest.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.delenv("SUDO_USER", raising=False)
    return Host(tmp_path / "opt/wheelhouse", capsys)


def test_all_files_arrive_and_a_second_run_changes_nothing(host: Host) -> None:
    asked = host.query()
    assert (asked["changed"], asked["missing"], asked["unsent"]) == (True, [*FILES], [*FILES])
    host.send(asked["unsent"])
    assert host.accept()["failed"] is False
    assert host.staged() == FILES
    assert not host.incoming.exists()
    again = host.query()
    assert (again["failed"], again["changed"], again["missing"], again["unsent"]) == (False, False, [], [])
    assert not host.incoming.exists()


def test_what_is_missing_or_damaged_is_asked_for_and_nothing_else(host: Host) -> None:
    host.dest.mkdir(parents=True)
    (host.dest / "a.bin").write_bytes(FILES["a.bin"])
    (host.dest / "b.bin").write_bytes(b"s" * len(FILES["b.bin"]))
    (host.dest / "c.bin").mkdir()
    (host.dest / "mine.txt").write_text("not of this list")
    assert host.query()["missing"] == ["b.bin", "c.bin"]
    (host.dest / "c.bin").rmdir()
    untouched = (host.dest / "a.bin").stat()
    host.send(["b.bin", "c.bin"])
    assert host.accept()["failed"] is False
    assert host.staged() == {**FILES, "mine.txt": b"not of this list"}
    assert (host.dest / "a.bin").stat() == untouched


def test_a_file_that_is_edited_after_it_was_staged_is_sent_again(host: Host) -> None:
    host.send(host.query()["unsent"])
    host.accept()
    (host.dest / "a.bin").write_bytes(b"edited")
    assert host.query()["missing"] == ["a.bin"]


def test_check_mode_says_what_would_be_sent_and_writes_nothing(host: Host) -> None:
    predicted = host.query(check_mode=True)
    assert (predicted["changed"], predicted["missing"]) == (True, [*FILES])
    assert not host.dest.parent.exists()
    host.dest.mkdir(parents=True)
    (host.dest / "a.bin").write_bytes(FILES["a.bin"])
    assert host.query(check_mode=True)["missing"] == ["b.bin", "c.bin"]
    assert [path.name for path in host.dest.iterdir()] == ["a.bin"]


def test_an_interrupted_transfer_goes_on_where_it_stopped(host: Host) -> None:
    host.query()
    host.send(["a.bin"])
    (host.incoming / "b.bin").write_bytes(FILES["b.bin"][:100])
    (host.incoming / "of-another-run").write_bytes(b"x")
    resumed = host.query()
    assert (resumed["missing"], resumed["unsent"]) == ([*FILES], ["b.bin", "c.bin"])
    # Halves are gone, so that they take no room from what is sent now.
    assert [path.name for path in host.incoming.iterdir()] == ["a.bin"]
    host.send(resumed["unsent"])
    assert host.accept()["failed"] is False
    assert host.staged() == FILES


def test_an_interrupted_acceptance_is_finished_by_the_next_run(host: Host) -> None:
    host.send(host.query()["unsent"])
    (host.incoming / "a.bin").rename(host.dest / "a.bin")
    resumed = host.query()
    assert (resumed["missing"], resumed["unsent"]) == (["b.bin", "c.bin"], [])
    assert host.accept()["failed"] is False
    assert host.staged() == FILES


@pytest.mark.parametrize("damage", [b"", b"other bytes", FILES["b.bin"][::-1], FILES["b.bin"] + b"x"])
def test_what_arrives_damaged_is_refused_and_removed(host: Host, damage: bytes) -> None:
    host.send(host.query()["unsent"])
    (host.incoming / "b.bin").write_bytes(damage)
    refused = host.accept()
    assert refused["failed"] is True
    digest = hashlib.sha256(FILES["b.bin"]).hexdigest()
    assert f"b.bin arrived in {host.dest} with other bytes than SHA-256 {digest}: run again" in refused["msg"]
    assert "the file on the control node is not the one" in refused["msg"]
    assert not (host.incoming / "b.bin").exists()
    assert "b.bin" not in host.staged()
    resumed = host.query()
    assert (resumed["missing"], resumed["unsent"]) == (["b.bin", "c.bin"], ["b.bin"])
    host.send(["b.bin"])
    assert host.accept()["failed"] is False
    assert host.staged() == FILES


def test_what_never_arrives_is_refused(host: Host) -> None:
    host.query()
    assert "a.bin arrived in" in host.accept()["msg"]
    assert host.staged() == {}


def test_a_link_to_the_right_bytes_is_no_file_that_arrived(host: Host, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(FILES["a.bin"])
    host.send(host.query()["unsent"])
    (host.incoming / "a.bin").unlink()
    (host.incoming / "a.bin").symlink_to(elsewhere)
    assert host.accept()["failed"] is True
    assert host.staged() == {}
    assert elsewhere.read_bytes() == FILES["a.bin"]


def test_a_full_file_system_is_noticed_before_anything_is_sent(host: Host) -> None:
    refused = host.query(a=1 << 60)
    assert refused["failed"] is True
    assert refused["msg"].startswith(f"{host.dest} needs {1 << 40} MB and its file system has ")
    assert refused["msg"].endswith(" MB free: make room there")
    assert host.query()["failed"] is False


def test_the_login_may_write_and_nobody_else_and_the_files_are_the_hosts_in_the_end(host: Host) -> None:
    login = pwd.getpwnam("nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name)
    asked = host.query(login=login.pw_name)
    status = host.incoming.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (login.pw_uid, 0o700)
    host.send(asked["unsent"])
    for name in FILES:
        os.chown(host.incoming / name, login.pw_uid, -1)
        (host.incoming / name).chmod(0o600)
    assert host.accept()["failed"] is False
    assert {(path.stat().st_uid, path.stat().st_mode & 0o777) for path in map(host.dest.joinpath, FILES)} == {
        (os.geteuid(), 0o644)
    }


def test_without_a_configured_login_it_is_the_one_that_sudo_knows(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    login = pwd.getpwnam("nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name)
    monkeypatch.setenv("SUDO_USER", login.pw_name)
    host.query()
    assert host.incoming.stat().st_uid == login.pw_uid


def test_the_directories_can_be_entered_whatever_the_umask(host: Host) -> None:
    old = os.umask(0o077)
    try:
        host.query()
    finally:
        os.umask(old)
    assert [path.stat().st_mode & 0o777 for path in (host.dest, host.dest.parent)] == [0o755, 0o755]


@given(st.text().filter(lambda name: not name or "/" in name or name.startswith(".")))
def test_a_name_with_a_directory_or_a_hidden_one_is_refused(name: str) -> None:
    with pytest.raises(StagingError) as caught:
        ExpectedFile(name, "0", 0)
    assert str(caught.value) == f"'{name}' is no plain file name"


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", ".incoming", "..", ""])
def test_the_module_refuses_such_names(host: Host, name: str) -> None:
    host.files = {name: b"x"}
    assert host.query()["msg"] == f"'{name}' is no plain file name"
    assert not host.dest.exists()


def test_a_destination_that_is_a_file_is_named(host: Host) -> None:
    host.dest.parent.mkdir(parents=True)
    host.dest.write_text("x")
    refused = host.query()
    assert refused["failed"] is True
    assert str(host.dest) in refused["msg"]


def test_what_a_sibling_has_is_linked_and_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    one, two = Host(store / "one", capsys), Host(store / "two", capsys, {**FILES, "a.bin": b"third" * 1000})
    one.send(one.query()["unsent"])
    assert not one.accept()["failed"]
    predicted = two.query(check_mode=True, reuse=str(store))
    assert (predicted["changed"], two.dest.exists()) == (True, False)
    asked = two.query(reuse=str(store))
    assert (asked["changed"], asked["missing"], asked["unsent"]) == (True, [*FILES], ["a.bin"])
    two.send(asked["unsent"])
    assert not two.accept()["failed"]
    assert (two.staged(), one.staged()) == (two.files, FILES)
    assert (two.dest / "b.bin").samefile(one.dest / "b.bin")
    again = two.query(reuse=str(store))
    assert (again["changed"], again["missing"]) == (False, [])


def test_a_sibling_with_other_bytes_or_a_link_is_no_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    (store / "damaged").mkdir(parents=True)
    (store / "damaged" / "a.bin").write_bytes(b"FIRST" * 1000)
    (store / "damaged" / "b.bin").symlink_to("/dev/null")
    (store / "c.bin").write_bytes(b"")
    assert Host(store / "two", capsys).query(reuse=str(store))["unsent"] == [*FILES]
