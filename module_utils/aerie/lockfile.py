# SPDX-License-Identifier: Apache-2.0
"""Locked requirements: which distributions a host gets, for which Python and platform, pinned by hash.

A lock is a requirements file as pip and uv read it. Its first line says what it was resolved for::

    # python: 3.12; platform: manylinux_2_31_x86_64; vllm: 0.33.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_MANYLINUX = re.compile(r"^manylinux_2_(?P<minor>\d+)_(?P<machine>\w+)$")
# The oldest glibc that wheels of today are built against.
_OLDEST_MANYLINUX_MINOR = 5
_LEGACY_MANYLINUX = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


class LockError(ValueError):
    """A lock that cannot be used; the text says which line and why."""


@dataclass(frozen=True)
class Requirement:
    """One pinned distribution and the SHA-256 digests that its file may have."""

    name: str
    version: str
    sha256: frozenset[str]

    @property
    def key(self) -> str:
        return f"{self.name}=={self.version}"

    def text(self) -> str:
        """Return the requirement as a line of a requirements file."""
        return " ".join([self.key, *(f"--hash=sha256:{digest}" for digest in sorted(self.sha256))])


@dataclass(frozen=True)
class Lock:
    """A parsed lock. ``python`` is X.Y; ``platform`` is a wheel platform tag; ``vllm`` is a release, or empty."""

    python: str
    platform: str
    vllm: str
    requirements: tuple[Requirement, ...]

    def only(self, names: Iterable[str]) -> Lock:
        """Return this lock with the requirements that ``names`` names, and no other."""
        wanted = {normalise(name) for name in names}
        return replace(self, requirements=tuple(entry for entry in self.requirements if entry.name in wanted))

    def platforms(self) -> list[str]:
        """Return every platform tag whose wheels run where this lock's platform does, newest first."""
        match = _MANYLINUX.match(self.platform)
        if not match:
            return [self.platform]
        machine = match["machine"]
        tags = []
        for minor in range(int(match["minor"]), _OLDEST_MANYLINUX_MINOR - 1, -1):
            tags.append(f"manylinux_2_{minor}_{machine}")
            if minor in _LEGACY_MANYLINUX:
                tags.append(f"{_LEGACY_MANYLINUX[minor]}_{machine}")
        return tags


def normalise(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str, source: str) -> Lock:
    """Parse a lock's ``text``; ``source`` names it in errors."""
    lines = text.splitlines()
    header = lines[0] if lines else ""
    facts = dict(re.findall(r"(\w+): ([^;\s]+)", header)) if header.startswith("#") else {}
    if not {"python", "platform"} <= facts.keys():
        raise LockError(f"{source}: the first line must be like '# python: 3.12; platform: manylinux_2_31_x86_64'")
    requirements = []
    for logical in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        line = logical.split(" #")[0].strip()
        if not line or line.startswith("#"):
            continue
        match = _REQUIREMENT.match(line)
        digests = frozenset(_HASH.findall(line))
        if not match or not digests:
            raise LockError(f"{source}: '{line[:60]}' is not 'name==version --hash=sha256:...'; compile the lock again")
        requirements.append(Requirement(normalise(match["name"]), match["version"], digests))
    return Lock(facts["python"], facts["platform"], facts.get("vllm", ""), tuple(requirements))


def wheel_identity(filename: str) -> tuple[str, str]:
    """Return the normalised name and the version of a wheel's file name."""
    name, _, rest = filename.partition("-")
    return normalise(name), rest.partition("-")[0]
