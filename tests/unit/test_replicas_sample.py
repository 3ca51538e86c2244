# SPDX-License-Identifier: Apache-2.0
"""The sample of replicas over several hosts: what Ansible makes of it, and what its hosts are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_inventories import KNOWN, ROOT, rendered, run

INVENTORY = "sample-replicas"
REPLICAS = {"replica_a": ["gpu-a1", "gpu-a2"], "replica_b": ["gpu-b1", "gpu-b2"]}
HOSTS = [host for hosts in REPLICAS.values() for host in hosts]


@pytest.fixture(scope="module")
def listed() -> dict[str, Any]:
    return dict(json.loads(run("ansible-inventory", "-i", f"inventory/{INVENTORY}", "--list")))


def test_every_variable_is_one_that_a_role_reads(listed: dict[str, Any]) -> None:
    names = {name for variables in listed["_meta"]["hostvars"].values() for name in variables}
    assert {name for name in names - KNOWN if not name.startswith(("ansible_", "vault_"))} == set()
    for host in HOSTS:
        assert (ROOT / "requirements" / f"{listed['_meta']['hostvars'][host]['ml_env_lock']}.txt").is_file()


def test_what_it_shows_as_a_default_is_the_default() -> None:
    defaults: dict[str, Any] = {}
    for path in (ROOT / "roles").glob("*/defaults/main.yml"):
        defaults.update(yaml.safe_load(path.read_text()) or {})
    text = "".join(path.read_text() for path in sorted((ROOT / "inventory" / INVENTORY).rglob("*.yml")))
    shown = {line[2:] for line in text.splitlines() if line.startswith("# ") and ": " in line and line[2].islower()}
    values = yaml.safe_load("\n".join(sorted(line for line in shown if " " not in line.partition(":")[0])))
    assert values == {name: defaults[name] for name in values}
    assert len(values) >= 4


def test_both_hosts_of_a_replica_get_the_same_release_cut_in_two(tmp_path: Path) -> None:
    configurations = rendered(INVENTORY, tmp_path)
    assert set(configurations) == set(HOSTS)
    assert all(configuration == configurations[HOSTS[0]] for configuration in configurations.values())
    options = configurations[HOSTS[0]]
    assert options["tensor-parallel-size"] == 8
    assert options["pipeline-parallel-size"] == 2
    assert options["distributed-executor-backend"] == "ray"


def test_each_host_knows_its_part(tmp_path: Path) -> None:
    playbook = "tests/reference/render_replicas.yml"
    run("ansible-playbook", playbook, "-i", f"inventory/{INVENTORY}", "-e", f"into={tmp_path}")
    facts = {host: json.loads((tmp_path / host).read_text()) for host in HOSTS}
    for replica, (head, other) in REPLICAS.items():
        for host in (head, other):
            assert facts[host]["hosts"] == [head, other], replica
            assert facts[host]["gpus"] == 8
            assert facts[host]["worker"] is (host == other)
        third = {"replica_a": "1", "replica_b": "2"}[replica]
        addresses = f"198.51.100.{third}1,198.51.100.{third}2"
        assert f"AERIE_REPLICA_HOSTS={addresses}\n" in facts[head]["settings"]
        assert f"VLLM_HOST_IP=198.51.100.{third}2\n" in facts[other]["settings"]
        assert "NCCL_IB_HCA=mlx5_0,mlx5_1\n" in facts[head]["settings"]
        # The gateway may use the API, and the replica's hosts each other's ports.
        assert f"192.0.2.2 192.0.2.1 {addresses.replace(',', ' ')}" in facts[head]["drop_in"]
        assert "ExecStartPre=+/usr/sbin/nft -f /etc/aerie/replica.nft" in facts[head]["drop_in"]
        assert f"ip saddr 198.51.100.{third}2 accept" in facts[head]["rules"]
        assert "192.0.2.2" not in facts[head]["rules"]
    assert [server["name"] for server in facts["gpu-a1"]["servers"]] == ["gpu-a1", "gpu-b1"]
