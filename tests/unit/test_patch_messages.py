# SPDX-License-Identifier: Apache-2.0
"""The table of refusals in docs/patch-sets.md quotes what the code says, and has every condition of a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ROOT / "module_utils" / "aerie"
_, _, _TABLE = (ROOT / "docs" / "patch-sets.md").read_text().partition("## When a file is refused\n")
QUOTES = re.findall(r"^\| `(.*?)` \|", _TABLE.partition("\n## ")[0], re.MULTILINE)


def texts(tree: ast.AST) -> list[str]:
    """Return the texts of the code; one with values in it counts as the pieces between them."""
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def conditions() -> Iterator[str]:
    """Yield how ``condition.diagnose`` says what happened to a file, up to the first value."""
    for node in ast.walk(ast.parse((CODE / "condition.py").read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "what":
            yield texts(node.value)[0]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Condition":
            yield from (text for text in texts(node.args[1]))


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_one_of_the_code(quote: str) -> None:
    said = [
        text
        for name in ("condition", "patcher", "wheel")
        for text in texts(ast.parse((CODE / f"{name}.py").read_text()))
    ]
    pieces = [piece.strip() for piece in quote.split("...") if re.search(r"\w", piece)]
    assert pieces
    assert [piece for piece in pieces if not any(piece in text for text in said)] == []


def test_every_condition_of_a_file_is_in_the_table() -> None:
    found = list(conditions())
    assert len(found) == 6
    assert [text for text in found if not any(text.strip() in quote for quote in QUOTES)] == []
