# SPDX-License-Identifier: Apache-2.0
"""The sample of replicas over several hosts: what Ansible makes of it, and what its hosts are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
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


DROP_INS = "/etc/systemd/system/vllm.service.d"
RULES = "/etc/aerie/replica.nft"
ENVIRONMENT = "/etc/aerie/vllm.env"


def told(into: Path, *limits: str, **extra: object) -> dict[str, Any]:
    """Return what each host would be told with these extra variables."""
    into.mkdir(exist_ok=True)
    variables = json.dumps({"into": str(into), **extra})
    run(
        "ansible-playbook",
        "tests/reference/render_replicas.yml",
        "-i",
        f"inventory/{INVENTORY}",
        "-e",
        variables,
        *limits,
    )
    return {path.name: json.loads(path.read_text()) for path in into.iterdir()}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told(tmp_path_factory.mktemp("told"))


def test_each_host_knows_its_part(facts: dict[str, Any]) -> None:
    for replica, (head, other) in REPLICAS.items():
        for host in (head, other):
            assert facts[host]["hosts"] == [head, other], replica
            assert facts[host]["gpus"] == 8
            assert facts[host]["worker"] is (host == other)
        third = {"replica_a": "1", "replica_b": "2"}[replica]
        addresses = f"198.51.100.{third}1,198.51.100.{third}2"
        settings = facts[head]["settings"]
        assert f"AERIE_REPLICA_HOSTS={addresses}\n" in settings[ENVIRONMENT]
        assert f"VLLM_HOST_IP=198.51.100.{third}2\n" in facts[other]["settings"][ENVIRONMENT]
        assert "NCCL_IB_HCA=mlx5_0,mlx5_1\n" in settings[ENVIRONMENT]
        # The gateway may use the API, and the replica's hosts each other's ports.
        assert "192.0.2.2 192.0.2.1\n" in facts[head]["reread"][f"{DROP_INS}/aerie-host.conf"]
        assert f"\nIPAddressAllow={addresses.replace(',', ' ')}\n" in settings[f"{DROP_INS}/aerie-replica.conf"]
        assert f"\nExecStartPre=+/usr/sbin/nft -f {RULES}\n" in settings[f"{DROP_INS}/aerie-replica.conf"]
        assert f"ip saddr 198.51.100.{third}2 accept" in settings[RULES]
        assert "192.0.2.2" not in settings[RULES]
        assert not facts[head]["open"]
    assert [server["name"] for server in facts["gpu-a1"]["servers"]] == ["gpu-a1", "gpu-b1"]


def test_what_a_host_has_as_a_part_of_a_replica_comes_and_goes_with_the_switch(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    """What the staging writes takes effect while the release before serves, alone or with another host."""
    together = facts["gpu-a1"]
    each = {"aerie_replica": "{{ inventory_hostname }}", "vllm_service_clients": []}
    alone = told(tmp_path / "alone", "--limit=gpu-a1", **each)["gpu-a1"]
    others = "{{ 'mixed' if inventory_hostname in ['gpu-a1', 'gpu-b2'] else inventory_hostname }}"
    mixed = told(tmp_path / "mixed", "--limit=gpu-a1", aerie_replica=others)["gpu-a1"]
    assert mixed["hosts"] == ["gpu-a1", "gpu-b2"]
    assert mixed["reread"] == together["reread"]
    assert "198.51.100." not in json.dumps(together["reread"])
    assert [alone["hosts"], alone["open"]] == [["gpu-a1"], True]
    # Files that a host alone must not have: the switch removes them, and restores them.
    ours = (RULES, f"{DROP_INS}/aerie-replica.conf")
    assert {path for path, text in alone["settings"].items() if text is None} == set(ours)
    assert set(alone["settings"]) == set(together["settings"])
    # Where a unit lets few addresses through, the processes of one host keep to one of these.
    assert "SOCKET_IFNAME" not in alone["settings"][ENVIRONMENT]
    single = {"aerie_replica": "{{ inventory_hostname }}", "vllm_service_environment": {"NCCL_SOCKET_IFNAME": "eth7"}}
    filtered = told(tmp_path / "filtered", "--limit=gpu-a1", **single)["gpu-a1"]["settings"][ENVIRONMENT]
    assert "\nGLOO_SOCKET_IFNAME=lo\nVLLM_HOST_IP=127.0.0.1\n" in filtered and "NCCL_SOCKET" not in filtered
    # Whatever a start must have is put and restored together with what asks for it.
    for host in (alone, together, mixed):
        needed = re.findall(r"(?m)^Exec\w+=\+?(?!-)\S+ -f (\S+)$", "\n".join(host["reread"].values()))
        assert needed == []


def test_a_teardown_removes_every_file_that_a_host_was_told(facts: dict[str, Any]) -> None:
    names: dict[str, Any] = {}
    for role in ("vllm_service", "multi_node"):
        names.update(yaml.safe_load((ROOT / f"roles/{role}/vars/main.yml").read_text()))
    tasks = yaml.safe_load((ROOT / "roles/vllm_service/tasks/remove.yml").read_text())
    (removed,) = [task["loop"] for task in tasks if task["name"] == "Remove the settings and the other units"]
    paths = {jinja2.Template(item).render(names) for item in removed}
    files = {**facts["gpu-a1"]["settings"], **facts["gpu-a1"]["reread"]}
    assert {path for path in files if not paths & {path, str(Path(path).parent)}} == set()


@pytest.mark.parametrize("playbook", ["playbooks/stage.yml", "playbooks/preflight.yml"])
def test_what_explains_a_fault_is_asked_before_what_it_would_look_like(playbook: str) -> None:
    listed = run(
        "ansible-playbook", playbook, "-i", f"inventory/{INVENTORY}", "--list-tasks", "-e", "vault_operations_key="
    )
    places = [listed.index(words) for words in ORDER[playbook]]
    assert places == sorted(places)


# A part of a replica looks like a network that is closed, and sizes that do not fit like too few GPUs or a long wait.
ORDER = {
    "playbooks/preflight.yml": [
        "preflight : Stop if there is any problem",
        "multi_node : Refuse a part of a replica",
        "multi_node : Listen for the other hosts",
        "target_model : ",
        "multi_node : Cut the target into stages",
    ],
}
ORDER["playbooks/stage.yml"] = [*ORDER["playbooks/preflight.yml"], "drafter : Send the files"]
