# SPDX-License-Identifier: Apache-2.0
"""Whether the service can listen where it is to: the port is free, and the address is one of the host's."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

from ansible.module_utils.aerie.findings import Finding
from ansible.module_utils.aerie.preflight_findings import problem

_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_REMEDY = "stop it, or set vllm_service_port"


def check_port(port: int, unit: str, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Yield a problem if anything that is not of ``unit`` listens on ``port``."""
    sockets = _listening(port, proc)
    if not sockets:
        return
    pids = sorted((entry for entry in proc.iterdir() if entry.name.isdigit()), key=lambda entry: int(entry.name))
    holders = [pid for pid in pids if _holds(pid, sockets)]
    for pid in holders:
        try:
            name, group = (pid / "comm").read_text().strip(), (pid / "cgroup").read_text()
        except OSError:
            continue  # it ended just now
        if f"/{unit}" not in group:
            yield problem("port", f"port {port} is in use by {name} (process {pid.name})", _REMEDY)
            return
    if not holders:
        message = f"port {port} is in use by a process that cannot be seen"
        yield problem("port", message, "find it, or set vllm_service_port")


def own_processes(unit: str, proc: Path = Path("/proc")) -> frozenset[int]:
    """Return the processes in the control group of ``unit``."""
    found = set()
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                group = (entry / "cgroup").read_text()
            except OSError:
                continue  # it ended just now
            if f"/{unit}" in group:
                found.add(int(entry.name))
    return frozenset(found)


def _listening(port: int, proc: Path) -> set[str]:
    """Return the sockets that listen on ``port``, as links in /proc/<pid>/fd name them."""
    sockets = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    return sockets


def _holds(pid: Path, sockets: set[str]) -> bool:
    try:
        return any(str(link.readlink()) in sockets for link in (pid / "fd").iterdir())
    except OSError:
        return False


def check_address(address: str) -> Iterator[Finding]:
    """Yield a problem unless ``address`` is one that a service on this host can listen on."""
    remedy = "correct vllm_service_host"
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        yield problem("address", f"the service is to listen on {address}, which this host cannot resolve", remedy)
        return
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            # Port 0: any that is free. Nothing listens on it.
            probe.bind(where)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                message = f"the service is to listen on {address}, which is no address of this host"
                yield problem("address", message, remedy)
