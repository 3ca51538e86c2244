# SPDX-License-Identifier: Apache-2.0
"""The module drafter_check describes a drafter that fits, and fails with the findings of one that does not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from model_files import DrafterFiles, llama_drafter, target_facts
from modules import run_module


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


def test_a_truncated_file_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = small_drafter().write(tmp_path / "drafter")
    path = root / "model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 1)
    result = run_module("drafter_check", arguments(root), capsys)
    assert result["failed"]
    (finding,) = result["findings"]
    assert (finding["id"], finding["severity"]) == ("unreadable", "error")
    assert f"{path}: at byte {path.stat().st_size}: truncated" in result["msg"]


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        ({"vllm_version": "newest"}, "'newest' is not a vLLM version such as 0.33.0"),
        ({"target": {}}, "text.hidden_size is None, expected an integer"),
    ],
)
def test_what_it_cannot_check_with_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: dict[str, object], problem: str
) -> None:
    result = run_module("drafter_check", arguments(tmp_path, **others), capsys)
    assert result["failed"]
    assert result["msg"] == f"The drafter cannot be checked: {problem}"
