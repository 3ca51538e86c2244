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
    assert [(case, "captured twice: stream 3" in fault) for case, fault in proof.failures] == [
        (Case(STAGES, (3,)), True)
    ]


def test_a_tap_that_is_a_sequence_parallel_shard_is_caught() -> None:
    ungathered = broken("self.gathered(hidden_states + residual, positions)", "hidden_states + residual")
    shards = Case((8,), (4,), sequence_parallel=True)
    proof = run(ungathered, [shards, Case((8,), (4,))])
    assert [case for case, _ in proof.failures] == [shards]
    assert "stream 4 (a sequence-parallel shard of 3 of 10 rows)" in proof.failures[0][1]
    assert "sequence-parallel MoE" in proof.summary


def test_a_source_without_the_class_fails_every_case() -> None:
    proof = run("x = 1\n", [Case(STAGES, (1,)), Case(STAGES, (2,))])
    assert [fault for _, fault in proof.failures] == [f"{toy_vllm.MODEL} has no Model"] * 2


INTERFACE = """\
class Supports:
    flag: ClassVar[bool] = True

    def set_aux_hidden_state_layers(self, layers): ...

    def get_eagle3_aux_hidden_state_layers(self): ...
"""
DEFAULT = """\
    def get_eagle3_aux_hidden_state_layers(self):
        layers = len(self.model.layers)
        return (2, layers // 2, layers - 3)
"""
DECLARED = broken("class CausalLM(nn.Module):\n", f"class CausalLM(nn.Module, Supports):\n{DEFAULT}\n")


def run_asked(model: str, **roles: object) -> Proof:
    """Run one case as a runner does that first asks for the interface."""
    files = {**toy_vllm.files(), toy_vllm.MODEL: model.encode(), "asked.py": INTERFACE.encode()}
    proof = {**toy_vllm.PROOF, "interface": {"path": "asked.py", "class": "Supports"}, **roles}
    return prove(files.__getitem__, proof, [Case((8,), (2, 5))])


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        pytest.param(RIGHT, "CausalLM does not declare Supports: the runner refuses it", id="not declared"),
        pytest.param(
            DECLARED.replace("layers - 3", "layers - 4"), "gives (2, 4, 4) instead of (2, 4, 5)", id="other default"
        ),
        pytest.param(DECLARED.replace(DEFAULT, ""), "gives None instead of (2, 4, 5)", id="no default"),
    ],
)
def test_the_interface_that_the_runner_asks_for_must_be_declared(model: str, fault: str) -> None:
    assert run_asked(DECLARED).failures == []
    (failure,) = run_asked(model).failures
    assert fault in failure[1]


def test_a_gate_before_the_model_is_run_too() -> None:
    files = {
        **toy_vllm.files(),
        toy_vllm.MODEL: RIGHT.encode(),
        "gate.py": b"def verify(self):\n    allowed = []\n"
        b"    if self.method == 'eagle3' and self.target_model_config.hf_text_config.model_type not in allowed:\n"
        b"        raise ValueError('not allowed')\n",
    }
    proof = {**toy_vllm.PROOF, "allow_list": {"path": "gate.py", "model_types": ["toy"]}}
    result = prove(files.__getitem__, proof, [Case((8,), (2, 5))])
    assert result.run == 2
    assert result.summary == (
        "1 of 2 symbolic cases passed; first failure: the list of models that EAGLE-3 is allowed for: "
        "gate.py refuses the model type toy: not allowed"
    )
    assert prove(files.__getitem__, proof, [Case((8,), (2, 5))], stop_early=True).run == 1


BARE = """

class BareWrapper(nn.Module):
    def __init__(self, config):
        self.language_model = Model(vllm_config=config)

    def set_aux_hidden_state_layers(self, layers):
        self.language_model._set_aux_hidden_state_layers(layers)

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.language_model(input_ids, positions, intermediate_tensors)
"""


def test_a_wrapper_that_holds_the_bare_model_is_run_as_such() -> None:
    case = Case((8,), (2, 5), wrapped=True)

    def result(model: str) -> Proof:
        proof = {**toy_vllm.PROOF, "wrapper": {"path": toy_vllm.MODEL, "class": "BareWrapper"}}
        return prove({**toy_vllm.files(), toy_vllm.MODEL: model.encode()}.__getitem__, proof, [case])

    assert result(RIGHT + BARE).failures == []
    (failure,) = result(RIGHT + BARE.replace("Model(vllm_config=config)", "registered(config)")).failures
    assert "'CausalLM' object has no attribute '_set_aux_hidden_state_layers'" in failure[1]


def test_an_optional_source_may_be_missing() -> None:
    files = {**toy_vllm.files(), toy_vllm.MODEL: RIGHT.encode()}
    optional = {"path": toy_vllm.INTERFACES, "names": ["Later"], "optional": True}
    case = Case((8,), (2, 5))
    proof = {**toy_vllm.PROOF, "sources": [*toy_vllm.PROOF["sources"], optional]}
    assert prove(files.__getitem__, proof, [case]).failures == []
    optional["optional"] = False
    assert [fault for _, fault in prove(files.__getitem__, proof, [case]).failures] == [
        f"{toy_vllm.INTERFACES} has no Later"
    ]
