# SPDX-License-Identifier: Apache-2.0
"""Patching when something goes wrong at any moment, and beside environments that share its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import toy_vllm
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patcher import Patcher
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import package_of_directory
from patched_host import (
    PATHS,
    PRISTINE,
    Host,
    Plan,
    digests,
    drop_capabilities,
    finish,
    in_child,
    killed_at,
    mount,
    own_mounts,
    patched,
    plan_of,
    signalled_at,
    start,
)

FIRST, SECOND = PATHS
_STEPS = range(1, 400)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of()


@pytest.mark.parametrize("aim", ["present", "absent"])
def test_a_kill_at_any_step_is_finished_or_undone_by_the_next_run(tmp_path: Path, plan: Plan, aim: str) -> None:
    between = 0
    for step in _STEPS:
        folder = tmp_path / str(step)
        folder.mkdir()
        host = Host(folder)
        names = host.everything()
        if aim == "absent":
            host.run(plan)
        killed = killed_at(step, partial(host.run, plan if aim == "present" else None))
        now = digests(host.bytes())
        assert all(now[path] in (digests(PRISTINE)[path], patched(plan)[path]) for path in PATHS)
        between += now not in (digests(PRISTINE), patched(plan))
        # Finish in the same direction on even steps, turn back on odd ones.
        forward = (step % 2 == 0) == (aim == "present")
        host.run(plan if forward else None)
        assert digests(host.bytes()) == (patched(plan) if forward else digests(PRISTINE))
        assert not host.run(plan if forward else None)
        assert host.everything() == names
        host.run(None)
        assert host.bytes() == PRISTINE
        assert host.run(plan)
        assert [path.name for path in host.store.rglob(".*")] == []
        if not killed:
            break
    assert step > 30
    assert between > 0


def interrupted(host: Host, plan: Plan) -> None:
    """Leave ``host`` between its two files: the first is patched, the second is not."""
    for step in _STEPS:
        killed_at(step, lambda: host.run(plan))
        if digests(host.bytes())[FIRST] == patched(plan)[FIRST]:
            break
        host.run(None)
    assert host.bytes()[SECOND] == PRISTINE[SECOND]


def test_an_interrupted_run_is_reported_once(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    interrupted(host, plan)
    work = host.work(plan)
    assert (work.interrupted, work.changed) == (True, True)
    assert work.notes == [f"an earlier run was interrupted: of its files, {FIRST} held the patch"]
    assert [host.run(plan), host.run(plan)] == [True, False]
    assert host.work(plan).notes == []


@pytest.mark.parametrize("edited", PATHS)
def test_an_edit_between_two_files_is_refused_and_then_the_run_goes_on(tmp_path: Path, plan: Plan, edited: str) -> None:
    host = Host(tmp_path)
    interrupted(host, plan)
    state = host.bytes()
    (host.package_dir / edited).write_bytes(state[edited] + b"# mine\n")
    for wanted in (plan, None):
        message = host.refusal(wanted)
        assert message.startswith(f"{host.package_dir / edited} was edited ")
        assert message.endswith("\n+# mine")
        assert host.bytes() == {**state, edited: state[edited] + b"# mine\n"}
    (host.package_dir / edited).write_bytes(state[edited])
    assert host.run(plan)
    assert digests(host.bytes()) == patched(plan)


def test_two_runs_at_once_do_not_mix(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    other_store = Host(tmp_path, host.package_dir)
    other_store.store = tmp_path / "elsewhere"
    for step in _STEPS:
        child, reader = start(partial(signalled_at, step, signal.SIGSTOP, lambda: host.run(plan)))
        _, status = os.waitpid(child, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        # Stopped in the middle: its intent is on record, no file is renamed yet.
        reached = any((host.store / "patched").glob("*.json")) and host.bytes() == PRISTINE
        if reached:
            for late in (host, other_store):
                assert "another run is patching" in late.refusal(plan)
                assert host.bytes() == PRISTINE
        os.kill(child, signal.SIGCONT)
        assert finish(child, reader) == 0
        assert digests(host.bytes()) == patched(plan)
        if reached:
            break
        host.run(None)
    assert reached
    assert not host.run(plan)


def test_work_that_another_run_has_overtaken_is_refused(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.run(plan)
    late = host.work(None)
    host.run(None)
    with pytest.raises(Refusal, match="was patched by another run meanwhile: run again"):
        Patcher(host.package_dir, host.store).write(late, package_of_directory(host.package_dir))
    assert host.bytes() == PRISTINE


def on_a_file_system(folder: Path, options: str, action: Callable[[Path], None]) -> None:
    """Run ``action`` in a process with a file system of its own at ``folder``."""

    def run() -> None:
        own_mounts()
        mount("-t", "tmpfs", "-o", options, "tmpfs", str(folder))
        action(folder)

    in_child(run)


@pytest.mark.parametrize("limit", ["size=1m", "size=4m,nr_inodes=64"])
@pytest.mark.parametrize("aim", ["present", "absent"])
def test_a_disk_that_gets_full_at_any_point_leaves_every_file_as_it_was(
    tmp_path: Path, plan: Plan, limit: str, aim: str
) -> None:
    wanted = plan if aim == "present" else None

    def scenario(folder: Path) -> None:
        host = Host(folder)
        (folder / "room").mkdir()
        names = host.everything()
        refused = 0
        if aim == "absent":
            host.run(plan)
        before = host.bytes()
        while True:
            fill(folder / "room", leave=refused)
            try:
                assert host.run(wanted)
                break
            except Refusal as refusal:
                assert "No space left on device; mend that and run again" in str(refusal), refusal
                assert host.bytes() == before
                assert host.everything() == names
                refused += 1
        assert refused >= 2
        assert not host.run(wanted)

    on_a_file_system(tmp_path, limit, scenario)


def fill(room: Path, leave: int) -> None:
    """Leave as much space as ``leave`` files of one page need."""
    count = 0
    for path in room.iterdir():
        path.unlink()
    while True:
        try:
            (room / str(count)).write_bytes(b"x" * 4096)
        except OSError:
            break
        count += 1
    (room / str(count)).unlink(missing_ok=True)
    for number in range(leave):
        (room / str(number)).unlink()


def test_a_read_only_file_system_is_refused_and_needs_nothing_when_all_is_done(tmp_path: Path, plan: Plan) -> None:
    def scenario(folder: Path) -> None:
        host = Host(folder)
        mount("-o", "remount,bind,ro", str(folder))
        assert host.refusal(plan).endswith("Read-only file system; mend that and run again, which completes the work")
        assert host.bytes() == PRISTINE
        assert not host.run(None)
        mount("-o", "remount,bind,rw", str(folder))
        assert host.run(plan)
        mount("-o", "remount,bind,ro", str(folder))
        assert not host.run(plan)
        assert "Read-only file system" in host.refusal(None)
        assert digests(host.bytes()) == patched(plan)

    on_a_file_system(tmp_path, "size=4m", scenario)


def test_a_directory_that_may_not_be_written_is_refused_before_the_first_file(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    (host.package_dir / "models").chmod(0o555)

    def scenario() -> None:
        drop_capabilities()
        message = host.refusal(plan)
        assert message.startswith(f"cannot write {host.package_dir / 'models'}")
        assert "Permission denied; mend that and run again" in message

    in_child(scenario)
    assert host.bytes() == PRISTINE
    (host.package_dir / "models").chmod(0o755)
    assert host.run(plan)


@pytest.mark.parametrize("aim", ["present", "absent"])
def test_an_error_at_the_second_file_takes_the_first_one_back(tmp_path: Path, plan: Plan, aim: str) -> None:
    host = Host(tmp_path)
    wanted = plan if aim == "present" else None
    if aim == "absent":
        host.run(plan)
    before, names = host.bytes(), host.everything()
    second = str(host.package_dir / SECOND)

    def scenario() -> None:
        own_mounts()
        # A mount point can be read and written, but nothing can be renamed over it.
        mount("--bind", second, second)
        message = host.refusal(wanted)
        assert message.startswith("cannot write ")
        assert "Device or resource busy; mend that and run again" in message

    in_child(scenario)
    assert host.bytes() == before
    assert host.everything() == names
    assert not host.work(wanted).interrupted
    assert host.run(wanted)


def uv(*arguments: str, cache: Path) -> None:
    environment = {**os.environ, "UV_CACHE_DIR": str(cache), "UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}
    subprocess.run([sys.executable, "-m", "uv", "-q", *arguments], check=True, env=environment)


def installed_by_uv(folder: Path, wheel: Path, cache: Path) -> Path:
    """Make an environment with ``wheel`` by hard links from uv's cache; return its package directory."""
    uv("venv", "--no-project", "--python", sys.executable, str(folder), cache=cache)
    command = ["pip", "install", "--no-deps", "--link-mode", "hardlink", "--python", str(folder), str(wheel)]
    uv(*command, cache=cache)
    (package_dir,) = folder.glob("lib/python3*/site-packages/vllm")
    return package_dir


