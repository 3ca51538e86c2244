# SPDX-License-Identifier: Apache-2.0
"""This host's part of a replica over several hosts: Ray on each, and on the first one, the head, vLLM besides.

    aerie_node.py COMMAND...    COMMAND is vLLM's, which the head runs once all hosts are there

All parts live and die together: whatever ends on one host, or a host itself, ends the part of every other one, and
systemd starts them again. So nothing of an earlier start is ever mixed with a later one, and a request to an engine
that lost a part gets an error instead of no answer. In which order the hosts start does not matter: the others ask the
head until it is there, and the head waits for all of them.

Each host keeps one connection to the head's program (PORT + 1). It is refused to a host of another release or Python;
its end is how the parts learn of each other's, at once if a program ended and within LOST_S if a host or its network
did. Ray's own ports follow (PORT to PORT + 99), and everything that listens here is for the replica's hosts alone: Ray
has no protection of its own, and roles/multi_node has nftables see to it.

Runs in the release's environment, standard library only. Settings, from the unit's environment files:
AERIE_REPLICA_HOSTS (addresses with commas, the head's first), VLLM_HOST_IP (this host's), AERIE_REPLICA_PORT,
AERIE_REPLICA_GPUS, AERIE_REPLICA_OBJECT_STORE_MB, AERIE_REPLICA_WAIT_S.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import importlib.util
import ipaddress
import json
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

# A silent peer is asked after IDLE_S, then every EVERY_S, and is lost after PROBES questions.
IDLE_S, EVERY_S, PROBES = 5, 2, 5
LOST_S = IDLE_S + EVERY_S * PROBES
RETRY_S = 1.0
RAY_START_S = 120.0
GREETING_S = 10.0
PORTS = 100
Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
# Linux: which interfaces have which IPv4 addresses, in records of a label and a socket address.
_SIOCGIFCONF = 0x8912
_INTERFACE = struct.Struct("16s4x4s16x")
_INTERFACES = 256
# Ray looks at files of its own to rotate them, and would give workers a lower priority and kill them where memory is
# short: systemd's limits do that.
RAY_ENVIRONMENT = {
    "RAY_ROTATION_MAX_BYTES": str(16 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "3",
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Lost(Exception):
    """Why this part has to start again; the text is for the journal."""


@dataclass(frozen=True)
class Node:
    """This host's part. ``hosts`` are addresses, the head's first; ``release`` is the release's directory."""

    release: Path
    hosts: tuple[str, ...]
    address: str
    port: int
    gpus: int
    object_store_mb: int
    wait_s: float

    @property
    def head(self) -> str:
        return self.hosts[0]

    @property
    def is_head(self) -> bool:
        return self.address == self.head

    @property
    def greeting(self) -> dict[str, str]:
        """Return what has to be the same on all hosts."""
        return {"release": self.release.name, "python": platform.python_version()}


def node_of(settings: Mapping[str, str], release: Path) -> Node:
    """Read the settings. Raises Lost where they do not fit together."""
    try:
        hosts = tuple(settings["AERIE_REPLICA_HOSTS"].split(","))
        node = Node(
            release=release,
            hosts=hosts,
            address=settings["VLLM_HOST_IP"],
            port=int(settings["AERIE_REPLICA_PORT"]),
            gpus=int(settings["AERIE_REPLICA_GPUS"]),
            object_store_mb=int(settings["AERIE_REPLICA_OBJECT_STORE_MB"]),
            wait_s=float(settings["AERIE_REPLICA_WAIT_S"]),
        )
    except (KeyError, ValueError) as error:
        raise Lost(f"the settings in /etc/aerie are not complete: {error}") from error
    if node.address not in hosts:
        raise Lost(f"VLLM_HOST_IP is {node.address}, which is none of AERIE_REPLICA_HOSTS ({', '.join(hosts)})")
    return node


