# SPDX-License-Identifier: Apache-2.0
"""Mistakes in an inventory that Ansible itself ignores."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

_CLOSE = 0.85


def misspelt(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Return, for each of ``names`` that is unknown, the known name that it is close to.

    A name that starts as only a role's variables do is misspelt however far it is from the others.
    """
    prefixes = tuple({f"{name.split('_')[0]}_" for name in known if "_" in name} - {"target_", "ml_"})
    result = {}
    for name in sorted(set(names) - set(known)):
        if name.startswith(("ansible_", "_")):
            continue
        cutoff = 0.0 if name.startswith(prefixes) else _CLOSE
        if close := difflib.get_close_matches(name, known, n=1, cutoff=cutoff):
            result[name] = close[0]
    return result


def shared_addresses(addresses: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the addresses that several hosts have, and these hosts."""
    hosts: dict[str, list[str]] = {}
    for host, address in addresses.items():
        hosts.setdefault(address, []).append(host)
    return {address: names for address, names in hosts.items() if len(names) > 1}
