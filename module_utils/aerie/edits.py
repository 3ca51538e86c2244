# SPDX-License-Identifier: Apache-2.0
"""Structural edits: each finds exactly one place in a Python file by its structure, or refuses.

An edit is a mapping with ``id`` (its name in the marker), ``op``, where it applies (``class``, ``method``, and the
shape of a statement: see ``source.matches``) and the ``code`` to put there:

========================  ==================================================================================
add_import                ``from``, ``name`` (into the file's one ``from ... import``, in its order)
add_base                  ``class``, ``base``
add_class_attribute       ``class``, ``code`` (one assignment)
add_method                ``class``, ``code`` (one function)
insert_in_method          [``class``,] [``method``,] ``before`` or ``after`` (a shape), ``code``
replace_statement         [``class``,] [``method``,] ``statement`` (a shape), ``code``
replace_test              [``class``,] [``method``,] ``statement`` (the shape of an if or while), ``code`` (expression)
replace_loop              [``class``,] [``method``,] ``statement`` (the shape of a for), ``code`` (``a in b``)
extend_list               [``class``,] [``method``,] ``statement`` (the shape of an assignment), ``code`` (items)
========================  ==================================================================================

Without ``class``, ``method`` is a function of the module; without both, the whole module is searched. All edits of a
file are resolved against the file as it is.
Every line that an edit adds or changes ends with the comment ``# aerie <set>:<id>``.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from ansible.module_utils.aerie.source import (
    MARKER,
    Function,
    Node,
    Refusal,
    Source,
    Splice,
    attribute,
    classes,
    functions,
    has_base,
    imported_names,
    imports_from,
    matches,
    parse_shape,
    statements,
)

Edit = Mapping[str, Any]
_Owner = Union[ast.Module, ast.ClassDef]


def apply_edits(path: str, data: bytes, set_name: str, edits: Sequence[Edit]) -> bytes:
    """Return the bytes of the Python file ``data`` with every edit made; raise ``Refusal`` when one cannot be.

    The result is checked: it compiles, every marker is a comment of its own, and what each edit adds is there.
    """
    source = Source(path, data)
    splices: list[Splice] = []
    for edit in edits:
        splices += _Place(source, set_name, edit).splices()
    result = source.spliced(splices)
    try:
        compile(result, path, "exec", dont_inherit=True)
        comments = _marker_comments(result)
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        raise Refusal(f"{path}: the edited file does not compile: {error}") from error
    if comments != sum(splice.text.count(MARKER) for splice in splices) + _marker_comments(data):
        raise Refusal(f"{path}: a marker would land inside a string; edit another statement")
    edited = Source(path, result)
    for edit in edits:
        _Place(edited, set_name, edit).check()
    return result


def _marker_comments(data: bytes) -> int:
    if MARKER.encode() not in data:
        return 0
    tokens = tokenize.tokenize(io.BytesIO(data).readline)
    return sum(token.string.count(MARKER) for token in tokens if token.type == tokenize.COMMENT)


class _Place:
    """One edit and the file that it is for."""

    def __init__(self, source: Source, set_name: str, edit: Edit) -> None:
        self.source = source
        self.edit = edit
        self.name = f"{set_name}:{edit.get('id')}"
        self.marker = f"  {MARKER}{self.name}"
        if not edit.get("id") or edit.get("op") not in _OPERATIONS:
            raise Refusal(
                f"{source.path}: edit {self.name} needs an id and one of the operations {sorted(_OPERATIONS)}"
            )

    def splices(self) -> list[Splice]:
        return _OPERATIONS[self.edit["op"]][0](self)

    def check(self) -> None:
        if not _OPERATIONS[self.edit["op"]][1](self):
            raise Refusal(f"{self.source.path}: edit {self.name} left nothing of {self.edit['op']} in the result")

    def field(self, key: str) -> str:
        value = self.edit.get(key)
        if not isinstance(value, str) or not value.strip():
            raise Refusal(f"{self.source.path}: edit {self.name} ({self.edit['op']}) needs `{key}`")
        return value

    def one(self, found: Sequence[Any], looked_for: str) -> Any:  # noqa: ANN401 - the node type is the caller's
        if len(found) != 1:
            where = ", ".join(f"{kind} {self.edit[kind]}" for kind in ("class", "method") if kind in self.edit)
            lines = f" (lines {', '.join(str(node.lineno) for node in found)})" if found else ""
            raise Refusal(
                f"{self.source.path}{', ' + where if where else ''}: looked for {looked_for}, "
                f"found {len(found)}{lines}, need exactly 1 (edit {self.name})"
            )
        return found[0]

    def class_(self) -> ast.ClassDef:
        name = self.field("class")
        node: ast.ClassDef = self.one(classes(self.source.tree, name), f"the class {name}")
        return node

    def owner(self) -> _Owner:
        return self.class_() if "class" in self.edit else self.source.tree

    def method(self) -> Function:
        name = self.field("method")
        node: Function = self.one(functions(self.owner(), name), f"the function {name}")
        return node

    def scope(self) -> _Owner | Function:
        return self.method() if "method" in self.edit else self.owner()

    def statement(self, key: str) -> ast.stmt:
        shape = parse_shape(self.field(key))
        found = [node for node in statements(self.scope()) if matches(shape, node)]
        node: ast.stmt = self.one(found, f"the statement `{self.field(key).strip()}`")
        return node

    def own_line(self, node: ast.stmt) -> str:
        """Return the indentation of ``node``, which must not share a line with another statement."""
        source = self.source
        indent = source.indent(source.start_with_decorators(node))
        after = source.text[source.end(node) : source.line_end(source.end(node))].strip()
        if indent is None or (after and not after.startswith("#")):
            raise Refusal(
                f"{source.path}, line {node.lineno}: the statement shares its line with another ({self.name})"
            )
        return indent

    def lines(self, code: str, indent: str) -> list[str]:
        """Return ``code`` as marked lines, indented as the file does it; blank lines stay blank."""
        unit = _indent_unit(self.source, indent)
        lines = []
        for line in textwrap.dedent(code).strip("\n").split("\n"):
            depth, rest = divmod(len(line) - len(line.lstrip(" ")), 4)
            lines.append(f"{indent}{unit * depth}{' ' * rest}{line.strip()}{self.marker}" if line.strip() else "")
        return lines

    def after(self, offset: int, code: str, indent: str, *, blank_line: bool = False) -> list[Splice]:
        """Insert ``code`` as whole lines below the line that holds ``offset``."""
        newline, end = self.source.newline(offset), self.source.line_end(offset)
        lines = ["", *([""] if blank_line else []), *self.lines(code, indent)]
        return [Splice(end, end, newline.join(lines))]

    def before(self, offset: int, code: str, indent: str, *, blank_line: bool = False) -> list[Splice]:
        """Insert ``code`` as whole lines above the line that holds ``offset``."""
        newline, start = self.source.newline(offset), self.source.line_start(offset)
        lines = [*self.lines(code, indent), *([""] if blank_line else []), ""]
        return [Splice(start, start, newline.join(lines))]

    def instead(self, start: int, end: int, indent: str) -> list[Splice]:
        """Put the edit's code in the place of the characters ``start:end``; what follows them on their line stays."""
        lines = self.source.newline(end).join(self.lines(self.field("code"), indent))
        return [Splice(start, end, lines[len(indent) : -len(self.marker)]), self.mark_line(end)]

    def mark_line(self, offset: int) -> Splice:
        end = self.source.line_end(offset)
        return Splice(end, end, self.marker)

    def has_own_line(self, item: Node) -> bool:
        """Tell whether ``item`` of a comma-separated list shares its line with nothing but its comma and a comment."""
        source, end = self.source, self.source.end(item)
        rest = source.text[end : source.line_end(end)].strip()
        return source.indent(source.start(item)) is not None and (
            rest[:1] in ("", "#") or (rest[:1] == "," and rest[1:].strip()[:1] in ("", "#"))
        )

    def append_items(self, last: Node, items: Sequence[str]) -> list[Splice]:
        """Add ``items`` after ``last`` in a comma-separated list: on lines of their own when ``last`` has one."""
        source, end = self.source, self.source.end(last)
        if not self.has_own_line(last):
            return [Splice(end, end, "".join(f", {item}" for item in items)), self.mark_line(end)]
        indent = source.indent(source.start(last)) or ""
        comma = source.text[end : source.line_end(end)].lstrip().startswith(",")
        code = ",\n".join(items) + ("," if comma else "")
        added = self.after(end, code, indent)
        return added if comma else [Splice(end, end, ","), self.mark_line(end), *added]

    def insert_item(self, following: Node, item: str) -> list[Splice]:
        """Add ``item`` before ``following`` in a comma-separated list, as ``append_items`` does."""
        source, start = self.source, self.source.start(following)
        if self.has_own_line(following):
            return self.before(start, f"{item},", source.indent(start) or "")
        return [Splice(start, start, f"{item}, "), self.mark_line(start)]


