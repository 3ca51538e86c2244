# SPDX-License-Identifier: Apache-2.0
"""What a patch set does to a release is decided from the release's code."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import toy_vllm
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patchset import Capability, Selection, SetPlan, make_plan, plan_set, plan_sets
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import Package, package_of_wheel

NATIVE_MODEL = (
    toy_vllm.files()[toy_vllm.MODEL]
    .replace(b"    supports_aux", b"    native_mark = True\n    supports_aux")
    .replace(b"_over_pp = False", b"_over_pp = True")
)
OPT_OUT = {"path": toy_vllm.INTERFACES, "class": "Mixin", "method": "absent"}
REGISTRY = b'_MODELS = {"ToyForCausalLM": ("toy", "CausalLM")}\n'


def package(tmp_path: Path, version: str = "0.33.0", **replaced: bytes) -> Package:
    files = {**toy_vllm.files(**replaced), "model_executor/models/registry.py": REGISTRY}
    return package_of_wheel(toy_vllm.wheel(tmp_path, files, version=version))


def plan(tmp_path: Path, version: str = "0.33.0", **changes: object) -> SetPlan:
    return plan_set(package(tmp_path, version), toy_vllm.patch_set(**changes), [8])


def select(tmp_path: Path, *patch_sets: dict[str, Any], architectures: tuple[str, ...] = ()) -> Selection:
    return plan_sets(package(tmp_path), patch_sets, [8], architectures)


def test_a_set_that_is_needed_applies_with_its_files_and_proof(tmp_path: Path) -> None:
    planned = plan(tmp_path)
    assert (planned.name, planned.state, planned.warnings) == ("toy", "applies", [])
    assert [file.path for file in planned.files] == [toy_vllm.MODEL, toy_vllm.INTERFACES]
    assert planned.proof.run > 0
    assert planned.reason == f"vLLM 0.33.0 needs it; {planned.proof.run} of {planned.proof.run} symbolic cases passed"
    assert "+    supports_aux_hidden_states_over_pp = True  # aerie toy:opt-in\n" in planned.files[0].diff()


def test_a_release_that_has_it_is_native_whatever_its_version(tmp_path: Path) -> None:
    for version in ("0.29.0", "0.33.0", "1.0.0"):
        planned = plan_set(package(tmp_path, version, models_toy_py=NATIVE_MODEL), toy_vllm.patch_set(), [8])
        assert (planned.state, planned.files, planned.warnings) == ("native", [], [])
        found = "class Model attribute native_mark in models/toy.py"
        assert planned.reason.startswith(f"vLLM {version} has it: {found}; ")
        assert planned.reason.endswith("symbolic cases passed")


def test_a_release_whose_own_code_passes_the_proof_is_native_without_any_mark(tmp_path: Path) -> None:
    opted_in = toy_vllm.files()[toy_vllm.MODEL].replace(b"_over_pp = False", b"_over_pp = True")
    planned = plan_set(package(tmp_path, models_toy_py=opted_in), toy_vllm.patch_set(native=[]), [8])
    assert planned.state == "native"
    assert planned.proof.run > 0


def test_a_release_whose_own_code_fails_over_stages_has_it_for_one_stage_only(tmp_path: Path) -> None:
    wrong = NATIVE_MODEL.replace(b"start=self.start_layer", b"start=0")
    release = package(tmp_path, models_toy_py=wrong)
    never = {"pipeline_parallel": {"supported": False, "reason": "the runner cannot"}}
    earlier = toy_vllm.patch_set(name="earlier", proof={**toy_vllm.PROOF, "pipeline_sizes": [1]}, capabilities=never)
    capabilities: dict[str, Any]
    for capabilities in ({"pipeline_parallel": {}}, {}):
        chosen = plan_sets(release, [earlier, toy_vllm.patch_set(capabilities=capabilities)], [8])
        planned = chosen.plans[-1]
        assert (planned.state, chosen.plan["files"]) == ("native", [])
        assert planned.reason.startswith("vLLM 0.33.0 has it for one pipeline stage: class Model attribute native_mark")
        assert f"{planned.proof.run - len(planned.proof.failures)} of {planned.proof.run} symbolic" in planned.reason
        (warning,) = chosen.warnings
        assert warning.startswith("vLLM 0.33.0 has toy for one pipeline stage only: over several its own code fails")
        over_stages = chosen.capabilities["pipeline_parallel"]
        assert not over_stages.supported
        assert over_stages.reason == f"its own code fails the symbolic check: {planned.proof.summary}"
        assert "first failure: pipeline size 2 " in over_stages.reason
        assert "lost tap" in over_stages.reason


def test_a_release_whose_own_code_fails_on_one_stage_is_refused_with_the_way_out(tmp_path: Path) -> None:
    wrong = NATIVE_MODEL.replace(b"taps.append(self.gathered(hidden_states + residual, positions))", b"pass")
    release = package(tmp_path, models_toy_py=wrong)
    planned = plan_set(release, toy_vllm.patch_set(), [8])
    assert (planned.state, planned.files, planned.capabilities) == ("refused", [], {})
    assert planned.reason.startswith(
        "toy is refused for vLLM 0.33.0, which says that it has it "
        "(class Model attribute native_mark in models/toy.py): its own code fails the symbolic check: "
    )
    assert "first failure: pipeline size 1 (layers 8), ids (2, 4, 5): lost tap stream 2" in planned.reason
    assert planned.reason.endswith("leave toy out of vllm_patch_sets and do without its proof")
    with pytest.raises(Refusal) as refusal:
        plan_sets(release, [toy_vllm.patch_set()], [8])
    assert str(refusal.value) == planned.reason


def test_an_attribute_counts_as_the_value_that_is_asked_for(tmp_path: Path) -> None:
    flag = {"path": toy_vllm.MODEL, "class": "Model", "attribute": "supports_aux_hidden_states_over_pp"}
    for value, state in ((False, "applies"), (True, "not needed"), (0, "not needed")):
        assert plan(tmp_path, requires=[{**flag, "value": value}]).state == state
    asked = "class Model attribute supports_aux_hidden_states_over_pp = True in models/toy.py"
    assert (
        plan(tmp_path, requires=[{**flag, "value": True}]).reason == f"toy is for code with {asked}, unlike vLLM 0.33.0"
    )


@pytest.mark.parametrize("layers", [[], [0], [61, -1]])
def test_numbers_of_layers_that_prove_nothing_are_refused_by_name(tmp_path: Path, layers: list[int]) -> None:
    release = package(tmp_path, models_toy_py=NATIVE_MODEL)
    with pytest.raises(Refusal) as refusal:
        plan_sets(release, [toy_vllm.patch_set()], layers)
    assert str(refusal.value).startswith(f"vllm_patch_layer_counts is {layers}, which proves nothing: name the numbers")
    # Without patch sets there is nothing to prove.
    assert plan_sets(release, [], layers).plan["files"] == []


def test_an_older_release_is_refused_and_a_newer_one_is_answered_with_a_warning(tmp_path: Path) -> None:
    older, newer = plan(tmp_path, "0.29.1"), plan(tmp_path, "0.34.0rc1")
    assert older.state == "refused"
    assert older.reason == "toy is refused for vLLM 0.29.1: it is for >=0.30,<0.34"
    assert newer.state == "applies"
    assert newer.warnings == ["toy is tested for >=0.30,<0.34, not for vLLM 0.34.0rc1: its code decides"]


@pytest.mark.parametrize(
    ("fact", "described"),
    [
        (OPT_OUT, "class Mixin method absent in models/interfaces.py"),
        ({"path": "absent.py", "function": "f"}, "function f in absent.py"),
        (
            {"path": toy_vllm.MODEL, "class": "Model", "method": "forward", "statement": "taps = 1"},
            "class Model method forward with `taps = 1` in models/toy.py",
        ),
        (
            {"path": toy_vllm.MODEL, "class": "Model", "base": "Mixin", "absent": True},
            "no class Model base Mixin in models/toy.py",
        ),
    ],
)
def test_a_set_for_other_code_is_not_needed(tmp_path: Path, fact: dict[str, Any], described: str) -> None:
    planned = plan(tmp_path, requires=[fact])
    assert planned.state == "not needed"
    assert planned.reason == f"toy is for code with {described}, unlike vLLM 0.33.0"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"files": [{"path": toy_vllm.MODEL, "edits": [{**toy_vllm.OPT_IN, "statement": "taps = 1"}]}]},
            "toy is refused for vLLM 0.33.0: models/toy.py, class Model: looked for the statement `taps = 1`, found 0, "
            "need exactly 1 (edit toy:opt-in)",
        ),
        (
            {"files": [{"path": toy_vllm.MODEL, "edits": [{**toy_vllm.OPT_IN, "code": "mystery = True"}]}]},
            "first failure: pipeline size 2 (layers 4+4), ids (2, 4, 5): the source raises ValueError: CausalLM does "
            "not support eagle3 with pipeline parallelism",
        ),
        (
            {"files": [{"path": "absent.py", "edits": [toy_vllm.OPT_IN]}]},
            "vllm-0.33.0-py3-none-any.whl has no file vllm/absent.py",
        ),
    ],
)
def test_a_refusal_names_the_release_and_the_reason(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    planned = plan(tmp_path, **changes)
    assert planned.state == "refused"
    assert planned.reason.startswith("toy is refused for vLLM 0.33.0: ")
    assert reason in planned.reason
    with pytest.raises(Refusal) as refusal:
        select(tmp_path, toy_vllm.patch_set(**changes))
    assert str(refusal.value) == planned.reason


def test_a_set_that_is_not_well_formed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="patch set toy must have exactly the keys"):
        plan(tmp_path, unknown=1)
    assert "is no version range" in plan(tmp_path, versions="about 0.33").reason


@pytest.mark.parametrize("present", [True, False])
def test_an_edit_and_a_file_are_left_out_where_their_facts_do_not_hold(tmp_path: Path, present: bool) -> None:
    name = "Wrapper" if present else "Absent"
    mark = {"id": "mark", "op": "add_class_attribute", "class": "Wrapper", "code": "mark = True"}
    files = [
        {"path": toy_vllm.MODEL, "edits": [toy_vllm.OPT_IN, {**mark, "when": [{"class": name}]}]},
        {
            "path": toy_vllm.INTERFACES,
            "when": [{"path": toy_vllm.MODEL, "class": name}],
            "edits": [{**mark, "class": "Mixin"}],
        },
    ]
    planned = plan(tmp_path, files=files)
    assert planned.state == "applies"
    assert [file.path for file in planned.files] == [toy_vllm.MODEL, *([toy_vllm.INTERFACES] if present else [])]
    assert (b"mark = True" in planned.files[0].patched) == present


def test_an_optional_part_of_the_proof_is_left_out_where_its_file_is_not_there(tmp_path: Path) -> None:
    wrapper = toy_vllm.PROOF["wrapper"]
    absent = {**toy_vllm.PROOF, "pipeline_sizes": [1, 2], "wrapper": {**wrapper, "path": "absent.py", "optional": True}}
    without, whole = plan(tmp_path, proof=absent), plan(tmp_path)
    assert without.state == whole.state == "applies"
    assert 0 < without.proof.run < whole.proof.run
    absent["wrapper"].pop("optional")
    assert plan(tmp_path, proof=absent).state == "refused"


def test_shards_are_tried_where_the_release_has_them(tmp_path: Path) -> None:
    fact = {"path": toy_vllm.MODEL, "class": "Model", "method": "gathered"}
    proof = {**toy_vllm.PROOF, "pipeline_sizes": [1, 2]}
    with_shards, without = plan(tmp_path, proof={**proof, "sequence_parallel": fact}), plan(tmp_path, proof=proof)
    assert with_shards.proof.run > without.proof.run


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
    assert select(tmp_path, toy_vllm.patch_set()).plan == select(tmp_path, toy_vllm.patch_set()).plan


def test_two_sets_that_apply_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        Refusal, match=r"one and two both apply to vLLM 0\.33\.0, and a release gets at most one patch set"
    ):
        select(tmp_path, toy_vllm.patch_set(name="one"), toy_vllm.patch_set(name="two"))


def test_a_set_for_other_code_does_not_stand_in_the_way_of_one_that_applies(tmp_path: Path) -> None:
    selection = select(tmp_path, toy_vllm.patch_set(name="other", requires=[OPT_OUT]), toy_vllm.patch_set())
    assert [plan.state for plan in selection.plans] == ["not needed", "applies"]
    assert (selection.plan["set"], len(selection.plan["files"])) == ("toy", 2)
    assert selection.plan["sets"]["other"]["state"] == "not needed"


def test_a_release_for_which_there_is_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refusal:
        select(tmp_path, toy_vllm.patch_set(requires=[OPT_OUT]))
    assert str(refusal.value).startswith("no patch set is for the code of vLLM 0.33.0: toy is for code with ")


def test_without_patch_sets_the_plan_is_empty(tmp_path: Path) -> None:
    selection = select(tmp_path)
    assert (selection.plan["set"], selection.plan["files"], selection.plan["sets"]) == (None, [], {})
    assert (selection.plans, selection.capabilities, selection.warnings) == ([], {}, [])


def test_a_release_without_the_wanted_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"vLLM 0\.33\.0 has no model OtherForCausalLM: .* install a release that has it"):
        select(tmp_path, toy_vllm.patch_set(), architectures=("ToyForCausalLM", "OtherForCausalLM"))
    assert select(tmp_path, architectures=("ToyForCausalLM",)).warnings == []


def test_a_model_that_no_proof_runs_through_is_warned_of(tmp_path: Path) -> None:
    selection = select(tmp_path, toy_vllm.patch_set(), architectures=("ToyForCausalLM",))
    assert selection.warnings == ["no patch set proves anything for ToyForCausalLM of vLLM 0.33.0"]


def test_a_capability_is_there_when_one_of_the_sets_gives_it(tmp_path: Path) -> None:
    never = {"pipeline_parallel": {"supported": False, "reason": "the runner cannot"}}
    here = {"path": toy_vllm.MODEL, "class": "Model"}
    facts = {
        "found": {"when": [here], "reason": "unused"},
        "missing": {"when": [{**here, "absent": True}], "reason": "it is old"},
    }
    alone = select(tmp_path, toy_vllm.patch_set(capabilities={**never, **facts}))
    assert alone.capabilities == {
        "pipeline_parallel": Capability(False, "the runner cannot"),
        "found": Capability(True),
        "missing": Capability(False, "it is old"),
    }
    native = toy_vllm.patch_set(name="native", native=[here], capabilities=never)
    other = toy_vllm.patch_set(name="other", requires=[OPT_OUT], capabilities={"unheard": {}})
    together = select(tmp_path, native, toy_vllm.patch_set(), other)
    assert together.capabilities == {"pipeline_parallel": Capability(True)}
