# SPDX-License-Identifier: Apache-2.0
"""The state and the history of a fleet, from what its hosts tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def fleet(
    hosts: Sequence[str], states: Mapping[str, Mapping[str, Any]], gateways: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each host; ``states`` and ``gateways`` are results of release_status and gateway_server.

    ``problems`` of a row are sentences that begin with the host's name.
    """
    return [_row(host, states.get(host, {}), gateways) for host in hosts]


def _row(host: str, state: Mapping[str, Any], gateways: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    acceptance = state.get("acceptance") or {}
    # Of a replica over several hosts, gateways know the one that answers.
    asked = {} if state.get("worker") else gateways
    seen = {name: _at_gateway(host, listed) for name, listed in asked.items()}
    problems = list(state["problems"] if "problems" in state else [_unknown(state)])
    problems += [f"gets no requests from {name}: {what}" for name, what in seen.items() if what != "up"]
    return {
        "host": host,
        "release": state.get("release", ""),
        "deployment": state.get("deployment", ""),
        "deployed": state.get("deployed", ""),
        "vllm": state.get("vllm", ""),
        "patched": list(state.get("patched", [])),
        "drafter": state.get("drafter", ""),
        "service": state.get("service", "unreachable" if _is_unreachable(state) else "unknown"),
        "restarts": state.get("restarts"),
        "uptime_s": state.get("uptime_s"),
        "uptime": duration(state.get("uptime_s")),
        "acceptance": dict(acceptance) or None,
        "length": str(acceptance.get("length") or "-"),
        "gateway": ", ".join(seen.values()) or "none",
        "switch": state.get("switch"),
        "problems": [f"{host}: {problem}" for problem in problems],
    }


def _is_unreachable(result: Mapping[str, Any]) -> bool:
    return not result or bool(result.get("unreachable"))


def _unknown(result: Mapping[str, Any]) -> str:
    """Say why a module told nothing."""
    message = f": {result['msg']}" if result.get("msg") else ""
    return f"{'cannot be reached' if _is_unreachable(result) else 'could not be looked at'}{message}"


def _at_gateway(host: str, listed: Mapping[str, Any]) -> str:
    if "servers" not in listed:
        return "gateway unreachable" if _is_unreachable(listed) else f"gateway failed: {listed['msg']}"
    if not listed["running"]:
        return "HAProxy does not run"
    for server in listed["servers"]:
        if server["name"] == host:
            return str(server["state"]) if server["state"] != "ready" else "up" if server["up"] else "down"
    return "not in its configuration"


def duration(seconds: float | None) -> str:
    """Return a duration for people: the two largest units."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    for size, large, small, rest in ((86400, "d", "h", 3600), (3600, "h", "min", 60), (60, "min", "s", 1)):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // rest} {small}"
    return f"{whole} s"


def history(ledgers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return a line for each entry of the hosts' ledgers, oldest first."""
    entries = sorted(
        ((entry.get("time", ""), host, entry) for host, ledger in ledgers.items() for entry in ledger),
        key=lambda item: item[:2],
    )
    return [_line(host, entry) for _, host, entry in entries]


def _line(host: str, entry: Mapping[str, Any]) -> str:
    what = {
        "activate": "{from} -> {to}, {why}",
        "confirm": "{to} confirmed{gates}",
        "restore": "{to} restored instead of {from}: {why}",
        # Of adopted hosts.
        **dict.fromkeys(("patch", "unpatch"), "patch set {from} -> {to}, {why}"),
    }.get(entry.get("action", ""), "{action}")
    gates = "; ".join(f"{gate['gate']} {gate['verdict']}" for gate in entry.get("gates", []))
    values = {name: entry.get(name) or "nothing" for name in ("from", "to", "why", "action")}
    text = what.format(**values, gates=f" ({gates})" if gates else "")
    return f"{entry.get('time', '?'):20} {entry.get('deployment', ''):18} {host:16} {text}"
