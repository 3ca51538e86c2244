# SPDX-License-Identifier: Apache-2.0
"""Mistakes in an inventory: misspelt variables and shared addresses, on names that people really use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.inventory import look_at_inventory, misspelt, shared_addresses
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())
KNOWN = sorted(
    {
        name
        for path in (ROOT / "roles").glob("*/meta/argument_specs.yml")
        for entry_point in yaml.safe_load(path.read_text())["argument_specs"].values()
        for name in entry_point.get("options", {})
    }
)
# From the group_vars of other projects, and what people add to this one's.
THEIR_OWN = """
domain timezone ssh_port service_name service_port service_user service_options service_environment service_host
ntp_servers my_team team env environment region rack datacenter data_center host_name hostname fqdn dns_servers proxy
http_proxy https_proxy no_proxy proxy_env users admin_users firewall_rules packages python_version cuda_version
nvidia_driver_version gpu_count gpu_type model_path model_name models_dir target_path target_host deploy_user app_root
root_dir cache_dir log_level backup_dir owner contact cost_center cluster_name replica_count vllm_version vllm_image
vllm_models_dir vllm_port our_vllm_service_port old_drafter_path ml_env ml_environment ml_platform ml_env2
prometheus_port node_exporter_version docker_users haproxy_backends letsencrypt_email sshd_config sudo_rules
ufw_rules nfs_server vault_demo_key vault_team_search_key vault_password vault_key huggingface_token hf_token
hf_home drafts draft embedded_layers embedded_state target targets prefetch preflights patches releases inventory_name
environment_name
"""
# What Ansible puts among a host's variables by itself.
ANSIBLES = """
ansible_host ansible_user ansible_port ansible_become ansible_check_mode ansible_play_hosts inventory_hostname
inventory_hostname_short inventory_dir inventory_file group_names groups hostvars omit playbook_dir role_name role_names
role_path module_setup gather_subset discovered_interpreter_python _private __preflight_host
"""


def closest(*names: str) -> dict[str, str]:
    return misspelt(names, KNOWN, ROLES)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("aerie_rot", "aerie_root"),
        ("areie_root", "aerie_root"),
        ("arie_cahce", "aerie_cache"),
        ("drater_path", "drafter_path"),
        ("draftr_pth", "drafter_path"),
        ("mlenv_lock", "ml_env_lock"),
        ("ml-env-lock", "ml_env_lock"),
        ("targetmodel_path", "target_model_path"),
        ("target_modle_path", "target_model_path"),
        ("vlm_service_port", "vllm_service_port"),
        ("vllm_sevice_port", "vllm_service_port"),
        ("vllm_service_prot", "vllm_service_port"),
        ("VLLM_SERVICE_PORT", "vllm_service_port"),
        ("vllm_services_option", "vllm_service_options"),
        ("vllm_serivce_api_key", "vllm_service_api_keys"),
    ],
)
def test_a_close_spelling_is_found(name: str, meant: str) -> None:
    assert closest(name) == {name: meant}


@pytest.mark.parametrize("option", KNOWN)
def test_a_slip_of_one_letter_is_found_anywhere_in_any_option(option: str) -> None:
    slips = set()
    for i in range(len(option)):
        before, letter, after = option[:i], option[i], option[i + 1 :]
        # Left out, doubled, another one, swapped with the next: in turns, since each is looked for in the same way.
        slips.add(before + ("", 2 * letter, "x", after[:1] + letter)[i % 4] + (after[1:] if i % 4 == 3 else after))
    # A leading underscore is the mark of names that no operator sets.
    slips = {slip for slip in slips if not slip.startswith("_")} - set(KNOWN)
    found = closest(*slips)
    assert found.keys() == slips
    # A slip may be as close to another option.
    assert option in found.values()
    assert set(found.values()) <= set(KNOWN)


@pytest.mark.parametrize("name", (THEIR_OWN + ANSIBLES).split())
def test_a_name_of_the_users_own_is_left_alone(name: str) -> None:
    assert closest(name) == {}


@pytest.mark.parametrize("option", KNOWN)
def test_an_option_itself_and_names_built_around_it_are_left_alone(option: str) -> None:
    assert closest(option, f"vault_{option}", f"default_{option}", f"my_{option}") == {}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("vllm_service_workers", "vllm_service_"),
        ("drafter_k", "drafter_"),
        ("ml_env_wheels_directory", "ml_env_"),
        ("preflight_skip", "preflight_"),
        ("aerie_releases_to_keep", "aerie_"),
        ("target_model_revision", "target_model_"),
        ("vllm_patch_force", "vllm_patch_"),
    ],
)
def test_an_unknown_name_that_starts_with_a_role_is_found_however_far_off(name: str, role: str) -> None:
    found = closest(name)
    assert list(found) == [name]
    assert found[name] in KNOWN
    assert found[name].startswith(role)


@given(st.lists(st.text() | st.sampled_from(KNOWN)), st.lists(st.text()), st.lists(st.text()))
def test_any_names_have_an_answer(names: list[str], known: list[str], roles: list[str]) -> None:
    found = misspelt(names, known, roles)
    assert found.keys() <= set(names) - set(known)
    assert set(found.values()) <= set(known)


@given(st.sampled_from(KNOWN), st.text("abcdefghijklmnopqrstuvwxyz_", min_size=3))
def test_three_letters_in_front_make_another_name(option: str, prefix: str) -> None:
    name = f"{prefix}{option}"
    if not name.startswith(("_", *(f"{role}_" for role in ROLES))):
        assert closest(name) == {}


# ------------------------------------------------------------------------------------------------------------ addresses


def test_hosts_that_share_an_address_are_named() -> None:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.1", "d": "10.0.0.1"}
    assert shared_addresses(addresses) == {"10.0.0.1": ["a", "c", "d"]}
    assert shared_addresses({"a": "10.0.0.1", "b": "10.0.0.2"}) == {}


def test_a_host_without_an_address_is_reached_by_its_name() -> None:
    assert shared_addresses({"gpu-01": "", "gpu-02": ""}) == {}
    assert shared_addresses({"gpu-01": "", "first": "gpu-01"}) == {"gpu-01": ["gpu-01", "first"]}


# --------------------------------------------------------------------------------------------------------------- module


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two roles and a playbook that passes facts between them."""
    spec: dict[str, Any] = {
        "argument_specs": {
            "main": {"options": {"store_path": {}}},
            "other": {"options": {"store_size": {}}},
            "bare": {},
        }
    }
    for role, text in (("store", yaml.safe_dump(spec)), ("empty", yaml.safe_dump({"argument_specs": {}}))):
        (tmp_path / "roles" / role / "meta").mkdir(parents=True)
        (tmp_path / "roles" / role / "meta/argument_specs.yml").write_text(text)
    (tmp_path / "roles/store/tasks").mkdir()
    (tmp_path / "roles/store/tasks/main.yml").write_text("- command: ls\n  register: store_listing\n")
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks/deploy.yml").write_text("- set_fact: {store_summary: x}\n")
    return tmp_path