def interface_of(address: str) -> str:
    """Return the network interface that has ``address``. Raises Lost if none has."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return "lo"
    for name, found in addresses():
        if found == wanted:
            return name
    raise Lost(f"no network interface of this host has the address {address}: correct multi_node_address")


def addresses() -> Iterator[tuple[str, Address]]:
    """Yield the interfaces of this host with each address. The program `ip` may not run in the service's sandbox."""
    room = array.array("B", bytes(_INTERFACES * _INTERFACE.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        size, _ = struct.unpack("iP", fcntl.ioctl(asked, _SIOCGIFCONF, request))
    for label, packed in _INTERFACE.iter_unpack(room.tobytes()[:size]):
        # A second address may have a label of its own: eth0:1.
        yield label.rstrip(b"\0").decode().partition(":")[0], ipaddress.IPv4Address(packed)
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(int(digits, 16))


def ray_command(node: Node) -> list[str]:
    """Return the command that is Ray's part here. Every port is fixed, so that the firewall knows them."""
    if node.is_head:
        role = ["--head", f"--port={node.port}", "--include-dashboard=false"]
        if importlib.util.find_spec("grpc"):
            # Ray then has a server for clients, which nothing turns off: at 10001 unless it is told another port.
            role.append(f"--ray-client-server-port={node.port + 8}")
    else:
        role = [f"--address={node.head}:{node.port}"]
    return [
        str(node.release / "venv/bin/ray"),
        "start",
        "--block",
        *role,
        f"--node-ip-address={node.address}",
        f"--node-manager-port={node.port + 2}",
        f"--object-manager-port={node.port + 3}",
        f"--runtime-env-agent-port={node.port + 4}",
        f"--dashboard-agent-listen-port={node.port + 5}",
        f"--dashboard-agent-grpc-port={node.port + 6}",
        f"--metrics-export-port={node.port + 7}",
        # The one before is where systemd answers the other hosts' switch programs (module_utils/aerie/mates.py).
        f"--min-worker-port={node.port + 11}",
        f"--max-worker-port={node.port + PORTS - 1}",
        # vLLM's workers ask for GPUs alone.
        "--num-cpus=1",
        f"--num-gpus={node.gpus}",
        f"--object-store-memory={node.object_store_mb << 20}",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]


def environment(node: Node, interface: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Ray and vLLM. What the inventory says of NCCL and Gloo wins."""
    return {
        "GLOO_SOCKET_IFNAME": interface,
        # With `=` it is the name itself, and no prefix.
        "NCCL_SOCKET_IFNAME": f"={interface}",
        **RAY_ENVIRONMENT,
        # systemd is told by this program alone.
        **{name: value for name, value in inherited.items() if name != "NOTIFY_SOCKET"},
        "RAY_ADDRESS": f"{node.head}:{node.port}",
    }


def tell(status: str) -> None:
    """Say in the journal, and to systemd, how far this part is."""
    print(f"[replica] {status}", flush=True)
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stream, contextlib.suppress(OSError):
            stream.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            stream.sendall(f"STATUS={status}".encode())


def watch_closely(writer: asyncio.StreamWriter) -> None:
    """Have the kernel find out within LOST_S that a peer is gone without a word."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)


async def until_closed(reader: asyncio.StreamReader) -> None:
    """Return when the peer ended the connection, or is gone."""
    with contextlib.suppress(OSError):
        while await reader.read(1024):
            pass


async def until_listening(address: str, port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
            return
        await asyncio.sleep(RETRY_S / 4)


class Ray:
    """Ray's processes on this host."""

    def __init__(self, node: Node, variables: Mapping[str, str]) -> None:
        self._node = node
        self._variables = variables

    async def start(self) -> None:
        """Return when this host is a node of the cluster. Raises Lost if it does not become one."""
        self._process = await asyncio.create_subprocess_exec(*ray_command(self._node), env=self._variables)
        up = asyncio.gather(
            until_listening(self._node.head, self._node.port),
            until_listening(self._node.address, self._node.port + 2),
        )
        try:
            await first_of(up, self.until_ended(), after_s=RAY_START_S)
        except TimeoutError as error:
            raise Lost(f"Ray was not up after {RAY_START_S:g} s") from error

    async def until_ended(self) -> None:
        """Raise Lost when Ray ends."""
        raise Lost(f"Ray ended with status {await self._process.wait()}")


class Members:
    """The head's list of the replica's other hosts."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._here: dict[str, asyncio.StreamWriter] = {}
        self._changed = asyncio.Event()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._complete = False

    @property
    def missing(self) -> list[str]:
        return [address for address in self._node.hosts[1:] if address not in self._here]

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of one host until it ends."""
        watch_closely(writer)
        address = str(writer.get_extra_info("peername")[0])
        try:
            async with asyncio.timeout(GREETING_S):
                refusal = self._refusal(address, await reader.readline())
                writer.write(f"{json.dumps({'refused': refusal})}\n".encode())
                await writer.drain()
            if not refusal:
                # Its Ray is up once it says so.
                if await reader.readline():
                    self._here[address] = writer
                    self._changed.set()
                await until_closed(reader)
        except (OSError, TimeoutError, ValueError):
            pass
        finally:
            writer.close()
            if self._here.get(address) is writer:
                self._forget(address)

    def _refusal(self, address: str, line: bytes) -> str:
        if address not in self._node.hosts[1:]:
            return f"{address} is no host of this replica"
        theirs = json.loads(line)
        if not isinstance(theirs, dict):
            raise ValueError(line)
        for name, ours in self._node.greeting.items():
            if theirs.get(name) != ours:
                return f"the head has {name} {ours}, and {address} has {theirs.get(name)}"
        if address in self._here:
            # It started again before its end was noticed. Whoever says something else is not it.
            self._forget(address)
        return ""

    def _forget(self, address: str) -> None:
        del self._here[address]
        self._changed.set()
        if self._complete and not self._lost.done():
            self._lost.set_exception(Lost(f"{address} is gone"))

    async def until_complete(self) -> None:
        """Return when all hosts are here. Raises Lost if they are not within the budget."""
        try:
            async with asyncio.timeout(self._node.wait_s):
                while self.missing:
                    tell(f"waits for {', '.join(self.missing)}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise Lost(
                f"{', '.join(self.missing)} did not come within {self._node.wait_s:g} s: see vllm.service there"
            ) from error
        self._complete = True

    async def until_one_is_lost(self) -> None:
        """Raise Lost when a host is gone that was here."""
        await asyncio.shield(self._lost)


async def first_of(*work: Awaitable[Any], after_s: float | None = None) -> None:
    """Await whatever of ``work`` ends first, and cancel the rest. Raises what that raises, and TimeoutError."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, timeout=after_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise TimeoutError
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve_head(node: Node, variables: Mapping[str, str], command: Sequence[str], stop: asyncio.Event) -> int:
    """Be the head; return the exit status once vLLM ended or ``stop`` is set. Raises Lost."""
    ray = Ray(node, variables)
    members = Members(node)
    await first_of(ray.start(), stop.wait())
    if stop.is_set():
        return 0
    # Not closed before the program ends: that would wait for the other hosts to hang up.
    server = await asyncio.start_server(members.greet, node.address, node.port + 1)
    await first_of(members.until_complete(), ray.until_ended(), stop.wait())
    if stop.is_set():
        return 0
    tell(f"all {len(node.hosts)} hosts are here: starts vLLM")
    vllm = await asyncio.create_subprocess_exec(*command, env=variables)
    ended = asyncio.ensure_future(vllm.wait())
    await first_of(asyncio.shield(ended), ray.until_ended(), members.until_one_is_lost(), stop.wait())
    if ended.done():
        raise Lost(f"vLLM ended with status {ended.result()}")
    # As vLLM alone: it answers the requests that run, within its shutdown-timeout.
    vllm.terminate()
    await ended
    server.close()
    return 0


async def serve_worker(node: Node, variables: Mapping[str, str], stop: asyncio.Event) -> int:
    """Be one of the other hosts; return the exit status once ``stop`` is set. Raises Lost."""
    told = ""
    while not stop.is_set():
        try:
            reader, writer, refusal = await meet(node)
        except (OSError, TimeoutError, ValueError):
            refusal = f"waits for the head at {node.head}"
        else:
            if not refusal:
                break
            writer.close()
        if refusal != told:
            tell(told := refusal)
        await first_of(asyncio.sleep(RETRY_S), stop.wait())
    else:
        return 0
    ray = Ray(node, variables)
    gone = asyncio.ensure_future(until_closed(reader))
    try:
        await first_of(ray.start(), asyncio.shield(gone), stop.wait())
        if not gone.done() and not stop.is_set():
            writer.write(b"joined\n")
            tell(f"joined {node.head}")
            await first_of(ray.until_ended(), asyncio.shield(gone), stop.wait())
        if stop.is_set():
            return 0
        raise Lost(f"the head at {node.head} is gone")
    finally:
        gone.cancel()


async def meet(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    """Return a connection to the head, and why it refuses this host, or nothing. Raises OSError and ValueError."""
    async with asyncio.timeout(GREETING_S):
        # The head knows this host by the address that the firewall knows.
        reader, writer = await asyncio.open_connection(node.head, node.port + 1, local_addr=(node.address, 0))
        watch_closely(writer)
        writer.write(f"{json.dumps(node.greeting)}\n".encode())
        await writer.drain()
        return reader, writer, str(json.loads(await reader.readline())["refused"])


async def serve(command: Sequence[str], release: Path) -> int:
    """Be this host's part of the replica; return the exit status."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        node = node_of(os.environ, release)
        variables = environment(node, interface_of(node.address), os.environ)
        if node.is_head:
            return await serve_head(node, variables, command, stop)
        return await serve_worker(node, variables, stop)
    except Lost as lost:
        tell(f"starts again: {lost}")
        return 1


def main() -> int:
    program = Path(__file__).resolve()
    release = program.parent.parent
    python = release / "venv/bin/python"
    if Path(sys.executable) != python:
        # By the release's own path, not through `current`: what runs tells by its command line which release it is.
        os.execv(python, [str(python), str(program), *sys.argv[1:]])
    # Whatever of Ray is left is systemd's to kill.
    return asyncio.run(serve(sys.argv[1:], release))


if __name__ == "__main__":
    sys.exit(main())
