#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure what a run costs, side by side on hosts of this machine; one `name value` line each on standard output.

    bench.py [--rounds N]

Root; boots eight hosts with the stand-in engine (tests/stand_in), which starts in a tenth of a second, so that what is
measured is Aerie's part, and one with the real environment. What is compared with each other is measured in turns, and
the median counts: the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
STATE = Path(os.environ.get("AERIE_STATE", "/var/tmp/aerie"))
CACHE = Path(os.environ.get("AERIE_CACHE", STATE / "cache"))
HOSTS = 8
VARIABLES = "tests/molecule/interrupted/inventory/group_vars"
REAL_VARIABLES = "inventory/local/group_vars"

# On the host, seconds from a stop of the service to the answer of the next start, without Aerie.
RESTART = """
import subprocess, time, urllib.request
settings = dict(line.strip().split("=", 1) for line in open("/etc/aerie/vllm.env") if "=" in line)
address = f"http://{settings['AERIE_HOST']}:{settings['AERIE_PORT']}/health"
began = time.monotonic()
subprocess.run(["systemctl", "stop", "vllm"], check=True)
subprocess.run(["systemctl", "start", "vllm"], check=True)
while True:
    try:
        urllib.request.urlopen(address, timeout=1)
        break
    except OSError:
        time.sleep(0.02)
print(time.monotonic() - began)
"""

# On the host, the bytes that are used on the file system, and those of all releases.
DISK = """
import os, subprocess
system = os.statvfs("/opt/aerie")
print((system.f_blocks - system.f_bfree) * system.f_frsize)
print(subprocess.run(["du", "-sb", "/opt/aerie/releases"], capture_output=True, text=True).stdout.split()[0])
"""


def say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"{command[0]} failed:\n{result.stdout[-4000:]}{result.stderr[-2000:]}")
    return result.stdout


def seconds(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


class Fleet:
    """Hosts of an inventory that is written for them, at 10.77.8.x."""

    def __init__(self, directory: Path, names: dict[str, int], variables: str, layers: list[str]) -> None:
        hosts = {name: {"ansible_host": f"10.77.8.{number}"} for name, number in names.items()}
        inventory = {"inference": {"hosts": hosts, "vars": {"embedded_layers": layers}}}
        directory.mkdir()
        self.hosts = directory / "hosts.yml"
        # JSON is YAML.
        self.hosts.write_text(json.dumps(inventory))
        (directory / "group_vars").symlink_to(ROOT / variables)
        self._inventory = directory

    def playbook(self, name: str, *arguments: str, limit: str = "inference") -> str:
        return run("ansible-playbook", name, "-i", self._inventory, "--limit", limit, *arguments)

    def ping(self, host: str) -> str:
        return run("ansible", host, "-i", self._inventory, "-m", "ping")

    def on(self, host: str, program: str) -> str:
        """Return what a Python program prints on a host."""
        address = json.loads(self.hosts.read_text())["inference"]["hosts"][host]["ansible_host"]
        known = f"UserKnownHostsFile={STATE}/known_hosts"
        command = ["ssh", "-i", str(STATE / "key"), "-o", known, f"ansible@{address}", "sudo python3 -"]
        return subprocess.run(command, input=program, capture_output=True, text=True, check=True).stdout


def measure_noop(fleet: Fleet, rounds: int) -> dict[str, float]:
    """A deploy that finds nothing to do, against the cheapest thing that Ansible can do."""
    times: dict[str, list[float]] = {"ping": [], "one": [], "all": []}
    for _ in range(rounds):
        times["ping"].append(seconds(lambda: fleet.ping("bench-1")))
        times["one"].append(seconds(lambda: fleet.playbook("deploy.yml", limit="bench-1")))
        times["all"].append(seconds(lambda: fleet.playbook("deploy.yml")))
    ping, one, all_hosts = (median(times[name]) for name in ("ping", "one", "all"))
    return {"noop_one_host_over_ping": one / ping, f"noop_{HOSTS}_hosts_over_noop_one": all_hosts / one}


def measure_downtime(fleet: Fleet, rounds: int) -> dict[str, float]:
    """How long nothing serves in a switch, beyond what the engine itself takes to stop and to start."""
    last = "import json; print(json.loads(open('/opt/aerie/ledger.jsonl').readlines()[-1])['downtime_s'])"
    beyond = []
    for number in range(rounds):
        variables = json.dumps({"vllm_service_environment": {"STAND_IN_RELEASE": f"{time.time()}-{number}"}})
        fleet.playbook("deploy.yml", "-e", variables, "-e", "accept_downtime=true", limit="bench-1")
        beyond.append(float(fleet.on("bench-1", last)) - float(fleet.on("bench-1", RESTART)))
    return {"switch_downtime_beyond_restart_s": median(beyond)}


def measure_second_release(fleet: Fleet, rounds: int) -> dict[str, float]:
    """Releases of the same code as one that is there, against that one."""
    fleet.playbook("playbooks/stage.yml")
    before, first = map(int, fleet.on("bench-real", DISK).split())
    times = []
    for number in range(rounds):
        variables = json.dumps({"vllm_service_environment": {"OTHER": str(number)}})
        times.append(seconds(partial(fleet.playbook, "playbooks/stage.yml", "-e", variables)))
    more = (int(fleet.on("bench-real", DISK).split()[0]) - before) / rounds
    return {"second_release_stages_in_s": median(times), "second_release_disk_percent": 100 * more / first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    run(sys.executable, "tests/stand_in/stand_in_wheel.py", CACHE / "stand-in")
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as temporary:
        names = {f"bench-{number}": 10 + number for number in range(1, HOSTS + 1)}
        small = Fleet(Path(temporary) / "small", names, VARIABLES, [])
        real = Fleet(Path(temporary) / "real", {"bench-real": 31}, REAL_VARIABLES, ["vllm-0.32.0-cpu"])
        fleets = (small, real)
        try:
            for fleet in fleets:
                run(sys.executable, "embedded/cluster.py", "up", fleet.hosts)
            say(f"deploying to {HOSTS} hosts")
            small.playbook("deploy.yml", "-e", "aerie_batch=100%")
            say("measuring")
            results = {
                **measure_noop(small, rounds),
                **measure_downtime(small, rounds),
                **measure_second_release(real, rounds),
            }
        finally:
            for fleet in fleets:
                run(sys.executable, "embedded/cluster.py", "down", fleet.hosts)
    for name, value in results.items():
        print(f"{name} {value:.2f}")


if __name__ == "__main__":
    main()
