# SPDX-License-Identifier: Apache-2.0
"""Our rule for pipeline stages against that of released wheels: the function get_pp_indices itself, run here."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import releases
import wheels
from ansible.module_utils.aerie.stages import partition_of

SOURCE = "vllm/distributed/utils.py"
# The releases that can serve EAGLE-3 over stages.
OVER_STAGES = [release for release in releases.load() if release.capabilities["pipeline_parallel"]]


@pytest.fixture(scope="module")
def wheel_of() -> Callable[[str, str], Path]:
    partial = wheels.partial_wheels(((release.distribution, release.version) for release in OVER_STAGES), {SOURCE})
    return lambda distribution, version: partial[distribution, version]


def real_rule(wheel: Path, partition: str | None) -> Callable[[int, int, int], tuple[int, int]]:
    """Return the release's own get_pp_indices, with a stand-in for the two names of its module that it uses."""
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(SOURCE))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_pp_indices"]
    scope = {
        "envs": SimpleNamespace(VLLM_PP_LAYER_PARTITION=partition),
        "logger": SimpleNamespace(info=lambda *words: None),
    }
    exec(compile(ast.Module([function], []), str(wheel), "exec"), scope)
    rule: Callable[[int, int, int], tuple[int, int]] = scope["get_pp_indices"]  # type: ignore[assignment]
    return rule


@pytest.mark.parametrize("release", OVER_STAGES, ids=str)
def test_layers_are_cut_as_the_release_does(release: releases.Release, wheel_of: Callable[[str, str], Path]) -> None:
    wheel = wheel_of(release.distribution, release.version)
    rule = real_rule(wheel, None)
    for layers in range(1, 80):
        for count in range(1, min(layers, 16) + 1):
            cuts = [rule(layers, stage, count) for stage in range(count)]
            assert [end - first for first, end in cuts] == partition_of(layers, count)
    asked = real_rule(wheel, "29,32")
    assert [asked(61, 0, 2), asked(61, 1, 2)] == [(0, 29), (29, 61)]
    assert partition_of(61, 2, "29,32") == [29, 32]
