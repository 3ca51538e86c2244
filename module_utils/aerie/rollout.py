# SPDX-License-Identifier: Apache-2.0
"""In which order replicas get a release: one alone as the canary, then batches. A replica's hosts go together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class RolloutError(ValueError):
    """A batch size that is none; the text says what it may be."""


class Rollout(NamedTuple):
    """``hosts`` in the order of the rollout; ``batches`` are numbers of hosts, for the keyword `serial` of a play."""

    hosts: list[str]
    batches: list[int]


def batch_size(text: str, replicas: int) -> int:
    """Return how many replicas a batch has, from a number or a share such as ``25%``; at least one."""
    match = re.fullmatch(r"([0-9]+)(%?)", str(text).strip())
    if not match or int(match[1]) < 1 or (match[2] and int(match[1]) > 100):
        raise RolloutError(f"aerie_batch is {text}: it must be a number of replicas, or a share of them such as 25%")
    return max(replicas * int(match[1]) // 100, 1) if match[2] else int(match[1])


def plan(hosts: Sequence[str], replica_of: Mapping[str, str], batch: str) -> Rollout:
    """Order ``hosts`` by their replicas and cut them into batches.

    A host that ``replica_of`` does not name is a replica by itself. Replicas keep the order of their first hosts. The
    share that a batch is of is that of the replicas that take part.
    """
    replicas: dict[str, list[str]] = {}
    for host in hosts:
        replicas.setdefault(replica_of.get(host, host), []).append(host)
    size = batch_size(batch, len(replicas))
    members = list(replicas.values())
    groups = [members[:1]] + [members[at : at + size] for at in range(1, len(members), size)]
    batches = [sum(len(hosts) for hosts in group) for group in groups if group]
    return Rollout([host for group in members for host in group], batches)


class End(NamedTuple):
    """How a host's switch ended: ``outcome`` as the module `switch` gives it, or ``failed`` or ``unreachable``.

    ``switch`` is that module's account of it, ``message`` says why there is none.
    """

    host: str
    outcome: str
    switch: Mapping[str, Any]
    message: str


# A host's results in the order in which they come, the last one that it has counts.
RESULTS = ("release_not_drained", "release_started", "release_followed", "release_confirmed", "release_undone")


def end_of(host: str, variables: Mapping[str, Any]) -> End:
    """Return how the switch of ``host`` stands, from its registered results."""
    end = End(host, "not started", {}, "")
    for name in RESULTS:
        result = variables.get(name)
        if not isinstance(result, Mapping) or result.get("skipped"):
            continue
        fallback = "unreachable" if result.get("unreachable") else "failed"
        message = str(result.get("msg", ""))
        end = End(host, result.get("outcome", fallback), result.get("switch", end.switch), message)
    return end


def report(ends: Sequence[End], untouched: Sequence[str]) -> str:
    """Say what happened to each host of a batch in which anything failed, and which hosts were not touched."""
    lines = [_sentence(end) for end in ends]
    if untouched:
        lines.append(f"Not touched: {', '.join(untouched)}.")
    return "\n".join(lines)


def _sentence(end: End) -> str:
    switch = end.switch
    before, after = switch.get("from") or "no release", switch.get("to", "the new release")
    if end.outcome in ("confirmed", "unchanged"):
        return f"{end.host}: keeps release {after}." if switch else f"{end.host}: nothing had to be done."
    if end.outcome == "unreachable":
        return (
            f"{end.host}: cannot be reached ({end.message}). Its switch from {before} to {after} goes back by itself "
            "unless it was confirmed. It gets no requests until a run finds it healthy."
        )
    if end.outcome == "not started":
        return f"{end.host}: was not switched."
    if switch.get("waits_for"):
        return (
            f"{end.host}: was told to keep release {after}, and waits for what another host of the replica "
            f"({', '.join(switch['waits_for'])}) does, which it will do, too. It gets no requests until a run finds it "
            "healthy."
        )
    if end.outcome in ("failed", "none") and switch:
        return (
            f"{end.host}: it is not known how the switch from {before} to {after} ended "
            f"({end.message or 'see above'}). It goes back by itself unless it was confirmed. It gets no requests "
            "until a run finds it healthy."
        )
    if end.outcome in ("failed", "none"):
        return f"{end.host}: the switch did not begin: {end.message or 'see above'}"
    gate = f" at the gate `{switch['failed_gate']}`" if switch.get("failed_gate") else ""
    reason = f": {switch['reason']}" if switch.get("reason") else ""
    failed_phase = switch.get("failed_phase", "")
    # "the host was rebooted while ..." says it already.
    phase = f" while {failed_phase}" if failed_phase and not gate and failed_phase not in reason else ""
    failed = f"{end.host}: the switch from {before} to {after} failed{gate}{phase}{reason}"
    if end.outcome == "restored":
        return f"{failed.rstrip('. ')}. Restored: {switch.get('message', '')}."
    if end.outcome == "not restored":
        return f"{failed.rstrip('. ')}. NOT restored: {switch.get('message', '')}. It gets no requests."
    return f"{failed.rstrip('. ')}. It is still {end.outcome}."