def _indent_unit(source: Source, indent: str) -> str:
    """Return one level of indentation as the file has it: that of its first nested block, or tabs below a tab."""
    if "\t" in indent:
        return "\t"
    for node in source.tree.body:
        body = getattr(node, "body", None)
        found = source.indent(source.start_with_decorators(body[0])) if isinstance(body, list) and body else None
        if found and not (indent and "\t" in found):
            return found
    return "    "


def _add_import(place: _Place) -> list[Splice]:
    source, module, name = place.source, place.field("from"), place.field("name")
    if name in imported_names(source.tree, module):
        raise Refusal(f"{source.path}: {name} is imported from {module} already (edit {place.name})")
    statement: ast.ImportFrom = place.one(imports_from(source.tree, module), f"`from {module} import ...`")
    later = [alias for alias in statement.names if _import_order(alias.name) > _import_order(name)]
    return place.insert_item(later[0], name) if later else place.append_items(statement.names[-1], [name])


def _import_order(name: str) -> tuple[int, str]:
    """Order names as import sorters do: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def _add_base(place: _Place) -> list[Splice]:
    owner, base = place.class_(), place.field("base")
    if has_base(owner, base):
        raise Refusal(f"{place.source.path}: class {owner.name} has the base {base} already (edit {place.name})")
    if owner.bases:
        return place.append_items(owner.bases[-1], [base])
    if owner.keywords:
        return place.insert_item(owner.keywords[0], base)
    head = re.compile(rf"class\s+{owner.name}(?P<bases>\s*\(\s*\)|)\s*:").match(
        place.source.text, place.source.start(owner)
    )
    if not head:
        raise Refusal(
            f"{place.source.path}, line {owner.lineno}: the head of class {owner.name} is none that a base "
            f"can be added to (edit {place.name})"
        )
    return [Splice(*head.span("bases"), f"({base})"), place.mark_line(head.end())]


def _add_class_attribute(place: _Place) -> list[Splice]:
    owner, name = place.class_(), _assigned_name(place)
    if attribute(owner, name) is not None:
        raise Refusal(f"{place.source.path}: class {owner.name} has the attribute {name} already (edit {place.name})")
    head = _leading_attributes(owner)
    if head:
        indent = place.own_line(head[-1])
        blank_line = isinstance(head[-1], ast.Expr) and len(head) < len(owner.body)
        return place.after(place.source.end(head[-1]), place.field("code"), indent, blank_line=blank_line)
    indent = place.own_line(owner.body[0])
    start = place.source.start_with_decorators(owner.body[0])
    return place.before(start, place.field("code"), indent, blank_line=True)


def _leading_attributes(owner: ast.ClassDef) -> list[ast.stmt]:
    """Return the docstring and the assignments that open the class body."""
    head: list[ast.stmt] = []
    for node in owner.body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (text or isinstance(node, (ast.Assign, ast.AnnAssign))):
            break
        head.append(node)
    return head


def _assigned_name(place: _Place) -> str:
    statement = parse_shape(place.field("code"))
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    if not isinstance(target, ast.Name):
        raise Refusal(f"{place.source.path}: edit {place.name} must assign one name")
    return target.id


def _add_method(place: _Place) -> list[Splice]:
    owner, name = place.class_(), _function_name(place)
    if functions(owner, name):
        raise Refusal(f"{place.source.path}: class {owner.name} has the method {name} already (edit {place.name})")
    indent = place.own_line(owner.body[-1])
    return place.after(place.source.end(owner.body[-1]), place.field("code"), indent, blank_line=True)


def _function_name(place: _Place) -> str:
    statement = parse_shape(place.field("code"))
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise Refusal(f"{place.source.path}: edit {place.name} must define one function")
    return statement.name


def _insert(place: _Place) -> list[Splice]:
    if ("before" in place.edit) == ("after" in place.edit):
        raise Refusal(f"{place.source.path}: edit {place.name} needs either `before` or `after`")
    key = "before" if "before" in place.edit else "after"
    node = place.statement(key)
    indent = place.own_line(node)
    if key == "before":
        return place.before(place.source.start_with_decorators(node), place.field("code"), indent)
    return place.after(place.source.end(node), place.field("code"), indent)


def _replace_statement(place: _Place) -> list[Splice]:
    node = place.statement("statement")
    return place.instead(place.source.start_with_decorators(node), place.source.end(node), place.own_line(node))


def _replace_test(place: _Place) -> list[Splice]:
    node = place.statement("statement")
    if not isinstance(node, (ast.If, ast.While)):
        raise Refusal(f"{place.source.path}: edit {place.name} needs the shape of an if or while")
    return place.instead(place.source.start(node.test), place.source.end(node.test), place.own_line(node))


def _replace_loop(place: _Place) -> list[Splice]:
    node = place.statement("statement")
    if not isinstance(node, (ast.For, ast.AsyncFor)):
        raise Refusal(f"{place.source.path}: edit {place.name} needs the shape of a for")
    return place.instead(place.source.start(node.target), place.source.end(node.iter), place.own_line(node))


def _items(place: _Place) -> dict[str, ast.expr]:
    """Return the items that an edit adds to a list, by their text: one expression, or several with commas between."""
    text = f"[{place.field('code').strip()}]"
    try:
        value = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise Refusal(f"{place.source.path}: edit {place.name} must give items of a list: {error}") from error
    return {ast.get_source_segment(text, item) or "": item for item in getattr(value, "elts", [])}


def _extend_list(place: _Place) -> list[Splice]:
    node = place.statement("statement")
    value = getattr(node, "value", None)
    if not isinstance(value, (ast.List, ast.Tuple, ast.Set)) or not value.elts:
        raise Refusal(f"{place.source.path}: edit {place.name} needs the shape of an assignment of a filled list")
    return place.append_items(value.elts[-1], list(_items(place)))


def _has_code(place: _Place) -> bool:
    wanted = ast.parse(textwrap.dedent(place.field("code"))).body
    return all(any(matches(shape, node) for node in statements(place.scope())) for shape in wanted)


def _has_test(place: _Place) -> bool:
    wanted = ast.parse(textwrap.dedent(place.field("code")), mode="eval").body
    return any(isinstance(node, (ast.If, ast.While)) and matches(wanted, node.test) for node in ast.walk(place.scope()))


def _has_loop(place: _Place) -> bool:
    (wanted,) = ast.parse(f"for {textwrap.dedent(place.field('code')).strip()}:\n    ...").body
    return any(matches(wanted, node) for node in statements(place.scope()))


def _has_items(place: _Place) -> bool:
    wanted = list(_items(place).values())
    lists = [node for node in ast.walk(place.scope()) if isinstance(node, (ast.List, ast.Tuple, ast.Set))]
    return any(matches(wanted, node.elts[-len(wanted) :]) for node in lists)


_OPERATIONS: dict[str, tuple[Callable[[_Place], list[Splice]], Callable[[_Place], bool]]] = {
    "add_import": (
        _add_import,
        lambda place: place.field("name") in imported_names(place.source.tree, place.field("from")),
    ),
    "add_base": (_add_base, lambda place: has_base(place.class_(), place.field("base"))),
    "add_class_attribute": (
        _add_class_attribute,
        lambda place: attribute(place.class_(), _assigned_name(place)) is not None,
    ),
    "add_method": (_add_method, lambda place: len(functions(place.class_(), _function_name(place))) == 1),
    "insert_in_method": (_insert, _has_code),
    "replace_statement": (_replace_statement, _has_code),
    "replace_test": (_replace_test, _has_test),
    "replace_loop": (_replace_loop, _has_loop),
    "extend_list": (_extend_list, _has_items),
}
