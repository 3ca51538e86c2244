# SPDX-License-Identifier: Apache-2.0
"""The variables of inventories, playbooks and scenarios are the roles' variables, and vLLM gets what they say.

Ansible ignores a variable that nothing reads, and finds one that nothing sets only when it needs it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import pytest
import yaml
from ansible.module_utils.aerie.inventory import known_variables

ROOT = Path(__file__).parents[2]
INVENTORIES = ("local", "sample")
SAMPLE = ROOT / "inventory" / "sample"
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())
KNOWN: set[str] = known_variables(ROOT / "roles")
ROLE_PREFIXES = tuple(f"{role}_" for role in ROLES)

# What Ansible and Molecule themselves provide to an expression.
GIVEN = {"group_names", "groups", "hostvars", "inventory_dir", "inventory_hostname", "item", "lookup", "omit"}
GIVEN |= {"playbook_dir", "query", "role_path"}
GIVEN_PREFIXES = ("ansible_", "molecule_", "vault_")
# What the inventories of embedded hosts tell embedded/cluster.py, and each other.
EMBEDDED_PREFIX = "embedded_"
CONDITIONS = {"when", "that", "until", "changed_when", "failed_when"}

Data = Any


class Loader(yaml.SafeLoader):
    """YAML with Ansible's own tags, such as !vault, whose content does not matter here."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def load(path: Path) -> Data:
    return yaml.load(path.read_text(), Loader)


