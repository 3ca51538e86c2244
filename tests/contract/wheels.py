# SPDX-License-Identifier: Apache-2.0
"""The partial wheels of many releases, fetched side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ansible.module_utils.aerie import remote_wheel

CACHE = remote_wheel.CACHE
_AT_ONCE = 8


def partial_wheel(distribution: str, version: str, members: Collection[str]) -> Path:
    """Return a partial wheel with those of ``members`` that the release has, from the cache or the index."""
    return remote_wheel.partial_wheel(distribution, version, members, CACHE)


def partial_wheels(releases: Iterable[tuple[str, str]], members: Collection[str]) -> dict[tuple[str, str], Path]:
    """Return the partial wheels of ``releases`` (distribution, version)."""
    wanted = list(dict.fromkeys(releases))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        paths = pool.map(lambda release: partial_wheel(release[0], release[1], members), wanted)
        return dict(zip(wanted, paths, strict=True))
