# SPDX-License-Identifier: Apache-2.0
"""How a target is cut into pipeline stages, and which of them captures a tap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ansible.module_utils.aerie.stages import Sizes, StagesError, describe, partition_of, problems, stages
from hypothesis import given
from hypothesis import strategies as st

KIMI = Sizes(hosts=2, tensor=8, pipeline=2, layers=61, heads=64, experts=384)


@pytest.mark.parametrize(
    ("layers", "count", "partition", "expected"),
    [
        (8, 2, "", [4, 4]),
        (61, 2, "", [31, 30]),
        (61, 3, "", [20, 21, 20]),
        (61, 4, "", [15, 15, 16, 15]),
        (62, 4, "", [15, 16, 16, 15]),
        (63, 4, "", [16, 16, 16, 15]),
        (61, 1, "", [61]),
        (61, 2, "29,32", [29, 32]),
    ],
)
def test_layers_are_cut_as_vllm_does(layers: int, count: int, partition: str, expected: list[int]) -> None:
    assert partition_of(layers, count, partition) == expected


@pytest.mark.parametrize(
    ("partition", "why"),
    [
        ("29", "must be 2 numbers"),
        ("30,30", "make 61 layers"),
        ("61,0", "each at least 1"),
        ("a,b", "numbers with commas"),
        ("62,-1", "each at least 1"),
    ],
)
def test_a_partition_that_vllm_refuses_is_refused(partition: str, why: str) -> None:
    with pytest.raises(StagesError, match=why):
        partition_of(61, 2, partition)


@given(layers=st.integers(1, 128), data=st.data())
def test_every_tap_is_captured_by_one_stage(layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, layers))
    taps = data.draw(st.lists(st.integers(0, layers), unique=True))
    cut = stages(layers, count, taps)
    assert [stage.end for stage in cut] == [*(stage.first for stage in cut[1:]), layers]
    assert [tap for stage in cut for tap in stage.taps] == sorted(taps)
    for stage in cut:
        assert all(stage.first <= tap <= stage.end for tap in stage.taps)


def test_a_tap_on_the_boundary_is_the_upstream_stages() -> None:
    assert describe(stages(8, 2, [2, 4, 6]), ["h1", "h2"]) == [
        "stage 0 on h1: layers 0 to 3 (4), taps 2, 4 (on the boundary)",
        "stage 1 on h2: layers 4 to 7 (4), tap 6",
    ]
    assert describe(stages(8, 2, [0, 8]), ["h1", "h2"]) == [
        "stage 0 on h1: layers 0 to 3 (4), tap 0",
        "stage 1 on h2: layers 4 to 7 (4), tap 8",
    ]


def test_of_more_hosts_only_the_heads_place_is_known() -> None:
    lines = describe(stages(61, 4, [2, 30, 58]), ["h1", "h2", "h3", "h4"])
    assert lines[0] == "stage 0 on h1: layers 0 to 14 (15), tap 2"
    assert lines[3] == "stage 3 on one of h2, h3, h4: layers 46 to 60 (15), tap 58"


def test_hosts_with_several_stages_each() -> None:
    lines = describe(stages(8, 4, []), ["h1", "h2"])
    assert [line.split(":")[0] for line in lines] == [
        "stage 0 on h1",
        "stage 1 on h1",
        "stage 2 on h2",
        "stage 3 on h2",
    ]
    assert lines[0].endswith("no taps")


def test_kimi_over_two_hosts_of_eight_gpus_fits() -> None:
    assert list(problems(KIMI)) == []
    assert KIMI.gpus == 8
    assert replace(KIMI, tensor=4, pipeline=4).gpus == 8


def test_all_that_does_not_fit_is_said_at_once() -> None:
    found = list(problems(Sizes(hosts=2, tensor=6, pipeline=3, layers=2, heads=64, experts=4, expert_parallel=True)))
    assert found == [
        "pipeline-parallel-size is 3 and the replica has 2 hosts: leave it out, or give each host as many stages, such "
        "as 2",
        "tensor-parallel-size is 6 and does not divide the target's 64 attention heads: take 4",
        "enable-expert-parallel spreads 4 experts over 6 GPUs: each needs one; lower tensor-parallel-size",
        "pipeline-parallel-size is 3 and the target has 2 layers: each stage needs one",
    ]
