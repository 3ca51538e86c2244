# SPDX-License-Identifier: Apache-2.0
"""A release that is no good stops at the canary, which has its old one back; the other replica is not touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from ansible.module_utils.aerie.journal import RESTORED
from fleet import SERVICE, Machine
from scenario import Run
from traffic import Traffic

FULL = bool(os.environ.get("INTERRUPTED_ALL"))


class Bad(NamedTuple):
    """Faults of a release, the gate that finds them, what it says, and what else the run is told."""

    environment: dict[str, Any]
    gate: str
    says: str
    variables: Mapping[str, Any] = MappingProxyType({})


DIFFERS = '{"gate": "numeric", "verdict": "failed", "message": "tap 2 is off by +1 layer"}'


RELEASES = {
    "dies at its start": Bad({"STAND_IN_DIE": "traceback"}, "health", "the stand-in was told to die: traceback"),
    "ends without a word": Bad({"STAND_IN_DIE": "clean"}, "health", "exited with status 0"),
    "is never healthy": Bad({"STAND_IN_HEALTH": "never"}, "health", "raise vllm_service_start_budget"),
    "does not speculate": Bad({"STAND_IN_COUNTERS": "missing"}, "health", "serves without speculative decoding"),
    # On a host with GPUs the check runs in the switch: that of the stand-in's is a word.
    "gives the drafter other hidden states": Bad(
        {"STAND_IN_RELEASE": "other taps"},
        "numeric",
        "tap 2 is off by +1 layer",
        {"release_numeric": {"mode": "enforce", "argv": ["/bin/echo", DIFFERS], "budget_s": 20}},
    ),
    "accepts nothing": Bad({"STAND_IN_ACCEPTANCE": 0}, "live", "Acceptance length 1.00"),
}


# One that each gate finds.
SOME = ("dies at its start", "gives the drafter other hidden states", "accepts nothing")


@pytest.mark.parametrize("release", RELEASES if FULL else SOME)
def test_a_bad_release_is_undone(
    release: str, fleet: dict[str, Machine], served: str, traffic: Traffic, playbook: Callable[..., Run]
) -> None:
    bad = RELEASES[release]
    failures = len(traffic.failures)
    untouched = fleet["right"].pids(SERVICE)
    run = playbook(
        "deploy.yml", vllm_service_environment=bad.environment, vllm_service_start_budget=10, **bad.variables
    )

    assert run.status == "failed"
    assert f"left: the switch from {served} to " in run.messages
    assert f"failed at the gate `{bad.gate}`" in run.messages
    assert bad.says in run.messages
    assert f"{served} serves again" in run.messages
    assert "Not touched: right." in run.messages

    assert fleet["left"].last()["outcome"] == RESTORED
    assert fleet["left"].served().release == served
    assert fleet["right"].pids(SERVICE) == untouched
    assert fleet["gate"].gateway() == {"left": "UP", "right": "UP"}
    assert traffic.failures[failures:] == []
