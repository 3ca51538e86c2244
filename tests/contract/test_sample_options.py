# SPDX-License-Identifier: Apache-2.0
"""The options in inventory/sample are options of the vLLM release that its lock names, as its source has them."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import wheels
import yaml

SAMPLE = Path(__file__).parents[2] / "inventory" / "sample" / "group_vars"
ENGINE = "vllm/engine/arg_utils.py"
FRONTEND = "vllm/entrypoints/common/cli_args.py"
REASONING = "vllm/reasoning/__init__.py"
TOOLS = "vllm/tool_parsers/__init__.py"
ATTENTION = "vllm/v1/attention/backends/registry.py"
MULTIMODAL = "vllm/config/multimodal.py"
CACHE_KINDS = "vllm/v1/kv_cache_interface.py"
MODEL = "vllm/model_executor/models/kimi_k25.py"
MEMBERS = (ENGINE, FRONTEND, REASONING, TOOLS, ATTENTION, MULTIMODAL, CACHE_KINDS, MODEL)

Sources = dict[str, ast.Module]


@pytest.fixture(scope="module")
def sources() -> Iterator[Sources]:
    lock = yaml.safe_load((SAMPLE / "inference/service.yml").read_text())["ml_env_lock"]
    with pytest.MonkeyPatch.context() as patch:
        # Apart from the partial wheels of other tests: one that lacks members is replaced.
        patch.setattr(wheels, "CACHE", wheels.CACHE / "options")
        path = wheels.partial_wheel("vllm", lock.split("-")[1], MEMBERS)
    with zipfile.ZipFile(path) as wheel:
        yield {name: ast.parse(wheel.read(name)) for name in MEMBERS}


@pytest.fixture(params=["h200", "rtx_pro_6000"])
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    """Return the options that a group sets, and those that it shows in comments."""
    text = (SAMPLE / request.param / "service.yml").read_text()
    shown = yaml.safe_load("\n".join(re.findall(r"^  #   ([a-z0-9-]+: .+)$", text, re.MULTILINE)))
    assert shown
    return {**yaml.safe_load(text)["vllm_service_options"], **shown}


def class_named(module: ast.Module, name: str) -> ast.ClassDef:
    (found,) = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def assigned(module: ast.Module, name: str) -> ast.expr:
    """Return what a module assigns to ``name``."""
    (found,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and name
        in {ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    )
    return found


def texts(node: ast.AST) -> set[str]:
    """Return every string constant in ``node``."""
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def members(enumeration: ast.ClassDef) -> dict[str, str]:
    """Return the members of an enumeration, and their values where these are texts."""
    return {
        ast.unparse(node.targets[0]): "".join(texts(node.value))
        for node in enumeration.body
        if isinstance(node, ast.Assign)
    }


def options_of(sources: Sources) -> set[str]:
    """Return the options of `vllm serve`: arguments that the engine adds, and fields of the frontend's dataclasses."""
    calls = [node for node in ast.walk(sources[ENGINE]) if isinstance(node, ast.Call)]
    adds = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    found = {name[2:] for call in adds for name in texts(ast.List(call.args)) if name.startswith("--")}
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        fields = (node for node in class_named(sources[FRONTEND], name).body if isinstance(node, ast.AnnAssign))
        found |= {ast.unparse(field.target).replace("_", "-") for field in fields}
    return found


def test_every_option_is_one_of_the_release(sources: Sources, options: dict[str, object]) -> None:
    known = options_of(sources)
    assert {"model", "served-model-name", "speculative-config", "host", "port", "middleware"} <= known
    assert set(options) - known == set()


def test_the_parsers_are_registered(sources: Sources, options: dict[str, object]) -> None:
    assert options["reasoning-parser"] in texts(assigned(sources[REASONING], "_REASONING_PARSERS_TO_REGISTER"))
    assert options["tool-call-parser"] in texts(assigned(sources[TOOLS], "_TOOL_PARSERS_TO_REGISTER"))


def test_the_choices_exist(sources: Sources, options: dict[str, object]) -> None:
    assert options["mm-encoder-tp-mode"] in texts(assigned(sources[MULTIMODAL], "MMEncoderTPMode"))
    limits = options["limit-mm-per-prompt"]
    assert isinstance(limits, dict)
    (supported,) = (
        node
        for node in ast.walk(sources[MODEL])
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_mm_limits"
    )
    assert set(limits) <= texts(supported)


def test_the_attention_kernel_exists(sources: Sources) -> None:
    options = yaml.safe_load((SAMPLE / "rtx_pro_6000/service.yml").read_text())["vllm_service_options"]
    backends = members(class_named(sources[ATTENTION], "AttentionBackendEnum"))
    kinds = members(class_named(sources[CACHE_KINDS], "KVCacheSpecKind"))
    for kind, backend in options["attention-config"]["backend_per_kind"].items():
        assert kind in kinds.values()
        assert backend in backends
