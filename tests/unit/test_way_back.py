# SPDX-License-Identifier: Apache-2.0
"""Which hosts go back with `to=previous`, from the ledgers of a fleet whose runs are cut off wherever one likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from ansible.module_utils.aerie.release import Releases
from ansible.module_utils.aerie.rollback import TO_PREVIOUS, WayBack, way_back
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
OLD, NEW, OTHER = "0" * 16, "1" * 16, "2" * 16


@dataclass
class Fleet:
    """Hosts with a ledger each, and what they serve; runs reach them one after the other."""

    root: Path
    names: tuple[str, ...]
    replica_of: Mapping[str, str] = field(default_factory=dict)
    runs: int = 0

    def releases(self, host: str) -> Releases:
        return Releases(self.root / host)

    def served(self) -> list[str]:
        """Return what each host serves: what its ledger has last."""
        return [str(next(iter(self.releases(host).ledger()[::-1]), {"to": ""})["to"]) for host in self.names]

    def run(self, aims: Mapping[str, str], why: str, reaches: int | None = None, restored: Sequence[str] = ()) -> None:
        """Bring ``aims`` to hosts that serve something else, and end after ``reaches`` of them.

        Those that ``restored`` names have what they served before in the end.
        """
        self.runs += 1
        deployment = f"2026-{self.runs:03}"
        pending = [host for host, now in zip(self.names, self.served(), strict=True) if aims.get(host, now) != now]
        for host in pending[:reaches]:
            now = dict(zip(self.names, self.served(), strict=True))[host]
            releases = self.releases(host)
            releases.root.mkdir(exist_ok=True)
            entry = {"deployment": deployment, "action": "activate", "from": now, "to": aims[host], "why": why}
            releases.append_to_ledger(entry)
            end = {"action": "restore", "from": aims[host], "to": now, "why": "nobody confirmed"}
            kept = {"action": "confirm", "to": aims[host], "gates": []}
            releases.append_to_ledger({"deployment": deployment, **(end if host in restored else kept)})

    def deploy(
        self, release: str, reaches: int | None = None, limit: Sequence[str] = (), restored: Sequence[str] = ()
    ) -> None:
        self.run(dict.fromkeys(limit or self.names, release), "deploy", reaches, restored)

    def way_back(self, limit: Sequence[str] = ()) -> WayBack:
        histories = {host: self.releases(host).deployments()[:2] for host in limit or self.names}
        return way_back(histories, self.replica_of)

    def back(
        self, reaches: int | None = None, limit: Sequence[str] = (), restored: Sequence[str] = ()
    ) -> tuple[bool, list[str]]:
        """Roll back to previous; return whether that finished another rollback, and which hosts went back."""
        found = self.way_back(limit)
        aims = {host: self.releases(host).newest_deployment()["from"] for host in found.hosts}
        self.run(aims, TO_PREVIOUS, reaches, restored)
        return found.finishes, found.hosts

    def name(self, release: str, reaches: int | None = None, limit: Sequence[str] = ()) -> None:
        """Roll back to a release by its id."""
        self.run(dict.fromkeys(limit or self.names, release), f"rollback to {release}", reaches)


@contextmanager
def fleet_of(*names: str) -> Iterator[Fleet]:
    """Make a fleet that serves OLD since its first deployment."""
    with TemporaryDirectory() as directory:
        fleet = Fleet(Path(directory), names)
        fleet.deploy(OLD)
        yield fleet


def test_the_playbook_notes_what_is_looked_for() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/rollback.yml").read_text())
    (why,) = [play["vars"]["release_why"] for play in plays if "release_why" in play.get("vars", {})]
    assert why.replace("{{ to }}", "previous") == TO_PREVIOUS


# What is done to three hosts that serve OLD, which of them `to=previous` then takes (and whether it finishes another
# rollback), and what they serve after it.
Story = tuple[Callable[[Fleet], object], tuple[bool, list[str]], list[str]]


def story(*steps: Callable[[Fleet], object]) -> Callable[[Fleet], object]:
    return lambda fleet: [step(fleet) for step in steps]


STORIES: dict[str, Story] = {
    "an update": (lambda fleet: fleet.deploy(NEW), (False, ["a", "b", "c"]), [OLD, OLD, OLD]),
    "an update that was cut off": (lambda fleet: fleet.deploy(NEW, 1), (False, ["a"]), [OLD, OLD, OLD]),
    "an update that was cut off and run again": (
        story(lambda fleet: fleet.deploy(NEW, 1), lambda fleet: fleet.deploy(NEW)),
        (False, ["a", "b", "c"]),
        [OLD, OLD, OLD],
    ),
    "an update that was cut off twice": (
        story(*[lambda fleet: fleet.deploy(NEW, 1)] * 3),
        (False, ["a", "b", "c"]),
        [OLD, OLD, OLD],
    ),
    "an update that stopped at a host which restored itself": (
        lambda fleet: fleet.deploy(NEW, 2, restored=["b"]),
        (False, ["a"]),
        [OLD, OLD, OLD],
    ),
    "an update of one host at first": (
        story(lambda fleet: fleet.deploy(NEW, limit=["b"]), lambda fleet: fleet.deploy(NEW)),
        (False, ["a", "b", "c"]),
        [OLD, OLD, OLD],
    ),
    "a rollback that was cut off": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back(1)),
        (True, ["b", "c"]),
        [OLD, OLD, OLD],
    ),
    "a rollback that was cut off twice": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back(1), lambda fleet: fleet.back(1)),
        (True, ["c"]),
        [OLD, OLD, OLD],
    ),
    "a rollback that stopped at a host which restored itself": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back(2, restored=["b"])),
        (True, ["b", "c"]),
        [OLD, OLD, OLD],
    ),
    "a rollback of which nothing stayed": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back(1, restored=["a"])),
        (False, ["a", "b", "c"]),
        [OLD, OLD, OLD],
    ),
    "a rollback of an update that was cut off and run again": (
        story(lambda fleet: fleet.deploy(NEW, 2), lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back(1)),
        (True, ["b", "c"]),
        [OLD, OLD, OLD],
    ),
    "a rollback of one host at first": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back(limit=["b"])),
        (True, ["a", "c"]),
        [OLD, OLD, OLD],
    ),
    "a rollback of hosts that served different releases": (
        story(
            lambda fleet: fleet.deploy(OTHER, limit=["c"]),
            lambda fleet: fleet.deploy(NEW),
            lambda fleet: fleet.back(1),
        ),
        (True, ["b", "c"]),
        [OLD, OLD, OTHER],
    ),
    "a rollback": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back()),
        (False, ["a", "b", "c"]),
        [NEW, NEW, NEW],
    ),
    "a rollback in two runs": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back(1), lambda fleet: fleet.back()),
        (False, ["a", "b", "c"]),
        [NEW, NEW, NEW],
    ),
    "a second rollback that was cut off": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back(), lambda fleet: fleet.back(1)),
        (True, ["b", "c"]),
        [NEW, NEW, NEW],
    ),
    "a second rollback": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.back(), lambda fleet: fleet.back()),
        (False, ["a", "b", "c"]),
        [OLD, OLD, OLD],
    ),
    "a rollback of what was not updated everywhere": (
        story(lambda fleet: fleet.deploy(NEW, 1), lambda fleet: fleet.back()),
        (False, ["a"]),
        [NEW, OLD, OLD],
    ),
    # Whoever names another aim does not run the same again.
    "a rollback to an id that was cut off": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.name(OTHER, 1)),
        (False, ["a"]),
        [NEW, NEW, NEW],
    ),
    "a rollback to an id": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.name(OTHER, 1), lambda fleet: fleet.name(OTHER)),
        (False, ["a", "b", "c"]),
        [NEW, NEW, NEW],
    ),
    "another update since, of one host": (
        story(lambda fleet: fleet.deploy(NEW), lambda fleet: fleet.deploy(OTHER, limit=["b"])),
        (False, ["b"]),
        [NEW, NEW, NEW],
    ),
    "another update of one host, and back again": (
        story(
            lambda fleet: fleet.deploy(NEW),
            lambda fleet: fleet.deploy(OTHER, limit=["b"]),
            lambda fleet: fleet.back(),
        ),
        (False, ["b"]),
        [NEW, OTHER, NEW],
    ),
    "a rollback of one host, and the update again": (
        story(
            lambda fleet: fleet.deploy(NEW),
            lambda fleet: fleet.back(limit=["b"]),
            lambda fleet: fleet.deploy(NEW),
        ),
        (False, ["a", "b", "c"]),
        [OLD, OLD, OLD],
    ),
    "an update with a limit": (
        lambda fleet: fleet.deploy(NEW, limit=["a", "b"]),
        (False, ["a", "b"]),
        [OLD, OLD, OLD],
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_to_previous_goes_back_on_the_hosts_of_the_newest_update(name: str) -> None:
    happened, taken, served = STORIES[name]
    with fleet_of("a", "b", "c") as fleet:
        happened(fleet)
        assert fleet.back() == taken
        assert fleet.served() == served


def test_with_a_limit_the_other_hosts_are_not_looked_at() -> None:
    with fleet_of("a", "b") as fleet:
        fleet.deploy(NEW)
        assert fleet.back(limit=["a"]) == (False, ["a"])
        # The same command again undoes it, although another host was never reached.
        assert fleet.back(limit=["a"]) == (False, ["a"])
        assert fleet.served() == [NEW, NEW]


def test_a_host_that_served_nothing_before_is_not_left_out_silently() -> None:
    with fleet_of("a") as old:
        fleet = Fleet(old.root, ("a", "new"), runs=old.runs)
        fleet.deploy(NEW)
        # Its way back leads to no release, which the role refuses.
        assert fleet.way_back().hosts == ["a", "new"]
        assert fleet.releases("new").newest_deployment()["from"] == ""


def test_a_fleet_that_nothing_was_deployed_on_has_no_way_back() -> None:
    assert way_back({"a": [], "b": []}, {}) == WayBack("", False, [])


def test_the_hosts_of_a_replica_go_together() -> None:
    with fleet_of("head", "worker", "other") as fleet:
        fleet.replica_of = {"head": "big", "worker": "big"}
        # As after a worker was replaced by another machine, whose ledger begins then.
        fleet.deploy(NEW, limit=["worker"])
        assert fleet.way_back().hosts == ["head", "worker"]


cuts = st.lists(st.integers(0, 4), max_size=4)


@given(st.integers(2, 4), cuts, cuts, cuts)
def test_wherever_runs_are_cut_off_a_rerun_ends_as_if_nothing_had_happened(
    hosts: int, updates: list[int], backs: list[int], again: list[int]
) -> None:
    """An update, a rollback of it, and one of that, each cut off as often as one likes before it is run to its end."""
    with fleet_of(*"abcd"[:hosts]) as fleet:
        for reaches in [*updates, None]:
            fleet.deploy(NEW, reaches)
        for number, (there, here, runs) in enumerate(((NEW, OLD, backs), (OLD, NEW, again))):
            assert fleet.served() == [there] * hosts, number
            # One that reaches all of them is at its end: whoever runs it again wants another one.
            for reaches in runs:
                left = fleet.served().count(there)
                if reaches < left:
                    fleet.back(reaches)
            fleet.back()
            assert fleet.served() == [here] * hosts, number
