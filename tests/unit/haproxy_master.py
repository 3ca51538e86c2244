# SPDX-License-Identifier: Apache-2.0
"""The master socket of an HAProxy, as far as Aerie uses it: answers have the form of HAProxy 2.6's."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DATA = Path(__file__).parent / "haproxy"
DRAINED = 8


@dataclass
class Process:
    """A process: what it knows of its servers by name, and how many requests they have from it."""

    pid: int
    admin: dict[str, int]
    operation: dict[str, int]
    in_flight: dict[str, int]
    description: str = "digest"


@dataclass
class Master:
    """``processes`` are the newest first. ``garble`` replaces answers, by the first words of the command.

    ``before`` is called with every command before it is answered.
    """

    path: Path
    processes: list[Process]
    garble: dict[str, bytes] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda command: None

    def __post_init__(self) -> None:
        master = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                # HAProxy's master waits for more commands until the client says that there are none.
                for line in self.rfile.read().decode().splitlines():
                    self.wfile.write(master.answer(line))

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self._server = Server(str(self.path), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.path.unlink()

    def replace(self, admin: dict[str, int]) -> None:
        """Do what a reload does, with what the new process read in the state file."""
        newest = self.processes[0]
        self.processes.insert(0, Process(newest.pid + 1, admin, dict(newest.operation), dict.fromkeys(admin, 0)))

    def answer(self, line: str) -> bytes:
        self.commands.append(line)
        self.before(line)
        target, _, command = line.partition(" ") if line.startswith("@") else ("", "", line)
        for start, answer in self.garble.items():
            if command.startswith(start):
                return answer
        if not target:
            assert command == "show proc"
            return self._processes().encode()
        found = [process for process in self.processes if target == f"@!{process.pid}"]
        if not found:
            return f"Can't find the target PID matching the prefix '{target}'\n".encode()
        return (self._ask(found[0], command) + "\n").encode()

    def _processes(self) -> str:
        lines = (DATA / "processes.txt").read_text().splitlines()[:2]
        for reloads, process in enumerate(self.processes):
            lines += {0: ["# workers"], 1: ["# old workers"]}.get(reloads, [])
            lines.append(f"{process.pid:<15} worker          {reloads:<15} 0d00h00m00s     2.6.12-1+deb12u3")
        return "\n".join([*lines, "# programs", "", ""])

    def _ask(self, process: Process, command: str) -> str:
        if command == "show info":
            return f"Name: HAProxy\nPid: {process.pid}\ndescription: {process.description}\nStopping: 0\n"
        if command == "show servers state replicas":
            title = (DATA / "states.txt").read_text().splitlines()[1]
            rows = [
                f"3 replicas {number} {name} 10.77.4.{number} {process.operation[name]} {admin} 1 1 605 15 3 4 6 0 0 0 "
                "- 8000 - 0 0 - - 0"
                for number, (name, admin) in enumerate(process.admin.items(), start=1)
            ]
            return "\n".join(["1", title, *rows, ""])
        if command == "show stat replicas 4 -1":
            title, example, *_ = (DATA / "statistics.csv").read_text().splitlines()
            columns = example.split(",")
            rows = [
                ",".join(["replicas", name, "0", "0", str(process.in_flight.get(name, 0)), *columns[5:]])
                for name in process.admin
            ]
            return "\n".join([title, *rows, ""])
        verb, _, server, _, state = command.split()
        assert verb == "set"
        if process is not self.processes[0]:
            return "Proxy is disabled.\n"
        name = server.partition("/")[2]
        if name not in process.admin:
            return "No such server.\n"
        process.admin[name] = {"drain": DRAINED, "ready": 0}[state]
        return ""
