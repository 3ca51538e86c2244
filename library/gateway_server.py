#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: take replicas out of a gateway, put them back, and look at them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gateway_server
short_description: Drain replicas at an HAProxy gateway, or put them back
description:
  - With O(state=drained), HAProxy sends no new request to O(servers), and the module waits until those that they have
    are answered, also by processes of HAProxy that a reload replaced.
  - With O(state=ready), HAProxy sends them requests again as soon as its check finds them up.
  - Every change is written to HAProxy's state file before the module returns, so that it survives a reload, a restart
    and a crash of HAProxy.
  - With O(state=listed), changes nothing and says what there is. HAProxy checks drained servers, too, so O(wait_up)
    tells whether it will find them.
  - Runs as root on the gateway, which the role C(load_balancer) configures.
options:
  state:
    description: What is wanted.
    type: str
    choices: [drained, ready, listed]
    required: true
  servers:
    description: The servers' names. Required unless O(state=listed) without O(wait_up).
    type: list
    elements: str
    default: []
  timeout_s:
    description:
      - Seconds to wait for requests in flight with O(state=drained), for the servers to be up with O(wait_up), or for
        the configuration with O(state=listed) and O(configuration).
    type: float
    default: 600
  fail_on_timeout:
    description: Whether requests that are still in flight after O(timeout_s) are a failure.
    type: bool
    default: true
  wait_up:
    description:
      - Wait until HAProxy's check finds the servers up, and fail if it does not. Not for O(state=drained).
    type: bool
    default: false
  configuration:
    description: With O(state=listed), wait until HAProxy runs the configuration with this digest.
    type: str
    default: ''
  master_socket:
    description: The socket of HAProxy's master process.
    type: path
    default: /run/aerie-haproxy/master.sock
  state_file:
    description: The state file that HAProxy's configuration names.
    type: path
    default: /var/lib/aerie-haproxy/server-state
  backend:
    description: The backend that has the servers.
    type: str
    default: replicas
attributes:
  check_mode:
    support: full
    description: In check mode nothing is waited for.
  diff_mode:
    support: full
author: Aerie
"""

EXAMPLES = r"""
- name: Drain a replica
  gateway_server:
    state: drained
    servers: [replica-a]
    timeout_s: 300
  delegate_to: gateway

- name: Put it back
  gateway_server:
    state: ready
    servers: [replica-a]
    wait_up: true
    timeout_s: 60
  delegate_to: gateway

- name: Look at all
  gateway_server:
    state: listed
"""

RETURN = r"""
running:
  description: Whether there is a HAProxy that Aerie configured.
  type: bool
  returned: success
configuration:
  description: The digest of the configuration that HAProxy runs.
  type: str
  returned: success
in_flight:
  description: How many requests each of O(servers) still has.
  type: dict
  returned: success
  sample: {replica-a: 0}
waited_s:
  description: How long the module waited.
  type: float
  returned: success
  sample: 4.2
servers:
  description: All servers of the backend, in the order of their names.
  type: list
  elements: dict
  returned: success
  sample:
    - {name: replica-a, address: 192.0.2.11, port: 8000, state: drained, up: true, in_flight: 2, check: L7OK 200}
