# SPDX-License-Identifier: Apache-2.0
"""The scenario's hosts from outside, through /proc and the network of this machine: looked at, and struck.

Nothing here goes through Ansible, SSH or Aerie, so it works on a host that is cut off, and takes milliseconds.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Host, attempt, cgroup_directories, read_inventory, run

HOME = "/opt/aerie"
SERVICE = "vllm.service"
SWITCH = "aerie-switch.service"
_RELEASE = re.compile(r"/opt/aerie/releases/([0-9a-f]+)/venv")
_INIT = "init.scope"
_STATISTICS = "/run/aerie-haproxy/stats.sock"
_PATIENCE_S = 60.0
# Between two looks for a point in a run: shorter than the shortest phase of a switch.
_LOOK_S = 0.002


def await_that(holds: Callable[[], bool], what: str, seconds: float = _PATIENCE_S, every: float = 0.05) -> None:
    """Return as soon as ``holds`` does; fail with ``what`` if that is not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(every)


@dataclass(frozen=True)
class Served:
    """What a host's service really is: the releases that its processes run, the link, the unit, systemd's word."""

    running: frozenset[str]
    current: str
    unit_of: str
    active: bool

    @property
    def release(self) -> str:
        """The one release that all of it agrees on; fails where it is something between."""
        assert self.active, self
        assert self.running == {self.current} == {self.unit_of}, self
        return self.current


