# SPDX-License-Identifier: Apache-2.0
"""Patching an installed package: all files or none, undone to the byte, whatever happens in between."""

from __future__ import annotations

import fcntl
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import toy_vllm
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patcher import Patcher
from ansible.module_utils.aerie.patchset import make_plan, plan_set
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import package_of_directory, package_of_wheel

Plan = dict[str, Any]
PATHS = (toy_vllm.MODEL, toy_vllm.INTERFACES)


class Host:
    """One environment with its store, patched as the module does it."""

    def __init__(self, folder: Path, package_dir: Path | None = None) -> None:
        self.package_dir = package_dir or toy_vllm.environment(folder, toy_vllm.files())
        self.store = folder / "store"

    def run(self, plan: Plan | None) -> bool:
        """Apply ``plan``, or undo for None; return whether something changed."""
        package = package_of_directory(self.package_dir)
        patcher = Patcher(self.package_dir, self.store)
        work = patcher.present(package, plan) if plan else patcher.absent(package)
        patcher.write(work, package)
        return work.changed

    def bytes(self) -> dict[str, bytes]:
        return {path: (self.package_dir / path).read_bytes() for path in PATHS}

    def everything(self) -> set[str]:
        return {str(path.relative_to(self.package_dir)) for path in self.package_dir.rglob("*")}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan_of(tmp_path_factory.mktemp("wheel"))


def plan_of(folder: Path, **changes: object) -> Plan:
    package = package_of_wheel(toy_vllm.wheel(folder, toy_vllm.files()))
    return make_plan(package, [plan_set(package, toy_vllm.patch_set(**changes), [8])])


PRISTINE = {path: toy_vllm.files()[path] for path in PATHS}


def patched(plan: Plan) -> dict[str, str]:
    return {file["path"]: file["patched_sha256"] for file in plan["files"]}


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {path: sha256_bytes(data) for path, data in files.items()}


