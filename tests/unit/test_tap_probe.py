# SPDX-License-Identifier: Apache-2.0
"""The dialect probe: the drafters that it serves, the table, and what it recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.doctor import examine
from ansible.module_utils.aerie.drafter import read_drafter
from ansible.module_utils.aerie.drafter_fit import Service, Target
from ansible.module_utils.aerie.tap_probe import recommend, table, variants
from model_files import llama_drafter, speculators_drafter, target_facts
from modules import run_module

IDS = "eagle_aux_hidden_state_layer_ids"


def live(length: float, verdict: str = "passed", spread: float = 0.1, reason: str = "") -> dict[str, Any]:
    bounds = {"acceptance_length": [length - spread, min(length + spread, 4.0)]}
    rate = round((length - 1) / 3, 2)
    return {
        "verdict": verdict,
        "reason": reason,
        "acceptance_length": length,
        "per_position": [rate] * 3,
        "drafts": 800,
        "bounds": bounds,
        "speculative_tokens": 3,
    }


def measured(lower: Any, served: Any, upper: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return the rows for ids 1, 29, 57 and their neighbours, in the order in which they are measured."""
    rows = []
    for shift, result in ((0, served), (-1, lower), (1, upper)):
        ids = [item + shift for item in (1, 29, 57)]
        rows.append({"shift": shift, "tap_ids": ids, **({"left_out": result} if isinstance(result, str) else {})})
        if not isinstance(result, str):
            rows[-1]["live"] = result
    return rows


# --- The drafters


def test_the_ids_are_shifted_in_both_places_and_nothing_else_is(tmp_path: Path) -> None:
    files = llama_drafter()
    files.others = {"optimizer.pt": b"state"}
    root = files.write(tmp_path / "drafter")
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    found = variants(read_drafter(root), [2, 30, 58], 61, False, tmp_path / "made")
    assert [(item.shift, item.tap_ids, item.left_out) for item in found] == [
        (0, [2, 30, 58], ""),
        (-1, [1, 29, 57], ""),
        (1, [3, 31, 59], ""),
    ]
    assert found[0].path == ""
    for item in found[1:]:
        config = json.loads((Path(item.path) / "config.json").read_text())
        assert config.pop(IDS) == config["eagle_config"].pop(IDS) == item.tap_ids
        del config["aerie_derived"]
        original = json.loads(before["config.json"])
        original.pop(IDS, None)
        original.setdefault("eagle_config", {}).pop(IDS, None)
        assert config == original
        weights = Path(item.path) / "model.safetensors"
        assert weights.is_symlink()
        assert weights.samefile(root / "model.safetensors")
        assert not (Path(item.path) / "optimizer.pt").exists()
    assert {path.name: path.read_bytes() for path in root.iterdir()} == before


@pytest.mark.parametrize("make", [llama_drafter, speculators_drafter])
def test_the_doctor_takes_a_shifted_drafter_as_it_is(tmp_path: Path, make: Any) -> None:  # noqa: ANN401
    root = make().write(tmp_path / "drafter")
    target, service = Target.from_facts(target_facts()), Service("0.33.0", tap_dialect="vllm")
    for item in variants(read_drafter(root), [2, 30, 58], 61, False, tmp_path / "made")[1:]:
        examination = examine(Path(item.path), target, service, tmp_path / "derived")
        assert examination.errors == []
        assert examination.source is None
        assert examination.drafter is not None and examination.drafter.tap_ids.top_level == item.tap_ids


@pytest.mark.parametrize(
    ("served", "proved", "left_out"),
    [
        ([1, 29, 57], False, {-1: "0 is outside 1 to 60", 1: ""}),
        ([1, 29, 57], True, {-1: "", 1: ""}),
        ([0, 29, 57], True, {-1: "-1 is outside 0 to 61", 1: ""}),
        ([2, 30, 60], False, {-1: "", 1: "61 is outside 1 to 60"}),
    ],
)
def test_ids_that_do_not_exist_are_left_out(
    tmp_path: Path, served: list[int], proved: bool, left_out: dict[int, str]
) -> None:
    root = llama_drafter().write(tmp_path / "drafter")
    found = variants(read_drafter(root), served, 61, proved, tmp_path / "made")
    assert {item.shift: item.left_out for item in found[1:]} == left_out
    assert all(bool(item.path) is not bool(item.left_out) for item in found[1:])


