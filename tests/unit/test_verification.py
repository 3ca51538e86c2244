# SPDX-License-Identifier: Apache-2.0
"""What verify.yml finds of all that can differ on a host, and that no deploy takes what differs for what it made."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.installed import stat_digest
from ansible.module_utils.aerie.verification import quick_check
from modules import run_module
from switched_host import SERVICE, Host, host_below

REQUEST = {"the lock": "1"}
PATCHED, PRISTINE = b"patched = True\n", b"patched = False\n"
SITE_PACKAGES = "venv/lib/python3.12/site-packages"


class Installed(Host):
    """A host on which a release serves whose environment has a distribution, and files of uv's."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(directory, capsys)
        self._reader = capsys

    def set_up(self) -> None:
        patches = {"models/a.py": hashlib.sha256(PATCHED).hexdigest()}
        self.identity = self.stage("new", complete=False, more={"patches": patches})
        self.home = self.releases.path(self.identity)
        self.site_packages = self.home / SITE_PACKAGES
        self.install()
        self.note(made=True)
        self.serve(self.identity)

    def install(self) -> None:
        """Write what uv would, and the patch."""
        files = {"vllm/models/a.py": PRISTINE, "vllm/models/b.py": b"", "../../../bin/tool": b"#!"}
        for name, data in files.items():
            path = self.site_packages / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        rows = [f"{name},sha256={_urlsafe(data)},{len(data)}" for name, data in files.items()]
        self.record_file = self.site_packages / "vllm-1.dist-info/RECORD"
        self.record_file.parent.mkdir(exist_ok=True)
        self.record_file.write_text("\n".join([*rows, "vllm-1.dist-info/RECORD,,"]))
        (self.site_packages / "_virtualenv.py").write_text("import sys\n")
        (self.home / "venv/pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
        (self.site_packages / "vllm/models/a.py").write_bytes(PATCHED)

    def note(self, check_mode: bool = False, **arguments: object) -> dict[str, Any]:
        """Do what a deploy does at the end of staging."""
        common = {"root": str(self.root), "state": "complete", "id": self.identity, "request": REQUEST}
        return run_module("release", {**common, **arguments}, self._reader, check_mode)

    def verify(self) -> list[str]:
        arguments = {"root": str(self.root), "unit": str(self.unit), "settings": next(iter(self.settings()))}
        before = self.tree()
        found = run_module("release_verify", arguments, self._reader)
        assert (found["failed"], found["changed"], self.tree()) == (False, False, before), found
        problems: list[str] = found["problems"]
        return problems

    def environment_is_known(self) -> bool:
        return not quick_check(self.releases, self.identity, self.root / "digests.json")


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    with host_below(tmp_path, capsys, monkeypatch, Installed) as made:
        made.set_up()
        yield made


def written(name: str, data: bytes = b"edited") -> Callable[[Installed], None]:
    def change(host: Installed) -> None:
        path = host.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)

    return change


def with_old_times(change: Callable[[Installed], None]) -> Callable[[Installed], None]:
    """Whoever means harm sets times back, and keeps sizes."""

    def hidden(host: Installed) -> None:
        before = {path: path.stat() for path in (host.home / "venv").rglob("*") if path.is_file()}
        noted = stat_digest(host.home / "venv")
        change(host)
        for path, status in before.items():
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert stat_digest(host.home / "venv") == noted

    return hidden


def removed(host: Installed) -> None:
    (host.site_packages / "vllm/models/b.py").unlink()


def recorded(host: Installed) -> None:
    """Edited, and its RECORD with it."""
    path = host.site_packages / "vllm/models/b.py"
    path.write_bytes(b"edited")
    host.record_file.write_text(host.record_file.read_text().replace(_urlsafe(b""), _urlsafe(b"edited")))


def linked(host: Installed) -> None:
    (host.site_packages / "evil").symlink_to("/srv/evil")


def bytecode(host: Installed) -> None:
    cache = host.site_packages / "vllm/models/__pycache__"
    cache.mkdir()
    for number in range(9):
        (cache / f"{number}.pyc").write_bytes(b"")