def problems(repository: Path, **options: Any) -> list[str]:  # noqa: ANN401
    places = {"roles": str(repository / "roles"), "playbooks": str(repository / "playbooks")}
    nothing: dict[str, Any] = {
        "variables": {},
        "addresses": {},
        "sources": [],
        "names": [],
        "drafters": {},
        "certificates": [],
    }
    result = look_at_inventory({**nothing, **places, **options})
    return [f"{finding['message']}: {finding['remedy']}" for finding in result["findings"]]


def test_a_sound_inventory_has_no_problems(repository: Path) -> None:
    variables = {"a": ["store_path", "my_own"], "b": ["store_size"]}
    assert problems(repository, variables=variables, addresses={"a": "10.0.0.1", "b": "10.0.0.2"}) == []
    assert problems(repository) == []


def test_all_problems_are_reported_with_their_hosts(repository: Path) -> None:
    variables = {"a": ["store_pth"], "b": ["my_own", "store_pth", "stor_size"]}
    assert problems(repository, variables=variables, addresses={"a": "10.0.0.1", "b": "10.0.0.1"}) == [
        "variable 'stor_size' of b is unknown: did you mean 'store_size'?",
        "variable 'store_pth' of a, b is unknown: did you mean 'store_path'?",
        "a and b have the same address 10.0.0.1: give each host its own, or remove one",
    ]


def test_an_option_of_vllm_among_the_variables_is_sent_where_it_belongs() -> None:
    (found,) = problems(ROOT, variables={"a": ["vllm_service_max_model_len"]})
    assert found.endswith("? vLLM's own options belong in vllm_service_options")


def test_variables_that_no_host_has_are_noted(repository: Path, tmp_path: Path) -> None:
    for name in ("group_vars/h200", "group_vars/h200s", "host_vars"):
        (tmp_path / "mine" / name).mkdir(parents=True)
    for name in ("hosts.yml", "host_vars/gpu-1.yml", "host_vars/gpu-2.example.org", "host_vars/gpu_2.yml"):
        (tmp_path / "mine" / name).touch()
    names = ["all", "h200", "gpu-1", "gpu-2.example.org"]
    expected = [
        f"{tmp_path}/mine/group_vars/h200s is read for no host: there is no group h200s: ",
        f"{tmp_path}/mine/host_vars/gpu_2.yml is read for no host: there is no host gpu_2: ",
    ]
    assert problems(repository, sources=[str(tmp_path / "mine")], names=names) == expected
    assert problems(repository, sources=[str(tmp_path / "mine/hosts.yml"), "gpu-1,"], names=names) == expected


def test_what_roles_and_playbooks_pass_to_each_other_is_known(repository: Path) -> None:
    assert problems(repository, variables={"a": ["store_listing", "store_summary"]}) == []


def inventory_variables(inventory: Path) -> Iterator[str]:
    """Every variable that an inventory of the repository sets; an encrypted file sets none that can be read."""

    def of_hosts(group: dict[str, Any]) -> Iterator[str]:
        yield from group.get("vars") or {}
        for host_variables in (group.get("hosts") or {}).values():
            yield from host_variables or {}
        for child in (group.get("children") or {}).values():
            yield from of_hosts(child or {})

    for group in yaml.safe_load((inventory / "hosts.yml").read_text()).values():
        yield from of_hosts(group)
    for path in inventory.glob("group_vars/*/*"):
        content = yaml.compose(path.read_text())
        yield from (key.value for key, _ in content.value) if isinstance(content, yaml.MappingNode) else ()


@pytest.mark.parametrize("name", ["local", "sample"])
def test_the_inventories_of_the_repository_are_sound(name: str) -> None:
    names = sorted(set(inventory_variables(ROOT / "inventory" / name)))
    assert "drafter_path" in names
    assert problems(ROOT, variables={"a": [*names, *ANSIBLES.split()]}) == []


def test_what_the_roles_of_the_repository_set_is_known() -> None:
    names = ["ml_env_path", "ml_env_wheelhouse", "drafter_result", "target_model_result", "vllm_service_gate"]
    assert problems(ROOT, variables={"a": names}) == []
    assert len(problems(ROOT, variables={"a": [f"{name}s" for name in names]})) == len(names)
