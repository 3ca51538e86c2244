# SPDX-License-Identifier: Apache-2.0
"""Patching an installed package: all files or none, undone to the byte; and what became of files in between."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import toy_vllm
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patcher import Patcher
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import Package, package_of_directory
from patched_host import PATHS, PRISTINE, Host, Plan, digests, patched, plan_of

FIRST, SECOND = PATHS


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of()


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


def test_the_bytes_of_both_versions_are_kept_by_their_digest(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.run(plan)

    def kept(kind: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (host.store / kind).iterdir() if path.suffix != ".json"}

    assert kept("pristine") == {sha256_bytes(data): data for data in PRISTINE.values()}
    assert kept("patched") == {sha256_bytes(data): data for data in host.bytes().values()}


def test_mode_owner_and_extended_attributes_stay(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    target = host.package_dir / SECOND
    target.chmod(0o640)
    with suppress(PermissionError):
        os.chown(target, 1234, 2345)
    for name in ("user.aerie", "security.selinux"):
        # A label is kept where SELinux does not run, too; both need a file system that can.
        with suppress(OSError):
            os.setxattr(target, name, b"system_u:object_r:lib_t:s0")

    def metadata() -> tuple[object, ...]:
        status = target.stat()
        attributes = {name: os.getxattr(target, name) for name in os.listxattr(target)}
        return status.st_mode, status.st_uid, status.st_gid, attributes

    before = metadata()
    assert host.run(plan)
    assert metadata() == before
    assert host.run(None)
    assert metadata() == before


def test_stale_byte_code_goes(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    cached = host.package_dir / "models" / "__pycache__"
    cached.mkdir()
    for wanted in (plan, None):
        for name in ("toy.cpython-312.pyc", "toy.cpython-312.opt-1.pyc", "toybox.cpython-312.pyc"):
            (cached / name).write_bytes(b"stale")
        host.run(wanted)
        assert [path.name for path in cached.iterdir()] == ["toybox.cpython-312.pyc"]


def test_another_plan_replaces_the_first_and_undo_takes_both_back(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    other = plan_of(name="other", files=[{"path": toy_vllm.MODEL, "edits": [toy_vllm.OPT_IN]}])
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
    shutil.rmtree(host.store / "pristine")
    assert host.refusal(None).endswith("has no copy of the original: install vllm 0.33.0 again")
    package = package_of_directory(host.package_dir)
    patcher = Patcher(host.package_dir, host.store)
    patcher.write(patcher.absent(package, plan), package)
    assert host.bytes() == PRISTINE


def test_a_symbolic_link_is_refused(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    target = host.package_dir / SECOND
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


def refused_alike(host: Host, *wanted: Plan | None) -> str:
    """Return the one message that each of the ``wanted`` runs is refused with, and that nothing is written."""
    before = host.bytes()
    (message,) = {host.refusal(plan) for plan in wanted}
    assert host.bytes() == before
    assert "so nothing was written" in message
    return message


def test_an_edit_before_the_patch_is_refused_with_its_diff(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    edited = host.package_dir / FIRST
    edited.write_bytes(edited.read_bytes() + b"# mine\n")
    message = refused_alike(host, plan)
    assert message.startswith(f"{edited} was edited by someone else")
    assert "keep the change elsewhere and install vllm 0.33.0 again" in message
    assert "How it differs from the file of vllm 0.33.0:" in message
    assert message.endswith("\n+# mine")
    assert not host.run(None)
    assert host.bytes()[FIRST].endswith(b"# mine\n")


def test_an_edit_after_the_patch_is_refused_with_that_edit_alone(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.run(plan)
    ours = host.bytes()[FIRST]
    edited = host.package_dir / FIRST
    edited.write_bytes(ours + b"# mine\n")
    message = refused_alike(host, plan, None)
    assert message.startswith(f"{edited} was edited after Aerie patched it")
    assert "take that edit out" in message
    changes = [line for line in message.splitlines() if line.startswith(("+", "-"))]
    assert changes == ["--- a/vllm/models/interfaces.py", "+++ b/vllm/models/interfaces.py", "+# mine"]
    edited.write_bytes(ours)
    assert host.run(None)
    assert host.bytes() == PRISTINE


def test_a_long_edit_is_shown_in_part(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    (host.package_dir / FIRST).write_text("".join(f"x{number} = {number}\n" for number in range(500)))
    message = refused_alike(host, plan)
    assert message.count("\n") < 70
    assert message.endswith(" more lines)")


def test_another_patch_for_the_same_thing_is_told_from_an_edit(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    edited = host.package_dir / FIRST
    edited.write_bytes(edited.read_bytes().replace(b"class Mixin:\n", b"class Mixin:\n    touched = 1\n"))
    message = refused_alike(host, plan)
    assert message.startswith(f"{edited} holds another patch for the same thing, not Aerie's (it brings touched)")
    assert "keep that patch and drop the patch set, or take it out (install vllm 0.33.0 again)" in message


def test_a_file_that_is_patched_in_part_names_the_edits_that_it_lacks(tmp_path: Path) -> None:
    two = [toy_vllm.OPT_IN, {"id": "mark", "op": "add_class_attribute", "class": "Wrapper", "code": "touched = True"}]
    whole = plan_of(files=[{"path": toy_vllm.MODEL, "edits": two}])
    host = Host(tmp_path)
    host.run(whole)
    edited = host.package_dir / toy_vllm.MODEL
    lines = edited.read_text().splitlines(keepends=True)
    edited.write_text("".join(line for line in lines if "# aerie toy:mark" not in line))
    message = refused_alike(host, whole, None)
    assert message.startswith(f"{edited} is patched in part: 1 of Aerie's 2 edits are missing (toy:mark)")
    assert ": install vllm 0.33.0 again\n" in message


def test_the_patch_of_another_aerie_is_told_from_an_edit(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    old = Host(tmp_path, host.package_dir)
    old.store = tmp_path / "elsewhere"
    old.run(plan_of(name="older"))
    message = refused_alike(host, plan)
    assert " was patched by another Aerie, or with another store (edits older:also), so nothing was written" in message
    assert "take the patch out with the Aerie and the store that wrote it" in message
    assert "carries Aerie's marks, but" in host.refusal(None)
    assert old.run(None)
    assert host.run(plan)


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_was_cut_off_is_named_so(tmp_path: Path, plan: Plan, size: int) -> None:
    host = Host(tmp_path)
    os.truncate(host.package_dir / SECOND, size)
    whole = len(PRISTINE[SECOND])
    message = refused_alike(host, plan)
    assert f" is cut off: it holds the first {size} of {whole} bytes of the file of vllm 0.33.0" in message


def test_a_file_that_is_gone_is_refused(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    (host.package_dir / SECOND).unlink()
    assert host.refusal(plan) == f"{host.package_dir / SECOND} is missing; install vllm-0.33.0.dist-info again"
    assert (host.package_dir / FIRST).read_bytes() == PRISTINE[FIRST]


def upgraded(host: Host, **files: bytes) -> None:
    """Install another release over the one that is there."""
    shutil.rmtree(host.package_dir.parent)
    toy_vllm.environment(host.package_dir.parents[1], toy_vllm.files(**files), version="0.33.1")


def test_an_upgrade_takes_the_patch_with_it_and_that_is_said(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.run(plan)
    newer = toy_vllm.files()[toy_vllm.MODEL] + b"# newer\n"
    upgraded(host, models_toy_py=newer)
    (note,) = host.work(None).notes
    assert note == "vLLM 0.33.0, which was patched with toy, was replaced by vllm 0.33.1: the patch went with it"
    assert not host.run(None)
    assert host.work(None).notes == []
    assert (host.package_dir / toy_vllm.MODEL).read_bytes() == newer


def test_a_file_that_the_upgrade_did_not_replace_is_refused(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.run(plan)
    ours = host.bytes()[toy_vllm.MODEL]
    newer = toy_vllm.files()[toy_vllm.MODEL] + b"# newer\n"
    upgraded(host, models_toy_py=newer)
    package_dir = host.package_dir
    (package_dir / toy_vllm.MODEL).write_bytes(ours)
    for wanted in (plan_for(package_dir, newer), None):
        message = refused_alike(host, wanted)
        assert message.startswith(
            f"{package_dir / toy_vllm.MODEL} is still the file of vLLM 0.33.0, as Aerie patched it, but the RECORD is "
            "that of vllm 0.33.1: the upgrade did not replace it"
        )
        assert message.endswith("; install vllm 0.33.1 again")


def plan_for(package_dir: Path, model: bytes) -> Plan:
    """Return the plan for the release of ``package_dir``, whose model is to be ``model``."""
    installed = package_of_directory(package_dir)
    return plan_of(
        Package(installed.distribution, installed.version, {}, toy_vllm.files(models_toy_py=model).__getitem__)
    )


def test_a_file_that_was_put_back_is_patched_again_and_that_is_said(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    host.run(plan)
    (host.package_dir / SECOND).write_bytes(PRISTINE[SECOND])
    work = host.work(plan)
    assert work.notes == [f"{SECOND} was patched with toy and put back by someone"]
    assert [move.path for move in work.moves] == [SECOND]
    host.run(plan)
    assert digests(host.bytes()) == patched(plan)


@pytest.mark.parametrize(("put_back", "extent"), [((), "whole"), ((SECOND,), "partly applied")])
def test_a_patch_that_the_store_knows_nothing_of_is_taken_over(
    tmp_path: Path, plan: Plan, put_back: tuple[str, ...], extent: str
) -> None:
    host = Host(tmp_path)
    host.run(plan)
    for path in put_back:
        (host.package_dir / path).write_bytes(PRISTINE[path])
    shutil.rmtree(host.store)
    assert "carries Aerie's marks" in host.refusal(None)
    there = ", ".join(path for path in PATHS if path not in put_back)
    assert host.work(plan).notes == [f"{there} held this patch ({extent}), of which {host.store} had no record"]
    assert host.run(plan) == bool(put_back)
    assert digests(host.bytes()) == patched(plan)
    host.run(None)
    assert host.bytes() == PRISTINE


def test_an_environment_without_hashes_is_refused_with_the_way_out(tmp_path: Path, plan: Plan) -> None:
    host = Host(tmp_path)
    record = host.package_dir.with_name("vllm-0.33.0.dist-info") / "RECORD"
    record.write_text(toy_vllm.record(toy_vllm.files(), hashes=False))
    message = host.refusal(plan)
    assert "the RECORD of vllm 0.33.0 has no hash for vllm/models/" in message
    assert message.endswith("install the released wheel, or let Aerie make the environment")
    record.unlink()
    message = host.refusal(plan)
    assert message.startswith(f"{host.package_dir} must belong to one distribution with a RECORD, found none")
    assert message.endswith("install the released wheel, or let Aerie make the environment")
