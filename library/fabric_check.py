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
  - Fails with all that keeps the hosts from working together. Changes nothing.
options:
  state:
    description: Listen in the background, or measure.
    type: str
    choices: [listening, measured]
    required: true
  address:
    description: This host's address on the network that joins the hosts.
    type: str
    required: true
  port:
    description: The port that each host listens on.
    type: int
    required: true
  seconds:
    description: How long to listen, or how long to send to each other host.
    type: float
    required: true
  addresses:
    description:
      - The addresses of the replica's hosts, which may connect to O(port) and the next one from now on, whatever rules
        the release that serves has. They are gone when rules are loaded again. For O(state=listening).
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
    let_in,
    listen,
    measure,
    misnamed,
    mtu_of,
    problems,
)
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "choices": ["listening", "measured"], "required": True},
    "address": {"type": "str", "required": True},
    "port": {"type": "int", "required": True},
    "seconds": {"type": "float", "required": True},
    "addresses": {"type": "list", "elements": "str", "default": []},
    "first_engine_port": {"type": "int", "default": 0},
    "last_engine_port": {"type": "int", "default": 65535},
    "host": {"type": "str", "default": "this host"},
    "peers": {"type": "dict", "default": {}},
    "least_gbit_s": {"type": "float", "default": 0},
    "hostnames": {"type": "str", "choices": ["enforce", "advisory"], "default": "enforce"},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    options = module.params
    host, address, port = options["host"], options["address"], options["port"]
    interface = interface_of(address)
    if not interface:
        module.fail_json(msg=f"no network interface of {host} has the address {address}: correct multi_node_address")
    if options["state"] == "listening":
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
            let_in(options["addresses"], port)
            listen(address, port, options["seconds"])
        except OSError as error:
            module.fail_json(msg=f"{host} cannot listen on {address}:{port} ({error}): free it, or set multi_node_port")
        module.exit_json(changed=False)
    mtu = mtu_of(interface)
    found = [measure(address, peer, port, options["seconds"], mtu) for peer in options["peers"]]
    wrong = list(problems(host, address, options["peers"], found, options["least_gbit_s"]))
    astray = list(misnamed(host, address, options["peers"], found))
    if options["hostnames"] == "enforce":
        wrong += astray
    else:
        for name in astray:
            module.warn(name)
    if wrong:
        module.fail_json(msg=". ".join(wrong), problems=wrong)
    module.exit_json(changed=False, ways=describe(host, options["peers"], found))


if __name__ == "__main__":
    main()
