# SPDX-License-Identifier: Apache-2.0
"""Facts about a release's code: what a file of the `vllm` package defines, imports nothing and runs nothing.

A fact is a mapping: in the file ``path`` there is a ``function`` of the module, or a ``class`` with a ``base``, a
``method`` (in which there is the ``statement``, a shape as in ``source.matches``) or an ``attribute`` (with the plain
``value``). With ``absent: true`` the fact is that it is not there.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.aerie.source import (
    Refusal,
    attribute,
    classes,
    functions,
    has_base,
    matches,
    parse_shape,
    statements,
)
from ansible.module_utils.aerie.wheel import Package

Fact = Mapping[str, Any]
_REGISTRY = "model_executor/models/registry.py"
_MODELS = "model_executor/models/"


class Code:
    """The code of one package; a file is read and parsed once."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self._data: dict[str, bytes] = {}
        self._trees: dict[str, ast.Module] = {}

    def has(self, path: str) -> bool:
        """Tell whether the package has the file ``path``."""
        return path in self.package.recorded

    def read(self, path: str) -> bytes:
        """Return the bytes of the file ``path``, read once."""
        if path not in self._data:
            self._data[path] = self.package.read(path)
        return self._data[path]

    def tree(self, path: str) -> ast.Module:
        """Return the syntax tree of the file ``path``; refuse what this Python cannot parse."""
        if path not in self._trees:
            try:
                self._trees[path] = ast.parse(self.read(path))
            except (SyntaxError, ValueError) as error:
                raise Refusal(f"{path} cannot be parsed by this Python: {error}") from error
        return self._trees[path]

    def holds(self, fact: Fact) -> bool:
        """Tell whether the code is as ``fact`` says."""
        found = self.has(fact["path"]) and _is_there(self.tree(fact["path"]), fact)
        return found != bool(fact.get("absent"))

    def model(self, architecture: str) -> str | None:
        """Return the path of the file that the model registry names for ``architecture``, or None."""
        if not self.has(_REGISTRY):
            return None
        for node in ast.walk(self.tree(_REGISTRY)):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and key.value == architecture and isinstance(value, ast.Tuple):
                    return f"{_MODELS}{ast.literal_eval(value.elts[0])}.py"
        return None


def _is_there(tree: ast.Module, fact: Fact) -> bool:
    if "function" in fact:
        return bool(functions(tree, fact["function"]))
    return any(
        ("base" not in fact or has_base(owner, fact["base"]))
        and ("method" not in fact or _has_method(owner, fact))
        and ("attribute" not in fact or _has_attribute(owner, fact))
        for owner in classes(tree, fact["class"])
    )


def _has_method(owner: ast.ClassDef, fact: Fact) -> bool:
    found = functions(owner, fact["method"])
    if "statement" not in fact:
        return bool(found)
    shape = parse_shape(fact["statement"])
    return any(matches(shape, node) for method in found for node in statements(method))


def _has_attribute(owner: ast.ClassDef, fact: Fact) -> bool:
    found = attribute(owner, fact["attribute"])
    return found is not None and ("value" not in fact or matches(ast.Constant(fact["value"]), found))


def describe(fact: Fact) -> str:
    """Return the fact in words: ``class A base B in models/a.py``."""
    kinds = ("function", "class", "base", "method", "attribute")
    parts = [f"{kind} {fact[kind]}" for kind in kinds if kind in fact]
    if "value" in fact:
        parts.append(f"= {fact['value']!r}")
    if "statement" in fact:
        parts.append(f"with `{fact['statement'].strip()}`")
    return f"{'no ' if fact.get('absent') else ''}{' '.join(parts)} in {fact['path']}"
