# SPDX-License-Identifier: Apache-2.0
"""HAProxy's runtime API: who is drained, who still has requests, and a state file that outlives HAProxy.

What is set through the runtime API is gone after a reload unless it stands in a state file that the configuration
names, so every change is written there at once. All goes through the socket of HAProxy's master process, since a
process that a reload replaced keeps its requests until they end, and only the master reaches it.

Also a program for HAProxy's unit, run as root on the gateway: ``haproxy.py prepare|save|reload``.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.aerie.files import write_atomically

MASTER_SOCKET = Path("/run/aerie-haproxy/master.sock")
STATE_FILE = Path("/var/lib/aerie-haproxy/server-state")
CONFIGURATION = Path("/etc/haproxy/haproxy.cfg")
BACKEND = "replicas"

# HAProxy's SRV_ADMF_* and SRV_ST_STOPPED.
_FORCED_MAINTENANCE = 0x01
_CONFIGURED_MAINTENANCE = 0x04
_FORCED_DRAIN = 0x08
_STOPPED = 0

# Process id, type, in older releases a column more, reloads, uptime.
_WORKER = re.compile(r"(\d+)\s+worker\s(?:.*\s)?(\d+)\s+\d+d\d+h\d+m\d+s\s", re.ASCII)

_ANSWER_S = 10.0
# While HAProxy reloads, its master breaks connections off.
PATIENCE_S = 5.0
_LOCK_S = 60.0
_RELOAD_S = 60.0
_POLL_S = 0.1


class GatewayError(Exception):
    """What HAProxy did not do; the text names it and the remedy."""


class Worker(NamedTuple):
    """A process that serves; ``reloads`` is how often HAProxy was reloaded since it started."""

    pid: int
    reloads: int


class Server(NamedTuple):
    """What HAProxy knows about one server: ``drained`` and ``maintenance`` as somebody told it, ``up`` by its check."""

    name: str
    address: str
    port: int
    drained: bool
    maintenance: bool
    up: bool

    @property
    def state(self) -> str:
        return "maintenance" if self.maintenance else "drained" if self.drained else "ready"


class Load(NamedTuple):
    """What one process counts for a server: requests that it has now, and what its last check said."""

    in_flight: int
    check: str


# ------------------------------------------------------------------------------------------------------------- parsing


def parse_workers(text: str) -> list[Worker]:
    """Return the workers of ``show proc``, the one that takes new connections first."""
    workers: list[Worker] = []
    for line in text.splitlines():
        if line.split()[1:2] != ["worker"]:
            continue
        row = _WORKER.match(line)
        if row is None:
            raise GatewayError(f"HAProxy lists its processes in a form that Aerie does not know: {line.strip()!r}")
        workers.append(Worker(int(row[1]), int(row[2])))
    if not workers:
        raise GatewayError("HAProxy's master process has no worker: see journalctl -u haproxy")
    return sorted(workers, key=lambda worker: worker.reloads)


def parse_state(text: str, backend: str) -> dict[str, Server]:
    """Return the servers of ``backend`` in the output of ``show servers state``, which is also a state file's form."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or lines[0].strip() != "1" or not lines[1].startswith("# be_id "):
        raise GatewayError(f"HAProxy's server states are in a form that Aerie does not know: {text[:200]!r}")
    titles = lines[1][1:].split()
    servers = {}
    for line in lines[2:]:
        row = dict(zip(titles, line.split()))
        if row.get("be_name") != backend:
            continue
        try:
            admin = int(row["srv_admin_state"])
            server = Server(
                name=row["srv_name"],
                address=row["srv_addr"],
                port=int(row["srv_port"]),
                drained=bool(admin & _FORCED_DRAIN),
                maintenance=bool(admin & (_FORCED_MAINTENANCE | _CONFIGURED_MAINTENANCE)),
                up=int(row["srv_op_state"]) != _STOPPED,
            )
        except (KeyError, ValueError) as error:
            raise GatewayError(f"HAProxy's state of a server cannot be read: {line!r} ({error})") from None
        servers[server.name] = server
    return servers


def parse_statistics(text: str, backend: str) -> dict[str, Load]:
    """Return what one process counts for each server of ``backend``, from the CSV of ``show stat``."""
    if not text.startswith("# pxname,"):
        raise GatewayError(f"HAProxy's statistics are in a form that Aerie does not know: {text[:200]!r}")
    try:
        rows = list(csv.DictReader(io.StringIO(text[2:])))
    except csv.Error as error:
        raise GatewayError(f"HAProxy's statistics cannot be read: {error}") from error
    loads = {}
    for row in rows:
        if row["pxname"] != backend or row.get("svname") in ("FRONTEND", "BACKEND", None):
            continue
        try:
            in_flight = int(row["scur"]) + int(row["qcur"])
        except (KeyError, TypeError, ValueError):
            raise GatewayError(f"HAProxy's statistics of {row['svname']} have no number of requests") from None
        check = " ".join(word for word in (row.get("check_status"), row.get("check_code"), row.get("last_chk")) if word)
        loads[row["svname"]] = Load(in_flight, check)
    return loads


