# SPDX-License-Identifier: Apache-2.0
"""A Python file as text that can be cut and joined without touching any other byte, and shapes to find places in it."""

from __future__ import annotations

import ast
import difflib
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Union

# Every line that an edit adds or changes ends with this and `<set>:<edit>`.
MARKER = "# aerie "
_NEWLINE = re.compile(r"\r\n|\r|\n")
Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
# What has a place in the text.
Node = Union[ast.stmt, ast.expr, ast.alias, ast.keyword]


class Refusal(Exception):
    """Why an edit, a patch set or a file is refused; the text is what the user reads."""


class Splice(NamedTuple):
    """Replace the characters ``start:end`` of a text by ``text``."""

    start: int
    end: int
    text: str


class Source:
    """One Python file: its bytes, its text, its syntax tree, and where the tree's nodes are in the text.

    The encoding line, a byte order mark, CRLF line ends, tabs and a missing last newline survive ``spliced``.
    """

    def __init__(self, path: str, data: bytes) -> None:
        """Parse ``data``; refuse what this Python cannot parse or what decoding and encoding would change."""
        self.path = path
        try:
            self.encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
            self.text = data.decode(self.encoding)
            self.tree = ast.parse(data)
        except (SyntaxError, UnicodeError, ValueError) as error:
            raise Refusal(f"{path} cannot be parsed by this Python: {error}") from error
        if self.text.encode(self.encoding) != data:
            raise Refusal(f"{path} does not survive decoding and encoding as {self.encoding}")
        ends = list(_NEWLINE.finditer(self.text))
        self._starts = [0, *(end.end() for end in ends)]
        self._ends = [*(end.start() for end in ends), len(self.text)]

    def start(self, node: Node) -> int:
        """Return the offset in the text of the first character of ``node`` (decorators not counted)."""
        return self._offset(node.lineno, node.col_offset)

    def start_with_decorators(self, node: ast.stmt) -> int:
        """Return the offset of the first character of ``node``'s first line, which may be a decorator's."""
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda one: one.lineno)
        return self.start(first) if first is node else self.text.rindex("@", 0, self.start(first))

    def end(self, node: Node) -> int:
        """Return the offset in the text just after the last character of ``node``."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, utf8_column: int) -> int:
        start, end = self._starts[line - 1], self._ends[line - 1]
        return start + len(self.text[start:end].encode()[:utf8_column].decode())

    def line_start(self, offset: int) -> int:
        """Return where the line that holds ``offset`` starts."""
        return max(start for start in self._starts if start <= offset)

    def line_end(self, offset: int) -> int:
        """Return where the line that holds ``offset`` ends, before its line end."""
        return min(end for end in self._ends if end >= offset)

    def newline(self, offset: int) -> str:
        """Return the line end of the line that holds ``offset``; for a last line without one, that of the first."""
        end = self.line_end(offset)
        found = _NEWLINE.match(self.text, end) or _NEWLINE.search(self.text)
        return found.group() if found else "\n"

    def indent(self, offset: int) -> str | None:
        """Return what stands before ``offset`` on its line, or None when that is more than white space."""
        before = self.text[self.line_start(offset) : offset]
        return None if before.strip() else before

    def spliced(self, splices: Sequence[Splice]) -> bytes:
        """Return the file's bytes with ``splices`` made; those at one place keep their order."""
        parts, position = [], 0
        for splice in sorted(splices, key=lambda one: (one.start, one.end)):
            if splice.start < position:
                raise Refusal(f"{self.path}: two edits change the same characters")
            parts += [self.text[position : splice.start], splice.text]
            position = splice.end
        return "".join([*parts, self.text[position:]]).encode(self.encoding)


def parse_shape(text: str) -> ast.stmt:
    """Parse a statement shape: one Python statement in which ``...`` stands for any expression, arguments or body."""
    try:
        (statement,) = ast.parse(textwrap.dedent(text)).body
    except (SyntaxError, ValueError) as error:
        raise Refusal(f"a shape must be one Python statement, not {text!r}") from error
    return statement


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement inside ``node`` at any depth."""
    return (child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node)


def matches(shape: object, node: object) -> bool:
    """Tell whether ``node`` has the form of ``shape``.

    ``...`` matches any expression; alone in a body, argument list or literal it matches all of it. A shape without
    ``else`` or ``finally`` says nothing about them.
    """
    if isinstance(shape, list):
        if len(shape) == 1 and _is_wildcard(shape[0]):
            return True
        return isinstance(node, list) and len(shape) == len(node) and all(map(matches, shape, node))
    if not isinstance(shape, ast.AST):
        # True is 1, and 1 is 1.0, only where their kinds do not matter.
        return type(shape) is type(node) and shape == node
    if _is_wildcard(shape) and isinstance(node, ast.expr):
        return True
    if type(shape) is not type(node):
        return False
    skipped = {"ctx", "type_comment", "type_ignores", "kind"}
    if isinstance(shape, ast.Call) and len(shape.args) == 1 and _is_wildcard(shape.args[0]) and not shape.keywords:
        skipped |= {"args", "keywords"}
    skipped |= {field for field in ("orelse", "finalbody") if not getattr(shape, field, None)}
    return all(
        matches(value, getattr(node, field, None)) for field, value in ast.iter_fields(shape) if field not in skipped
    )


def _is_wildcard(node: object) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def classes(tree: ast.Module, name: str) -> list[ast.ClassDef]:
    """Return the module's classes called ``name``."""
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]


def functions(owner: ast.Module | ast.ClassDef, name: str) -> list[Function]:
    """Return the functions called ``name`` that stand directly in ``owner``."""
    return [
        node for node in owner.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
    ]


def has_base(owner: ast.ClassDef, base: str) -> bool:
    """Tell whether ``owner`` names ``base`` among its bases."""
    return any(ast.unparse(node) == base for node in owner.bases)


def attribute(owner: ast.ClassDef, name: str) -> ast.expr | None:
    """Return the value that the class body gives to ``name``, or None."""
    for node in owner.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.value
    return None


def imported_names(tree: ast.Module, module: str) -> dict[str, ast.alias]:
    """Return what the file imports with ``from module import ...``, by the name it gets."""
    return {alias.asname or alias.name: alias for node in imports_from(tree, module) for alias in node.names}


def imports_from(tree: ast.Module, module: str) -> list[ast.ImportFrom]:
    """Return the file's top-level ``from module import`` statements; ``module`` may start with dots."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and "." * node.level + (node.module or "") == module
    ]


def unified_diff(name: str, before: bytes, after: bytes) -> str:
    """Return a unified diff of two versions of the file called ``name``; undecodable bytes are escaped."""
    old, new = (data.decode("utf-8", "backslashreplace").splitlines(keepends=True) for data in (before, after))
    lines = difflib.unified_diff(old, new, fromfile=f"a/{name}", tofile=f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
