# SPDX-License-Identifier: Apache-2.0
"""The module target_check says what a model is, or everything that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import write_kimi
from modules import run_module


@pytest.mark.parametrize("check_mode", [False, True])
def test_a_whole_model_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str], check_mode: bool) -> None:
    root = write_kimi(tmp_path / "kimi")
    result = run_module("target_check", {"path": str(root), "service_user": "root"}, capsys, check_mode)
    assert (result["failed"], result["changed"]) == (False, False)
    assert result["target"]["path"] == str(root)
    assert result["target"]["text"]["num_hidden_layers"] == 61
    assert result["target"]["shards"] == 2


def test_a_broken_model_fails_with_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_kimi(tmp_path / "kimi")
    (root / "config.json").unlink()
    (root / "model-00001-of-00002.safetensors").unlink()
    result = run_module("target_check", {"path": str(root)}, capsys)
    assert result["failed"]
    assert [problem.split(": ")[0] for problem in result["problems"]] == [
        str(root / "config.json"),
        str(root / "model-00001-of-00002.safetensors"),
    ]
    assert result["msg"] == "The target model cannot be served: " + "; ".join(result["problems"])


def test_a_missing_path_fails_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_module("target_check", {"path": str(tmp_path / "absent")}, capsys)
    assert result["failed"]
    assert result["msg"] == (
        f"The target model cannot be served: {tmp_path / 'absent'}: no such directory on this host; "
        "put the model there or correct target_model_path"
    )
