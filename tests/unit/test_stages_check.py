# SPDX-License-Identifier: Apache-2.0
"""The module that cuts a target into stages: what it shows, and what it refuses."""

from __future__ import annotations

import pytest
from modules import run_module

KIMI = {
    "hosts": ["h1", "h2"],
    "tensor_parallel_size": 8,
    "pipeline_parallel_size": 2,
    "layers": 61,
    "heads": 64,
    "tap_ids": [2, 31, 58],
}


def test_stages_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_module("stages_check", KIMI, capsys)
    assert result["stages"] == [
        "stage 0 on h1: layers 0 to 30 (31), taps 2, 31 (on the boundary)",
        "stage 1 on h2: layers 31 to 60 (30), tap 58",
    ]
    assert (result["gpus"], result["changed"]) == (8, False)
    other = run_module("stages_check", {**KIMI, "partition": "30,31"}, capsys)
    assert other["stages"][0] == "stage 0 on h1: layers 0 to 29 (30), tap 2"


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_module("stages_check", {**KIMI, "tensor_parallel_size": 7, "partition": "30,30"}, capsys)
    assert result["failed"]
    assert len(result["problems"]) == 2
    assert "does not divide the target's 64 attention heads: take 4" in result["msg"]
