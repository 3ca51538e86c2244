# SPDX-License-Identifier: Apache-2.0
"""Every module's documentation says what the module takes: ansible-lint does not compare the two."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "library").glob("*.py"))


@pytest.fixture(params=NAMES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def specification(module: ModuleType) -> dict[str, Any]:
    """Return the ARGUMENT_SPEC of a module, or of the action that does the work of one that is documentation only."""
    if hasattr(module, "main"):
        return dict(module.ARGUMENT_SPEC)
    action = runpy.run_path(str(ROOT / "plugins" / "action" / f"{module.__name__}.py"))
    return dict(action["ARGUMENT_SPEC"])


def documented(options: dict[str, Any]) -> dict[str, Any]:
    """Return what ``options`` of a DOCUMENTATION say, in the form of ``taken``."""
    return {name: _shape(option, option.get("suboptions")) for name, option in options.items()}


def taken(options: dict[str, Any]) -> dict[str, Any]:
    """Return what an ARGUMENT_SPEC takes: type, whether required, default, choices, kind of elements, suboptions."""
    return {name: _shape(option, option.get("options")) for name, option in options.items()}


def _shape(option: dict[str, Any], inner: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "type": option.get("type", "str"),
        "required": option.get("required", False),
        "default": option.get("default"),
        "choices": option.get("choices"),
        "elements": option.get("elements"),
        "aliases": option.get("aliases", []),
        "options": {name: _shape(entry, entry.get("suboptions", entry.get("options"))) for name, entry in inner.items()}
        if inner
        else None,
    }


def test_there_are_modules_to_compare() -> None:
    assert {"target_check", "drafter_check"} <= set(NAMES)


def test_the_documented_options_are_the_options(module: ModuleType) -> None:
    assert documented(yaml.safe_load(module.DOCUMENTATION).get("options", {})) == taken(specification(module))


def test_every_option_is_described(module: ModuleType) -> None:
    def undescribed(options: dict[str, Any]) -> list[str]:
        bare = [name for name, option in options.items() if not option.get("description")]
        return bare + [name for option in options.values() for name in undescribed(option.get("suboptions", {}))]

    assert undescribed(yaml.safe_load(module.DOCUMENTATION).get("options", {})) == []


def test_check_mode_and_diff_mode_are_declared(module: ModuleType) -> None:
    document = yaml.safe_load(module.DOCUMENTATION)
    assert document["module"] == module.__name__
    supports = {"full", "partial", "none", "N/A"}
    assert {name: attribute["support"] in supports for name, attribute in document["attributes"].items()} == {
        "check_mode": True,
        "diff_mode": True,
    }
    assert document["attributes"]["check_mode"]["support"] == "full"


def test_examples_call_the_module_with_options_that_it_takes(module: ModuleType) -> None:
    tasks = [task[module.__name__] for task in yaml.safe_load(module.EXAMPLES) if module.__name__ in task]
    assert tasks
    options = specification(module)
    required = {name for name, option in options.items() if option.get("required")}
    for arguments in tasks:
        assert required <= set(arguments) <= set(options)


def test_returned_values_are_described(module: ModuleType) -> None:
    returned = yaml.safe_load(module.RETURN)
    assert {
        name for name, value in returned.items() if not {"description", "type", "returned"} <= value.keys()
    } == set()
