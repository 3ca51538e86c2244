# SPDX-License-Identifier: Apache-2.0
"""The options of a release's `vllm serve`, read from its source without running it.

vLLM adds most options by name, and the frontend's by a loop over the fields of a dataclass. Options whose value is a
mapping are described by a dataclass below vllm/config, whose fields are the keys. True for 0.11 to 0.33.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import Package, package_of_wheel

_ENGINE = "engine/arg_utils.py"
_SERVE = "entrypoints/cli/serve.py"
_FRONTEND = re.compile(r"entrypoints/(?:\w+/)*cli_args\.py")
_CONFIGS = re.compile(r"config/\w+\.py|config\.py")
_CONFIG_CLASS = re.compile(r"\b(\w+Config)\b")
_FRONTEND_CLASS = re.compile(r"(?:\w+)?FrontendArgs")
_MAPPING = "speculative-config"
# What every release has: where one of these is missing, the source was not understood.
_ALWAYS = {"model", "served-model-name", "max-model-len", "tensor-parallel-size", "host", "port", "middleware"}
_ALIKE = 0.6


@dataclass(frozen=True)
class Options:
    """What `vllm serve` of a release takes: its options by name, and for some the keys of their mapping."""

    version: str
    names: frozenset[str]
    keys: Mapping[str, frozenset[str]]

    def problems(self, wanted: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each of the ``wanted`` options that this release does not take."""
        found = []
        for option, value in wanted.items():
            name, _, key = option.replace("_", "-").partition(".")
            # vLLM gives every switch a form that turns it off.
            if name in self.names or name.removeprefix("no-") in self.names:
                keys = [str(each) for each in value] if isinstance(value, Mapping) and not key else []
                # A dot leads to a key, and further ones into its value.
                keys += [key.partition(".")[0]] if key else []
                if name in self.keys:
                    found += [
                        self._sentence(f"{name}.", each, self.keys[name]) for each in keys if self._odd(name, each)
                    ]
            else:
                found.append(self._sentence("", name, self.names))
        return found

    def _odd(self, name: str, key: str) -> bool:
        return key.replace("-", "_") not in self.keys[name]

    def _sentence(self, prefix: str, name: str, known: Iterable[str]) -> str:
        near = difflib.get_close_matches(name, sorted(known), 1, _ALIKE)
        remedy = f"the nearest that it has is {prefix}{near[0]}" if near else "it has none like it"
        return f"vLLM {self.version} has no option {prefix}{name}: {remedy}"


def check_options(wheel: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Compare ``wanted`` with the options of the release in ``wheel``. Raises Refusal where they cannot be read.

    Returns ``vllm_version``, ``known``, the number of its options, and ``problems``, a sentence each.
    """
    options = options_of(package_of_wheel(wheel))
    return {"vllm_version": options.version, "known": len(options.names), "problems": options.problems(wanted)}


def options_of(package: Package) -> Options:
    """Read the options of a release. Raises Refusal where its source has another shape than is known."""
    frontends = sorted(path for path in package.recorded if _FRONTEND.fullmatch(path))
    engine = _parsed(package, _ENGINE)
    modules = [engine, *(_parsed(package, path) for path in frontends)]
    if _SERVE in package.recorded:
        modules.append(_parsed(package, _SERVE))
    names = {name for module in modules for name in _added(module)}
    names |= {
        field.replace("_", "-")
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and _FRONTEND_CLASS.fullmatch(node.name)
        for field in _fields(node)
    }
    missing = sorted(_ALWAYS - names)
    if missing:
        raise Refusal(
            f"the options of vLLM {package.version} cannot be read from its source: {', '.join(missing)} not found; "
            "set vllm_service_check_options to false to deploy without this check"
        )
    return Options(package.version, frozenset(names), _mappings(package, engine))


def _mappings(package: Package, engine: ast.Module) -> dict[str, frozenset[str]]:
    """Return the keys of the options whose values are mappings, by option."""
    wanted = {_MAPPING: "SpeculativeConfig"}
    for node in ast.walk(engine):
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and (match := _CONFIG_CLASS.search(ast.unparse(field.annotation))):
                    wanted.setdefault(ast.unparse(field.target).replace("_", "-"), match[1])
    classes: dict[str, ast.ClassDef] = {}
    for path in sorted(path for path in package.recorded if _CONFIGS.fullmatch(path)):
        for node in ast.walk(_parsed(package, path)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)
    return {
        option: frozenset(_fields(classes[name]))
        for option, name in wanted.items()
        if name in classes and not _inherits(classes[name])
    }


def _inherits(node: ast.ClassDef) -> bool:
    # Fields of a base class would be missed.
    return any(isinstance(base, ast.Name) and base.id.endswith("Config") for base in node.bases)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def _added(module: ast.Module) -> Iterator[str]:
    """Yield the options that `add_argument` is called with."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                    yield str(argument.value)[2:].replace("_", "-")


def _parsed(package: Package, path: str) -> ast.Module:
    try:
        return ast.parse(package.read(path))
    except SyntaxError as error:
        raise Refusal(f"vllm/{path} of {package.version} is no Python that this interpreter reads: {error}") from error
