# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Ray: `ray start --block` as Aerie's part of a replica runs it, which joins nothing.

It listens where Ray would, and on another host than the head it waits for the head's. With the entry "ray": "dies" of
the JSON object in /run/stand-in/faults.json it ends at its start.

Runs on a host's Python, with the standard library alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import sys
import time
from pathlib import Path

FAULTS = Path(os.environ.get("STAND_IN_FAULTS", "/run/stand-in/faults.json"))
_LOOK_S = 0.1


def is_to_die() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads(FAULTS.read_text()).get("ray") == "dies")
    return False


def until_reached(address: str, port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection((address, port), _LOOK_S):
            return
        time.sleep(_LOOK_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="ray")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("start", allow_abbrev=False)
    command.add_argument("--block", action="store_true", required=True)
    command.add_argument("--head", action="store_true")
    command.add_argument("--port", type=int)
    command.add_argument("--address", default="")
    command.add_argument("--node-ip-address", required=True)
    command.add_argument("--node-manager-port", type=int, required=True)
    options, _ = parser.parse_known_args()
    if is_to_die():
        sys.exit("RuntimeError: the stand-in for Ray was told to die")
    if options.address:
        head, _, port = options.address.rpartition(":")
        until_reached(head, int(port))
    ports = [options.port] if options.head else []
    listeners = [socket.create_server((options.node_ip_address, port)) for port in (*ports, options.node_manager_port)]
    print(f"Ray runtime started, listening at {', '.join(str(one.getsockname()) for one in listeners)}", flush=True)
    # Who connects is heard: connections that nobody accepts would fill the queue, and nobody else would get in.
    with selectors.DefaultSelector() as ready:
        for listener in listeners:
            ready.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.accept()[0].close()


if __name__ == "__main__":
    main()