def test_environments_that_share_files_with_uvs_cache_and_each_other_are_not_touched(
    tmp_path: Path, plan: Plan
) -> None:
    wheel = toy_vllm.wheel(tmp_path, toy_vllm.files())
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(
            "vllm-0.33.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    cache = tmp_path / "cache"
    host = Host(tmp_path, installed_by_uv(tmp_path / "one", wheel, cache))
    others = [installed_by_uv(tmp_path / "two", wheel, cache), tmp_path / "three" / "vllm"]
    subprocess.run(["cp", "-al", str(host.package_dir.parent), str(tmp_path / "three")], check=True)
    model = (host.package_dir / toy_vllm.MODEL).stat()
    assert [(path / toy_vllm.MODEL).stat().st_ino for path in others] == [model.st_ino] * 2
    # The three environments and the cache itself.
    assert model.st_nlink == 4

    def everything(folder: Path) -> dict[str, str]:
        return {str(path): sha256_bytes(path.read_bytes()) for path in folder.rglob("*") if path.is_file()}

    elsewhere = [cache, *(path.parent for path in others)]
    before = [everything(folder) for folder in elsewhere]
    assert host.run(plan)
    assert digests(host.bytes()) == patched(plan)
    assert [everything(folder) for folder in elsewhere] == before
    copy = tmp_path / "four"
    subprocess.run(["cp", "-al", str(host.package_dir.parent), str(copy)], check=True)
    assert host.run(None)
    assert host.bytes() == PRISTINE
    assert [everything(folder) for folder in elsewhere] == before
    assert digests({path: (copy / "vllm" / path).read_bytes() for path in PATHS}) == patched(plan)