def parse_description(text: str) -> str:
    """Return the ``description`` in the output of ``show info``, which Aerie's configuration sets to its digest."""
    for line in text.splitlines():
        if line.startswith("description:"):
            return line.partition(":")[2].strip()
    return ""


class Configured(NamedTuple):
    """A server's port in a configuration, and whether HAProxy speaks TLS with it."""

    port: int
    tls: bool


def configured(configuration: str) -> dict[str, Configured]:
    """Return the servers in a configuration that Aerie wrote."""
    rows = re.findall(r"^\s*server\s+(\S+)\s+\S+:(\d+)(\s+ssl)?(?:\s|$)", configuration, re.MULTILINE)
    return {name: Configured(int(port), bool(tls)) for name, port, tls in rows}


def as_configured(state: str, servers: Mapping[str, Configured]) -> str:
    """Return the state file ``state`` with the ports of these servers, and with TLS or without it.

    HAProxy takes both from the state file even where the configuration has others; the address it takes from the
    configuration.
    """
    lines = state.splitlines()
    titles = lines[1][1:].split() if len(lines) > 1 else []
    if "srv_name" not in titles or "srv_port" not in titles:
        return state
    for number, line in enumerate(lines[2:], start=2):
        row = dict(zip(titles, line.split()))
        server = servers.get(row.get("srv_name", ""))
        if server is not None and len(line.split()) == len(titles):
            row["srv_port"] = str(server.port)
            if "srv_use_ssl" in row:
                row["srv_use_ssl"] = str(int(server.tls))
            lines[number] = " ".join(row.values())
    return "".join(f"{line}\n" for line in lines)


# ------------------------------------------------------------------------------------------------------------- talking


