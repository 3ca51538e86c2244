# SPDX-License-Identifier: Apache-2.0
"""What the contract tests share: the partial wheels of the releases, and the patch sets as the role renders them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import releases
import wheels
import yaml

TEMPLATES = Path(__file__).parents[2] / "templates" / "patches"
_REGISTRY = "model_executor/models/registry.py"


def render(name: str, version: str) -> dict[str, Any]:
    """Return a patch set rendered for a release."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES / name), undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    patch_set: dict[str, Any] = yaml.safe_load(environment.get_template("set.yml.j2").render(vllm_version=version))
    return patch_set


@pytest.fixture(scope="session")
def wheel_of() -> Callable[[str, str], Path]:
    """Return the partial wheel of a distribution's release: the files that the patch sets and their proofs read."""
    paths = {path for name in releases.SETS for path in _paths(render(name, "0"))}
    members = {f"vllm/{path}" for path in {"__init__.py", _REGISTRY, *paths}}
    wanted = ((release.distribution, release.version) for release in releases.load())
    partial = wheels.partial_wheels(wanted, members)
    return lambda distribution, version: partial[distribution, version]


def _paths(value: object) -> Iterator[str]:
    """Yield every ``path`` that a patch set names, at any depth."""
    if isinstance(value, dict):
        yield from (path for key, path in value.items() if key == "path")
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            yield from _paths(child)


@pytest.fixture(scope="session")
def rendered() -> Callable[[str, str], dict[str, Any]]:
    """Return a patch set rendered for a release."""
    return render
