# SPDX-License-Identifier: Apache-2.0
"""The symbolic check passes what is right and names what is wrong, on a toy release.

tests/contract/test_patch_sets.py does the same with the released sources.
"""

from __future__ import annotations

import time

import pytest
import toy_vllm
from ansible.module_utils.aerie.prove import Case, Proof, default_cases, prove

RIGHT: str = toy_vllm.files()[toy_vllm.MODEL].decode().replace("_over_pp = False", "_over_pp = True")


def run(model: str, cases: list[Case]) -> Proof:
    files = {**toy_vllm.files(), toy_vllm.MODEL: model.encode()}
    return prove(files.__getitem__, toy_vllm.PROOF, cases)


def broken(old: str, new: str) -> str:
    assert RIGHT.count(old) == 1
    return RIGHT.replace(old, new)


def test_a_right_model_passes_every_case() -> None:
    cases = default_cases(61, [1, 2, 3, 4, 8], wrapped=True)
    started = time.monotonic()
    proof = run(RIGHT, cases)
    assert (proof.run, proof.failures) == (len(cases), [])
    assert proof.summary == f"{len(cases)} of {len(cases)} symbolic cases passed"
    assert time.monotonic() - started < 2


def test_the_default_cases_cover_what_matters() -> None:
    cases = default_cases(61, [1, 2, 3, 4, 8], wrapped=True)
    assert {len(case.stages) for case in cases} == {1, 2, 3, 4, 8}
    assert all(sum(case.stages) == 61 and min(case.stages) > 0 for case in cases)
    for size in (2, 3, 4, 8):
        splits = {case.stages for case in cases if len(case.stages) == size}
        assert any(max(split) - min(split) <= 1 for split in splits)
        assert any(max(split) - min(split) > 1 for split in splits)
        for split in splits:
            ids = {tap for case in cases if case.stages == split for tap in case.ids}
            starts = {sum(split[:stage]) for stage in range(size + 1)}
            assert starts | {1, 60} <= ids
    assert any(case.ids != tuple(sorted(case.ids)) for case in cases)
    assert any(len(case.ids) != len(set(case.ids)) for case in cases)
    assert {case.wrapped for case in cases} == {True, False}
    assert any(case.sequence_parallel for case in cases)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
def test_a_small_model_gets_cases_that_it_can_have(layers: int) -> None:
    cases = default_cases(layers, [1, 2, 3, 4, 8], wrapped=False)
    assert {len(case.stages) for case in cases} == {size for size in (1, 2, 3, 4, 8) if size <= layers}
    assert all(sum(case.stages) == layers and min(case.stages) > 0 for case in cases)
    assert {tap for case in cases for tap in case.ids} == set(range(layers + 1))
    assert run(RIGHT, cases).failures == []


def test_the_even_split_is_vllms() -> None:
    cases = default_cases(61, [4, 8], wrapped=False)
    assert (15, 15, 16, 15) in {case.stages for case in cases}
    assert (7, 7, 8, 8, 8, 8, 8, 7) in {case.stages for case in cases}


STAGES = (3, 3)


