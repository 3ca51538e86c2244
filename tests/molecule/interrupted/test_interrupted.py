# SPDX-License-Identifier: Apache-2.0
"""Whatever cuts an update off, and wherever it does: a host serves its old or its new release, and a re-run mends it.

Two replicas with the stand-in engine behind a gateway, and a client that must never notice. The stand-in holds a switch
at a point until something was done to the host. INTERRUPTED_ALL=1 strikes in every way at every point.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ansible.module_utils.aerie.journal import (
    ACTIVATING,
    AWAITING,
    CONFIRMED,
    CONFIRMING,
    MEASURING,
    REQUESTED,
    RESTORED,
    RESTORING,
    STARTING,
    STOPPING,
)
from fleet import HOME, SERVICE, Machine, await_point, await_that
from scenario import INVENTORY, ROOT, Run
from traffic import Traffic

LABEL = "STAND_IN_RELEASE"
FULL = bool(os.environ.get("INTERRUPTED_ALL"))
OLD, NEW = "old", "new"
REPLICAS = ("left", "right")
# A run that was cut off ends by itself, within its own budgets.
RUN_S = 180


# --- Points


@dataclass(frozen=True)
class Scene:
    """An update that is under way: its process, the host to be struck, the release that it had before, the gateway."""

    run: subprocess.Popen[str]
    struck: Machine
    before: str
    gate: Machine


@dataclass(frozen=True)
class Point:
    """A point in an update of the host ``on``.

    ``hold`` are faults that keep it there, and ``then`` those from the point on, until the strike. From the phase
    ``writes`` on, nothing can be written to the ledger. ``leaves`` is what the host serves when it was struck there:
    certain except where a step of milliseconds is hit.
    """

    name: str
    reached: Callable[[Scene], bool]
    hold: Mapping[str, object] = field(default_factory=dict)
    then: Mapping[str, object] = field(default_factory=dict)
    writes: str = ""
    leaves: frozenset[str] = frozenset({OLD})
    on: str = "left"
    inside: bool = True  # the switch program runs
    begun: bool = True  # the host has been asked to switch


def phase(name: str) -> Callable[[Scene], bool]:
    return lambda scene: scene.struck.phase() == name


def logged(text: str) -> Callable[[Scene], bool]:
    return lambda scene: scene.struck.phase() == STARTING and text in scene.struck.log()


def stopped(scene: Scene) -> bool:
    return scene.struck.phase() == STOPPING and not scene.struck.pids(SERVICE)


def activated(scene: Scene) -> bool:
    return scene.struck.phase() == ACTIVATING and scene.struck.current() != scene.before


def confirmed(scene: Scene) -> bool:
    return not scene.struck.journal() and scene.struck.current() != scene.before


def drained(scene: Scene) -> bool:
    return scene.gate.gateway()[scene.struck.name] != "UP"


EITHER = frozenset({OLD, NEW})
POINTS = {
    point.name: point
    for point in (
        Point("drained", drained, inside=False, begun=False),
        Point("requested", lambda scene: bool(scene.struck.journal()), leaves=EITHER),
        Point("stopping", phase(STOPPING), hold={"stop_s": 50}),
        Point("stopped", stopped),
        Point("activating", phase(ACTIVATING)),
        Point("activated", activated),
        Point("starting", phase(STARTING)),
        Point("loading", logged("  0% Completed"), hold={"start_s": 600}),
        Point("loaded and not healthy", logged("init engine"), hold={"health": "never"}),
        Point("healthy without a token", logged("Application startup complete"), hold={"tokens": "none"}),
        Point("measuring", phase(MEASURING), then={"token_s": 5}),
        Point("awaiting confirmation", phase(AWAITING), leaves=EITHER),
        Point("confirming", phase(CONFIRMING), writes=AWAITING, leaves=EITHER),
        Point("confirmed", confirmed, leaves=frozenset({NEW}), inside=False),
        Point("restoring", phase(RESTORING), hold={"die": "traceback"}, then={"start_s": 600}),
        Point("the second replica", phase(STARTING), hold={"start_s": 600}, on="right"),
    )
}


# --- Strikes


def kill_the_run(scene: Scene) -> None:
    os.killpg(scene.run.pid, signal.SIGKILL)
    scene.run.wait()


def run_is_over(scene: Scene) -> None:
    scene.run.wait(RUN_S)


def serves_all_the_same(scene: Scene) -> None:
    """Wait until the host serves; the program may wait for room to write that down."""
    ends = ("", CONFIRMING, RESTORING)
    await_that(lambda: scene.struck.phase() in ends and scene.struck.serves(), f"{scene.struck.name} serves")


def nothing(_: Scene) -> None:
    pass


@dataclass(frozen=True)
class Kind:
    """A way to strike, how long it lasts, and what ends it; ``inside``: it strikes the switch program."""

    strike: Callable[[Scene], None]
    until: Callable[[Scene], None] = run_is_over
    end: Callable[[Scene], None] = nothing
    inside: bool = False


KINDS = {
    "control process killed": Kind(kill_the_run),
    "network down": Kind(lambda scene: scene.struck.cut(), end=lambda scene: scene.struck.mend()),
    "host rebooted": Kind(lambda scene: scene.struck.reboot()),
    "switch program killed": Kind(lambda scene: scene.struck.kill_switch(), inside=True),
    "disk full": Kind(lambda scene: scene.struck.fill(), serves_all_the_same, lambda scene: scene.struck.free()),
}
EVERY = [
    (kind, point) for point, kind in itertools.product(POINTS, KINDS) if POINTS[point].inside or not KINDS[kind].inside
]
# In each way once, at points that have nothing in common.
SOME = [
    ("control process killed", "drained"),
    ("network down", "measuring"),
    ("host rebooted", "activated"),
    ("switch program killed", "restoring"),
    ("disk full", "stopping"),
]


# --- Updates


class Update(NamedTuple):
    """A playbook that brings both replicas another release."""

    playbook: str
    variables: dict[str, Any]

    def start(self, log: Path) -> subprocess.Popen[str]:
        """Start it in a process group of its own."""
        command = [str(Path(sys.executable).with_name("ansible-playbook")), self.playbook, "-i", str(INVENTORY)]
        with log.open("w") as stream:
            return subprocess.Popen(
                [*command, "-e", json.dumps(self.variables)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                text=True,
                start_new_session=True,
            )


def labels(machine: Machine) -> dict[str, str]:
    """Return the labels of the releases on a host, by their ids."""
    files = machine.path(f"{HOME}/releases").glob("*/service.env")
    return {file.parent.name: file.read_text().partition(f'{LABEL}="')[2].partition('"')[0] for file in files}


@pytest.fixture
def update(fleet: dict[str, Machine], served: str) -> Update:
    """Return an update to the release that is not served; one that is on the hosts already takes less time."""
    known = labels(fleet["left"])
    label = "two" if known[served] == "one" else "one"
    staged = [identity for identity in known if known[identity] == label and identity in labels(fleet["right"])]
    if staged:
        return Update("rollback.yml", {"to": staged[0]})
    return Update("deploy.yml", {"vllm_service_environment": {LABEL: label}})


@pytest.mark.parametrize(("kind", "point"), EVERY if FULL else SOME)
def test_update_is_cut_off(
    kind: str,
    point: str,
    fleet: dict[str, Machine],
    served: str,
    update: Update,
    traffic: Traffic,
    playbook: Callable[..., Run],
    tmp_path: Path,
) -> None:
    at, way = POINTS[point], KINDS[kind]
    struck, other = fleet[at.on], fleet["right" if at.on == "left" else "left"]
    bystander = other.pids(SERVICE)
    failures = len(traffic.failures)
    run = update.start(tmp_path / "cut-off.log")
    scene = Scene(run, struck, served, fleet["gate"])
    try:
        with contextlib.ExitStack() as held:
            if at.begun:
                # Not before: the replica serves until then.
                await_point(lambda: bool(struck.journal()), REQUESTED, run)
            struck.order(at.hold)
            if at.writes:
                await_point(lambda: struck.phase() == at.writes, at.writes, run)
                held.enter_context(struck.ledger_locked())
            await_point(lambda: at.reached(scene), point, run)
            struck.order(at.then)
            way.strike(scene)
        # What held the host goes on, wherever it is by now.
        struck.order({})
        way.until(scene)
        # Also while what struck it lasts.
        await_that(struck.is_whole, f"{struck.name} serves its old or its new release")
        way.end(scene)
        run.wait(RUN_S)
        await_that(struck.is_quiet, f"{struck.name} serves, and no switch is under way")
    finally:
        run.kill()
        way.end(scene)
        struck.order({})

    left = OLD if struck.served().release == served else NEW
    assert left in at.leaves
    if at.begun:
        assert struck.last()["outcome"] == (RESTORED if left == OLD else CONFIRMED)
    if left == OLD and at.on == "left":
        assert other.pids(SERVICE) == bystander

    again = playbook(update.playbook, **update.variables)
    assert (again.status, again.messages) == ("successful", "")
    (release,) = {fleet[name].served().release for name in REPLICAS}
    assert release != served
    assert fleet["gate"].gateway() == dict.fromkeys(REPLICAS, "UP")
    for name in REPLICAS:
        newest = fleet[name].ledger()[-1]
        assert (newest["action"], newest["to"]) == ("confirm", release)
        assert not fleet[name].journal()
    assert traffic.failures[failures:] == []
