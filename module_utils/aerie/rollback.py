# SPDX-License-Identifier: Apache-2.0
"""Which hosts go back to what they served before: those of the newest deployment, however many runs it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# What rollback.yml notes in the ledger where it goes back to what each host served before.
TO_PREVIOUS = "rollback to previous"

# A deployment that changed what a host serves, as the host's ledger has it: its id, `from`, `to` and `why`.
Step = Mapping[str, str]


class WayBack(NamedTuple):
    """``hosts`` go back; the others are left alone.

    They undo ``deployment``, or go on with it if it ``finishes``: a rollback that was cut off before it reached them.
    """

    deployment: str
    finishes: bool
    hosts: list[str]


def way_back(histories: Mapping[str, Sequence[Step]], replica_of: Mapping[str, str]) -> WayBack:
    """Return which hosts go back, from the steps of each, the newest first; two of them are enough.

    A run that was cut off and started again is another deployment, which takes the hosts that are left by the same
    step: they all took part in one update. The hosts of a replica go together.
    """
    newest_steps = {host: steps[0] for host, steps in histories.items() if steps}
    if not newest_steps:
        return WayBack("", False, [])
    newest = max(newest_steps.values(), key=lambda step: step["deployment"])
    deployment = newest["deployment"]
    reached = [host for host, step in newest_steps.items() if step["deployment"] == deployment]
    # What this rollback undid; hosts that it did not reach still have it as their newest.
    undone = [histories[host][1] for host in reached if newest["why"] == TO_PREVIOUS and len(histories[host]) > 1]
    rest = {host: step for host, step in newest_steps.items() if host not in reached and _is_one_of(step, undone)}
    same = [newest_steps[host] for host in reached]
    found = rest or {host for host, step in newest_steps.items() if _is_one_of(step, same)}
    replicas = {replica_of.get(host, host) for host in found}
    return WayBack(deployment, bool(rest), [host for host in histories if replica_of.get(host, host) in replicas])


def _is_one_of(step: Step, steps: Iterable[Step]) -> bool:
    return any(
        step["deployment"] == other["deployment"] or (step["from"], step["to"]) == (other["from"], other["to"])
        for other in steps
    )
