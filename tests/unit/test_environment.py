# SPDX-License-Identifier: Apache-2.0
"""The module python_env, with the real uv, wheels of a few bytes, and this very Python."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from modules import run_module
from tiny_wheels import make_wheel, pin, serve
from uv import find_uv_bin

RELEASE = f"{sys.version_info[0]}.{sys.version_info[1]}"
UV_RELEASE = subprocess.run([find_uv_bin(), "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
WRAPPER = f'#!/bin/sh\nexec {sys.executable} "$@"\n'


@pytest.fixture(scope="module")
def uv_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """uv's own program, packed as its wheel has it."""
    path = tmp_path_factory.mktemp("uv") / f"uv-{UV_RELEASE}-py3-none-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(find_uv_bin(), f"uv-{UV_RELEASE}.data/scripts/uv")
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Where uv was unpacked by an earlier run; unpacking it takes longer than all the rest."""
    directory = tmp_path / "tools"
    directory.mkdir()
    (directory / f"uv-{UV_RELEASE}").symlink_to(find_uv_bin())
    return directory


@dataclass
class Host:
    """A host with a wheelhouse of two distributions; ``run`` calls the module with what differs from the usual."""

    root: Path
    options: dict[str, Any]
    capsys: pytest.CaptureFixture[str]

    @property
    def wheelhouse(self) -> Path:
        return self.root / "wheelhouse"

    @property
    def environment(self) -> Path:
        return self.root / "releases/a/venv"

    def run(self, changes: dict[str, str | Path], *, check_mode: bool = False) -> dict[str, Any]:
        arguments = {key: str(value) for key, value in {**self.options, **changes}.items()}
        return run_module("python_env", arguments, self.capsys, check_mode)

    def predicted(self, **changes: str | Path) -> dict[str, Any]:
        before = self.files()
        result = self.run(changes, check_mode=True)
        assert self.files() == before
        return result

    def made(self, **changes: str | Path) -> dict[str, Any]:
        result = self.run(changes)
        assert result["failed"] is False, result["msg"]
        assert result["changed"] is True
        return result

    def unchanged(self, **changes: str | Path) -> None:
        result = self.run(changes)
        assert result["failed"] is False, result["msg"]
        assert result["changed"] is False

    def refused(self, **changes: str | Path) -> str:
        result = self.run(changes)
        assert result["failed"] is True
        assert "Traceback" not in result["msg"]
        return str(result["msg"])

    def files(self) -> list[tuple[str, int]]:
        """Every path below the root, and when it was changed."""
        return sorted((str(path), path.lstat().st_mtime_ns) for path in self.root.rglob("*"))


@pytest.fixture
def host(tmp_path: Path, uv_wheel: Path, tools: Path, capsys: pytest.CaptureFixture[str]) -> Host:
    one = make_wheel(tmp_path / "wheelhouse", "one", "1.0", "VALUE = 'first'\n")
    two = make_wheel(tmp_path / "wheelhouse", "two", "2.0", "VALUE = 'second'\n")
    options = {
        "path": tmp_path / "releases/a/venv",
        "lock": pin(one) + pin(two),
        "uv_wheel": uv_wheel,
        "tools": tools,
        "cache": tmp_path / "cache",
        "python": sys.executable,
        "python_release": RELEASE,
        "wheelhouse": tmp_path / "wheelhouse",
    }
    return Host(tmp_path, options, capsys)


def value(environment: Path, module: str) -> str:
    """Import ``module`` with the environment's own Python and return its VALUE, or the error."""
    code = f"import {module}; print({module}.VALUE)"
    result = subprocess.run([environment / "bin/python", "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip() or result.stderr.splitlines()[-1]


def test_an_environment_has_what_the_lock_names(host: Host) -> None:
    result = host.made()
    assert (value(host.environment, "one"), value(host.environment, "two")) == ("first", "second")
    assert Path(result["site_packages"]) == host.environment / f"lib/python{RELEASE}/site-packages"
    assert (Path(result["site_packages"]) / "one.py").is_file()
    assert result["diff"]["before"] == {}
    assert result["diff"]["after"]["uv"] == UV_RELEASE


def test_a_second_run_changes_nothing(host: Host) -> None:
    host.made()
    before = host.files()
    host.unchanged()
    assert host.files() == before


def test_check_mode_predicts_and_writes_nothing(host: Host) -> None:
    assert host.predicted() == host.made()
    assert host.predicted()["changed"] is False
    assert host.predicted(lock=f"# another\n{host.options['lock']}")["changed"] is True


def test_another_lock_makes_it_anew_with_nothing_of_the_old(host: Host) -> None:
    host.made()
    (host.environment / "left-over").touch()
    lock = pin(host.wheelhouse / "two-2.0-py3-none-any.whl")
    result = host.made(lock=lock)
    assert result["diff"]["before"]["lock_sha256"] != result["diff"]["after"]["lock_sha256"]
    assert value(host.environment, "one") == "ModuleNotFoundError: No module named 'one'"
    assert value(host.environment, "two") == "second"
    assert not (host.environment / "left-over").exists()
    host.unchanged(lock=lock)


def test_another_python_makes_it_anew(host: Host) -> None:
    host.made()
    python = host.root / "python3"
    python.write_text(WRAPPER)
    python.chmod(0o755)
    host.made(python=python)
    host.unchanged(python=python)


def test_another_uv_makes_the_next_one_and_leaves_this_one_alone(host: Host, uv_wheel: Path, tools: Path) -> None:
    """The release id does not have it: a new uv would make the environment of a release that serves anew."""
    host.made()
    newer = host.root / "uv-99.0-py3-none-any.whl"
    newer.symlink_to(uv_wheel)
    before = host.files()
    assert host.predicted(uv_wheel=newer)["changed"] is False
    host.unchanged(uv_wheel=newer)
    assert host.files() == before
    result = host.made(uv_wheel=newer, path=host.root / "releases/b/venv")
    assert result["diff"]["after"]["uv"] == "99.0"
    assert {path.name for path in tools.iterdir()} == {f"uv-{UV_RELEASE}", "uv-99.0"}
    assert os.access(tools / "uv-99.0", os.X_OK)


LOST = {"record": "aerie.json is missing or damaged", "lock": "lock_sha256 was "}


@pytest.mark.parametrize("lost", LOST)
def test_the_environment_of_the_current_release_is_not_made_anew(host: Host, lost: str) -> None:
    host.made()
    (host.root / "current").symlink_to("releases/a")
    host.unchanged()
    changes: dict[str, str | Path] = {}
    if lost == "record":
        (host.environment / "aerie.json").unlink()
    else:
        changes = {"lock": f"# another\n{host.options['lock']}"}
    before = host.files()
    for check_mode in (True, False):
        result = host.run(changes, check_mode=check_mode)
        assert result["failed"] is True
        assert result["msg"].startswith("release a is active, and its environment would be made anew, since ")
        assert LOST[lost] in result["msg"]
        assert result["msg"].endswith(
            "Roll back to another release, then deploy again. If there is no other, stop the service, remove "
            f"{host.root / 'current'}, and deploy again"
        )
    assert host.files() == before
    # Once another one is current.
    (host.root / "current").unlink()
    (host.root / "current").symlink_to("releases/b")
    host.made(**changes)


def test_the_environment_that_a_process_runs_is_not_made_anew(host: Host) -> None:
    path = host.root / "releases/0123456789abcdef/venv"
    host.made(path=path)
    (path / "aerie.json").unlink()
    command = [str(path / "bin/python"), "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        message = host.refused(path=path)
        assert (path / "bin/python").exists()
        process.communicate(b"")
    assert message.startswith("release 0123456789abcdef is not active, but a process still runs it, ")
    assert f"{path} in /proc/PID/maps" in message
    host.made(path=path)


def test_what_was_interrupted_is_made_anew(host: Host) -> None:
    site_packages = Path(host.made()["site_packages"])
    # As a kill leaves it: distributions half unpacked, and no record, which is written last.
    (host.environment / "aerie.json").unlink()
    (site_packages / "one.py").unlink()
    (host.environment / "half").touch()
    host.made()
    assert value(host.environment, "one") == "first"
    assert not (host.environment / "half").exists()


@pytest.mark.parametrize("record", ["{", '["lock_sha256"]'])
def test_a_damaged_record_is_no_record(host: Host, record: str) -> None:
    host.made()
    (host.environment / "aerie.json").write_text(record)
    host.made()
    assert set(json.loads((host.environment / "aerie.json").read_text())) > {"lock_sha256", "uv"}


def test_a_failed_change_is_never_taken_for_the_environment_before_it(host: Host) -> None:
    host.made()
    host.refused(lock="ghost==1.0 --hash=sha256:" + "0" * 64 + "\n")
    host.made()
    assert value(host.environment, "one") == "first"


def test_a_wheel_with_other_bytes_is_refused(host: Host) -> None:
    make_wheel(host.wheelhouse, "one", "1.0", "VALUE = 'evil'\n")
    message = host.refused()
    assert message.startswith("uv pip sync failed: error: Failed to download `one==1.0`")
    assert "Hash mismatch" in message
    assert host.predicted()["changed"] is True
    make_wheel(host.wheelhouse, "one", "1.0", "VALUE = 'first'\n")
    host.made()


def test_a_wheel_that_is_missing_is_named(host: Host) -> None:
    (host.wheelhouse / "two-2.0-py3-none-any.whl").unlink()
    assert "two==2.0" in host.refused()


def test_a_requirement_without_a_hash_is_refused(host: Host) -> None:
    assert "all requirements must have a hash" in host.refused(lock="one==1.0\n")


def test_nothing_is_built_from_source(host: Host) -> None:
    source = host.wheelhouse / "three-1.0.tar.gz"
    with tarfile.open(source, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("three-1.0/setup.py"))
    message = host.refused(lock=pin(source).replace("three==1.0.tar.gz", "three==1.0"))
    assert "`three`" in message
    assert "--no-build" in message


def test_another_release_of_python_is_refused(host: Host) -> None:
    message = host.refused(python_release="3.1")
    assert message == f"{sys.executable} is not Python 3.1, for which the lock was resolved"
    assert not (host.environment / "aerie.json").exists()
    host.made()
    assert host.refused(python_release="3.1") == message


@pytest.mark.parametrize(
    ("python", "place"),
    [("/nowhere/python3.12", "at /nowhere/python3.12"), ("/etc/passwd", "at /etc/passwd"), ("", "given")],
)
def test_a_missing_interpreter_is_named_with_the_remedy(host: Host, python: str, place: str) -> None:
    assert host.refused(python=python, python_release="3.12") == (
        f"there is no Python {place}: install python3.12, or set ml_env_python or ml_env_python_archive"
    )


def test_a_second_environment_shares_the_files_of_the_first(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the host's own uv is set to does not count.
    monkeypatch.setenv("UV_LINK_MODE", "copy")
    monkeypatch.setenv("UV_COMPILE_BYTECODE", "1")
    first = Path(host.made()["site_packages"])
    second = Path(host.made(path=host.root / "releases/b/venv")["site_packages"])
    for name in ("one.py", "two.py", "one-1.0.dist-info/METADATA"):
        assert (first / name).stat().st_ino == (second / name).stat().st_ino
    assert (host.environment / "aerie.json").stat().st_nlink == 1
    assert list(host.root.rglob("one*.pyc")) == []


def test_a_host_with_a_wheelhouse_asks_no_index(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(main=host.wheelhouse) as index:
        for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL"):
            monkeypatch.setenv(name, f"{index.url}/main")
        empty = host.root / "empty"
        empty.mkdir()
        host.refused(wheelhouse=empty)
        host.made()
    assert index.asked == {}


def test_an_index_is_asked_where_there_is_no_wheelhouse(host: Host) -> None:
    with serve(main=host.wheelhouse) as index:
        host.made(wheelhouse="", index_url=f"{index.url}/main")
    assert sorted(index.asked["main"]) == ["one", "two"]
    assert value(host.environment, "two") == "second"


def test_wheelhouse_and_index_together_are_refused(host: Host) -> None:
    assert host.refused(index_url="http://127.0.0.1:1/") == (
        "wheelhouse and index_url are both set: the wheels come from one of them, so empty the other"
    )


def test_the_service_can_read_it_whatever_the_umask(host: Host) -> None:
    old = os.umask(0o077)
    try:
        site_packages = Path(host.made()["site_packages"])
    finally:
        os.umask(old)
    assert (site_packages / "one.py").stat().st_mode & 0o444 == 0o444
    directories = [path for path in site_packages.parents if path.is_relative_to(host.root / "releases")]
    assert [path for path in directories if path.stat().st_mode & 0o555 != 0o555] == []


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Path]:
    """A Python archive's place; the tests fill it with a Python that is a program of two lines."""
    yield tmp_path / "python-0123456789abcdef.tar.gz"


def pack(archive: Path, *names: str, text: str = WRAPPER) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o755
            tar.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.parametrize("name", ["python/bin/python3", "bin/python3"])
def test_a_python_from_an_archive(host: Host, archive: Path, tools: Path, name: str) -> None:
    pack(archive, name)
    options: dict[str, str | Path] = {"python": "/nowhere/python3", "python_archive": archive}
    result = host.made(**options)
    assert value(host.environment, "one") == "first"
    assert result["diff"]["after"]["python"] == f"archive {archive.name}"
    host.unchanged(**options)
    (home,) = tools.glob("python-*")
    before = home.stat()
    host.made(**options, path=host.root / "releases/b/venv")
    assert home.stat() == before
    assert sorted(path.name for path in tools.iterdir()) == sorted([home.name, f"uv-{UV_RELEASE}"])


def test_an_archive_without_a_python_is_refused(host: Host, archive: Path) -> None:
    pack(archive, "python/bin/python9")
    assert host.refused(python_archive=archive) == f"{archive.name} has neither python/bin/python3 nor bin/python3"


def test_a_damaged_archive_is_refused_and_leaves_nothing(host: Host, archive: Path, tools: Path) -> None:
    # Bytes that gzip cannot shrink, so that half of the archive is half of the file.
    pack(archive, "python/bin/python3", text=os.urandom(30000).hex())
    archive.write_bytes(archive.read_bytes()[:20000])
    assert f"{archive} cannot be unpacked: " in host.refused(python_archive=archive)
    archive.write_bytes(b"no archive")
    assert f"{archive} cannot be unpacked: " in host.refused(python_archive=archive)
    assert [path.name for path in tools.iterdir()] == [f"uv-{UV_RELEASE}"]
    pack(archive, "python/bin/python3")
    host.made(python_archive=archive)


@pytest.mark.parametrize("content", ["no zip", "no uv"])
def test_a_wheel_that_is_not_uvs_is_refused(host: Host, tools: Path, content: str) -> None:
    wheel = host.root / "uv-1.0-py3-none-any.whl"
    if content == "no zip":
        wheel.write_bytes(b"no zip")
    else:
        wheel = make_wheel(host.root, "uv", "1.0")
    message = host.refused(uv_wheel=wheel)
    assert message == f"{wheel} is damaged, or no wheel of uv: remove it"
    assert [path.name for path in tools.iterdir()] == [f"uv-{UV_RELEASE}"]


def test_a_missing_wheel_of_uv_is_named(host: Host) -> None:
    wheel = host.root / "uv-1.0-py3-none-any.whl"
    assert str(wheel) in host.refused(uv_wheel=wheel)