"""

import time
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.haproxy import Gateway, GatewayError
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "state": {"type": "str", "choices": ["drained", "ready", "listed"], "required": True},
    "servers": {"type": "list", "elements": "str", "default": []},
    "timeout_s": {"type": "float", "default": 600},
    "fail_on_timeout": {"type": "bool", "default": True},
    "wait_up": {"type": "bool", "default": False},
    "configuration": {"type": "str", "default": ""},
    "master_socket": {"type": "path", "default": "/run/aerie-haproxy/master.sock"},
    "state_file": {"type": "path", "default": "/var/lib/aerie-haproxy/server-state"},
    "backend": {"type": "str", "default": "replicas"},
}


def listing(gateway: Gateway) -> list[dict[str, Any]]:
    """Return one dictionary per server."""
    loads = gateway.loads()
    return [
        {
            "name": name,
            "address": server.address,
            "port": server.port,
            "state": server.state,
            "up": server.up,
            "in_flight": loads[name].in_flight if name in loads else 0,
            "check": loads[name].check if name in loads else "",
        }
        for name, server in sorted(gateway.servers().items())
    ]


def change(module: AnsibleModule, gateway: Gateway) -> dict[str, Any]:
    """Bring the servers into the wanted state, and wait for what that means."""
    params, began = module.params, time.monotonic()
    names, drained = list(dict.fromkeys(params["servers"])), params["state"] == "drained"
    before = {name: server.state for name, server in gateway.known(names).items()}
    changed = gateway.change(names, drained)
    result: dict[str, Any] = {"changed": bool(changed), "diff": _diff(before, params["state"])}
    left = gateway.await_idle(names, params["timeout_s"] if drained else 0.0)
    result["in_flight"] = left
    if drained and any(left.values()) and params["fail_on_timeout"]:
        counts = ", ".join(f"{name} {count}" for name, count in left.items() if count)
        module.fail_json(
            msg=f"Requests are still in flight after {params['timeout_s']:g} s ({counts}): wait longer "
            "(load_balancer_drain_timeout), or let the switch end them (load_balancer_drain_strict: false).",
            **result,
        )
    if params["wait_up"] and not drained:
        await_up(module, gateway, names, result)
    return {**result, "waited_s": round(time.monotonic() - began, 1)}


def await_up(module: AnsibleModule, gateway: Gateway, names: list[str], result: dict[str, Any]) -> None:
    """Wait until HAProxy's check finds the servers up; fail, with ``result``, if it does not."""
    timeout_s = module.params["timeout_s"]
    down = gateway.await_up(names, timeout_s)
    if down:
        reasons = "; ".join(f"{name}: {check}" for name, check in down.items())
        module.fail_json(
            msg=f"HAProxy's check does not find these up after {timeout_s:g} s: {reasons}. It asks /health at the "
            "server's address: see whether the gateway reaches it.",
            **result,
        )


def predict(module: AnsibleModule, gateway: Gateway) -> dict[str, Any]:
    """Say what ``change`` would do, also where the role has not configured the gateway or the servers yet."""
    names, wanted = list(dict.fromkeys(module.params["servers"])), module.params["state"]
    servers = gateway.servers() if gateway.is_running() else {}
    known = [name for name in names if name in servers]
    pending = gateway.pending(known, wanted == "drained") if known else []
    loads = gateway.loads() if known else {}
    return {
        "changed": bool(pending) or (wanted == "drained" and known != names),
        "diff": _diff({name: servers[name].state if name in servers else "ready" for name in names}, wanted),
        "in_flight": {name: loads[name].in_flight if name in loads else 0 for name in names},
        "waited_s": 0.0,
    }


def look(module: AnsibleModule, gateway: Gateway) -> dict[str, Any]:
    """Wait for the configuration, and for servers to be up, if these are asked for."""
    params, began = module.params, time.monotonic()
    names, wanted = list(dict.fromkeys(params["servers"])), params["configuration"]
    result: dict[str, Any] = {"changed": False, "in_flight": {}}
    if wanted and not module.check_mode:
        running = gateway.await_configuration(wanted, params["timeout_s"])
        if running != wanted:
            raise GatewayError(
                f"HAProxy runs the configuration {running or 'of somebody else'} and not {wanted} after "
                f"{params['timeout_s']:g} s: see journalctl -u haproxy"
            )
    if params["wait_up"] and not module.check_mode:
        await_up(module, gateway, names, result)
    return {**result, "waited_s": round(time.monotonic() - began, 1)}


def _diff(before: dict[str, str], after: str) -> dict[str, str]:
    return {
        "before": "".join(f"{name} {state}\n" for name, state in sorted(before.items())),
        "after": "".join(f"{name} {after}\n" for name in sorted(before)),
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    params = module.params
    gateway = Gateway(Path(params["master_socket"]), Path(params["state_file"]), params["backend"])
    listed = params["state"] == "listed"
    waits = bool(params["configuration"] or params["wait_up"])
    if not params["servers"] and (not listed or params["wait_up"]):
        wanted = "up" if listed else params["state"]
        module.fail_json(msg=f"servers is empty: name those that should be {wanted}.")
    act = look if listed else predict if module.check_mode else change
    # Otherwise there was one, or the act failed.
    may_be_absent = module.check_mode or (listed and not waits)
    try:
        result = act(module, gateway)
        running = not may_be_absent or gateway.is_running()
        result.update(
            running=running,
            configuration=gateway.configuration() if running else "",
            servers=listing(gateway) if running else [],
        )
    except (GatewayError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
