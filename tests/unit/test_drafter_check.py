# SPDX-License-Identifier: Apache-2.0
"""The module drafter_check describes a drafter that fits, and fails with the findings of one that does not."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from model_files import DrafterFiles, llama_drafter, target_facts
from modules import run_module

ROOT = Path(__file__).parents[2]


def small_drafter() -> DrafterFiles:
    """Return a drafter whose files are small enough to be digested: for a target of hidden size 8, vocabulary 64."""
    drafter = llama_drafter()
    drafter.config |= {"hidden_size": 8, "vocab_size": 64, "draft_vocab_size": 64}
    for name in ("d2t", "t2d"):
        del drafter.tensors[name]
    for name, shape in {
        "fc.weight": (8, 24),
        "midlayer.hidden_norm.weight": (8,),
        "midlayer.self_attn.q_proj.weight": (16, 16),
        "midlayer.self_attn.k_proj.weight": (16, 16),
        "midlayer.self_attn.v_proj.weight": (16, 16),
        "midlayer.self_attn.o_proj.weight": (8, 16),
        "midlayer.mlp.down_proj.weight": (8, 16),
        "norm.weight": (8,),
        "lm_head.weight": (64, 8),
    }.items():
        drafter.tensors[name].shape = shape
    return drafter


def arguments(root: Path, **others: object) -> dict[str, Any]:
    target = target_facts(hidden_size=8, vocab_size=64)
    return {"path": str(root), "target": target, "vllm_version": "0.33.0", **others}


@pytest.mark.parametrize("check_mode", [False, True])
def test_a_drafter_that_fits_is_described_with_what_travels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check_mode: bool
) -> None:
    drafter = small_drafter()
    drafter.others = {"optimizer.pt": b"state"}
    root = drafter.write(tmp_path / "drafter")
    result = run_module("drafter_check", arguments(root), capsys, check_mode)
    assert (result["failed"], result["changed"]) == (False, False)
    facts = result["drafter"]
    assert facts["files"] == [
        {
            "name": name,
            "path": str(root / name),
            "size": (root / name).stat().st_size,
            "sha256": hashlib.sha256((root / name).read_bytes()).hexdigest(),
        }
        for name in ("config.json", "model.safetensors")
    ]
    assert facts["bytes"] == sum(entry["size"] for entry in facts["files"])
    assert (facts["architecture"], facts["tap_ids"], facts["model_runner"]) == (
        "LlamaForCausalLMEagle3",
        [2, 30, 58],
        "v2",
    )
    assert [(finding["id"], finding["severity"]) for finding in result["findings"]] == [("training_files", "note")]


def test_the_digest_names_the_content_and_not_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = str(tmp_path / "digests.json")

    def digest(root: Path) -> str:
        result = run_module("drafter_check", arguments(root, digest_cache=cache), capsys)
        return str(result["drafter"]["sha256"])

    one, two = small_drafter().write(tmp_path / "one"), small_drafter().write(tmp_path / "two")
    assert digest(one) == digest(two)
    (two / "generation_config.json").write_text("{}", encoding="utf-8")
    assert digest(one) != digest(two)


def test_a_derived_configuration_travels_in_place_of_the_drafters_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = small_drafter()
    plain = drafter.write(tmp_path / "drafter")
    before = run_module("drafter_check", arguments(plain), capsys)["drafter"]
    assert (before["derived"], before["source_sha256"]) == (False, before["sha256"])
    result = run_module("drafter_check", arguments(plain, tap_dialect="specforge", derived=str(tmp_path / "d")), capsys)
    assert not result["failed"]
    assert [finding["id"] for finding in result["findings"]] == ["tap_ids_derived"]
    facts = result["drafter"]
    assert (facts["derived"], facts["dialect"], facts["tap_ids"]) == (True, "specforge", [3, 31, 59])
    assert (facts["tap_ids_declared"], facts["source_sha256"]) == ([2, 30, 58], before["sha256"])
    assert facts["sha256"] != before["sha256"]
    config, weights = facts["files"]
    assert weights == before["files"][1]
    assert config["path"] == str(tmp_path / "d" / config["sha256"] / "config.json")
    assert config["sha256"] == hashlib.sha256(Path(config["path"]).read_bytes()).hexdigest()


@pytest.mark.parametrize("check_mode", [False, True])
def test_nested_ids_are_an_error_only_where_nothing_may_be_derived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check_mode: bool
) -> None:
    drafter = small_drafter()
    del drafter.config["eagle_aux_hidden_state_layer_ids"]
    drafter.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}
    root = drafter.write(tmp_path / "drafter")
    as_vllm = {"tap_dialect": "vllm"}
    result = run_module("drafter_check", arguments(root, model_runner="v1", **as_vllm), capsys, check_mode)
    assert (result["drafter"]["tap_ids"], result["drafter"]["model_runner"]) == ([1, 29, 57], "v1")
    result = run_module("drafter_check", arguments(root, **as_vllm), capsys, check_mode)
    assert result["failed"]
    assert [finding["id"] for finding in result["findings"]] == ["tap_ids_nested"]
    derived = {"derived": str(tmp_path / "derived"), **as_vllm}
    result = run_module("drafter_check", arguments(root, **derived), capsys, check_mode)
    assert (result["failed"], result["changed"], result["drafter"]["tap_ids"]) == (False, False, [1, 29, 57])
    # Staging looks at the file also where nothing is to be changed.
    assert Path(result["drafter"]["files"][0]["path"]).is_file()


def test_a_misfit_fails_with_both_values_both_files_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = small_drafter()
    drafter.config["vocab_size"] = drafter.config["draft_vocab_size"] = 65
    drafter.tensors["lm_head.weight"].shape = (65, 8)
    root = drafter.write(tmp_path / "drafter")
    result = run_module("drafter_check", arguments(root), capsys)
    assert result["failed"]
    (finding,) = result["findings"]
    assert finding["facts"] == [
        {"what": "vocab_size", "value": 65, "file": str(root / "config.json")},
        {"what": "vocab_size", "value": 64, "file": "/models/kimi/config.json"},
    ]
    assert result["msg"] == f"The drafter does not fit: {finding['message']}; {finding['remedy']} [vocab_size]"


def test_a_warning_is_shown_and_does_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = small_drafter()
    drafter.config["max_position_embeddings"] = 4096
    root = drafter.write(tmp_path / "drafter")
    result = run_module("drafter_check", arguments(root, vllm_version="0.32.0"), capsys)
    assert not result["failed"]
    (finding,) = result["findings"]
    assert (finding["id"], finding["severity"]) == ("max_position", "warning")
    (warning,) = result["warnings"]
    assert warning["event"]["msg"] == f"{finding['message']}; {finding['remedy']}"


def test_an_advisory_error_is_a_warning_and_the_drafter_travels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = small_drafter()
    drafter.config["vocab_size"] = drafter.config["draft_vocab_size"] = 65
    drafter.tensors["lm_head.weight"].shape = (65, 8)
    root = drafter.write(tmp_path / "drafter")
    result = run_module("drafter_check", arguments(root, mode="advisory"), capsys)
    assert (result["failed"], result["errors"]) == (False, 1)
    (finding,) = result["findings"]
    assert (finding["id"], finding["severity"]) == ("vocab_size", "error")
    (warning,) = result["warnings"]
    assert warning["event"]["msg"] == f"{finding['message']}; {finding['remedy']}"
    assert [entry["name"] for entry in result["drafter"]["files"]] == ["config.json", "model.safetensors"]


# What the service's options are, and what is found of a drafter for 131072 positions that only yarn stretches so far.
LENGTHS: dict[str, tuple[dict[str, object], dict[str, object], list[str]]] = {
    "the target's own length": ({}, {}, ["max_position error"]),
    "a number": ({"max-model-len": 131072}, {}, []),
    "a longer number": ({"max-model-len": 131073}, {}, ["max_position error"]),
    "a number in quotes": ({"max-model-len": "131072"}, {}, []),
    "binary thousands": ({"max-model-len": "128K"}, {}, []),
    "more binary thousands": ({"max-model-len": "129K"}, {}, ["max_position error"]),
    "decimal thousands": ({"max-model-len": "131.072k"}, {}, []),
    "what fits": ({"max-model-len": "auto"}, {}, ["max_position error"]),
    "a drafter that is served shorter": ({"max-model-len": "128K"}, {"max_model_len": 4096}, ["max_position error"]),
    "a drafter that is served as long": ({"max-model-len": "128K"}, {"max_model_len": 131072}, []),
    "a cache of its own that there is not": (
        {"max-model-len": "128K"},
        {"kv_cache_dtype": "nonsense"},
        ["draft_kv_cache_dtype warning"],
    ),
}


@pytest.mark.parametrize(("options", "speculative", "found"), LENGTHS.values(), ids=LENGTHS.keys())
def test_what_the_inventory_says_of_the_service_is_what_is_checked(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, object],
    speculative: dict[str, object],
    found: list[str],
) -> None:
    wired = yaml.safe_load((ROOT / "playbooks/group_vars/all.yml").read_text())
    variables = {"vllm_service_options": options, "vllm_service_speculative_options": speculative}
    given: dict[str, str] = {}
    for task, role in yaml.safe_load((ROOT / "roles/drafter/tasks/check.yml").read_text())[0]["drafter_check"].items():
        (variable,) = re.findall(r"\{\{ (\w+)", role)
        if task.startswith("draft_") or task in ("max_model_len", "kv_cache_dtype", "attention_backend"):
            value = jinja2.Template(wired[variable]).render(variables)
            # Ansible leaves out what is empty, or 0.
            given |= {task: value} if value not in ("", "0") else {}
    drafter = small_drafter()
    yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    drafter.config |= {"max_position_embeddings": 131072, "rope_scaling": yarn}
    root = drafter.write(tmp_path / "drafter")
    result = run_module("drafter_check", arguments(root, mode="advisory", **given), capsys)
    assert [f"{finding['id']} {finding['severity']}" for finding in result["findings"]] == found


def summary(**variables: object) -> str:
    """Return what a run says of a release, from what its play keeps of the checks."""
    plays = yaml.safe_load((ROOT / "playbooks/stage.yml").read_text())
    (kept,) = [
        task["ansible.builtin.set_fact"]["aerie_staged"]
        for play in plays
        for task in play.get("tasks", [])
        if "aerie_staged" in task.get("ansible.builtin.set_fact", {})
    ]
    given = {"drafter_check_mode": "enforce", "hidden_states_numeric": "enforce", "vllm_service_speculation": "true"}
    # As Ansible, which takes what is not there below something else for not there.
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.ChainableUndefined)
    environment.filters["bool"] = lambda value: str(value).lower() == "true"
    names = ("drafter", "drafter_mode", "numeric", "numeric_mode")
    staged = {name: environment.from_string(kept[name]).render({**given, **variables}).strip() for name in names}
    template = environment.from_string((ROOT / "templates/summary.txt.j2").read_text())
    return template.render(aerie_staged={**staged, "taps": []}, release_order={"id": "r"}, release_confirmed={})


def test_the_summary_says_what_an_advisory_check_found() -> None:
    finding = {"severity": "error", "message": "vocab_size 65, but 64"}
    misfit = {"errors": 1, "findings": [finding, {"severity": "note", "message": "training files"}]}
    lines = summary(drafter_result=misfit, drafter_check_mode="advisory").splitlines()
    assert "drafter     does not fit: vocab_size 65, but 64 (advisory)" in lines
    lines = summary(drafter_result={"errors": 0, "findings": []}).splitlines()
    assert "drafter     fits" in lines
    assert "drafter " not in summary(vllm_service_speculation="false")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"hidden_states_numeric_result": {"message": "130 taps hold"}}, "130 taps hold"),
        # Whether an earlier run made it, this one does not know.
        ({}, "not made in this run: an earlier one staged the release"),
        ({"hidden_states_numeric": "off"}, "not made (off)"),
        ({"vllm_service_speculation": "false"}, "not made"),
    ],
)
def test_the_summary_claims_no_numeric_check_that_this_run_did_not_make(
    variables: dict[str, object], said: str
) -> None:
    assert f"numeric     {said}" in summary(**variables).splitlines()


def test_a_truncated_file_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = small_drafter().write(tmp_path / "drafter")
    path = root / "model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 1)
    # There is nothing to send, whatever the mode.
    result = run_module("drafter_check", arguments(root, mode="advisory"), capsys)
    assert result["failed"]
    (finding,) = result["findings"]
    assert (finding["id"], finding["severity"]) == ("unreadable", "error")
    assert f"{path}: at byte {path.stat().st_size}: truncated" in result["msg"]


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        ({"vllm_version": "newest"}, "'newest' is not a vLLM version such as 0.33.0"),
        ({"target": {}}, "text.hidden_size is None, expected an integer"),
        ({"max_model_len": "long"}, "max_model_len is 'long', expected tokens such as 131072, 128K, 128k or auto"),
    ],
)
def test_what_it_cannot_check_with_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: dict[str, object], problem: str
) -> None:
    result = run_module("drafter_check", arguments(tmp_path, **others), capsys)
    assert result["failed"]
    assert result["msg"] == f"The drafter cannot be checked: {problem}"
