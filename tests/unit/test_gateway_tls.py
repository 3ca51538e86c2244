# SPDX-License-Identifier: Apache-2.0
"""What HAProxy is told of replicas, and which of them a change of addresses or of TLS would lose."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from certificates_made import pair

ROOT = Path(__file__).parents[2]
OLD, NEW, AUTHORITY = (pair().pem for _ in range(3))


def replica(serves: str, wanted: str, authorities: str = "", running: str = "0123") -> dict[str, Any]:
    """Return a replica's variables: with which certificate it serves, and what the inventory has ("": none)."""
    listens = {"address": "0.0.0.0", "port": "8000"}
    variables: dict[str, Any] = {"release_probed": {"running": running, "certificate": serves, "listens": listens}}
    if wanted:
        variables["vllm_service_tls_certificate"] = wanted
    if authorities:
        variables["vllm_service_tls_authorities"] = authorities
    return {"ansible_host": "10.0.0.1", "vllm_service_host": "0.0.0.0", **variables}


def moving(before: str, wanted: dict[str, Any], running: str = "0123") -> dict[str, Any]:
    """Return a replica's variables that listens somewhere, and what the inventory has."""
    address, _, port = before.rpartition(":")
    probed = {"running": running, "certificate": "", "listens": {"address": address, "port": port}}
    return {"ansible_host": "10.0.0.1", "release_probed": probed, **wanted}


HERE, EVERYWHERE, ELSEWHERE = ({"vllm_service_host": host} for host in ("10.0.0.1", "0.0.0.0", "10.0.0.9"))
REPLICAS = {
    "stays": moving("10.0.0.1:8000", HERE),
    "stays-at-its-port": moving("10.0.0.1:9000", {**HERE, "vllm_service_port": "9000"}),
    "was-everywhere": moving("0.0.0.0:8000", HERE),
    "is-everywhere": moving("10.0.0.1:8000", EVERYWHERE),
    "stays-at-another": moving("10.0.0.9:8000", ELSEWHERE),
    "other-port": moving("10.0.0.1:8000", {**HERE, "vllm_service_port": 8001}),
    "other-port-everywhere": moving("0.0.0.0:8001", EVERYWHERE),
    "other-address": moving("10.0.0.1:8000", ELSEWHERE),
    "other-port-idle": moving("10.0.0.1:8001", HERE, running=""),
    "other-port-first": moving(":", HERE, running=""),
    "settings-gone": moving(":", HERE),
    "plain": replica("", ""),
    "same": replica(NEW, NEW),
    "changed": replica(OLD, NEW),
    "changed-known": replica(OLD, NEW, NEW + OLD),
    "changed-signed": replica(OLD, NEW, AUTHORITY),
    "turned-on": replica("", NEW),
    "turned-off": replica(OLD, ""),
    "turned-on-idle": replica("", NEW, running=""),
    "not-looked-at": {"ansible_host": "10.0.0.2", "vllm_service_host": "0.0.0.0", "vllm_service_tls_certificate": NEW},
}


@functools.cache
def made() -> dict[str, Any]:
    """Return what the role makes of the replicas, of one run of ansible-playbook."""
    with TemporaryDirectory() as directory:
        result = Path(directory) / "made.json"
        inventory = Path(directory) / "hosts.yml"
        inventory.write_text(yaml.safe_dump({"inference": {"hosts": REPLICAS}}, sort_keys=False))
        names = ["lost", "moved", "authorities", "undigested"]
        values = ", ".join(f"'_load_balancer_{name}': _load_balancer_{name}" for name in names)
        play = {
            "hosts": "localhost",
            "gather_facts": False,
            "vars": {"ansible_python_interpreter": sys.executable},
            "tasks": [
                # Does nothing without a gateway, and leaves the role's variables.
                {
                    "ansible.builtin.include_role": {
                        "name": "load_balancer",
                        "tasks_from": "drain",
                        "public": True,
                        "rolespec_validate": False,
                    }
                },
                {
                    "ansible.builtin.copy": {
                        "content": f"{{{{ {{{values}}} | to_json }}}}",
                        "dest": str(result),
                        "mode": "0600",
                    },
                    "vars": {"load_balancer_template_dir": str(ROOT / "templates")},
                },
            ],
        }
        playbook = Path(directory) / "play.yml"
        playbook.write_text(yaml.safe_dump([play], sort_keys=False))
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        command = [program, "-i", str(inventory), "-c", "local", str(playbook)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.exists(), run.stdout + run.stderr
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_replicas_that_a_change_would_lose() -> None:
    assert made()["_load_balancer_lost"] == ["changed", "turned-on", "turned-off"]
    assert made()["_load_balancer_moved"] == ["other-port", "other-port-everywhere", "other-address"]


def test_each_replica_is_verified_against_what_its_inventory_says() -> None:
    lines = [line.split() for line in made()["_load_balancer_undigested"].splitlines() if " server " in line]
    servers = {line[1]: line[2:] for line in lines if line[1] in REPLICAS}
    assert set(servers) == set(REPLICAS)
    with_tls = {name for name, words in servers.items() if words[1:]}
    assert with_tls == {name for name, variables in REPLICAS.items() if variables.get("vllm_service_tls_certificate")}
    for name in with_tls:
        expected = f"10.0.0.{2 if name == 'not-looked-at' else 1}:8000 ssl verify required ca-file"
        assert servers[name] == [*expected.split(), f"/etc/haproxy/aerie-replicas/{name}.pem"]
    authorities = made()["_load_balancer_authorities"]
    assert set(authorities) == with_tls
    assert (authorities["same"], authorities["changed-known"]) == (NEW, NEW + OLD)
    assert authorities["changed-signed"] == AUTHORITY
