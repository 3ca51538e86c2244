# SPDX-License-Identifier: Apache-2.0
"""What a patch set does to a release is decided from the release's code."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import toy_vllm
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patchset import SetPlan, make_plan, plan_set
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import Package, package_of_wheel


def package(tmp_path: Path, version: str = "0.33.0", **replaced: bytes) -> Package:
    return package_of_wheel(toy_vllm.wheel(tmp_path, toy_vllm.files(**replaced), version=version))


def plan(tmp_path: Path, version: str = "0.33.0", **changes: object) -> SetPlan:
    return plan_set(package(tmp_path, version), toy_vllm.patch_set(**changes), [8])


def test_a_set_that_is_needed_applies_with_its_files_and_proof(tmp_path: Path) -> None:
    planned = plan(tmp_path)
    assert (planned.name, planned.state, planned.warnings) == ("toy", "applies", [])
    assert [file.path for file in planned.files] == [toy_vllm.MODEL, toy_vllm.INTERFACES]
    assert planned.proof.run > 0
    assert planned.reason == f"vLLM 0.33.0 needs it; {planned.proof.run} of {planned.proof.run} symbolic cases passed"
    assert "-        taps = []\n+        taps: list = []  # aerie toy:opt-in\n" in planned.files[0].diff()


def test_a_release_that_has_it_is_native_whatever_its_version(tmp_path: Path) -> None:
    native = toy_vllm.files()[toy_vllm.MODEL].replace(b"    supports_aux", b"    native_mark = True\n    supports_aux")
    for version in ("0.29.0", "0.33.0", "1.0.0"):
        planned = plan_set(package(tmp_path, version, models_toy_py=native), toy_vllm.patch_set(), [8])
        assert (planned.state, planned.files) == ("native", [])
        assert planned.reason == f"vLLM {version} has it: class Model attribute native_mark in models/toy.py"


def test_an_older_release_is_refused_and_a_newer_one_is_answered_with_a_warning(tmp_path: Path) -> None:
    older, newer = plan(tmp_path, "0.29.1"), plan(tmp_path, "0.34.0rc1")
    assert older.state == "refused"
    assert older.reason == "toy is refused for vLLM 0.29.1: it is for >=0.30,<0.34"
    assert newer.state == "applies"
    assert newer.warnings == ["toy is tested for >=0.30,<0.34, not for vLLM 0.34.0rc1: its code decides"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"requires": [{"path": toy_vllm.INTERFACES, "class": "Mixin", "method": "absent"}]},
            "it needs class Mixin method absent in models/interfaces.py, which is not there",
        ),
        (
            {"requires": [{"path": "absent.py", "function": "f"}]},
            "toy is refused for vLLM 0.33.0: it needs function f in absent.py, which is not there",
        ),
        (
            {"files": [{"path": toy_vllm.MODEL, "edits": [{**toy_vllm.OPT_IN, "statement": "taps = 1"}]}]},
            "toy is refused for vLLM 0.33.0: models/toy.py, class Model, method forward: looked for the statement "
            "`taps = 1`, found 0, need exactly 1 (edit toy:opt-in)",
        ),
        (
            {"proof": {**toy_vllm.PROOF, "pipeline_sizes": [2]}},
            "first failure: pipeline size 2 (layers 4+4), ids (2, 4, 5): the source raises ValueError: CausalLM does "
            "not support eagle3 with pipeline parallelism",
        ),
    ],
)
def test_a_refusal_names_the_release_and_the_reason(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    planned = plan(tmp_path, **changes)
    assert planned.state == "refused"
    assert planned.reason.startswith("toy is refused for vLLM 0.33.0: ")
    assert reason in planned.reason


def test_a_set_that_is_not_well_formed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="patch set toy must have exactly the keys"):
        plan(tmp_path, unknown=1)
    assert "is no version range" in plan(tmp_path, versions="about 0.33").reason


def test_a_plan_carries_the_bytes_and_their_digests(tmp_path: Path) -> None:
    release = package(tmp_path)
    planned = plan_set(release, toy_vllm.patch_set(), [8])
    document = make_plan(release, [planned])
    assert (document["vllm_version"], document["distribution"], document["set"]) == ("0.33.0", "vllm", "toy")
    for file, entry in zip(planned.files, document["files"], strict=True):
        assert entry["path"] == file.path
        assert entry["pristine_sha256"] == release.pristine_sha256(file.path)
        assert sha256_bytes(base64.b64decode(entry["content"])) == entry["patched_sha256"] != entry["pristine_sha256"]


def test_planning_is_deterministic(tmp_path: Path) -> None:
    release = package(tmp_path)
    plans = [make_plan(release, [plan_set(release, toy_vllm.patch_set(), [8])]) for _ in range(2)]
    assert plans[0] == plans[1]


def test_two_sets_that_apply_are_refused(tmp_path: Path) -> None:
    release = package(tmp_path)
    both = [plan_set(release, toy_vllm.patch_set(name=name), [8]) for name in ("one", "two")]
    with pytest.raises(
        Refusal, match=r"one and two both apply to vLLM 0\.33\.0, and a release gets at most one patch set"
    ):
        make_plan(release, both)
