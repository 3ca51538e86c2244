# SPDX-License-Identifier: Apache-2.0
"""Tap ids are read in the dialect that the evidence names, both readings are shown, and an even case is not guessed.

Where vLLM would tap other layers than the ids mean, a derived config.json says so in both places that runners read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.dialects import Resolution, resolve
from ansible.module_utils.aerie.doctor import Examination, describe, examine
from ansible.module_utils.aerie.drafter import read_drafter
from ansible.module_utils.aerie.drafter_fit import Service, Target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import DrafterFiles, bf16, llama_drafter, mla_drafter, speculators_drafter, target_facts

IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUT_TOOLS = ["sglang", "specforge", "torchspec"]
TORCHSPEC = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}


def with_ids(ids: list[int], **config: object) -> DrafterFiles:
    """Return a Llama drafter with ``ids`` in both places, and more fields in its configuration."""
    drafter = llama_drafter()
    nested = config.pop("eagle_config", {})
    assert isinstance(nested, dict)
    drafter.config |= {IDS: ids, "eagle_config": {IDS: ids, **nested}, **config}
    drafter.tensors["fc.weight"] = bf16(7168, len(ids) * 7168)
    return drafter


def only_nested(ids: list[int]) -> DrafterFiles:
    drafter = with_ids(ids)
    del drafter.config[IDS]
    return drafter


def only_layer_ids(ids: list[int]) -> DrafterFiles:
    drafter = with_ids(ids)
    del drafter.config[IDS]
    drafter.config["eagle_config"] = {"layer_ids": ids}
    return drafter


def resolved(root: Path, drafter: DrafterFiles, wanted: str = "auto", layers: int = 61) -> Resolution:
    return resolve(read_drafter(drafter.write(root / "drafter")), layers, wanted)


def examined(root: Path, drafter: DrafterFiles, derived: bool = False, **options: Any) -> Examination:  # noqa: ANN401
    service = Service("0.33.0", **options)
    target = Target.from_facts(target_facts())
    return examine(drafter.write(root / "drafter"), target, service, root / "derived" if derived else None)


def found(examination: Examination) -> list[str]:
    return [f"{finding.id} {finding.severity}" for finding in examination.findings]


DECIDED: dict[str, tuple[DrafterFiles, int, str, list[int]]] = {
    "vLLM's default": (with_ids([2, 30, 58]), 61, "vllm", [2, 30, 58]),
    "SpecForge's default": (with_ids([1, 29, 57]), 61, "specforge", [2, 30, 58]),
    "vLLM's default, in any order": (with_ids([58, 2, 30]), 61, "vllm", [58, 2, 30]),
    "vLLM's default for fewer layers": (with_ids([2, 13, 24]), 27, "vllm", [2, 13, 24]),
    "SpecForge's default for fewer layers": (with_ids([1, 12, 23]), 27, "specforge", [2, 13, 24]),
    "the last boundary, which is no layer's output": (with_ids([5, 30, 61]), 61, "vllm", [5, 30, 61]),
    "speculators": (speculators_drafter(), 80, "vllm", [2, 30, 58]),
    "TorchSpec's fields": (with_ids([3, 9, 27], eagle_config=TORCHSPEC), 61, "torchspec", [4, 10, 28]),
    "a key that names SpecForge": (with_ids([3, 9, 27], specforge_version="0.2.0"), 61, "specforge", [4, 10, 28]),
    "a text that names SGLang": (with_ids([3, 9, 27], trained_for="SGLang 0.5.6"), 61, "sglang", [4, 10, 28]),
    "two against one": (
        with_ids([2, 30, 58], specforge_version="0.2.0", trained_for="sglang"),
        61,
        "specforge",
        [3, 31, 59],
    ),
}


@pytest.mark.parametrize(("drafter", "layers", "dialect", "ids"), DECIDED.values(), ids=DECIDED.keys())
def test_evidence_decides(tmp_path: Path, drafter: DrafterFiles, layers: int, dialect: str, ids: list[int]) -> None:
    resolution = resolved(tmp_path, drafter, layers=layers)
    assert (resolution.dialect, resolution.tap_ids) == (dialect, ids)
    (chosen,) = [reading for reading in resolution.readings if reading.chosen]
    assert dialect in chosen.dialects
    assert chosen.tap_ids == ids
    assert chosen.evidence


EVEN: dict[str, DrafterFiles] = {
    "nothing speaks for either": with_ids([2, 20, 40, 58]),
    "vLLM's default by SpecForge": with_ids([2, 30, 58], trained_with="SpecForge 0.2.0"),
    "TorchSpec's fields and vLLM's default": with_ids([2, 30, 58], eagle_config=TORCHSPEC),
}


@pytest.mark.parametrize("drafter", EVEN.values(), ids=EVEN.keys())
def test_an_even_case_is_not_guessed(tmp_path: Path, drafter: DrafterFiles) -> None:
    ids = drafter.config[IDS]
    examination = examined(tmp_path, drafter, derived=True)
    assert found(examination) == ["tap_dialect error"]
    assert (examination.resolution.dialect, examination.source) == (None, None)
    assert not any(reading.chosen for reading in examination.resolution.readings)
    (finding,) = examination.findings
    assert f"as inputs of layers (vllm) they are vLLM's {ids}" in finding.message
    assert f"(sglang, specforge, torchspec) vLLM's {[item + 1 for item in ids]}" in finding.message
    assert finding.remedy.startswith("set drafter_tap_dialect")
    for reading in examination.resolution.readings:
        assert all(reason in finding.message for reason in reading.evidence)


@pytest.mark.parametrize("dialect", ["vllm", *OUTPUT_TOOLS])
@pytest.mark.parametrize("drafter", [*EVEN.values(), with_ids([1, 29, 57])])
def test_what_the_user_says_counts_more_than_evidence(tmp_path: Path, drafter: DrafterFiles, dialect: str) -> None:
    shift = 0 if dialect == "vllm" else 1
    resolution = resolved(tmp_path, drafter, dialect)
    assert resolution.dialect == dialect
    assert resolution.tap_ids == [item + shift for item in drafter.config[IDS]]


def test_both_readings_are_shown_side_by_side(tmp_path: Path) -> None:
    examination = examined(tmp_path, with_ids([1, 29, 57]))
    described = describe(examination, Target.from_facts(target_facts()), Service("0.33.0"))
    assert described["readings"] == [
        {"dialects": ["vllm"], "tap_ids": [1, 29, 57], "evidence": [], "chosen": False},
        {
            "dialects": OUTPUT_TOOLS,
            "tap_ids": [2, 30, 58],
            "evidence": ["the default of SpecForge and TorchSpec for 61 layers"],
            "chosen": True,
        },
    ]
    assert (described["dialect"], described["tap_ids"]) == ("specforge", [1, 29, 57])


def test_ids_of_another_dialect_are_an_error_where_nothing_is_derived(tmp_path: Path) -> None:
    examination = examined(tmp_path, with_ids([1, 29, 57]))
    assert found(examination) == ["tap_dialect error"]
    (finding,) = examination.findings
    assert "in the dialect specforge they are vLLM's [2, 30, 58]" in finding.message
    assert "and vLLM taps [1, 29, 57]" in finding.message


def test_nested_ids_of_another_dialect_may_be_what_v2_taps_by_default(tmp_path: Path) -> None:
    assert found(examined(tmp_path, only_nested([1, 29, 57]))) == ["tap_ids_nested note"]
    assert found(examined(tmp_path, only_nested([1, 29, 57]), model_runner="v1")) == ["tap_dialect error"]


def test_an_output_past_the_last_layer_is_out_of_range(tmp_path: Path) -> None:
    examination = examined(tmp_path, with_ids([2, 30, 61]), tap_dialect="sglang")
    assert found(examination) == ["tap_ids_range error"]
    assert "they are vLLM's [3, 31, 62], and 62 is outside 0 to 61" in examination.findings[0].message


def test_ids_that_are_not_declared_have_no_dialect(tmp_path: Path) -> None:
    drafter = llama_drafter()
    del drafter.config[IDS], drafter.config["eagle_config"]
    examination = examined(tmp_path, drafter, derived=True)
    assert (examination.resolution, examination.source) == (Resolution(None, None, ()), None)
    assert found(examination) == ["tap_ids_undeclared note"]


DERIVED: dict[str, tuple[DrafterFiles, str, list[int]]] = {
    "a shift": (with_ids([1, 29, 57]), "auto", [2, 30, 58]),
    "a shift that was asked for": (with_ids([2, 20, 40, 57]), "torchspec", [3, 21, 41, 58]),
    "only nested": (only_nested([2, 30, 58]), "auto", [2, 30, 58]),
    "only nested, and a shift": (only_nested([5, 20, 40]), "sglang", [6, 21, 41]),
    "only as layer_ids, and a shift": (only_layer_ids([1, 29, 57]), "auto", [2, 30, 58]),
}


@pytest.mark.parametrize(("drafter", "wanted", "ids"), DERIVED.values(), ids=DERIVED.keys())
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_derived_configuration_has_vllms_ids_in_both_places(
    tmp_path: Path, drafter: DrafterFiles, wanted: str, ids: list[int], runner: str
) -> None:
    examination = examined(tmp_path, drafter, derived=True, tap_dialect=wanted, model_runner=runner)
    assert found(examination) == ["tap_ids_derived note"]
    made, source = examination.drafter, examination.source
    assert made is not None and source is not None
    path, original = Path(made.config), Path(source.config)
    config = json.loads(path.read_bytes())
    assert (config[IDS], config["eagle_config"][IDS]) == (ids, ids)
    assert config["eagle_config"].get("layer_ids", ids) == ids
    assert config.pop("aerie_derived") == {
        "config_sha256": hashlib.sha256(original.read_bytes()).hexdigest(),
        "tap_ids": source.tap_ids.declared,
        "tap_dialect": examination.resolution.dialect,
    }
    # Nothing else is another, and the user's file is as it was.
    assert {**config, IDS: None, "eagle_config": None} == {**drafter.config, IDS: None, "eagle_config": None}
    assert json.loads(original.read_bytes()) == drafter.config
    assert path == tmp_path / "derived" / hashlib.sha256(path.read_bytes()).hexdigest() / "config.json"
    described = describe(examination, Target.from_facts(target_facts()), Service("0.33.0", runner))
    assert (described["derived"], described["tap_ids"]) == (True, ids)
    # What was derived needs no derivation.
    again = examine(path.parent, Target.from_facts(target_facts()), Service("0.33.0", runner))
    assert [finding.id for finding in again.findings] == ["unreadable"]  # its weights are elsewhere


def test_a_speculators_configuration_is_derived_in_its_own_format(tmp_path: Path) -> None:
    drafter = speculators_drafter()
    examination = examined(tmp_path, drafter, derived=True, tap_dialect="specforge")
    made = examination.drafter
    assert made is not None and found(examination) == ["tap_ids_derived note"]
    config = json.loads(Path(made.config).read_bytes())
    assert config[IDS] == config["transformer_layer_config"]["eagle_config"][IDS] == [3, 31, 59]
    assert config["speculators_config"] == drafter.config["speculators_config"]


@pytest.mark.parametrize("make", [llama_drafter, mla_drafter, speculators_drafter])
def test_what_vllm_reads_rightly_is_sent_as_it_is(tmp_path: Path, make: Any) -> None:  # noqa: ANN401
    examination = examined(tmp_path, make(), derived=True)
    assert (found(examination), examination.source) == ([], None)
    assert not (tmp_path / "derived").exists()


@pytest.mark.parametrize(
    "drafter",
    [
        with_ids([1, 29, 57], eagle_config={IDS: [2, 30, 58]}),
        with_ids([2, 30, 58], eagle_config={"layer_ids": [1, 29, 57]}),
    ],
)
def test_ids_that_contradict_each_other_are_not_settled_by_deriving(tmp_path: Path, drafter: DrafterFiles) -> None:
    examination = examined(tmp_path, drafter, derived=True)
    assert (found(examination), examination.source) == (["tap_ids_conflict error"], None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    ids=st.lists(st.integers(0, 60), min_size=1, max_size=5, unique=True).map(sorted),
    wanted=st.sampled_from(["auto", "vllm", *OUTPUT_TOOLS]),
    nested=st.booleans(),
)
def test_whatever_is_deployed_taps_what_the_ids_mean(tmp_path: Path, ids: list[int], wanted: str, nested: bool) -> None:
    drafter = only_nested(ids) if nested else with_ids(ids)
    drafter.config["num_aux_hidden_states"] = len(ids)
    for runner in ("v1", "v2"):
        examination = examined(
            tmp_path, drafter, derived=True, tap_dialect=wanted, model_runner=runner, taps_proved=True
        )
        service = Service("0.33.0", runner)
        if examination.errors:
            assert [finding.id for finding in examination.errors] == ["tap_dialect"]
            assert wanted == "auto"
        else:
            described = describe(examination, Target.from_facts(target_facts()), service)
            assert described["tap_ids"] == examination.resolution.tap_ids