def test_apply_twice_undo_twice_apply_again(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    before = host.everything()
    assert [host.run(plan), host.run(plan)] == [True, False]
    first = host.bytes()
    assert digests(first) == patched(plan)
    assert [host.run(None), host.run(None)] == [True, False]
    assert host.bytes() == PRISTINE
    assert host.run(plan)
    assert host.bytes() == first
    assert host.everything() == before


def test_the_original_bytes_are_kept_by_their_digest(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.run(plan)
    kept = {path.name: path.read_bytes() for path in (host.store / "pristine").iterdir()}
    assert kept == {sha256_bytes(data): data for data in PRISTINE.values()}


def test_files_that_share_an_inode_keep_their_bytes(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    cache = tmp_path / "cache.py"
    os.link(host.package_dir / toy_vllm.MODEL, cache)
    host.run(plan)
    assert cache.read_bytes() == PRISTINE[toy_vllm.MODEL]
    patched_inode = (host.package_dir / toy_vllm.MODEL).stat().st_ino
    assert patched_inode != cache.stat().st_ino
    os.link(host.package_dir / toy_vllm.MODEL, tmp_path / "other.py")
    host.run(None)
    assert digests({toy_vllm.MODEL: (tmp_path / "other.py").read_bytes()}) == {
        toy_vllm.MODEL: patched(plan)[toy_vllm.MODEL]
    }


def test_mode_owner_and_extended_attributes_stay(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    target = host.package_dir / toy_vllm.MODEL
    target.chmod(0o640)
    with suppress(PermissionError):
        os.chown(target, 1234, 2345)
    with suppress(OSError):
        os.setxattr(target, "user.aerie", b"kept")

    def metadata() -> tuple[object, ...]:
        status = target.stat()
        attributes = {name: os.getxattr(target, name) for name in os.listxattr(target)}
        return status.st_mode, status.st_uid, status.st_gid, attributes

    before = metadata()
    host.run(plan)
    assert metadata() == before
    host.run(None)
    assert metadata() == before


def test_stale_byte_code_goes(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    cached = host.package_dir / "models" / "__pycache__"
    cached.mkdir()
    for name in ("toy.cpython-312.pyc", "toy.cpython-312.opt-1.pyc", "toybox.cpython-312.pyc"):
        (cached / name).write_bytes(b"stale")
    host.run(plan)
    assert [path.name for path in cached.iterdir()] == ["toybox.cpython-312.pyc"]


def test_another_plan_replaces_the_first_and_undo_takes_both_back(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    other = plan_of(tmp_path, name="other", files=[{"path": toy_vllm.MODEL, "edits": [toy_vllm.OPT_IN]}])
    host.run(plan)
    assert host.run(other)
    assert digests(host.bytes()) == {**digests(PRISTINE), **patched(other)}
    host.run(None)
    assert host.bytes() == PRISTINE


def test_a_plan_without_a_set_takes_the_patch_back(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.run(plan)
    assert host.run({**plan, "set": None, "files": []})
    assert host.bytes() == PRISTINE


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hand_edit_is_refused_with_its_diff_and_nothing_is_written(tmp_path: Path, plan: Plan, when: str) -> None:
    host = Host(tmp_path)
    if when == "after":
        host.run(plan)
    edited = host.package_dir / toy_vllm.INTERFACES
    edited.write_bytes(edited.read_bytes() + b"# mine\n")
    state = host.bytes()
    for wanted in (plan, None):
        if wanted is None and when == "before":
            continue
        with pytest.raises(Refusal) as refusal:
            host.run(wanted)
        message = str(refusal.value)
        assert message.startswith(f"{host.package_dir / toy_vllm.INTERFACES} was changed by someone else")
        assert "install vLLM 0.33.0 again" in message
        assert "\n+# mine" in message
        assert host.bytes() == state


def test_an_environment_of_another_release_is_refused(tmp_path: Path, plan: Plan) -> None:
    changed = toy_vllm.files(models_toy_py=toy_vllm.files()[toy_vllm.MODEL] + b"# newer\n")
    host = Host(tmp_path, toy_vllm.environment(tmp_path, changed, version="0.34.0"))
    with pytest.raises(
        Refusal, match=r"belongs to vllm 0\.34\.0 .*the plan is for vLLM 0\.33\.0 .*plan with the wheel"
    ):
        host.run(plan)


def test_lost_originals_are_taken_from_the_plan_or_refused(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.run(plan)
    for kept in (host.store / "pristine").iterdir():
        kept.unlink()
    with pytest.raises(Refusal, match=r"has no copy of the original: install the wheel again"):
        host.run(None)
    package = package_of_directory(host.package_dir)
    patcher = Patcher(host.package_dir, host.store)
    patcher.write(patcher.absent(package, plan), package)
    assert host.bytes() == PRISTINE


def test_a_symbolic_link_is_refused(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    target = host.package_dir / toy_vllm.MODEL
    target.rename(tmp_path / "elsewhere.py")
    target.symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(Refusal, match="is a symbolic link"):
        host.run(plan)


def test_a_tampered_plan_is_refused(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    first, second = plan["files"]
    with pytest.raises(Refusal, match="make the plan again"):
        host.run({**plan, "files": [{**first, "content": second["content"]}, second]})
    with pytest.raises(Refusal, match="is no path inside the package"):
        host.run({**plan, "files": [{**first, "path": "../outside.py"}]})
    assert host.bytes() == PRISTINE


def test_two_runs_at_once_do_not_mix(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.store.mkdir()
    with (host.store / "patch.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Refusal, match="another run is patching with the store"):
            host.run(plan)
        assert host.bytes() == PRISTINE
    assert host.run(plan)


def in_child(action: Callable[[], None]) -> int:
    """Run ``action`` in a forked process and return its exit status; the parent is untouched by what it sets up."""
    child = os.fork()
    if not child:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


_KILLED = 137


def killed_at(step: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a child that is killed at its ``step``-th use of the file system; tell whether it was."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        seen += event in ("open", "os.rename", "os.remove", "os.mkdir", "os.link", "tempfile.mkstemp")
        if seen == step:
            # As abrupt as a kill: nothing is cleaned up, no buffer is written.
            os._exit(_KILLED)

    def run() -> None:
        sys.addaudithook(hook)
        action()

    status = in_child(run)
    assert status in (0, _KILLED)
    return status == _KILLED


@pytest.mark.parametrize("aim", ["present", "absent"])
def test_a_kill_at_any_step_is_finished_or_undone_by_the_next_run(tmp_path: Path, plan: Plan, aim: str) -> None:
    kills = between = 0
    for step in range(1, 200):
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
        kills += killed
        if not killed:
            break
    assert kills > 10
    assert between > 0


def test_an_interrupted_run_is_reported_once(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    steps = iter(range(1, 200))
    while digests(host.bytes()) != patched(plan):
        killed_at(next(steps), lambda: host.run(plan))
    package = package_of_directory(host.package_dir)
    work = Patcher(host.package_dir, host.store).present(package, plan)
    assert (work.interrupted, work.changed, list(work.moves)) == (True, True, [])
    assert [host.run(plan), host.run(plan)] == [True, False]


def test_a_full_disk_leaves_every_file_as_it_was(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    names = host.everything()
    smaller, larger = sorted(len(data) for data in PRISTINE.values())
    said = tmp_path / "said"

    def run() -> None:
        said.touch()
        # The originals of both files fit; the first file fits, the second does not.
        limit = larger + 10
        assert smaller + 30 < limit < larger + 30
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            host.run(plan)
        except Refusal as refusal:
            said.write_text(str(refusal))

    assert in_child(run) == 0
    assert said.read_text().startswith("cannot write ")
    assert "File too large; mend that and run again" in said.read_text()
    assert host.bytes() == PRISTINE
    assert host.everything() == names
    assert host.run(plan)