class Gateway:
    """One HAProxy, through its master socket."""

    def __init__(
        self,
        master_socket: Path = MASTER_SOCKET,
        state_file: Path = STATE_FILE,
        backend: str = BACKEND,
        patience_s: float | None = None,
    ) -> None:
        """``patience_s`` is how long to ask again when there is no answer; by default PATIENCE_S."""
        self._socket = master_socket
        self._state_file = state_file
        self._backend = backend
        self._patience_s = PATIENCE_S if patience_s is None else patience_s

    def is_running(self) -> bool:
        """Say whether there is a HAProxy that Aerie configured."""
        with contextlib.suppress(OSError), self._connected():
            return True
        return False

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_ANSWER_S)
            connection.connect(str(self._socket))
        except BaseException:
            connection.close()
            raise
        return connection

    def ask(self, command: str, worker: Worker | None = None) -> str:
        """Return what the master, or a ``worker``, answers; nothing if the worker has ended."""
        line = f"@!{worker.pid} {command}\n" if worker else f"{command}\n"
        fault = "it said nothing"
        for _ in _until(self._patience_s):
            try:
                # Every answer ends with a line feed.
                if answer := self._exchange(line.encode()):
                    text = answer.decode(errors="replace")
                    return "" if worker and text.startswith("Can't find the target") else text
            except OSError as error:
                fault = str(error)
        raise GatewayError(
            f"HAProxy does not answer on {self._socket} ({fault}): see journalctl -u haproxy; deploy.yml starts it"
        )

    def _exchange(self, line: bytes) -> bytes:
        answer = b""
        with self._connected() as connection:
            connection.sendall(line)
            # The master answers what it was asked, and ends the connection then.
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answer += part
        return answer

    def workers(self) -> list[Worker]:
        """Return the processes that have requests or take new ones; the one that takes new ones is first."""
        return parse_workers(self.ask("show proc"))

    def configuration(self) -> str:
        """Return the digest of the configuration that runs; empty if it is not Aerie's."""
        return parse_description(self.ask("show info", self.workers()[0]))

    def servers(self) -> dict[str, Server]:
        """Return the servers by name, as new connections see them."""
        return parse_state(self.ask(f"show servers state {self._backend}", self.workers()[0]), self._backend)

    def loads(self) -> dict[str, Load]:
        """Return what each server has, summed over all processes; its check is the newest process's."""
        total: dict[str, Load] = {}
        for worker in self.workers():
            text = self.ask(f"show stat {self._backend} 4 -1", worker)
            for name, load in parse_statistics(text, self._backend).items() if text else ():
                known = total.get(name)
                total[name] = Load(known.in_flight + load.in_flight, known.check) if known else load
        return total

    def known(self, names: Iterable[str]) -> dict[str, Server]:
        """Return the servers ``names``; raise GatewayError if one of them is none."""
        servers = self.servers()
        if missing := sorted(set(names) - set(servers)):
            raise GatewayError(
                f"HAProxy has no server {', '.join(missing)}; it has {', '.join(sorted(servers)) or 'none'}: "
                "deploy.yml configures it"
            )
        return {name: servers[name] for name in names}

    # --- Changing

    def pending(self, names: Iterable[str], drained: bool) -> list[str]:
        """Return those of ``names`` that are not so, be it in HAProxy or in the state file.

        A server that the file does not have is ready when HAProxy starts.
        """
        recorded = {name: server.state for name, server in self._recorded().items()}
        state = "drained" if drained else "ready"
        return [
            name
            for name, server in self.known(names).items()
            if server.state != state or recorded.get(name, "ready") != state
        ]

    def _recorded(self) -> dict[str, Server]:
        try:
            return parse_state(self._state_file.read_text(errors="replace"), self._backend)
        except (OSError, GatewayError):
            return {}

    def change(self, names: Iterable[str], drained: bool) -> list[str]:
        """Drain the servers ``names``, or undo that, and write it to the state file; return those that changed.

        No reload comes between the two, so the next process knows.
        """
        with self._locked():
            pending = self.pending(names, drained)
            if not pending:
                return []
            # Those that it replaced refuse: they hand new requests to it.
            newest = self.workers()[0]
            for name in pending:
                command = f"set server {self._backend}/{name} state {'drain' if drained else 'ready'}"
                if refusal := self.ask(command, newest).strip():
                    raise GatewayError(f"HAProxy does not change server {name}: {refusal}")
            self._save(newest)
            if left := self.pending(names, drained):
                raise GatewayError(f"HAProxy did not change {', '.join(left)}: was it reloaded by a signal? Run again")
            return pending

    def _save(self, worker: Worker) -> None:
        text = self.ask(f"show servers state {self._backend}", worker)
        if not parse_state(text, self._backend):
            raise GatewayError(f"HAProxy has no servers in backend {self._backend}: deploy.yml configures it")
        write_atomically(self._state_file, text.encode(), mode=0o600)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep reloads, and other changes, away."""
        with self._state_file.with_name("lock").open("w") as stream:
            for _ in _until(_LOCK_S):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
            else:
                raise GatewayError(f"another change of HAProxy, or a reload, did not end in {_LOCK_S:g} s: run again")
            yield

    # --- Waiting

    def await_idle(self, names: Iterable[str], timeout_s: float) -> dict[str, int]:
        """Wait until the servers ``names`` have no request; return how many each has in the end."""
        names = list(names)
        left: dict[str, int] = {}
        for _ in _until(timeout_s):
            loads = self.loads()
            left = {name: loads[name].in_flight if name in loads else 0 for name in names}
            if not any(left.values()):
                break
        return left

    def await_up(self, names: Iterable[str], timeout_s: float) -> dict[str, str]:
        """Wait until HAProxy's check finds the servers ``names`` up; return what it says of those that are not."""
        names = list(names)
        down: list[str] = []
        for _ in _until(timeout_s):
            down = [name for name, server in self.known(names).items() if not server.up]
            if not down:
                return {}
        loads = self.loads()
        return {name: loads[name].check if name in loads else "not checked" for name in down}

    def await_configuration(self, digest: str, timeout_s: float) -> str:
        """Wait until new connections meet the configuration with this digest; return the one that they meet."""
        running = ""
        for _ in _until(timeout_s):
            running = self.configuration()
            if running == digest:
                break
        return running

    # --- For HAProxy's unit

    def save(self) -> None:
        """Write the state file, unless HAProxy is gone: then what stands there is the last that is known."""
        with self._locked():
            self._save(self.workers()[0])

    def prepare(self, configuration: Path) -> None:
        """Give the servers in the state file the ports and the TLS that the configuration has."""
        with contextlib.suppress(FileNotFoundError):
            before = self._state_file.read_text(errors="replace")
            after = as_configured(before, configured(configuration.read_text()))
            if after != before:
                write_atomically(self._state_file, after.encode(), mode=0o600)

    def reload(self, master_pid: int, configuration: Path) -> None:
        """Write the state file, have the master start a new process that reads it, and wait until it serves."""
        with self._locked():
            before = {worker.pid for worker in self.workers()}
            self._save(self.workers()[0])
            self.prepare(configuration)
            os.kill(master_pid, signal.SIGUSR2)
            for _ in _until(_RELOAD_S):
                # The master is on its way from the old program to the new one.
                with contextlib.suppress(GatewayError):
                    newest = self.workers()[0]
                    if newest.pid not in before and newest.reloads == 0:
                        return
            raise GatewayError("HAProxy kept its old process: see journalctl -u haproxy for what the new one lacks")


def _until(seconds: float) -> Iterator[None]:
    """Yield at once, and then again and again until ``seconds`` are over."""
    deadline = time.monotonic() + seconds
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(_POLL_S, left))


def main(arguments: list[str]) -> int:
    # A HAProxy that is gone must not wait for its restart.
    gateway = Gateway(patience_s=0)
    try:
        if arguments == ["prepare"]:
            gateway.prepare(CONFIGURATION)
        elif arguments == ["save"]:
            gateway.save()
        elif len(arguments) == 2 and arguments[0] == "reload":
            gateway.reload(int(arguments[1]), CONFIGURATION)
        else:
            sys.exit("usage: haproxy.py prepare | save | reload PID")
    except (GatewayError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
