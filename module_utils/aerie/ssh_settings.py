# SPDX-License-Identifier: Apache-2.0
"""What ssh would do for a host: ``ssh -G`` has its options, its configuration files and its defaults all resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# StrictHostKeyChecking, as ssh -G prints it and as its manual calls it.
_STRICT = {"false": "no", "off": "no", "accept-new": "accept-new", "true": "yes"}


@dataclass(frozen=True)
class Settings:
    """How ssh reaches a host. ``via`` is the ProxyJump or ProxyCommand, or empty; ``strict`` the policy on host
    keys (yes, ask, accept-new or no); ``known_as`` the name that the host's key is looked up by."""

    host: str
    port: int
    user: str
    known_as: str
    known_hosts: tuple[Path, ...]
    strict: str
    identities: tuple[Path, ...]
    use_agent: bool
    via: str
    timeout_s: float


def parse_settings(answer: str, default_timeout_s: float) -> Settings:
    """Read what ``ssh -G`` printed. It quotes no blanks, so a file whose name has some is not found."""
    fields: dict[str, list[str]] = {}
    for line in answer.splitlines():
        name, _, value = line.partition(" ")
        fields.setdefault(name.lower(), []).append(value.strip())

    def last(name: str, default: str = "") -> str:
        return fields.get(name, [default])[-1]

    host, port = last("hostname"), last("port", "22")
    via = next((fields[name][-1] for name in ("proxyjump", "proxycommand") if _is_set(fields, name)), "")
    known = [*last("userknownhostsfile").split(), *last("globalknownhostsfile").split()]
    connect_timeout = last("connecttimeout")
    return Settings(
        host,
        int(port) if port.isdigit() else 22,
        last("user"),
        last("hostkeyalias") if _is_set(fields, "hostkeyalias") else host,
        tuple(Path(name).expanduser() for name in known if name != "none"),
        _STRICT.get(last("stricthostkeychecking"), "ask"),
        tuple(Path(name).expanduser() for name in fields.get("identityfile", [])),
        last("identityagent", "SSH_AUTH_SOCK") != "none" and last("identitiesonly") != "yes",
        via,
        float(connect_timeout) if connect_timeout.isdigit() else default_timeout_s,
    )


def _is_set(fields: Mapping[str, Sequence[str]], name: str) -> bool:
    return fields.get(name, ["none"])[-1].lower() not in ("", "none")
