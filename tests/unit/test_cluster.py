# SPDX-License-Identifier: Apache-2.0
"""What embedded/cluster.py makes of an inventory, without root and without a boot."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "embedded"))

import cluster  # noqa: E402
from cluster import ClusterError, Host, image_directory, read_inventory  # noqa: E402


def host(name: str = "replica-a", address: str = "10.77.0.11") -> Host:
    return Host(name, ipaddress.IPv4Address(address), ())


def inventory(directory: Path, content: object) -> Path:
    path = directory / "hosts.yml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


# ------------------------------------------------------------------------------------------------------------ inventory


def test_hosts_of_nested_groups_with_the_layers_nearest_to_them(tmp_path: Path) -> None:
    content = {
        "all": {
            "vars": {"embedded_layers": ["base"]},
            "children": {
                "inference": {
                    "vars": {"embedded_layers": ["vllm", "models"]},
                    "hosts": {
                        "a": {"ansible_host": "10.77.0.11"},
                        "b": {"ansible_host": "10.77.0.12", "embedded_layers": []},
                    },
                },
                "gateways": {"hosts": {"c": {"ansible_host": "10.77.1.13"}}},
                "empty": None,
            },
        },
        # The same hosts in other groups, as Ansible allows.
        "canaries": {"hosts": {"a": None, "b": {"weight": 1}}},
        "nothing": None,
    }
    assert read_inventory(inventory(tmp_path, content)) == [
        Host("a", ipaddress.IPv4Address("10.77.0.11"), ("vllm", "models")),
        Host("b", ipaddress.IPv4Address("10.77.0.12"), ()),
        Host("c", ipaddress.IPv4Address("10.77.1.13"), ("base",)),
    ]


def test_the_inventory_of_the_demo() -> None:
    hosts = read_inventory(ROOT / "inventory/local/hosts.yml")
    assert len(hosts) == 2
    assert len({entry.address for entry in hosts}) == 2
    assert len({entry.bridge for entry in hosts}) == 1


@pytest.mark.parametrize("content", ["", "# nothing\n", "all:\n", "all: {hosts: {a: , b: {x: 1}}}\n"])
def test_an_inventory_without_addresses_has_no_hosts(tmp_path: Path, content: str) -> None:
    assert read_inventory(inventory(tmp_path, content)) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("all: {hosts: {a: {ansible_host: gpu-01.example}}}", "gpu-01.example"),
        ("all: {hosts: {a: {ansible_host: 'fd00::1'}}}", "fd00::1"),
        ("all: {hosts: {a: {ansible_host: 10.77.0.300}}}", "10.77.0.300"),
        ("all: {hosts: [a, b]}", "list"),
        ("- a\n- b\n", "list"),
        ("[gpu]\na ansible_host=10.0.0.1\n", "expected"),
        ("all: {hosts: {a: 5}}", "int"),
    ],
)
def test_an_inventory_that_cannot_be_used_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = inventory(tmp_path, content)
    with pytest.raises(ClusterError) as caught:
        read_inventory(path)
    assert str(caught.value).startswith(f"{path} is no inventory of hosts with IPv4 addresses: ")
    assert said in str(caught.value)


def test_a_missing_inventory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"/hosts\.yml: no such inventory$"):
        read_inventory(tmp_path / "hosts.yml")


def test_two_hosts_with_one_address_are_named(tmp_path: Path) -> None:
    content = {"all": {"hosts": {name: {"ansible_host": "10.77.0.11"} for name in ("a", "b")}}}
    with pytest.raises(ClusterError, match=r"a and b have the same address 10\.77\.0\.11$"):
        read_inventory(inventory(tmp_path, content))


# ---------------------------------------------------------------------------------------------------------------- names


@given(st.text(min_size=1, max_size=200), st.text(min_size=1, max_size=200), st.ip_addresses(v=4))
def test_interface_names_are_short_enough_and_a_hosts_own(
    first: str, second: str, address: ipaddress.IPv4Address
) -> None:
    one, two = Host(first, address, ()), Host(second, address, ())
    assert max(len(one.link), len(one.bridge)) <= 15
    assert set(one.link + one.bridge) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert (one.link == two.link) == (first == second)
    assert one.bridge == two.bridge


def test_hosts_of_a_network_share_a_bridge_and_a_gateway() -> None:
    one, two = host("a", "10.77.0.11"), host("b", "10.77.0.254")
    assert (one.bridge, one.gateway, str(one.network)) == ("ae0a4d0000", "10.77.0.1", "10.77.0.0/24")
    assert (two.bridge, two.gateway, two.network) == (one.bridge, one.gateway, one.network)
    assert (
        len({host("c", address).bridge for address in ("10.77.0.11", "10.77.1.11", "10.7.70.11", "172.77.0.11")}) == 4
    )


def test_a_hosts_files_are_below_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "STATE", tmp_path)
    assert host().root == tmp_path / "hosts/replica-a/root"
    assert host().namespace == "aerie-replica-a"


# ---------------------------------------------------------------------------------------------------------------- image


@pytest.mark.parametrize("setting", ["SUITE", "PACKAGES", "MASKED_UNITS", "SSHD_CONFIG"])
def test_another_recipe_is_another_image(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    before = image_directory()
    assert before == image_directory()
    assert before.parent == cluster.STATE / "image"
    monkeypatch.setattr(cluster, setting, "other")
    assert image_directory() != before


# ----------------------------------------------------------------------------------------------------------- supervisor


def test_a_supervisor_is_the_hosts_own_process_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "STATE", tmp_path)
    ours = host()
    assert ours.supervisor() is None
    ours.home.mkdir(parents=True)
    (ours.home / "pid").write_text("")
    assert ours.supervisor() is None
    command = [sys.executable, "-c", "print(flush=True); input()", "supervise", ours.name, ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        (ours.home / "pid").write_text(str(process.pid))
        assert ours.supervisor() == process.pid
        # The number of a process that ended may be given to another.
        other = host(f"{ours.name}-2")
        other.home.mkdir()
        (other.home / "pid").write_text(str(process.pid))
        assert other.supervisor() is None
        process.communicate(b"\n")
    assert ours.supervisor() is None
