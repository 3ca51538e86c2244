# SPDX-License-Identifier: Apache-2.0
"""Mistakes in an inventory that Ansible itself ignores."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

# Letters typed wrong, left out, doubled or swapped. What is farther off, such as `vault_<option>` or an option's name
# without its first word, is a name of the user's own.
_TYPING_ERRORS = 2


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