@pytest.mark.parametrize(
    ("model", "ids", "fault"),
    [
        pytest.param(
            broken("_over_pp = True", "_over_pp = False"),
            (1, 3, 5),
            "does not support eagle3 with pipeline parallelism",
            id="does not opt in",
        ),
        pytest.param(
            broken("start=self.start_layer", "start=0"), (5,), "lost tap stream 5", id="indices relative to the stage"
        ),
        pytest.param(
            broken("taps.append(self.gathered(hidden_states + residual, positions))", "taps.append(hidden_states)"),
            (1, 5),
            "overwritten by",
            id="residual dropped",
        ),
        pytest.param(
            broken("hidden_states.clone()", "hidden_states"), (0,), "hidden 0 overwritten by layer 0", id="no clone"
        ),
        pytest.param(
            broken("idx + 1 in self.aux_hidden_state_layers", "idx in self.aux_hidden_state_layers"),
            (2,),
            "wrong tap stream 3; lost tap stream 2",
            id="off by one",
        ),
        pytest.param(
            broken("range(self._aux_slot_base_cached if", "range(0 if"),
            (1, 5),
            "lost tap stream 1",
            id="nothing collected",
        ),
        pytest.param(broken(", **mine", ""), (1, 5), "expects 1 taps from upstream, it is sent 0", id="nothing sent"),
        pytest.param(
            broken("return hidden_states, taps", "return hidden_states, taps[::-1]"), (1, 5), "wrong order", id="order"
        ),
        pytest.param(
            broken("return hidden_states, taps", "return hidden_states, taps + taps[-1:]"),
            (1, 5),
            "captured twice: stream 5",
            id="twice",
        ),
        pytest.param(
            broken(
                "        if taps:\n",
                "        if 6 in self.aux_hidden_state_layers:\n"
                "            taps[-1] = hidden_states\n"
                "        if taps:\n",
            ),
            (1, 6),
            "wrong tap norm; lost tap stream 6",
            id="after the norm",
        ),
        pytest.param(
            broken("self.language_model.set_aux_hidden_state_layers(layers)", "pass"),
            (1, 5),
            "lost tap stream 1, stream 5",
            id="the wrapper does not delegate",
        ),
        pytest.param(
            broken(" or get_pp_group().is_last_rank:\n            self.embed", ":\n            self.embed"),
            (1,),
            "stage 1 of 2 builds no input embedding",
            id="no embedding for the drafter",
        ),
        pytest.param(
            broken(
                "hidden_states, residual = layer(positions, hidden_states, residual)",
                "hidden_states, residual = layer(positions, hidden_states, hidden_states)",
            ),
            (1,),
            "layer 0 gets",
            id="a layer is fed something else",
        ),
        pytest.param(
            broken("self.gathered(hidden_states + residual, positions)", "mystery(hidden_states)"),
            (1,),
            "a tap is mystery()",
            id="something that is not modelled",
        ),
        pytest.param(
            broken("if taps:", "if mystery:"), (1,), "cannot decide by mystery", id="a decision that is not modelled"
        ),
    ],
)
def test_a_broken_model_fails_and_the_message_names_the_fault(model: str, ids: tuple[int, ...], fault: str) -> None:
    case = Case(STAGES, ids, wrapped=True)
    proof = run(model, [case])
    assert [failed for failed, _ in proof.failures] == [case]
    assert fault in proof.failures[0][1]
    assert proof.summary.startswith("0 of 1 symbolic cases passed; first failure: pipeline size 2 (layers 3+3), ids")
    assert "through the wrapper" in proof.summary
    assert run(RIGHT, [case]).failures == []


def test_a_boundary_owned_twice_is_caught() -> None:
    owned_twice = broken(
        "        for idx, layer in",
        "        if self.start_layer and self.start_layer in self.aux_hidden_state_layers:\n"
        "            taps.append(hidden_states + residual)\n        for idx, layer in",
    )
    proof = run(owned_twice, [Case(STAGES, (3,)), Case(STAGES, (2,))])
    assert [(case.ids, "captured twice: stream 3" in fault) for case, fault in proof.failures] == [((3,), True)]


def test_a_tap_that_is_a_sequence_parallel_shard_is_caught() -> None:
    ungathered = broken("self.gathered(hidden_states + residual, positions)", "hidden_states + residual")
    proof = run(ungathered, [Case((8,), (4,), sequence_parallel=True), Case((8,), (4,))])
    assert [case.sequence_parallel for case, _ in proof.failures] == [True]
    assert "stream 4 (a sequence-parallel shard of 3 of 10 rows)" in proof.failures[0][1]
    assert "sequence-parallel MoE" in proof.summary


def test_a_source_without_the_class_fails_every_case() -> None:
    proof = run("x = 1\n", [Case(STAGES, (1,)), Case(STAGES, (2,))])
    assert [fault for _, fault in proof.failures] == [f"{toy_vllm.MODEL} has no Model"] * 2
