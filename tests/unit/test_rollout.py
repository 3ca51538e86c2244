# SPDX-License-Identifier: Apache-2.0
"""The order of a rollout, and what is said of its end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible.module_utils.aerie.rollout import RolloutError, batch_size, end_of, plan
from hypothesis import given
from hypothesis import strategies as st

PLUGIN = Path(__file__).parents[2] / "plugins/filter/aerie.py"


def filters() -> dict[str, Callable[..., Any]]:
    """Return the filters as Ansible finds them."""
    spec = importlib.util.spec_from_file_location("aerie_filters", PLUGIN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Callable[..., Any]] = module.FilterModule().filters()
    return found


FILTERS = filters()

# ----------------------------------------------------------------------------------------------------------- the order

EIGHT = [f"h{number}" for number in range(1, 9)]
# A replica of three hosts between replicas of one, and its hosts apart in the inventory.
UNEQUAL = {"h2": "big", "h4": "big", "h7": "big", "h5": "pair", "h6": "pair"}


@pytest.mark.parametrize(
    ("hosts", "replica_of", "batch", "order", "batches"),
    [
        ([], {}, "25%", [], []),
        (["h1"], {}, "25%", ["h1"], [1]),
        (EIGHT[:2], {}, "25%", EIGHT[:2], [1, 1]),
        (EIGHT, {}, "25%", EIGHT, [1, 2, 2, 2, 1]),
        (EIGHT, {}, "100%", EIGHT, [1, 7]),
        (EIGHT, {}, "1%", EIGHT, [1] * 8),
        (EIGHT, {}, "3", EIGHT, [1, 3, 3, 1]),
        (EIGHT, {}, "99", EIGHT, [1, 7]),
        # Five replicas: h1, big, h3, pair, h8. The canary is one of them, whatever its size.
        (EIGHT, UNEQUAL, "2", ["h1", "h2", "h4", "h7", "h3", "h5", "h6", "h8"], [1, 4, 3]),
        (EIGHT, UNEQUAL, "1", ["h1", "h2", "h4", "h7", "h3", "h5", "h6", "h8"], [1, 3, 1, 2, 1]),
        (EIGHT, {**UNEQUAL, "h1": "big"}, "50%", ["h1", "h2", "h4", "h7", "h3", "h5", "h6", "h8"], [4, 3, 1]),
        # With --limit, a share is one of the replicas that take part.
        (["h4", "h7", "h8", "h3"], UNEQUAL, "50%", ["h4", "h7", "h8", "h3"], [2, 1, 1]),
        (["h8", "h7", "h3", "h2"], UNEQUAL, "2", ["h8", "h7", "h2", "h3"], [1, 3]),
    ],
)
def test_a_canary_and_then_batches_of_whole_replicas(
    hosts: list[str], replica_of: dict[str, str], batch: str, order: list[str], batches: list[int]
) -> None:
    assert FILTERS["aerie_rollout"](hosts, replica_of, batch) == {"hosts": order, "batches": batches}


@given(
    st.lists(st.integers(0, 30), unique=True).map(lambda numbers: [f"h{number}" for number in numbers]),
    st.dictionaries(st.integers(0, 30).map(lambda number: f"h{number}"), st.sampled_from(["a", "b", "c"])),
    st.one_of(st.integers(1, 9).map(str), st.integers(1, 100).map(lambda share: f"{share}%")),
)
def test_no_replica_is_cut_and_no_host_is_forgotten(hosts: list[str], replica_of: dict[str, str], batch: str) -> None:
    rollout = plan(hosts, replica_of, batch)
    assert sorted(rollout.hosts) == sorted(hosts)
    assert sum(rollout.batches) == len(hosts)
    assert all(size > 0 for size in rollout.batches)
    left = list(rollout.hosts)
    seen: set[str] = set()
    replicas = len({replica_of.get(host, host) for host in hosts})
    for number, size in enumerate(rollout.batches):
        members = {replica_of.get(host, host) for host in left[:size]}
        left = left[size:]
        assert not members & seen
        assert len(members) <= (1 if number == 0 else batch_size(batch, replicas))
        seen |= members


@pytest.mark.parametrize("batch", ["0", "0%", "101%", "-1", "1.5", "half", "", "%", "25 %"])
def test_a_batch_that_is_no_size_is_refused(batch: str) -> None:
    with pytest.raises(RolloutError, match=f"^aerie_batch is {batch}: it must be a number of replicas, or a share"):
        plan(["h1"], {}, batch)
    with pytest.raises(AnsibleFilterError, match="aerie_batch"):
        FILTERS["aerie_rollout"](["h1"], {}, batch)


def test_a_number_of_the_inventory_is_a_size() -> None:
    assert FILTERS["aerie_rollout"](EIGHT, {}, 4)["batches"] == [1, 4, 3]


def test_the_replica_of_a_host() -> None:
    variables = {"h1": {"aerie_replica": "a"}, "h2": {}, "h3": {"aerie_replica": 7}, "h4": {"aerie_replica": "a"}}
    assert FILTERS["aerie_replica_of"](["h1", "h2", "h3"], variables) == {"h1": "a", "h2": "h2", "h3": "7"}


# ------------------------------------------------------------------------------------------------------------- its end

SWITCH = {"from": "aaaa", "to": "bbbb", "reason": "", "message": ""}
STARTED = {"outcome": "started", "switch": SWITCH}
READY = {"outcome": "ready", "switch": SWITCH}
SKIPPED = {"skipped": True, "changed": False}
CUT_OFF = "the host was rebooted while confirming"
GONE = {"unreachable": True, "msg": "no route to host"}


def restored(outcome: str = "restored", **facts: str) -> dict[str, Any]:
    end = {"reason": "it was killed.", "message": "release aaaa serves again", **facts}
    return {"outcome": outcome, "switch": {**SWITCH, **end}}


# The results of a host's tasks, in their order; its outcome; and what is said of it.
ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "never came so far": ({}, "not started", "h1: was not switched."),
    "unchanged": (
        {"release_started": {"outcome": "unchanged"}, "release_followed": SKIPPED, "release_confirmed": SKIPPED},
        "unchanged",
        "h1: nothing had to be done.",
    ),
    "kept": (
        {
            "release_started": STARTED,
            "release_followed": READY,
            "release_confirmed": {**READY, "outcome": "confirmed"},
            "release_undone": SKIPPED,
        },
        "confirmed",
        "h1: keeps release bbbb.",
    ),
    "refused": (
        {"release_started": {"msg": "release bbbb is not wholly staged", "failed": False}, "release_followed": SKIPPED},
        "failed",
        "h1: the switch did not begin: release bbbb is not wholly staged",
    ),
    "failed at a gate": (
        {"release_started": STARTED, "release_followed": restored(failed_gate="live", failed_phase="measuring")},
        "restored",
        "h1: the switch from aaaa to bbbb failed at the gate `live`: it was killed. Restored: release aaaa serves "
        "again.",
    ),
    "failed in a phase": (
        {"release_started": STARTED, "release_followed": restored(failed_phase="starting the service")},
        "restored",
        "h1: the switch from aaaa to bbbb failed while starting the service: it was killed. Restored: release aaaa "
        "serves again.",
    ),
    "cut off in a phase": (
        {"release_started": STARTED, "release_followed": restored(failed_phase="confirming", reason=CUT_OFF)},
        "restored",
        "h1: the switch from aaaa to bbbb failed: the host was rebooted while confirming. Restored: release aaaa "
        "serves again.",
    ),
    "not restored": (
        {"release_started": STARTED, "release_followed": restored("not restored", message="the disk is gone")},
        "not restored",
        "h1: the switch from aaaa to bbbb failed: it was killed. NOT restored: the disk is gone. It gets no requests.",
    ),
    "undone for another": (
        {
            "release_started": STARTED,
            "release_followed": READY,
            "release_confirmed": SKIPPED,
            "release_undone": restored(reason="another replica of the batch failed"),
        },
        "restored",
        "h1: the switch from aaaa to bbbb failed: another replica of the batch failed. Restored: release aaaa serves "
        "again.",
    ),
    "the first release": (
        {"release_started": STARTED, "release_followed": restored(**{"from": "", "message": "no release serves"})},
        "restored",
        "h1: the switch from no release to bbbb failed: it was killed. Restored: no release serves.",
    ),
    "out of reach": (
        {"release_started": STARTED, "release_followed": GONE, "release_confirmed": SKIPPED},
        "unreachable",
        "h1: cannot be reached (no route to host). Its switch from aaaa to bbbb goes back by itself unless it was "
        "confirmed. It gets no requests until a run finds it healthy.",
    ),
    "unknown": (
        {"release_started": STARTED, "release_followed": {"msg": "no space left", "failed": False}},
        "failed",
        "h1: it is not known how the switch from aaaa to bbbb ended (no space left). It goes back by itself unless it "
        "was confirmed. It gets no requests until a run finds it healthy.",
    ),
    "waits for another host of its replica": (
        {
            "release_started": STARTED,
            "release_followed": READY,
            "release_confirmed": {"outcome": "under way", "switch": {**SWITCH, "waits_for": ["10.0.0.2"]}},
        },
        "under way",
        "h1: was told to keep release bbbb, and waits for what another host of the replica (10.0.0.2) does, which it "
        "will do, too. It gets no requests until a run finds it healthy.",
    ),
    "still ready": (
        {"release_started": STARTED, "release_followed": READY, "release_confirmed": SKIPPED},
        "ready",
        "h1: the switch from aaaa to bbbb failed. It is still ready.",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_host_and_what_is_said_of_it(name: str) -> None:
    results, outcome, sentence = ENDS[name]
    variables = {"inventory_hostname": "h1", **results}
    assert end_of("h1", variables).outcome == outcome
    assert FILTERS["aerie_outcomes"]([variables]) == {"h1": outcome}
    assert FILTERS["aerie_report"]([variables], ["h1"]) == sentence


def test_the_report_names_every_host_of_the_batch_and_those_that_were_not_touched() -> None:
    failed = {"inventory_hostname": "h2", "release_followed": restored(failed_gate="health")}
    kept = {"inventory_hostname": "h3", "release_confirmed": {**READY, "outcome": "confirmed"}}
    assert FILTERS["aerie_report"]([failed, kept], EIGHT).splitlines() == [
        "h2: the switch from aaaa to bbbb failed at the gate `health`: it was killed. Restored: release aaaa serves "
        "again.",
        "h3: keeps release bbbb.",
        "Not touched: h4, h5, h6, h7, h8.",
    ]
    assert "Not touched" not in FILTERS["aerie_report"]([failed, kept], EIGHT[:3])