def run(program: str, *arguments: str | Path) -> str:
    """Run a program of this environment in the repository's root; return what it prints."""
    command = [str(Path(sys.executable).with_name(program)), *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@functools.cache
def listed(inventory: str) -> dict[str, Any]:
    """Return what Ansible makes of an inventory."""
    return dict(json.loads(run("ansible-inventory", "-i", f"inventory/{inventory}", "--list")))


def hosts_of(inventory: str) -> dict[str, dict[str, Any]]:
    """Return the variables of each host."""
    return dict(listed(inventory)["_meta"]["hostvars"])


# --- Inventories


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_every_host_serves(inventory: str) -> None:
    for variables in hosts_of(inventory).values():
        assert {"ansible_host", "ml_env_lock", "target_model_path", "drafter_path"} <= set(variables)
        assert {"vllm_service_api_keys", "vllm_service_options"} <= set(variables)


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_every_variable_is_one_that_a_role_reads(inventory: str) -> None:
    names = {name for variables in hosts_of(inventory).values() for name in variables}
    others = ("ansible_", "vault_", *([EMBEDDED_PREFIX] if inventory == "local" else []))
    assert {name for name in names - KNOWN if not name.startswith(others)} == set()


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_locks_are_in_the_repository(inventory: str) -> None:
    for variables in hosts_of(inventory).values():
        assert (ROOT / "requirements" / f"{variables['ml_env_lock']}.txt").is_file()


def test_the_sample_has_a_group_for_each_hardware() -> None:
    groups = listed("sample")
    assert set(groups["inference"]["children"]) == {"h200", "rtx_pro_6000"}
    assert groups["h200"]["hosts"] and groups["rtx_pro_6000"]["hosts"]


def test_the_sample_says_who_may_connect() -> None:
    assert all(variables["vllm_service_clients"] for variables in hosts_of("sample").values())


def test_the_sample_refers_to_secrets_and_has_none() -> None:
    example = yaml.safe_load((SAMPLE / "group_vars/inference/vault.yml.example").read_text())
    assert set(example.values()) == {"REPLACE"}
    references = {f"{{{{ {name} }}}}" for name in example}
    for variables in hosts_of("sample").values():
        assert set(variables["vllm_service_api_keys"].values()) == references


def test_what_the_sample_shows_as_a_default_is_the_default() -> None:
    defaults = {name: value for role in ROLES for name, value in defaults_of(role).items()}
    text = "".join(path.read_text() for path in sorted(SAMPLE.rglob("*.yml")))
    shown = yaml.safe_load("\n".join(re.findall(r"^# ([a-z]\w*_\w+: .+)$", text, re.MULTILINE)))
    assert len(shown) > 10
    assert shown == {name: defaults.get(name, "no such variable") for name in shown}


# --- Roles


def defaults_of(role: str) -> dict[str, Any]:
    return load(ROOT / "roles" / role / "defaults/main.yml") or {}


def options_of(role: str) -> dict[str, dict[str, Any]]:
    """Return the options of all entry points of a role."""
    entry_points = load(ROOT / "roles" / role / "meta/argument_specs.yml")["argument_specs"].values()
    return {name: option for entry_point in entry_points for name, option in entry_point.get("options", {}).items()}


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_defaults_are_its_options(role: str) -> None:
    options, defaults = options_of(role), defaults_of(role)
    required = {name for name, option in options.items() if option.get("required")}
    # An option that is not required and has no default is shown in a comment.
    text = (ROOT / "roles" / role / "defaults/main.yml").read_text()
    shown = set(re.findall(r"^# (\w+): ", text, re.MULTILINE)) & set(options)
    assert set(defaults) | required | shown == set(options)
    assert set(defaults) & required == set()


@pytest.mark.parametrize("role", ROLES)
def test_a_stated_default_is_the_default(role: str) -> None:
    defaults = defaults_of(role)
    stated = {name: option["default"] for name, option in options_of(role).items() if "default" in option}
    assert stated == {name: defaults.get(name) for name in stated}


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_variables_have_its_name(role: str) -> None:
    assert {name for name in options_of(role) if not name.startswith(f"{role}_")} == set()


# --- What is used exists

_PATTERNS = ("*.yml", "inventory/**/*.yml", "playbooks/**/*.yml", "embedded/**/*.yml", "tests/molecule/**/*.yml")
# A scenario links to the demo's vault, which is not there before `make embedded`.
FILES = sorted(
    path for pattern in (*_PATTERNS, "tests/reference/*.yml") for path in ROOT.glob(pattern) if path.is_file()
)
TEMPLATES = sorted(path for path in (ROOT / "templates").rglob("*.j2") if "patches" not in path.parts)


def nodes(data: Data) -> Iterator[dict[str, Any]]:
    """Yield every mapping in ``data``."""
    if isinstance(data, dict):
        yield data
    for child in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from nodes(child)


def assigned(data: Data, path: Path = ROOT) -> set[str]:
    """Return the names that plays, tasks, groups and hosts in ``data``, which ``path`` has, give values to."""
    found = set(data or {}) if {"group_vars", "host_vars"} & set(path.parts) else set()
    for node in nodes(data):
        found |= set(node.get("vars") or {})
        for key in ("group_vars", "host_vars"):
            for variables in (node.get(key) or {}).values():
                found |= set(variables)
    return found


def published(data: Data) -> set[str]:
    """Return the names that tasks in ``data`` leave to the ones after them."""
    found: set[str] = set()
    for node in nodes(data):
        found |= {node["register"]} if isinstance(node.get("register"), str) else set()
        found |= set(node.get("ansible.builtin.set_fact") or {}) - {"cacheable"}
        found |= {node["loop_var"]} if "loop_var" in node else set()
    return found


class AnyName(dict[str, Any]):
    """Filters and tests: those of Ansible are unknown to Jinja, and what they do does not matter here."""

    def get(self, key: str, default: object = None) -> object:
        return super().get(key, str)


JINJA = jinja2.Environment()
JINJA.filters, JINJA.tests = AnyName(JINJA.filters), AnyName(JINJA.tests)


def used(data: Data, condition: bool = False) -> set[str]:
    """Return the names that expressions in ``data`` read; a string is one as a whole where ``condition`` says so."""
    if isinstance(data, dict):
        return set().union(*(used(key) | used(value, key in CONDITIONS) for key, value in data.items()), set())
    if isinstance(data, list):
        return set().union(*(used(value, condition) for value in data), set())
    if not isinstance(data, str):
        return set()
    return jinja2.meta.find_undeclared_variables(JINJA.parse("{{ " + data + " }}" if condition else data))


def role_names() -> set[str]:
    """Return what the roles' constants and tasks provide to what runs after them."""
    found: set[str] = set()
    for path in sorted((ROOT / "roles").glob("*/vars/*.yml")):
        found |= set(load(path) or {})
    for path in sorted((ROOT / "roles").glob("*/tasks/*.yml")):
        found |= published(load(path))
    return found


def imported_with(data: Data) -> set[str]:
    """Return the names that playbooks in ``data`` are imported with, and those that all playbooks have."""
    imports = [node for node in nodes(data) if "ansible.builtin.import_playbook" in node]
    return {name for node in imports for name in node.get("vars") or {}}


PROVIDED = KNOWN | role_names() | GIVEN | {name for path in FILES for name in published(load(path))}
PROVIDED |= {name for path in FILES for name in imported_with(load(path))}
PROVIDED |= set(load(ROOT / "playbooks" / "group_vars" / "all.yml"))


def unknown(names: set[str]) -> set[str]:
    """Return the ``names`` that neither Ansible nor a role, an inventory's user or an earlier task provides."""
    return {name for name in names - PROVIDED if not name.startswith((*GIVEN_PREFIXES, EMBEDDED_PREFIX))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_file_reads_and_sets_exists(path: Path) -> None:
    data = load(path)
    set_here = assigned(data, path)
    # A scenario's playbooks run on its own inventory.
    for inventory in path.parent.glob("inventory/hosts.yml"):
        set_here |= assigned(load(inventory), inventory)
    # A playbook's comment says what to give it with -e.
    asked_for = set(re.findall(r"-e (\w+)=", path.read_text())) | {"now", "undef"}  # which is a function of Ansible's
    assert unknown(used(data) - set_here - asked_for) == set()
    # A name that looks like a role's is read by that role.
    assert {name for name in unknown(set_here) if name.startswith(ROLE_PREFIXES)} == set()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_template_reads_exists(path: Path) -> None:
    assert unknown(used(path.read_text())) == set()


def test_a_misspelt_name_would_be_found() -> None:
    task = {"when": ["vllm_service_prot == 1"], "vars": {"vllm_service_prot": "{{ a_name }}"}, "register": "result"}
    assert used(task) == {"vllm_service_prot", "a_name"}
    assert assigned([task]) == {"vllm_service_prot"} and published([task]) == {"result"}
    assert unknown({"vllm_service_prot", "vllm_service_port", "ansible_host"}) == {"vllm_service_prot"}


# --- The configuration of vLLM


def rendered(inventory: str, into: Path, **extra: object) -> dict[str, dict[str, Any]]:
    """Return each host's serve.yaml, parsed as vLLM parses it."""
    playbook = "tests/reference/render_serve_config.yml"
    run("ansible-playbook", playbook, "-i", f"inventory/{inventory}", "-e", json.dumps({"into": str(into), **extra}))
    return {path.stem: yaml.safe_load(path.read_text()) for path in into.iterdir()}


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` as flat YAML has them, JSON read back."""
    return {name if value is not False else f"no-{name}": value is False or value for name, value in options.items()}


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_a_hosts_configuration_says_what_its_inventory_says(inventory: str, tmp_path: Path) -> None:
    hosts = hosts_of(inventory)
    configurations = rendered(inventory, tmp_path)
    assert set(configurations) == set(hosts)
    for host, configuration in configurations.items():
        assert {type(value) for value in configuration.values()} <= {str, int, float, bool}
        options = arguments(hosts[host]["vllm_service_options"])
        read_back = {
            option: json.loads(configuration[option]) if isinstance(value, dict | list) else configuration[option]
            for option, value in options.items()
        }
        assert read_back == options
        assert configuration["model"] == hosts[host]["target_model_path"]
        speculation = json.loads(configuration["speculative-config"])
        assert speculation["method"] == "eagle3" and speculation["model"].startswith("/opt/aerie/store/")
        assert speculation["num_speculative_tokens"] == 3


def test_negations_and_awkward_values_survive(tmp_path: Path) -> None:
    options = {
        "enable-prefix-caching": False,
        "trust-remote-code": True,
        "chat-template": 'it\'s: "{quoted}" # no comment',
        "fingerprint-value": "no",
        "gpu-memory-utilization": 0.5,
        "hf-overrides": {"text_config": {"rope_theta": 5e4, "names": ["a'b", 'c"d', "é"], "none": None}},
    }
    configurations = rendered("local", tmp_path, vllm_service_options=options)
    for configuration in configurations.values():
        assert configuration["no-enable-prefix-caching"] is True and "enable-prefix-caching" not in configuration
        assert configuration["trust-remote-code"] is True
        assert json.loads(configuration["hf-overrides"]) == options["hf-overrides"]
        same = ("chat-template", "fingerprint-value", "gpu-memory-utilization")
        assert [configuration[name] for name in same] == [options[name] for name in same]


@pytest.mark.parametrize("scenario", sorted(path.parent.name for path in (ROOT / "tests/molecule").glob("*/inventory")))
def test_a_scenario_has_the_secrets_that_its_inventory_names(scenario: str) -> None:
    # Links to them are easily left out of the repository, which ignores such files elsewhere.
    inventory = ROOT / "tests/molecule" / scenario / "inventory"
    paths = [Path(folder) / name for folder, _, names in os.walk(inventory, followlinks=True) for name in names]
    # The vault that the links lead to is made with the hosts, later than this test in a fresh clone.
    vault = ROOT / "inventory/local/group_vars/inference/vault.yml"
    text = "".join(
        "vault_demo_key: made\n" if path.resolve() == vault else path.read_text()
        for path in paths
        if path.suffix == ".yml"
    )
    # Those of the service scenario are made when it is prepared.
    used = {name for name in re.findall(r"\bvault_\w+\b(?!:)", text) if not name.startswith("vault_service_")}
    assert used <= set(re.findall(r"(?m)^(vault_\w+):", text))
