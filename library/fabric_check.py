#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: the network between the hosts of a replica, measured from one to the others."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_check
short_description: Measure the network between the hosts of a replica
description:
  - Listens on one address for a while, or measures the way to others that listen; whether they are reached and how
    fast, whether large packets arrive, whether anything between them changes addresses, whether the clocks agree, and
    whether the hosts' names lead to these addresses.
  - Fails with all that keeps the hosts from working together. What it opens for a measurement closes by itself.
options:
  state:
    description: Listen in the background, measure, or let the other hosts connect until rules are loaded again.
    type: str
    choices: [listening, measured, admitted]
    required: true
  address:
    description: This host's address on the network that joins the hosts.
    type: str
    required: true
  port:
    description: The port that each host listens on, or that the others are let in to.
    type: int
    required: true
  seconds:
    description:
      - How long to listen, or how long to send to each other host. For O(state=listening) and O(state=measured).
    type: float
  addresses:
    description:
      - The addresses of the replica's hosts, which may connect to O(port) whatever rules the release that serves has.
        For as long as it listens with O(state=listening), until rules are loaded again with O(state=admitted); in check
        mode not at all.
    type: list
    elements: str
    default: []
  first_engine_port:
    description:
      - The first of the ports that nobody but these hosts connects to. One that the kernel gives to programs must be
        among them. For O(state=listening).
    type: int
    default: 0
  last_engine_port:
    description: The last of these ports.
    type: int
    default: 65535
  host:
    description: This host's name, for messages.
    type: str
    default: this host
  peers:
    description: The names of the other hosts, by their addresses.
    type: dict
    default: {}
  least_gbit_s:
    description: The Gbit/s that must go through. 0 for any.
    type: float
    default: 0
  hostnames:
    description: Whether a name that leads to another address fails, or is a warning.
    type: str
    choices: [enforce, advisory]
    default: enforce
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Listen
  fabric_check:
    state: listening
    address: 10.1.0.11
    port: 6388
    seconds: 60

- name: Measure
  fabric_check:
    state: measured
    address: 10.1.0.11
    port: 6388
    seconds: 1
    peers: {10.1.0.12: gpu-02}
"""

RETURN = r"""
kept_out:
  description: The addresses that in check mode are not let in, which rules of the release that serves keep out.
  returned: success and state is listening
  type: list
  elements: str
  sample: [10.1.0.13]
ways:
  description: A line for each other host.
  returned: success and state is measured
  type: list
  elements: str
  sample: ["gpu-01 to gpu-02: 0.05 ms there and back, 180.0 Gbit/s over TCP, MTU 9000, clock +0.01 s"]
problems:
  description: A sentence for each thing that is wrong.
  returned: when there are any
  type: list
  elements: str
  sample: ["gpu-01 has MTU 9000 and gpu-02 1500 on the fabric: give both the same"]
"""

import shutil
from typing import Any

from ansible.module_utils.aerie.fabric import (
    describe,
    given_ports,
    interface_of,
    kept_out,
    let_in,
    listen,
    loaded_rules,
    measure,
    misnamed,
    mtu_of,
    problems,
)
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "choices": ["listening", "measured", "admitted"], "required": True},
    "address": {"type": "str", "required": True},
    "port": {"type": "int", "required": True},
    "seconds": {"type": "float"},
    "addresses": {"type": "list", "elements": "str", "default": []},
    "first_engine_port": {"type": "int", "default": 0},
    "last_engine_port": {"type": "int", "default": 65535},
    "host": {"type": "str", "default": "this host"},
    "peers": {"type": "dict", "default": {}},
    "least_gbit_s": {"type": "float", "default": 0},
    "hostnames": {"type": "str", "choices": ["enforce", "advisory"], "default": "enforce"},
}
REQUIRED_IF = [("state", state, ["seconds"]) for state in ("listening", "measured")]


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, required_if=REQUIRED_IF, supports_check_mode=True)
    host, address = module.params["host"], module.params["address"]
    interface = interface_of(address)
    if not interface:
        module.fail_json(msg=f"no network interface of {host} has the address {address}: correct multi_node_address")
    if module.params["state"] == "measured":
        measure_all(module, interface)
    shut_out = kept_out(loaded_rules(), module.params["addresses"], module.params["port"])
    admitted = [] if module.check_mode else shut_out
    if module.params["state"] == "listening":
        listen_here(module, admitted)
        module.exit_json(changed=False, kept_out=[other for other in shut_out if other not in admitted])
    try:
        let_in(admitted, module.params["port"])
    except OSError as error:
        others = ", ".join(admitted)
        module.fail_json(msg=f"{host} cannot let {others} in ({error}): see nft list table inet aerie_replica")
    module.exit_json(changed=bool(shut_out))


def listen_here(module: AnsibleModule, admitted: list[str]) -> None:
    """Listen in the background, and let others in for as long."""
    options = module.params
    host, address, port = options["host"], options["address"], options["port"]
    first, last = given_ports()
    if first < options["first_engine_port"] or last > options["last_engine_port"]:
        module.fail_json(
            msg=f"{host} gives the ports {first}-{last} to programs that ask for any, and multi_node_engine_ports "
            f"is {options['first_engine_port']}-{options['last_engine_port']}: anybody could connect to the "
            f"others. Set it to {first}-{last}, or net.ipv4.ip_local_port_range on the host"
        )
    if shutil.which("nft") is None and shutil.which("/usr/sbin/nft") is None:
        module.fail_json(msg=f"{host} has no nft, which keeps others from Ray's ports: install nftables")
    try:
        let_in(admitted, port, options["seconds"])
        listen(address, port, options["seconds"])
    except OSError as error:
        module.fail_json(msg=f"{host} cannot listen on {address}:{port} ({error}): free it, or set multi_node_port")


def measure_all(module: AnsibleModule, interface: str) -> None:
    """Measure the way to each other host; end the module."""
    options = module.params
    host, address, peers = options["host"], options["address"], options["peers"]
    mtu = mtu_of(interface)
    found = [measure(address, peer, options["port"], options["seconds"], mtu) for peer in peers]
    wrong = list(problems(host, address, peers, found, options["least_gbit_s"]))
    astray = list(misnamed(host, address, peers, found))
    if options["hostnames"] == "enforce":
        wrong += astray
    else:
        for name in astray:
            module.warn(name)
    if wrong:
        module.fail_json(msg=". ".join(wrong), problems=wrong)
    module.exit_json(changed=False, ways=describe(host, peers, found))


if __name__ == "__main__":
    main()
