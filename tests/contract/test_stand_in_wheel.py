# SPDX-License-Identifier: Apache-2.0
"""The stand-in's wheel is patched exactly as the real one is: it holds every file that the patch sets ask about."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import releases
from ansible.module_utils.aerie.patchset import plan_sets
from ansible.module_utils.aerie.wheel import package_of_wheel
from releases import SETS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "stand_in"))
stand_in_wheel = importlib.import_module("stand_in_wheel")


def test_it_gets_the_patch_of_the_real_release(tmp_path: Path, rendered: Callable[[str, str], dict[str, Any]]) -> None:
    (real,) = [release for release in releases.load() if str(release) == stand_in_wheel.VERSION]
    lock = stand_in_wheel.build(tmp_path)
    package = package_of_wheel(tmp_path / stand_in_wheel.NAME)
    selection = plan_sets(package, [rendered(name, package.version) for name in SETS], [8], real.models)
    assert {plan.name: plan.state for plan in selection.plans} == real.states
    assert {
        file["path"]: {"pristine": file["pristine_sha256"], "patched": file["patched_sha256"]}
        for file in selection.plan["files"]
    } == real.files
    assert lock.read_text().startswith("# python: 3.11;")
