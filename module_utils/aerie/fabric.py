# SPDX-License-Identifier: Apache-2.0
"""The network between the hosts of a replica, measured from host to host in seconds, with nothing to install.

Each host listens for a minute (`listen`); then each asks every other one (`measure`): the clock and the way back, often
and small, then as much as goes through a second. A route that carries small packets and no large ones is found by that.
The judgement (`problems`) is apart from the measurement.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_CONNECT_S = 3.0
_STALLED_S = 5.0
_QUESTIONS = 20
_STREAMS = 4
_CHUNK = 1 << 20
_NFT = "/usr/sbin/nft"
_TABLE = "inet aerie_replica"
# What the clocks of one replica's hosts may be apart, in seconds.
CLOCK_S = 1.0


class Measurement(NamedTuple):
    """What a host found about the way to ``peer``.

    ``reached``: whether it answers. ``seen_as``: the address that the peer sees this host as. ``clock_s``: how much the
    peer's clock is ahead. ``rtt_ms``: the shortest way there and back. ``gbit_s``: with four TCP streams, None if
    nothing went through. ``mtu`` and ``peer_mtu`` are those of the two interfaces. ``name`` is what the peer calls
    itself, and ``leads_to`` the address that this host has for that name; empty if it has none.
    """

    peer: str
    reached: bool
    seen_as: str = ""
    clock_s: float = 0.0
    rtt_ms: float = 0.0
    gbit_s: float | None = None
    mtu: int = 0
    peer_mtu: int = 0
    name: str = ""
    leads_to: str = ""
    error: str = ""


# --- The listening side


def serve(listener: socket.socket, seconds: float, mtu: int) -> None:
    """Answer the other hosts' questions for ``seconds``; ``mtu`` is that of the interface here."""
    with listener:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, peer = listener.accept()
            except OSError:
                return
            arguments = (connection, str(peer[0]), mtu, listener)
            threading.Thread(target=_answer, args=arguments, daemon=True).start()


