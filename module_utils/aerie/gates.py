# SPDX-License-Identifier: Apache-2.0
"""What stands before a model's ``forward`` in a release, run from its own source: the list of target models that
EAGLE-3 is allowed for, and the part of the drafter's loader that takes the target apart.

Both are found by their form, so that a release that no longer has them passes.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from ansible.module_utils.aerie.source import matches, parse_shape, statements
from ansible.module_utils.aerie.symbolic import Opaque, ProofError

_TARGET_PARTS = parse_shape("if supports_multimodal(target_model): ...")
MEDIA_TOKEN = 163605


def check_allow_list(path: str, data: bytes, model_types: Sequence[str]) -> None:
    """Run the check of the target's model type that ``path`` makes for EAGLE-3; it must let ``model_types`` pass."""
    for check in _allow_lists(ast.parse(data)):
        code = _compiled(path, check)
        for model_type in model_types:
            text_config = SimpleNamespace(model_type=model_type)
            target = SimpleNamespace(hf_text_config=text_config, hf_config=text_config)
            config = SimpleNamespace(method="eagle3", target_model_config=target)
            try:
                exec(code, {"self": config})
            except ValueError as error:
                raise ProofError(f"{path} refuses the model type {model_type}: {error}") from error


def _allow_lists(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield every ``if`` that raises for a model type under EAGLE-3, after the assignments of the names it uses."""
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for node in statements(function):
            if not isinstance(node, ast.If) or not isinstance(node.body[-1], ast.Raise):
                continue
            constants = {one.value for one in ast.walk(node.test) if isinstance(one, ast.Constant)}
            attributes = {one.attr for one in ast.walk(node.test) if isinstance(one, ast.Attribute)}
            if "eagle3" in constants and "model_type" in attributes:
                used = {one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)}
                yield [*(one for one in statements(function) if _assigns(one, used)), node]


def _assigns(node: ast.stmt, names: set[str]) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id in names for one in node.targets)


def check_loader(path: str, data: bytes, target: Any, embedding: object, head: object) -> None:  # noqa: ANN401
    """Run the part of the drafter's loader that takes the multimodal ``target`` apart.

    It must find the target's image token, and the ``embedding`` and ``head`` that the drafter may share.
    """
    drafter = SimpleNamespace(config=SimpleNamespace())
    names: dict[str, Any] = {
        "supports_multimodal": lambda _model: True,
        "cast": lambda _type, value: value,
        "self": SimpleNamespace(model=drafter, get_model_name=lambda model: type(model).__name__),
        "target_model": target,
    }
    target.config = SimpleNamespace(media_placeholder_token_id=MEDIA_TOKEN)
    for node in [node for node in statements(ast.parse(data)) if matches(_TARGET_PARTS, node)]:
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and one.id not in names and not hasattr(builtins, one.id):
                names[one.id] = Opaque(one.id)
        try:
            exec(_compiled(path, [node]), names)
            language_model = names["target_language_model"]
            found = {
                "image token": drafter.config.image_token_index == MEDIA_TOKEN,
                "embedding": language_model.model.embed_tokens is embedding,
                "output head": getattr(language_model, "lm_head", None) is head,
            }
        except AttributeError as error:
            raise ProofError(f"the drafter's loader in {path} raises AttributeError: {error}") from error
        wrong = [part for part, right in found.items() if not right]
        if wrong:
            raise ProofError(f"the drafter's loader in {path} does not find the target's {', '.join(wrong)}")


def _compiled(path: str, body: Sequence[ast.stmt]) -> Any:  # noqa: ANN401 - a code object
    return compile(ast.Module(body=list(body), type_ignores=[]), path, "exec", dont_inherit=True)
