# SPDX-License-Identifier: Apache-2.0
"""Mistakes in an inventory that Ansible itself ignores, and what the control node lacks for it.

Needs PyYAML, which the control node has.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.aerie.findings import Finding
from ansible.module_utils.aerie.preflight_certificate import check_certificate
from ansible.module_utils.aerie.preflight_findings import note, problem

# Letters typed wrong, left out, doubled or swapped. What is farther off, such as `vault_<option>` or an option's name
# without its first word, is a name of the user's own.
_TYPING_ERRORS = 2
_NAME = re.compile(r"[A-Za-z_]\w*")


def misspelt(names: Iterable[str], known: Collection[str], roles: Iterable[str]) -> dict[str, str]:
    """Return, for each of ``names`` that is a misspelt one of ``known``, the known name that it is close to.

    A name that starts with one of ``roles`` and an underscore belongs to that role, so it is misspelt however far it is
    from what the role knows. Ansible's own names, and those that start with an underscore, are nobody's mistake.
    """
    roles = sorted(roles)
    result = {}
    for name in sorted(set(names) - set(known)):
        if name.startswith(("ansible_", "_")):
            continue
        candidates = [option for option in known if _typing_errors(name, option) <= _TYPING_ERRORS]
        for prefix in [f"{role}_" for role in roles if name.startswith(f"{role}_")]:
            candidates = candidates or [option for option in known if option.startswith(prefix)] or list(known)
        if candidates:
            (result[name],) = difflib.get_close_matches(name, sorted(candidates), n=1, cutoff=0.0)
    return result


def _typing_errors(name: str, option: str) -> int:
    """Return how many letters of ``option`` were typed wrong, left out, added or swapped with the next one.

    This is the optimal string alignment distance; upper and lower case are the same letter. Nothing is counted beyond
    the first that is too many.
    """
    typed, meant = name.casefold(), option.casefold()
    enough = _TYPING_ERRORS + 1
    if abs(len(typed) - len(meant)) >= enough:
        return enough
    before: list[int] = []
    row = list(range(len(meant) + 1))
    for i, letter in enumerate(typed, start=1):
        before, last, row = row, before, [i]
        for j, other in enumerate(meant, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == meant[j - 2] and typed[i - 2] == other:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
        if min(row) >= enough and min(before) >= enough:
            return enough
    return row[-1]


def shared_addresses(addresses: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the addresses that several hosts have, and these hosts. A host without an address has its name as one."""
    hosts: dict[str, list[str]] = {}
    for host, address in addresses.items():
        hosts.setdefault(address or host, []).append(host)
    return {address: names for address, names in hosts.items() if len(names) > 1}


def known_variables(roles: Path) -> set[str]:
    known: set[str] = set()
    for path in roles.glob("*/meta/argument_specs.yml"):
        for entry_point in yaml.safe_load(path.read_text())["argument_specs"].values():
            known.update(entry_point.get("options", {}))
    return known


def mentioned_names(*directories: Path) -> set[str]:
    """Return every name in YAML files: the facts that roles and playbooks set are there when a play follows another."""
    files = [path for directory in directories for path in directory.rglob("*.yml")]
    return {name for path in files for name in _NAME.findall(path.read_text())}


def check_names(variables: Mapping[str, list[str]], roles: Path, playbooks: Path) -> Iterator[Finding]:
    hosts_of: dict[str, list[str]] = {}
    for host, names in variables.items():
        for name in names:
            hosts_of.setdefault(name, []).append(host)
    suspects = hosts_of.keys() - mentioned_names(roles, playbooks)
    found = misspelt(suspects, known_variables(roles), [path.name for path in roles.iterdir()])
    for name, close in found.items():
        message = f"variable '{name}' of {', '.join(hosts_of[name])} is unknown"
        remedy = f"did you mean '{close}'?"
        if name.startswith("vllm_service_") and _typing_errors(name, close) > _TYPING_ERRORS:
            remedy += " vLLM's own options belong in vllm_service_options"
        yield problem("variable", message, remedy)


def check_addresses(addresses: Mapping[str, str]) -> Iterator[Finding]:
    for address, hosts in shared_addresses(addresses).items():
        message = f"{' and '.join(hosts)} have the same address {address}"
        yield problem("address-shared", message, "give each host its own, or remove one")


def check_sources(sources: Iterable[str], names: Collection[str]) -> Iterator[Finding]:
    """Find variables in ``sources``, directories or files of inventories, for none of ``names``, groups and hosts."""
    for source in map(Path, sources):
        for path in sorted((source if source.is_dir() else source.parent).glob("*_vars/*")):
            kind = {"group_vars": "group", "host_vars": "host"}.get(path.parent.name)
            if kind and not path.name.startswith(".") and not {path.name, path.stem} & set(names):
                yield note("unused-variables", f"{path} is read for no host: there is no {kind} {path.stem}")


def check_drafters(drafters: Mapping[str, str]) -> Iterator[Finding]:
    for path in sorted(set(filter(None, drafters.values()))):
        if not Path(path).exists():
            yield problem("drafter", f"there is no drafter at {path} on the control node", "correct drafter_path")


def size_mb(path: Path) -> int:
    """Return the size of a file, or of all files below a directory."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) >> 20


def look_at_inventory(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the findings, and the size of each host's drafter; ``options`` are those of the module inventory_check."""
    findings = [
        *check_names(options["variables"], Path(options["roles"]), Path(options["playbooks"])),
        *check_addresses(options["addresses"]),
        *check_sources(options["sources"], options["names"]),
        *check_drafters(options["drafters"]),
    ]
    now = datetime.now(timezone.utc)
    for path in options["certificates"]:
        findings += check_certificate(Path(path), now, " on the control node")
    sizes = {path: size_mb(Path(path)) for path in set(filter(None, options["drafters"].values()))}
    return {
        "findings": [finding.as_dict() for finding in findings],
        "drafter_mb": {host: sizes.get(path, 0) for host, path in options["drafters"].items()},
    }
