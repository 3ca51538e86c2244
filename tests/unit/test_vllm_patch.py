# SPDX-License-Identifier: Apache-2.0
"""The modules vllm_patch_plan and vllm_patch, run as Ansible runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_vllm
from modules import run_module

Run = Callable[..., dict[str, Any]]
PATHS = (toy_vllm.MODEL, toy_vllm.INTERFACES)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda module, check_mode=False, **arguments: run_module(module, arguments, capsys, check_mode)


@pytest.fixture
def planned(run: Run, tmp_path: Path) -> dict[str, Any]:
    return run("vllm_patch_plan", **plan_arguments(tmp_path))


OPT_IN = {
    "id": "opt-in",
    "op": "insert_in_method",
    "class": "Model",
    "method": "__init__",
    "after": "super().__init__()",
    "code": "self.supports_aux_hidden_states_over_pp = True",
}


def patch_set(**changes: object) -> dict[str, Any]:
    """Return a patch set with an edit in each of two files, without which the toy cannot carry taps over stages."""
    also = {"id": "also", "op": "add_class_attribute", "class": "Mixin", "code": "touched = True"}
    files = [{"path": toy_vllm.MODEL, "edits": [OPT_IN]}, {"path": toy_vllm.INTERFACES, "edits": [also]}]
    proof = {**toy_vllm.PROOF, "pipeline_sizes": [1, 2, 3]}
    return toy_vllm.patch_set(**{"files": files, "proof": proof, "capabilities": {}, **changes})


def plan_arguments(folder: Path, **changes: object) -> dict[str, Any]:
    wheel = toy_vllm.wheel(folder, toy_vllm.files())
    return {"wheel": str(wheel), "patch_sets": [patch_set(**changes)], "layer_counts": [8]}


def contents(package_dir: Path) -> dict[str, bytes]:
    return {path: (package_dir / path).read_bytes() for path in PATHS}


def digests(planned: dict[str, Any], which: str) -> dict[str, str]:
    return {path: digest[which] for path, digest in planned["sets"]["toy"]["files"].items()}


@pytest.mark.parametrize("check_mode", [False, True])
def test_a_plan_says_what_it_does_and_proves_it(run: Run, tmp_path: Path, check_mode: bool) -> None:
    result = run("vllm_patch_plan", check_mode, **plan_arguments(tmp_path))
    assert (result["failed"], result["changed"]) == (False, False)
    assert (result["vllm_version"], result["distribution"]) == ("0.33.0", "vllm")
    assert result["sets"]["toy"]["state"] == "applies"
    assert set(result["sets"]["toy"]["files"]) == set(PATHS)
    proof = result["proof"]
    assert 0 < proof["run"] == proof["passed"]
    assert proof["summary"] == f"{proof['run']} of {proof['run']} symbolic cases passed"
    assert "+        self.supports_aux_hidden_states_over_pp = True  # aerie toy:opt-in\n" in result["patch"]
    assert result["diff"] == {"prepared": result["patch"]}


def test_a_plan_of_a_release_that_needs_nothing_is_empty(run: Run, tmp_path: Path) -> None:
    native = [{"path": toy_vllm.MODEL, "class": "Model"}]
    result = run("vllm_patch_plan", **plan_arguments(tmp_path, native=native))
    assert result["sets"]["toy"]["state"] == "native"
    assert (result["plan"]["set"], result["plan"]["files"], result["patch"]) == (None, [], "")


def test_a_set_that_is_refused_fails_with_its_reason(run: Run, tmp_path: Path) -> None:
    result = run("vllm_patch_plan", **plan_arguments(tmp_path, versions=">=0.40"))
    assert result["failed"]
    assert result["msg"] == "toy is refused for vLLM 0.33.0: it is for >=0.40"


def test_a_proof_that_fails_fails_with_its_case(run: Run, tmp_path: Path) -> None:
    useless = [{**OPT_IN, "code": "self.useless = True"}]
    result = run("vllm_patch_plan", **plan_arguments(tmp_path, files=[{"path": toy_vllm.MODEL, "edits": useless}]))
    assert result["failed"]
    assert "first failure: pipeline size 2 (layers 4+4), ids (2, 4, 5): the source raises ValueError" in result["msg"]


def test_check_mode_predicts_what_the_run_does(run: Run, tmp_path: Path, planned: dict[str, Any]) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    before = contents(package_dir)
    arguments = {"package_dir": str(package_dir), "plan": planned["plan"], "store": str(tmp_path / "store")}
    predicted = run("vllm_patch", True, **arguments)
    assert contents(package_dir) == before
    assert not (tmp_path / "store").exists()
    done = run("vllm_patch", **arguments)
    assert [predicted["changed"], done["changed"]] == [True, True]
    assert predicted["diff"] == done["diff"]
    assert predicted["sets"]["toy"]["files"] == done["sets"]["toy"]["files"] == planned["sets"]["toy"]["files"]
    assert [predicted["sets"]["toy"]["state"], done["sets"]["toy"]["state"]] == ["applies", "applied"]
    for shown in done["diff"]:
        path = str(Path(shown["after_header"]).relative_to(package_dir))
        assert shown["before"].encode() == before[path]
        assert shown["after"].encode() == contents(package_dir)[path]
    again = run("vllm_patch", **arguments)
    assert (again["changed"], again["diff"]) == (False, [])
    assert again["sets"]["toy"]["state"] == "applied"
    after = digests(planned, "after")
    assert again["sets"]["toy"]["files"] == {path: {"before": after[path], "after": after[path]} for path in PATHS}


def test_check_mode_predicts_from_the_plan_where_nothing_is_installed(
    run: Run, tmp_path: Path, planned: dict[str, Any]
) -> None:
    package_dir = tmp_path / "later" / "vllm"
    arguments = {"package_dir": str(package_dir), "plan": planned["plan"], "store": str(tmp_path / "store")}
    predicted = run("vllm_patch", True, **arguments)
    assert (predicted["failed"], predicted["changed"], predicted["vllm_version"]) == (False, True, "0.33.0")
    assert predicted["sets"]["toy"]["files"] == planned["sets"]["toy"]["files"]
    toy_vllm.environment(tmp_path, toy_vllm.files())
    (tmp_path / "site-packages").rename(tmp_path / "later")
    assert run("vllm_patch", **arguments)["diff"] == predicted["diff"]
    refused = run("vllm_patch", package_dir=str(tmp_path / "absent"), plan=planned["plan"])
    assert refused["msg"] == f"{tmp_path / 'absent'} is no directory: install vLLM there first, or correct package_dir"


def test_absent_restores_the_bytes_and_needs_no_plan(run: Run, tmp_path: Path, planned: dict[str, Any]) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    before = contents(package_dir)
    common = {"package_dir": str(package_dir), "store": str(tmp_path / "store")}
    run("vllm_patch", plan=planned["plan"], **common)
    patched = contents(package_dir)
    predicted = run("vllm_patch", True, state="absent", **common)
    assert contents(package_dir) == patched
    done = run("vllm_patch", state="absent", **common)
    assert contents(package_dir) == before
    assert (predicted["changed"], done["changed"]) == (True, True)
    assert predicted["diff"] == done["diff"]
    assert not run("vllm_patch", state="absent", **common)["changed"]


def test_patch_sets_are_planned_on_the_host_from_the_pristine_files(
    run: Run, tmp_path: Path, planned: dict[str, Any]
) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    arguments = {
        "package_dir": str(package_dir),
        "patch_sets": [patch_set()],
        "layer_counts": [8],
        "store": str(tmp_path / "store"),
    }
    assert [run("vllm_patch", **arguments)["changed"] for _ in range(2)] == [True, False]
    by_plan = run("vllm_patch", package_dir=str(package_dir), plan=planned["plan"], store=str(tmp_path / "store"))
    assert not by_plan["changed"]
    refused = run("vllm_patch", **{**arguments, "patch_sets": [patch_set(versions=">=0.40")]})
    assert refused["msg"] == "toy is refused for vLLM 0.33.0: it is for >=0.40"


def test_a_hand_edit_fails_without_a_traceback(run: Run, tmp_path: Path, planned: dict[str, Any]) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    with (package_dir / toy_vllm.MODEL).open("ab") as stream:
        stream.write(b"mine = 1\n")
    before = contents(package_dir)
    result = run("vllm_patch", package_dir=str(package_dir), plan=planned["plan"], store=str(tmp_path / "store"))
    assert result["failed"]
    assert result["msg"].startswith(f"{package_dir / toy_vllm.MODEL} was edited by someone else")
    assert "\n+mine = 1" in result["msg"]
    assert contents(package_dir) == before


def test_an_edit_of_the_patch_is_refused_on_undo_with_its_diff(
    run: Run, tmp_path: Path, planned: dict[str, Any]
) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    common = {"package_dir": str(package_dir), "store": str(tmp_path / "store")}
    run("vllm_patch", plan=planned["plan"], **common)
    with (package_dir / toy_vllm.MODEL).open("ab") as stream:
        stream.write(b"mine = 1\n")
    before = contents(package_dir)
    for check_mode in (True, False):
        result = run("vllm_patch", check_mode, state="absent", **common)
        assert result["failed"]
        assert result["msg"].startswith(f"{package_dir / toy_vllm.MODEL} was edited after Aerie patched it")
        assert "\n+mine = 1" in result["msg"]
    assert contents(package_dir) == before


def test_what_became_of_an_earlier_patch_is_warned_of(run: Run, tmp_path: Path, planned: dict[str, Any]) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    arguments = {"package_dir": str(package_dir), "plan": planned["plan"], "store": str(tmp_path / "store")}
    pristine = contents(package_dir)
    assert run("vllm_patch", **arguments)["notes"] == []
    (package_dir / toy_vllm.MODEL).write_bytes(pristine[toy_vllm.MODEL])
    result = run("vllm_patch", True, **arguments)
    assert result["notes"] == [f"{toy_vllm.MODEL} was patched with toy and put back by someone"]
    assert result["notes"][0] in str(result["warnings"])
    assert result["changed"]


def test_a_release_that_the_set_was_not_tested_for_is_planned_with_a_warning(run: Run, tmp_path: Path) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files(), version="0.40.0")
    arguments = {"package_dir": str(package_dir), "patch_sets": [patch_set()], "store": str(tmp_path / "store")}
    result = run("vllm_patch", **arguments)
    assert (result["failed"], result["changed"]) == (False, True)
    assert result["notes"] == ["toy is tested for >=0.30,<0.34, not for vLLM 0.40.0: its code decides"]


def test_two_sets_for_one_release_are_refused(run: Run, tmp_path: Path) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    before = contents(package_dir)
    sets = [patch_set(), patch_set(name="second")]
    result = run("vllm_patch", package_dir=str(package_dir), patch_sets=sets, store=str(tmp_path / "store"))
    assert result["failed"]
    assert "a release gets at most one patch set" in result["msg"]
    assert contents(package_dir) == before


def test_a_file_that_cannot_be_read_fails_without_a_traceback(
    run: Run, tmp_path: Path, planned: dict[str, Any]
) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    (package_dir / toy_vllm.MODEL).unlink()
    (package_dir / toy_vllm.MODEL).mkdir()
    result = run("vllm_patch", package_dir=str(package_dir), plan=planned["plan"], store=str(tmp_path / "store"))
    assert result["failed"]
    assert result["msg"] == f"cannot read {package_dir / toy_vllm.MODEL}: Is a directory; mend that and run again"


@pytest.mark.parametrize("arguments", [{"plan": {"files": []}}, {"state": "absent"}])
def test_a_damaged_record_fails_without_a_traceback(run: Run, tmp_path: Path, arguments: dict[str, Any]) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    record = package_dir.with_name("vllm-0.33.0.dist-info") / "RECORD"
    record.write_text("vllm/__init__.py,sha256=47DEQ\n")
    result = run("vllm_patch", package_dir=str(package_dir), store=str(tmp_path / "store"), **arguments)
    assert result["failed"]
    assert result["msg"] == (
        f"{record} is damaged ('47DEQ' is no sha256 of vllm/__init__.py): install vllm-0.33.0.dist-info again"
    )


def test_present_needs_a_plan_or_patch_sets(run: Run, tmp_path: Path) -> None:
    result = run("vllm_patch", package_dir=str(tmp_path))
    assert result["failed"]
    assert "plan" in result["msg"]
    assert "patch_sets" in result["msg"]
