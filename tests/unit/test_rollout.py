# SPDX-License-Identifier: Apache-2.0
"""The order of a rollout, and what is said of its end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible.module_utils.aerie.probe import UNDER_WAY
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
GONE = {"unreachable": True, "msg": "no route to host"}

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


# ---------------------------------------------------------------------------------------------------------- who serves


def probed(current: str = "aaaa", running: str = "aaaa", healthy: bool = True, **more: object) -> dict[str, Any]:
    """Return a host's variables after the first look at it."""
    found = {"current": current, "running": running, "healthy": healthy, "reasons": ["the drafter changed"]}
    return {"release_probed": {**found, **more}}


def seen(release: str = "aaaa", running: str = "aaaa", healthy: bool = True, switch: object = None) -> dict[str, Any]:
    """Return a host's variables after the later look at it, when the first one was another."""
    found = {"release": release, "running": running, "healthy": healthy, "switch": switch}
    return {**probed(healthy=not healthy), "release_seen": found}


# A host's variables, and whether it serves; None: nobody knows.
LOOKS: dict[str, tuple[dict[str, Any], bool | None]] = {
    "differs from what is wanted": (probed(), True),
    "is as wanted": (probed(reasons=[]), True),
    "not healthy": (probed(healthy=False), False),
    "never served": (probed("", "", healthy=False), False),
    "another origin": (probed(current=""), False),
    "runs what is not current": (probed(running="bbbb"), False),
    "a switch was under way": (probed(reasons=[UNDER_WAY]), False),
    "it has ended since": (seen(), True),
    "a switch is under way": (seen(switch={"phase": "starting"}), False),
    "died since": (seen(healthy=False), False),
    "gone since": ({**probed(), "release_seen": GONE}, False),
    "out of reach": ({"release_probed": GONE}, False),
    "left out by --limit": ({}, None),
}


@pytest.mark.parametrize("name", LOOKS)
def test_who_serves(name: str) -> None:
    variables, serves = LOOKS[name]
    assert FILTERS["aerie_serving"](["h1"], {"h1": variables}) == (["h1"] if serves else [])
    # Another replica restarts, and this one serves or does not.
    fleet = {"h1": variables, "h2": probed()}
    assert FILTERS["aerie_stops_all"](["h2"], ["h1", "h2"], fleet, []) is (serves is False)


def test_a_replica_serves_with_all_its_hosts() -> None:
    several = {"aerie_replica": "a"}
    whole = {"h1": {**probed(), **several}, "h2": {**probed(), **several}, "h3": probed()}
    assert FILTERS["aerie_serving"](list(whole), whole) == ["h1", "h2", "h3"]
    broken = {**whole, "h2": {**probed(healthy=False), **several}}
    assert FILTERS["aerie_serving"](list(broken), broken) == ["h3"]
    assert FILTERS["aerie_stops_all"](["h3"], list(broken), broken, []) is True
    assert FILTERS["aerie_stops_all"](["h1", "h2"], list(broken), broken, []) is False


def listed(running: bool = True, **states: tuple[str, bool]) -> dict[str, Any]:
    """Return what a gateway says of servers: the state of each, and whether it is up."""
    servers = [{"name": name, "state": state, "up": up} for name, (state, up) in states.items()]
    return {"running": running, "servers": servers}


@pytest.mark.parametrize(
    ("gateways", "stops"),
    [
        ([], False),
        ([listed(h1=("ready", True))], False),
        ([listed(h1=("drained", True)), listed(h1=("ready", True))], False),
        ([listed(h1=("drained", True))], True),
        ([listed(h1=("ready", False))], True),
        ([listed(h2=("ready", True))], True),
        ([listed(running=False)], False),
        ([GONE], False),
    ],
)
def test_gateways_tell_of_replicas_that_nobody_looked_at(gateways: list[dict[str, Any]], stops: bool) -> None:
    fleet = {"h1": {}, "h2": probed()}
    assert FILTERS["aerie_stops_all"](["h2"], ["h1", "h2"], fleet, gateways) is stops


def test_the_only_replica_is_asked_for_while_it_runs() -> None:
    for variables, stops in ((probed(), True), (probed(healthy=False), True), (probed("", "", healthy=False), False)):
        assert FILTERS["aerie_stops_all"](["h1"], ["h1"], {"h1": variables}, []) is stops


def test_a_fleet_of_which_nothing_serves_has_nothing_to_lose() -> None:
    fleet = {"h1": probed(healthy=False), "h2": probed(healthy=False)}
    assert FILTERS["aerie_stops_all"](["h1"], ["h1", "h2"], fleet, []) is False
    assert FILTERS["aerie_stops_all"](["h1"], ["h1", "h2"], {**fleet, "h2": {}}, [listed(h2=("ready", False))]) is False
    assert FILTERS["aerie_stops_all"](["h1"], ["h1", "h2"], {**fleet, "h1": probed()}, []) is True


def test_what_gateways_did_not_do() -> None:
    done, refused, gone = {"servers": [], "item": "g1"}, {"msg": "it is full", "item": "g2"}, {**GONE, "item": "g3"}
    result = {"results": [done, refused, gone]}
    assert FILTERS["aerie_gateway_faults"](result) == ["g2: it is full.", "g3: no route to host."]
    assert FILTERS["aerie_gateway_faults"]({"results": [], "skipped": True}) == []
    assert FILTERS["aerie_gateway_faults"]({"skipped": True}) == []
    # A task that did not come to ask any.
    assert FILTERS["aerie_gateway_faults"]({"msg": "'x' is undefined"}) == ["The gateway: 'x' is undefined."]


# ------------------------------------------------------------------------------------------------------------- its end

SWITCH = {"from": "aaaa", "to": "bbbb", "reason": "", "message": ""}
STARTED = {"outcome": "started", "switch": SWITCH}
READY = {"outcome": "ready", "switch": SWITCH}
SKIPPED = {"skipped": True, "changed": False}
CUT_OFF = "the host was rebooted while confirming"


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


@pytest.mark.parametrize(
    ("results", "serves"),
    [
        (ENDS["kept"][0], True),
        (ENDS["unchanged"][0], True),
        ({**ENDS["undone for another"][0], **probed()}, True),
        # Restored is what there was: nothing, or what was stopped.
        ({**ENDS["the first release"][0], **probed("", "", healthy=False)}, False),
        ({**ENDS["failed at a gate"][0], **probed(running="", healthy=False)}, False),
        ({**ENDS["never came so far"][0], **probed()}, True),
        ({**ENDS["never came so far"][0], **probed("", "", healthy=False)}, False),
        ({**ENDS["not restored"][0], **probed()}, False),
    ],
)
def test_whether_a_gateway_can_find_it_afterwards(results: dict[str, Any], serves: bool) -> None:
    assert FILTERS["aerie_answers"]({"inventory_hostname": "h1", **results}) is serves


def test_a_host_that_does_not_get_requests_again_is_named() -> None:
    fault = "g1: HAProxy does not answer."
    kept = {"inventory_hostname": "h1", **ENDS["kept"][0], "release_not_undrained": fault}
    assert FILTERS["aerie_report"]([kept], ["h1"]) == (
        "h1: keeps release bbbb. Not every gateway sends it requests: g1: HAProxy does not answer. Mend that, and run "
        "again."
    )


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