def test_other_weights_with_the_same_configuration_replace_the_links(tmp_path: Path) -> None:
    first = llama_drafter().write(tmp_path / "epoch-1")
    second = llama_drafter().write(tmp_path / "epoch-2")
    places = []
    for root in (first, second, second):
        item = variants(read_drafter(root), [2, 30, 58], 61, False, tmp_path / "made")[1]
        places.append(item.path)
        assert (Path(item.path) / "model.safetensors").resolve() == (root / "model.safetensors").resolve()
    assert len(set(places)) == 1


def test_the_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = llama_drafter().write(tmp_path / "drafter")
    arguments = {"path": str(root), "tap_ids": [2, 30, 58], "num_layers": 61, "folder": str(tmp_path / "made")}
    result = run_module("tap_probe", arguments, capsys)
    assert (result["failed"], result["changed"]) == (False, False)
    assert [item["shift"] for item in result["variants"]] == [0, -1, 1]
    assert result["declared"] == read_drafter(root).tap_ids.declared
    (root / "config.json").unlink()
    broken = run_module("tap_probe", arguments, capsys)
    assert broken["failed"]
    assert "config.json" in broken["msg"]


# --- What it shows


def test_the_table() -> None:
    text = table(measured("0 is outside 1 to 60", live(1.02, "failed", 0.02), live(3.25)))
    assert text.splitlines() == [
        "tap ids    shift      acceptance length    per position    drafts  verdict",
        "1, 29, 57  as served  1.02 (1.00 to 1.04)  0.01 0.01 0.01  800     failed",
        "0, 28, 56  -1         not measured: 0 is outside 1 to 60",
        "2, 30, 58  +1         3.25 (3.15 to 3.35)  0.75 0.75 0.75  800     passed",
    ]


def test_the_table_without_any_result() -> None:
    assert table(measured("a", "b", "c")).splitlines()[1] == "1, 29, 57  as served  not measured: b"


BAD, GOOD = live(1.02, "failed", 0.02), live(3.0)
SMALL = {**live(1.9), "bounds": {}, "verdict": "warned"}


@pytest.mark.parametrize(
    ("rows", "declared", "said"),
    [
        ((BAD, GOOD, BAD), [1, 29, 57], "Keep the tap ids 1, 29, 57."),
        ((BAD, BAD, GOOD), [1, 29, 57], "set drafter_tap_dialect: sglang (or specforge or torchspec, whichever"),
        ((GOOD, BAD, BAD), [0, 28, 56], "Use the tap ids 0, 28, 56: set drafter_tap_dialect: vllm, then deploy."),
        ((GOOD, BAD, BAD), [1, 29, 57], "write them into the config.json of a copy of the drafter"),
        ((GOOD, BAD, BAD), None, "write them into the config.json of a copy of the drafter"),
        ((live(1.01, "failed"), live(1.02, "failed"), live(1.01, "failed")), [1, 29, 57], "ids are not the fault"),
        ((BAD, live(2.4), live(2.5)), [1, 29, 57], "Keep the tap ids 1, 29, 57: 2, 30, 58 accept more, but not by"),
        ((BAD, BAD, live(1.4, "failed")), [1, 29, 57], "2, 30, 58 accept more, and still too little"),
        # That it is below the last good release does not speak against ids.
        ((BAD, BAD, live(2.8, "failed", reason="below_last_good")), [1, 29, 57], "Use the tap ids 2, 30, 58"),
        ((BAD, live(1.5), SMALL), [1, 29, 57], "not by more than chance"),
        (("out", GOOD, "out"), [1, 29, 57], "nothing to compare"),
        ((BAD, "vLLM did not start", GOOD), [1, 29, 57], "nothing to compare"),
        (("out", BAD, GOOD), [1, 29, 57], "Use the tap ids 2, 30, 58"),
    ],
)
def test_the_recommendation(rows: tuple[Any, Any, Any], declared: list[int] | None, said: str) -> None:
    assert said in recommend(measured(*rows), declared)