@dataclass(frozen=True)
class Machine:
    """One embedded host."""

    host: Host

    @property
    def name(self) -> str:
        return self.host.name

    def pids(self, unit: str) -> list[int]:
        """Return the processes in the control group of a unit of the host."""
        with contextlib.suppress(OSError):
            place = unit if unit == _INIT else f"system.slice/{unit}"
            group = cgroup_directories(self.host)[0] / "payload" / place / "cgroup.procs"
            return [int(pid) for pid in group.read_text().split()]
        return []

    def init(self) -> int:
        """Return the process that is the host's systemd. Raises LookupError if the host is down."""
        for pid in self.pids(_INIT):
            with contextlib.suppress(OSError):
                # What systemd starts is in its control group, too, for a moment.
                if Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1:] == ["1"]:
                    return pid
        raise LookupError(f"{self.name} is down")

    def path(self, path: str) -> Path:
        """Return a path of the host as its own processes see it."""
        return Path(f"/proc/{self.init()}/root{path}")

    def text(self, path: str) -> str:
        """Return the text of a file; nothing if it is not there, or the host is down."""
        with contextlib.suppress(OSError, LookupError):
            return self.path(path).read_text()
        return ""

    def run(self, *command: str) -> str:
        """Return what a program prints that root runs on the host."""
        return run("nsenter", "--target", str(self.init()), "--all", "--", *command)

    # --- Looking

    def journal(self) -> dict[str, Any]:
        """Return the journal of the switch that is under way, or nothing."""
        return self._json(f"{HOME}/switch/journal.json")

    def phase(self) -> str:
        return str(self.journal().get("phase", ""))

    def told(self) -> str:
        """Return what the program of the switch that is under way was told last: confirm, abort, proceed or nothing."""
        deployment = self.journal().get("deployment", "")
        answers = ("confirm", "abort", "proceed")
        given = [what for what in answers if self.text(f"{HOME}/switch/{what}").partition("\n")[0] == deployment != ""]
        return given[0] if given else ""

    def last(self) -> dict[str, Any]:
        """Return the journal of the switch that ended last."""
        return self._json(f"{HOME}/switch/last.json")

    def _json(self, path: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.text(path) or "{}")
        return value

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(f"{HOME}/ledger.jsonl").splitlines()]

    def current(self) -> str:
        with contextlib.suppress(OSError, LookupError):
            return self.path(f"{HOME}/current").readlink().name
        return ""

    def served(self) -> Served:
        """Look at the service's processes, not at what anything says about them."""
        running = set()
        for pid in self.pids(SERVICE):
            with contextlib.suppress(OSError):
                process = Path(f"/proc/{pid}")
                seen = (process / "cmdline").read_text() + (process / "maps").read_text()
                running |= set(_RELEASE.findall(seen))
        current = self.current()
        unit = self.text(f"/etc/systemd/system/{SERVICE}")
        same = unit and unit == self.text(f"{HOME}/releases/{current}/{SERVICE}")
        active = self.run("systemctl", "show", "--property=ActiveState", "--value", SERVICE).strip() == "active"
        return Served(frozenset(running), current, current if same else "", active)

    def is_quiet(self) -> bool:
        """Say whether no switch is under way and the service answers."""
        with contextlib.suppress(Exception):
            return not self.journal() and not self.pids(SWITCH) and self.serves()
        return False

    def is_whole(self) -> bool:
        """Say whether the service is active and of one release."""
        with contextlib.suppress(Exception):
            return bool(self.served().release)
        return False

    def serves(self) -> bool:
        """Say whether the service of the host is up, by its own log of this start."""
        return "Application startup complete" in self.log() and bool(self.pids(SERVICE))

    def log(self) -> str:
        """Return what the current start of the service logged."""
        invocation = self.run("systemctl", "show", "--property=InvocationID", "--value", SERVICE).strip()
        return self.run("journalctl", "--output=cat", f"_SYSTEMD_INVOCATION_ID={invocation}")

    def gateway(self) -> dict[str, str]:
        """Return what HAProxy on this host says of each replica: UP, DRAIN, DOWN, or a transition such as `UP 1/3`."""
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(self.path(_STATISTICS)))
            stream.sendall(b"show stat\n")
            table = b"".join(iter(lambda: stream.recv(1 << 16), b"")).decode()
        rows = csv.DictReader(table.removeprefix("# ").splitlines())
        return {row["svname"]: row["status"] for row in rows if row["pxname"] == "replicas" and row["type"] == "2"}

    # --- Striking

    def order(self, faults: Mapping[str, object]) -> None:
        """Give the stand-in its faults; they are gone after a reboot."""
        directory = self.path("/run/stand-in")
        directory.mkdir(mode=0o755, exist_ok=True)
        (directory / "new").write_text(json.dumps(faults))
        (directory / "new").chmod(0o644)
        (directory / "new").rename(directory / "faults.json")

    @contextlib.contextmanager
    def ledger_locked(self) -> Iterator[None]:
        """Have whoever writes to the ledger wait."""
        with self.path(f"{HOME}/ledger.jsonl").open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def kill_switch(self) -> None:
        """Kill the switch program and all that it runs."""
        for pid in self.pids(SWITCH):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def reboot(self) -> None:
        """Have the host reboot without shutting anything down."""
        init = self.init()
        attempt("nsenter", "--target", str(init), "--all", "--", "systemctl", "reboot", "--force", "--force")
        await_that(lambda: init not in self.pids(_INIT), f"{self.name} goes down")
        await_that(lambda: bool(self.pids("ssh.service")), f"{self.name} is up again")

    def cut(self) -> None:
        """Pull the host's network cable."""
        run("ip", "link", "set", self.host.link, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self.host.link, "up")

    def fill(self) -> None:
        """Have no space left below HOME, which is a file system of its own."""
        self.run("sh", "-c", f"mount -o remount,size=$(du -sk {HOME} | cut -f1)k {HOME}")

    def free(self) -> None:
        self.run("mount", "-o", "remount,size=1g", HOME)


def machines(inventory: Path) -> dict[str, Machine]:
    """Return the hosts of an inventory by name."""
    return {host.name: Machine(host) for host in read_inventory(inventory)}


def await_point(holds: Callable[[], bool], what: str, process: subprocess.Popen[str]) -> None:
    """Return at a point in the run of ``process``; fail with ``what`` if the run ends before."""
    while not holds():
        assert process.poll() is None, f"the run ended before: {what}"
        time.sleep(_LOOK_S)
