# SPDX-License-Identifier: Apache-2.0
"""What the contract tests share: the partial wheels of the releases, and the patch sets as the role renders them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import wheels
import yaml

TEMPLATES = Path(__file__).parents[2] / "templates" / "patches"
_MODELS = "vllm/model_executor/models"
_MEMBERS = (
    "vllm/__init__.py",
    f"{_MODELS}/deepseek_v2.py",
    f"{_MODELS}/interfaces.py",
    f"{_MODELS}/kimi_k25.py",
    f"{_MODELS}/utils.py",
    "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
)


@pytest.fixture(scope="session")
def wheel_of() -> Callable[[str, str], Path]:
    """Return the partial wheel of a distribution's release: the files that the patch sets and their proofs read."""
    return lambda distribution, version: wheels.partial_wheel(distribution, version, _MEMBERS)


@pytest.fixture(scope="session")
def rendered() -> Callable[[str, str], dict[str, Any]]:
    """Return a patch set rendered for a release."""

    def render(name: str, version: str) -> dict[str, Any]:
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(TEMPLATES / name), undefined=jinja2.StrictUndefined, trim_blocks=True
        )
        patch_set: dict[str, Any] = yaml.safe_load(environment.get_template("set.yml.j2").render(vllm_version=version))
        return patch_set

    return render