def oddly_named(host: Installed) -> None:
    Path(os.fsdecode(os.fsencode(host.site_packages) + b"/\xff.pth")).write_text("")


# What is done to the environment, and what is said of it: {} is where distributions are.
ENVIRONMENT: dict[str, tuple[Callable[[Installed], None], str]] = {
    "edited": (written(f"{SITE_PACKAGES}/vllm/models/b.py"), "{}/vllm/models/b.py was edited: roll back"),
    "binary": (written(f"{SITE_PACKAGES}/vllm/models/b.py", b"\xff"), "{}/vllm/models/b.py was edited: roll back"),
    "script": (written("venv/bin/tool"), "{venv}/bin/tool was edited: roll back"),
    "removed": (removed, "{}/vllm/models/b.py is missing: roll back"),
    "uv's": (written(f"{SITE_PACKAGES}/_virtualenv.py"), "{}/_virtualenv.py was edited: roll back"),
    "interpreter": (written("venv/pyvenv.cfg"), "{venv}/pyvenv.cfg was edited: roll back"),
    "its RECORD, too": (recorded, "{}/vllm-1.dist-info/RECORD was edited: roll back"),
    "added": (written(f"{SITE_PACKAGES}/sitecustomize.py"), "{}/sitecustomize.py was added: remove"),
    "hook": (written(f"{SITE_PACKAGES}/x.pth"), "{}/x.pth was added: remove"),
    "link": (linked, "{}/evil was added: remove"),
    "odd name": (oddly_named, "{}/\\xff.pth was added: remove"),
    "bytecode": (bytecode, "{}/vllm/models/__pycache__/0.pyc was added, "),
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_file_of_the_environment_that_differs_is_named(host: Installed, name: str) -> None:
    assert host.verify() == []
    change, text = ENVIRONMENT[name]
    change(host)
    (problem,) = host.verify()
    assert problem.startswith(text.format(host.site_packages, venv=host.home / "venv")), problem


@pytest.mark.parametrize("name", ENVIRONMENT)
@pytest.mark.parametrize("check_mode", [True, False])
def test_a_deploy_does_not_take_it_for_what_it_made(host: Installed, name: str, check_mode: bool) -> None:
    change, text = ENVIRONMENT[name]
    change(host)
    before = host.tree()
    message = host.note(check_mode)["msg"]
    what = text.format(host.site_packages, venv=host.home / "venv").split(": ")[0]
    assert message.startswith(f"files of release {host.identity} are not as they were installed: {what}"), message
    assert f"remove {host.home} and deploy again" in message
    assert host.tree() == before
    assert not host.environment_is_known()


def test_what_was_removed_again_is_as_before(host: Installed) -> None:
    written(f"{SITE_PACKAGES}/sitecustomize.py")(host)
    assert not host.environment_is_known()
    (host.site_packages / "sitecustomize.py").unlink()
    assert host.environment_is_known()
    assert (host.verify(), host.note()["failed"]) == ([], False)


def test_other_times_of_the_same_bytes_are_noted_by_a_deploy(host: Installed) -> None:
    os.utime(host.site_packages / "vllm/models/b.py", (1, 1))
    (problem,) = host.verify()
    assert problem.endswith("changed, and nothing else: run deploy.yml")
    assert host.note()["failed"] is False
    assert (host.verify(), host.environment_is_known()) == ([], True)


def test_an_environment_that_was_made_again_is_noted_as_it_is(host: Installed) -> None:
    (host.site_packages / "more.py").write_text("")
    (host.site_packages / "vllm/models/b.py").write_text("edited")
    host.install()
    assert host.note(made=True)["failed"] is False
    assert (host.verify(), host.environment_is_known()) == ([], True)


def test_a_patch_that_was_written_again_hides_no_other_edit(host: Installed) -> None:
    path = host.site_packages / "vllm/models/a.py"
    path.write_bytes(PRISTINE)
    # In check mode the patcher did not write it yet.
    assert host.note(check_mode=True)["failed"] is False
    path.write_bytes(PATCHED)
    written(f"{SITE_PACKAGES}/vllm/models/b.py")(host)
    assert "vllm/models/b.py was edited. " in host.note()["msg"]


def test_of_many_files_some_are_named(host: Installed) -> None:
    bytecode(host)
    (problem,) = host.verify()
    assert problem.count("was added") == 6
    assert problem.endswith("/4.pyc was added and 4 more: remove what was added")


def test_an_edit_that_looks_untouched_is_found_by_its_bytes(host: Installed) -> None:
    with_old_times(written(f"{SITE_PACKAGES}/_virtualenv.py", b"import os \n"))(host)
    assert host.environment_is_known()
    (problem,) = host.verify()
    assert problem.startswith(f"{host.site_packages}/_virtualenv.py was edited: ")


@pytest.mark.parametrize("content", [b"\xff", b"vllm/models/b.py,sha256=!,1\n", b"a\n", b'"', b"\0,sha256=,1\n"])
def test_a_record_that_is_none_is_named_and_not_what_it_lost(host: Installed, content: bytes) -> None:
    host.record_file.write_bytes(content)
    (problem,) = host.verify()
    assert f"{host.record_file} was edited" in problem
    assert "roll back" in problem and "was added" not in problem


def test_an_environment_that_is_gone_is_named(host: Installed) -> None:
    (host.home / "venv").rename(host.root / "elsewhere")
    (problem,) = host.verify()
    assert problem.startswith(f"{host.home}/venv is missing: roll back")


# What is done to other files, and what is said of it.
FILES: dict[str, tuple[Callable[[Installed], None], str]] = {
    "edited": (written("serve.yaml"), "a file of {release} was edited or removed: "),
    "binary": (written("serve.yaml", b"\xff\xfe"), "a file of {release} was edited or removed: "),
    "module": (written("lib/sitecustomize.py"), "{release}/lib/sitecustomize.py was added: remove it"),
    "file": (written("more.env"), "{release}/more.env was added: remove it"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_release_that_differs_is_named(host: Installed, name: str) -> None:
    change, text = FILES[name]
    change(host)
    expected = text.format(release=host.home)
    (problem,) = host.verify()
    assert problem.startswith(expected)
    (problem,) = quick_check(host.releases, host.identity, host.root / "digests.json")
    assert problem.startswith(expected)


def test_line_ends_are_bytes_like_others(host: Installed) -> None:
    for path in (host.home / SERVICE, host.unit):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (problem,) = host.verify()
    assert problem.startswith(f"a file of {host.home} was edited or removed: ")


def test_what_an_interrupted_write_left_is_nobodys_concern(host: Installed) -> None:
    written(".serve.yaml.x1")(host)
    assert host.verify() == []


def test_what_the_service_runs_is_compared(host: Installed) -> None:
    host.unit.write_text(f"{host.unit.read_text()}# edited\n")
    settings = host.etc / "vllm.env"
    settings.write_text(f"{settings.read_text()}MORE=1\n")
    assert host.verify() == [
        f"{SERVICE} runs with other settings: run deploy.yml",
        f"{host.unit} is not the unit of release {host.identity}: run deploy.yml",
    ]


@pytest.mark.parametrize("record", [b"{", b"[]", b"{}", b'{"inputs": [], "files": []}', b"\xff", None])
def test_a_host_without_a_record_has_no_release(host: Installed, record: bytes | None) -> None:
    path = host.home / "release.json"
    path.unlink()
    if record is not None:
        path.write_bytes(record)
    assert host.verify() == [f"{host.root}/current names no release: run deploy.yml"]
    (problem,) = quick_check(host.releases, host.identity, host.root / "digests.json")
    assert problem.startswith(f"release {host.identity} is not on this host; ")


def test_a_release_that_is_not_whole_is_said_to_be_so(host: Installed) -> None:
    (host.root / "staged" / f"{host.identity}.json").unlink()
    assert host.verify() == [f"release {host.identity} is not wholly staged: run deploy.yml"]
