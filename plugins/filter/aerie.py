# SPDX-License-Identifier: Apache-2.0
"""Filters that check and plan a rollout and say how it went, and how a fleet stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ansible.constants as C
import ansible.module_utils
from ansible.errors import AnsibleFilterError

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie.acceptance import settings_of  # noqa: E402
from ansible.module_utils.aerie.acceptance_verdict import Conditions, thresholds_for  # noqa: E402
from ansible.module_utils.aerie.fleet import fleet, history  # noqa: E402
from ansible.module_utils.aerie.rollback import way_back  # noqa: E402
from ansible.module_utils.aerie.rollout import (  # noqa: E402
    RolloutError,
    answers,
    batch_size,
    end_of,
    gateway_faults,
    plan,
    replica_by_host,
    report,
    serving,
    stops_all,
)


def aerie_rollout(hosts: Sequence[str], replica_of: Mapping[str, str], batch: str) -> dict[str, Any]:
    """Return the rollout of ``hosts`` with the keys ``hosts`` and ``batches``."""
    try:
        return plan(list(hosts), dict(replica_of), batch)._asdict()
    except RolloutError as error:
        raise AnsibleFilterError(str(error)) from error


def aerie_batch_fault(batch: object) -> str:
    """Return why ``batch`` is no size of a rollout's batches; nothing if it is one."""
    try:
        batch_size(str(batch), 1)
    except RolloutError as error:
        return str(error)
    return ""


def aerie_live_gate_fault(config: Mapping[str, Any]) -> str:
    """Return why the gate of acceptance could not be run as configured; nothing if it can."""
    baseline = config.get("baseline") or {}
    if not isinstance(baseline, Mapping):
        return f"baseline is {baseline!r}, and no result of the gate"
    drafted = baseline.get("speculative_tokens", 1)
    try:
        settings = settings_of({**config, "url": "", "model": "", "speculative_tokens": drafted})
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    try:
        # As with a release that drafts as many tokens: otherwise the baseline is not looked at.
        same = {**baseline, "speculative_tokens": drafted}
        thresholds_for(Conditions(drafted, "", {}), same, settings.thresholds)
    except (LookupError, TypeError, ValueError) as error:
        return f"baseline has what is no number: {error}"
    return ""


def aerie_replica_of(hosts: Sequence[str], variables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the replica of each host; a host whose variables name none is one by itself."""
    return replica_by_host(hosts, variables)


def aerie_serving(hosts: Sequence[str], variables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return those of ``hosts`` that serve, by the last look at each."""
    return serving(hosts, variables)


def aerie_stops_all(
    first: Sequence[str],
    hosts: Sequence[str],
    variables: Mapping[str, Mapping[str, Any]],
    listed: Sequence[Mapping[str, Any]],
) -> bool:
    """Say whether none of ``hosts`` serves while ``first`` restart, which come first in a rollout."""
    return stops_all(first, hosts, variables, listed)


def aerie_answers(variables: Mapping[str, Any]) -> bool:
    """Say whether a host's service answers after its switch, from its variables."""
    return answers(variables["inventory_hostname"], variables)


def aerie_way_back(hosts: Sequence[str], variables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return which of ``hosts`` go back to what they served before, and why, with the keys of WayBack."""
    histories = {host: variables[host].get("release_probed", {}).get("deployments", []) for host in hosts}
    return way_back(histories, aerie_replica_of(hosts, variables))._asdict()


def aerie_outcomes(hosts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return how the switch of each host stands, by host, from the variables of ``hosts``."""
    ends = [end_of(variables["inventory_hostname"], variables) for variables in hosts]
    return {end.host: end.outcome for end in ends}


def aerie_report(hosts: Sequence[Mapping[str, Any]], all_hosts: Sequence[str]) -> str:
    """Say what happened to ``hosts``, a batch; the hosts after it in the rollout's order were not touched."""
    ends = [end_of(variables["inventory_hostname"], variables) for variables in hosts]
    last = max(list(all_hosts).index(end.host) for end in ends)
    return report(ends, list(all_hosts)[last + 1 :])


def aerie_fleet(
    hosts: Sequence[str], gateways: Sequence[str], variables: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each host, from what the plays before registered."""
    states = {host: variables[host].get("release_state", {}) for host in hosts}
    # With --limit nobody looked at them.
    seen = [gateway for gateway in gateways if "gateway_listed" in variables[gateway]]
    listed = {gateway: variables[gateway]["gateway_listed"] for gateway in seen}
    return fleet(list(hosts), states, listed)


def aerie_history(hosts: Sequence[str], variables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each entry of the hosts' ledgers."""
    return history({host: variables[host].get("release_state", {}).get("ledger", []) for host in hosts})


class FilterModule:
    """What Ansible looks for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "aerie_answers": aerie_answers,
            "aerie_batch_fault": aerie_batch_fault,
            "aerie_fleet": aerie_fleet,
            "aerie_gateway_faults": gateway_faults,
            "aerie_history": aerie_history,
            "aerie_live_gate_fault": aerie_live_gate_fault,
            "aerie_outcomes": aerie_outcomes,
            "aerie_replica_of": aerie_replica_of,
            "aerie_report": aerie_report,
            "aerie_rollout": aerie_rollout,
            "aerie_serving": aerie_serving,
            "aerie_stops_all": aerie_stops_all,
            "aerie_way_back": aerie_way_back,
        }