def _answer(connection: socket.socket, peer: str, mtu: int, listener: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_STALLED_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while question := connection.recv(1):
            if question == b"?":
                facts = {"clock": time.time(), "seen_as": peer, "mtu": mtu, "name": socket.gethostname()}
                connection.sendall(json.dumps(facts).encode() + b"\n")
            elif question == b".":
                listener.shutdown(socket.SHUT_RDWR)
                return
            else:
                received = 0
                while data := connection.recv(_CHUNK):
                    received += len(data)
                connection.sendall(f"{received}\n".encode())
                return


def listen(address: str, port: int, seconds: float) -> None:
    """Have a process of its own answer for ``seconds``, instead of an earlier one. Raises OSError if it cannot."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), _CONNECT_S) as earlier:
        earlier.sendall(b".")
        earlier.settimeout(_CONNECT_S)
        # Its end: it hangs up after it has stopped listening.
        earlier.recv(1)
    listener = socket.create_server((address, port), family=_family(address))
    if os.fork() == 0:
        os.setsid()
        # Whoever started this waits for the ends of its output.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        serve(listener, seconds, mtu_of(interface_of(address)))
        os._exit(0)
    listener.close()


def loaded_rules() -> str:
    """Return the rules that keep others from this host's part of a replica, as nft lists them; empty without any."""
    if not Path(_NFT).exists():
        return ""
    return subprocess.run([_NFT, "list", "table", *_TABLE.split()], capture_output=True, text=True, check=False).stdout


def kept_out(rules: str, addresses: Sequence[str], port: int) -> list[str]:
    """Return the hosts of a replica that ``rules`` do not let connect to ``port``, or not for good.

    Rules of the release that serves may be of a time when another host was part of the replica.
    """

    def knows(address: str) -> bool:
        where = re.escape(address)
        return bool(re.search(rf"saddr {where} accept|\b{where} \. {port}\b(?! timeout)", rules))

    return [address for address in addresses if rules and not knows(address)]


def admission(addresses: Sequence[str], port: int, seconds: float = 0) -> str:
    """Return the order to nft that lets these hosts connect to ``port``: for ``seconds``, or until rules are loaded."""
    found = ", ".join(f"{address} . {port}" for address in addresses)
    lasting = ", ".join(f"{address} . {port} timeout {math.ceil(seconds)}s" for address in addresses)
    place = f"element {_TABLE} newcomers"
    # One that is there keeps its end unless it goes first, which must be there to go.
    renewed = f"add {place} {{ {found} }}; delete {place} {{ {found} }}; add {place} {{ {lasting} }}"
    return renewed if seconds else f"add {place} {{ {found} }}"


def let_in(addresses: Sequence[str], port: int, seconds: float = 0) -> None:
    """Have this host's rules let these hosts connect to ``port``. Raises OSError with what nft said if they do not."""
    if addresses:
        order = admission(addresses, port, seconds)
        result = subprocess.run([_NFT, order], capture_output=True, text=True, check=False)
        if result.returncode:
            raise OSError(f"nft: {result.stderr.strip()}")


def given_ports() -> tuple[int, int]:
    """Return the first and the last of the ports that the kernel gives to programs that ask for any."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(first), int(last)


# --- The asking side


def measure(address: str, peer: str, port: int, seconds: float, mtu: int) -> Measurement:
    """Measure the way from ``address`` to ``peer``, both this host's and the other's on the fabric."""
    try:
        facts, clock_s, rtt_s = _ask(address, peer, port)
    except (OSError, ValueError) as error:
        return Measurement(peer, False, mtu=mtu, error=str(error))
    name = str(facts["name"])
    found = Measurement(
        peer, True, str(facts["seen_as"]), clock_s, rtt_s * 1000, None, mtu, int(facts["mtu"]), name, lead(name, peer)
    )
    sent: list[float] = []
    threads = [threading.Thread(target=_flood, args=(address, peer, port, seconds, sent)) for _ in range(_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found._replace(gbit_s=sum(sent) * 8 / 1e9) if len(sent) == _STREAMS else found


def _ask(address: str, peer: str, port: int) -> tuple[dict[str, Any], float, float]:
    """Return the peer's facts, how much its clock is ahead, and the shortest way there and back, in seconds."""
    best = (float("inf"), 0.0)
    with _connect(address, peer, port) as connection, connection.makefile("rb") as answers:
        for _ in range(_QUESTIONS):
            before, asked = time.time(), time.monotonic()
            connection.sendall(b"?")
            facts: dict[str, Any] = json.loads(answers.readline())
            took = time.monotonic() - asked
            best = min(best, (took, facts["clock"] - before - took / 2))
    return facts, best[1], best[0]


def _flood(address: str, peer: str, port: int, seconds: float, sent: list[float]) -> None:
    """Send for ``seconds``; add the bytes a second that arrived, nothing if the way is stalled."""
    with contextlib.suppress(OSError, ValueError), _connect(address, peer, port) as connection:
        data = memoryview(bytes(_CHUNK))
        began = time.monotonic()
        connection.sendall(b"!")
        while time.monotonic() < began + seconds:
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answers:
            sent.append(int(answers.readline()) / (time.monotonic() - began))


def _connect(address: str, peer: str, port: int) -> socket.socket:
    connection = socket.create_connection((peer, port), _CONNECT_S, (address, 0))
    connection.settimeout(_STALLED_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


# --- The host


def lead(name: str, like: str) -> str:
    """Return the first address that this host has for ``name``, of the kind that ``like`` is; empty if it has none."""
    try:
        found = socket.getaddrinfo(name, None, _family(like), socket.SOCK_STREAM)
    except OSError:
        return ""
    return str(found[0][4][0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_of(address: str) -> str:
    """Return the network interface that has ``address``; empty if none has."""
    try:
        found = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return ""
    for link in found:
        if any(entry.get("local") == address for entry in link.get("addr_info", [])):
            return str(link["ifname"])
    return ""


def mtu_of(interface: str) -> int:
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    except (OSError, ValueError):
        return 0


# --- The judgement


def problems(
    host: str, address: str, names: Mapping[str, str], found: Sequence[Measurement], least: float
) -> Iterator[str]:
    """Yield what keeps ``host`` from working with the others, one sentence each.

    ``names``: the hosts by their addresses. ``least``: the Gbit/s that the fabric must carry; 0 for any.
    """
    for way in found:
        peer = names.get(way.peer, way.peer)
        if not way.reached:
            yield (
                f"{host} cannot reach {peer} at {way.peer} from {address} ({way.error}): correct multi_node_address, "
                "or open the network between them"
            )
            continue
        if way.seen_as != address:
            yield f"{peer} sees {host} as {way.seen_as} and not as {address}: there must be no NAT between them"
        if abs(way.clock_s) > CLOCK_S:
            yield f"the clock of {peer} is {way.clock_s:+.1f} s from that of {host}: synchronise them (chrony)"
        if way.mtu != way.peer_mtu:
            yield f"{host} has MTU {way.mtu} and {peer} {way.peer_mtu} on the fabric: give both the same"
        if way.gbit_s is None:
            yield (
                f"small packets from {host} to {peer} arrive and large ones do not: some switch between them carries "
                f"less than MTU {way.mtu}"
            )
        elif way.gbit_s < least:
            yield (
                f"{host} sends {way.gbit_s:.1f} Gbit/s to {peer}, and multi_node_least_bandwidth is {least:g}: see the "
                "link's speed, or lower it"
            )


def misnamed(host: str, address: str, names: Mapping[str, str], found: Sequence[Measurement]) -> Iterator[str]:
    """Yield where a name that ``host`` has for itself or for another one leads past the fabric, one sentence each.

    A name that leads nowhere is none of them: whoever uses it fails at once, and does not take another network.
    """
    own = socket.gethostname()
    ways = [(host, address, own, lead(own, address))]
    ways += [(names.get(way.peer, way.peer), way.peer, way.name, way.leads_to) for way in found]
    for whose, where, name, to in ways:
        # Debian gives a host's own name an address of its loopback, which leads nowhere else.
        if to not in ("", where) and not (whose == host and ipaddress.ip_address(to).is_loopback):
            yield (
                f"on {host} the name {name} of {whose} leads to {to} and not to {where}, its address on the fabric: "
                f"have {where} {name} in /etc/hosts there"
            )


def describe(host: str, names: Mapping[str, str], found: Sequence[Measurement]) -> list[str]:
    """Return a line for each way that was measured."""
    return [
        f"{host} to {names.get(way.peer, way.peer)}: {way.rtt_ms:.2f} ms there and back, {way.gbit_s:.1f} Gbit/s over "
        f"TCP, MTU {way.mtu}, clock {way.clock_s:+.2f} s"
        for way in found
        if way.reached and way.gbit_s is not None
    ]
