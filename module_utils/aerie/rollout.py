# SPDX-License-Identifier: Apache-2.0
"""In which order replicas get a release: one alone as the canary, then batches. A replica's hosts go together.

Which of them serve is known from the last look at each host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible.module_utils.aerie.probe import UNDER_WAY


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


def replica_by_host(hosts: Iterable[str], variables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the replica of each host; a host whose variables name none is one by itself."""
    return {host: str(variables[host].get("aerie_replica", host)) for host in hosts}


def host_serves(variables: Mapping[str, Any]) -> bool | None:
    """Say whether a host's service answers with its current release and no switch is under way; None: nobody looked.

    ``variables`` has results of `release_status` and `release_probe`; the former is the later look.
    """
    seen, probed = variables.get("release_seen"), variables.get("release_probed")
    if isinstance(seen, Mapping):
        under_way, current = bool(seen.get("switch")), seen.get("release")
    elif isinstance(probed, Mapping):
        seen, under_way, current = probed, UNDER_WAY in probed.get("reasons", []), probed.get("current")
    else:
        return None
    # A host that could not be reached, or looked at, tells nothing of these.
    return bool(seen.get("healthy") and current and seen.get("running") == current and not under_way)


def serving(hosts: Sequence[str], variables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return those of ``hosts`` that serve; of a replica all do or none, as far as anybody looked at them."""
    replicas = replica_by_host(hosts, variables)
    seen = {host: host_serves(variables[host]) for host in hosts}
    broken = {replicas[host] for host in hosts if seen[host] is False}
    return [host for host in hosts if seen[host] and replicas[host] not in broken]


def stops_all(
    first: Sequence[str],
    hosts: Sequence[str],
    variables: Mapping[str, Mapping[str, Any]],
    listed: Sequence[Mapping[str, Any]],
) -> bool:
    """Say whether nothing serves while ``first`` restart, the hosts of a rollout's first replica.

    ``hosts`` are all that may serve. Those that nobody looked at serve if one of the gateways sends them requests, by
    their results of `gateway_server`; without a gateway that told, nothing speaks against it. Later replicas restart
    when the first one serves.
    """
    replicas = replica_by_host(hosts, variables)
    restarting = {replicas[host] for host in first}
    if not any(_runs(variables[host]) for host in first):
        return False
    if set(replicas.values()) - restarting and not serving(first, variables):
        # Of several, one that does not serve: nothing is lost.
        return False
    told = [result["servers"] for result in listed if result.get("running")]
    up = {server["name"] for servers in told for server in servers if server["state"] == "ready" and server["up"]}
    seen = {host: host_serves(variables[host]) for host in hosts}
    for replica in set(replicas.values()) - restarting:
        members = [host for host in hosts if replicas[host] == replica]
        unknown = all(seen[host] is None for host in members)
        if (not told or not up.isdisjoint(members)) if unknown else False not in [seen[host] for host in members]:
            return False
    return True


def _runs(variables: Mapping[str, Any]) -> bool:
    """Say whether a release runs on a host, healthy or not."""
    return any((variables.get(name) or {}).get("running") for name in ("release_seen", "release_probed"))


def gateway_faults(result: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each gateway that did not do as it was told, from a task that tells one after another.

    The module `gateway_server` lists the servers whenever it did.
    """
    told = result.get("results", [] if result.get("skipped") else [result])
    failed = [one for one in told if "servers" not in one]
    return [f"{one.get('item', 'The gateway')}: {str(one.get('msg', 'no answer')).rstrip('. ')}." for one in failed]


class End(NamedTuple):
    """How a host's switch ended: ``outcome`` as the module `switch` gives it, or ``failed`` or ``unreachable``.

    ``switch`` is that module's account of it, ``message`` says why there is none. ``gateway`` says why it does not get
    requests again, if it should and does not.
    """

    host: str
    outcome: str
    switch: Mapping[str, Any]
    message: str
    gateway: str


# A host's results in the order in which they come, the last one that it has counts.
RESULTS = ("release_not_drained", "release_started", "release_followed", "release_confirmed", "release_undone")


def end_of(host: str, variables: Mapping[str, Any]) -> End:
    """Return how the switch of ``host`` stands, from its registered results."""
    end = End(host, "not started", {}, "", str(variables.get("release_not_undrained", "")))
    for name in RESULTS:
        result = variables.get(name)
        if not isinstance(result, Mapping) or result.get("skipped"):
            continue
        fallback = "unreachable" if result.get("unreachable") else "failed"
        message = str(result.get("msg", ""))
        outcome, switch = result.get("outcome", fallback), result.get("switch", end.switch)
        end = end._replace(outcome=outcome, switch=switch, message=message)
    return end


def answers(host: str, variables: Mapping[str, Any]) -> bool:
    """Say whether the service of ``host`` answers after its switch, so that a gateway's check finds it up.

    What was restored is what there was before, which may be nothing.
    """
    outcome = end_of(host, variables).outcome
    as_before = outcome in ("restored", "not started") and bool(host_serves(variables))
    return outcome in ("confirmed", "unchanged") or as_before


def report(ends: Sequence[End], untouched: Sequence[str]) -> str:
    """Say what happened to each host of a batch in which anything failed, and which hosts were not touched."""
    lines = [f"{_sentence(end)} {_without_requests(end)}".rstrip() for end in ends]
    if untouched:
        lines.append(f"Not touched: {', '.join(untouched)}.")
    return "\n".join(lines)


def _without_requests(end: End) -> str:
    return f"Not every gateway sends it requests: {end.gateway} Mend that, and run again." if end.gateway else ""


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
