# SPDX-License-Identifier: Apache-2.0
"""Structural edits: the right place, every other byte kept, or a refusal that says why."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from ansible.module_utils.aerie.edits import apply_edits
from ansible.module_utils.aerie.source import Refusal

MODEL = b'''\
"""A model."""

from torch import nn

from .interfaces import (
    MixtureOfExperts,
    SupportsPP,
)
from .utils import make_layers, maybe_prefix

ALLOWED = ["llama", "qwen2"]
LONG = [
    "llama",
    "qwen2",  # second
]


@decorated
class Model(nn.Module):
    """Docs."""

    flag = False  # why

    @decorated
    def f(self):
        pass

    def __init__(self, config):
        super().__init__()
        if first():
            self.embed = Embedding()
        else:
            self.embed = Missing()

    def forward(self, x):
        taps = []
        for index, layer in enumerate(self.layers):
            if index in self.ids:  # a tap
                taps.append(x)
            x = layer(x)
        return x, taps


class Wrapper(
    nn.Module,
    SupportsPP,
):
    def forward(self, x):
        return self.model(x)
'''


def edit(data: bytes = MODEL, **fields: object) -> str:
    return apply_edits("m.py", data, "set", [{"id": "e", **fields}]).decode()


def changed_lines(before: bytes, after: str) -> tuple[list[str], list[str]]:
    old, new = before.decode().splitlines(), after.splitlines()
    return [line for line in old if line not in new], [line for line in new if line not in old]


def in_method(**fields: object) -> dict[str, Any]:
    return {"class": "Model", "method": "forward", **fields}


@pytest.mark.parametrize(
    ("fields", "gone", "come"),
    [
        (
            {"op": "add_import", "from": ".interfaces", "name": "EagleMixin"},
            [],
            ["    EagleMixin,  # aerie set:e"],
        ),
        (
            {"op": "add_import", "from": ".interfaces", "name": "supports"},
            [],
            ["    supports,  # aerie set:e"],
        ),
        (
            {"op": "add_import", "from": ".utils", "name": "needs"},
            ["from .utils import make_layers, maybe_prefix"],
            ["from .utils import make_layers, maybe_prefix, needs  # aerie set:e"],
        ),
        (
            {"op": "add_import", "from": ".utils", "name": "Missing"},
            ["from .utils import make_layers, maybe_prefix"],
            ["from .utils import Missing, make_layers, maybe_prefix  # aerie set:e"],
        ),
        (
            {"op": "add_base", "class": "Model", "base": "Mixin"},
            ["class Model(nn.Module):"],
            ["class Model(nn.Module, Mixin):  # aerie set:e"],
        ),
        ({"op": "add_base", "class": "Wrapper", "base": "Mixin"}, [], ["    Mixin,  # aerie set:e"]),
        (
            {"op": "add_class_attribute", "class": "Model", "code": "over_pp = True"},
            [],
            ["    over_pp = True  # aerie set:e"],
        ),
        (
            {"op": "add_class_attribute", "class": "Wrapper", "code": "over_pp: bool = True"},
            [],
            ["    over_pp: bool = True  # aerie set:e"],
        ),
        (
            {"op": "add_method", "class": "Model", "code": "def taps(self):\n    return 1\n"},
            [],
            ["    def taps(self):  # aerie set:e", "        return 1  # aerie set:e"],
        ),
        (
            {"op": "insert_in_method", **in_method(before="for index, layer in ...: ...", code="y = x")},
            [],
            ["        y = x  # aerie set:e"],
        ),
        (
            {"op": "insert_in_method", **in_method(after="x = layer(...)", code="if x:\n    pass")},
            [],
            ["            if x:  # aerie set:e", "                pass  # aerie set:e"],
        ),
        (
            {"op": "replace_statement", **in_method(statement="taps = ...", code="taps = self.collect()")},
            ["        taps = []"],
            ["        taps = self.collect()  # aerie set:e"],
        ),
        (
            {"op": "replace_test", **in_method(statement="if index in self.ids: ...", code="index in self.mine")},
            ["            if index in self.ids:  # a tap"],
            ["            if index in self.mine:  # a tap  # aerie set:e"],
        ),
        (
            {
                "op": "replace_test",
                "class": "Model",
                "method": "__init__",
                "statement": "if first():\n    self.embed = ...",
                "code": "first() or last()",
            },
            ["        if first():"],
            ["        if first() or last():  # aerie set:e"],
        ),
        (
            {
                "op": "replace_loop",
                **in_method(statement="for index, layer in ...: ...", code="index, layer in enumerate(\n    x,\n)"),
            },
            ["        for index, layer in enumerate(self.layers):"],
            [
                "        for index, layer in enumerate(  # aerie set:e",
                "            x,  # aerie set:e",
                "        ):  # aerie set:e",
            ],
        ),
        (
            {"op": "replace_statement", "class": "Model", "statement": "flag = ...", "code": "flag = True"},
            ["    flag = False  # why"],
            ["    flag = True  # why  # aerie set:e"],
        ),
        (
            {"op": "insert_in_method", "after": "ALLOWED = ...", "code": "x = 1"},
            [],
            ["x = 1  # aerie set:e"],
        ),
        (
            {"op": "insert_in_method", "class": "Model", "before": "@decorated\ndef f(self): ...", "code": "x = 1"},
            [],
            ["    x = 1  # aerie set:e"],
        ),
        (
            {"op": "extend_list", "statement": "ALLOWED = [...]", "code": '"kimi_k25"'},
            ['ALLOWED = ["llama", "qwen2"]'],
            ['ALLOWED = ["llama", "qwen2", "kimi_k25"]  # aerie set:e'],
        ),
        (
            {"op": "extend_list", "statement": "ALLOWED = [...]", "code": '"a", f(b, c)'},
            ['ALLOWED = ["llama", "qwen2"]'],
            ['ALLOWED = ["llama", "qwen2", "a", f(b, c)]  # aerie set:e'],
        ),
        (
            {"op": "extend_list", "statement": "LONG = [...]", "code": '"a", "b"'},
            [],
            ['    "a",  # aerie set:e', '    "b",  # aerie set:e'],
        ),
    ],
)
def test_an_edit_changes_its_lines_and_no_other(fields: dict[str, Any], gone: list[str], come: list[str]) -> None:
    result = edit(**fields)
    assert changed_lines(MODEL, result) == (gone, come)
    ast.parse(result)


@pytest.mark.parametrize(
    ("head", "result"),
    [
        ("class A:", "class A(B):  # aerie set:e"),
        ("class A():", "class A(B):  # aerie set:e"),
        ("class A(metaclass=M):", "class A(B, metaclass=M):  # aerie set:e"),
        ("class A(C, metaclass=M):", "class A(C, B, metaclass=M):  # aerie set:e"),
        ("class A(C,\n        D):", "class A(C,\n        D, B):  # aerie set:e"),
        ("class A(\n    C, D\n):", "class A(\n    C, D, B  # aerie set:e\n):"),
        (
            "class A(\n    C,\n    D  # last\n):",
            "class A(\n    C,\n    D,  # last  # aerie set:e\n    B  # aerie set:e\n):",
        ),
        ("class A(C[int]):  # why", "class A(C[int], B):  # why  # aerie set:e"),
    ],
)
def test_a_base_is_added_as_the_head_of_the_class_is_written(head: str, result: str) -> None:
    data = f"{head}\n    x = 1\n".encode()
    assert edit(data, op="add_base", **{"class": "A", "base": "B"}) == f"{result}\n    x = 1\n"


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ('    """Docs."""\n', '    """Docs."""\n    x = 1  # aerie set:e\n'),
        (
            '    """Docs."""\n\n    def f(self): ...\n',
            '    """Docs."""\n\n    x = 1  # aerie set:e\n\n    def f(self): ...\n',
        ),
        ("    y = 2\n", "    y = 2\n    x = 1  # aerie set:e\n"),
        (
            "    @property\n    @other\n    def f(self): ...\n",
            "    x = 1  # aerie set:e\n\n    @property\n    @other\n    def f(self): ...\n",
        ),
    ],
)
def test_an_attribute_opens_the_class_body(body: str, result: str) -> None:
    data = f"class A:\n{body}".encode()
    assert edit(data, op="add_class_attribute", **{"class": "A", "code": "x = 1"}) == f"class A:\n{result}"


def test_a_decorated_function_is_replaced_with_its_decorators() -> None:
    data = b"class A:\n    @old\n    # why\n    def f(self): ...\n"
    result = edit(
        data, op="replace_statement", **{"class": "A", "statement": "@...\ndef f(self): ...", "code": "f = 1"}
    )
    assert result == "class A:\n    f = 1  # aerie set:e\n"


def test_an_inserted_line_ends_as_its_neighbours_do() -> None:
    data = b"a = 1\r\ndef f():\n    b = 2\n    return b\r\n"
    result = edit(data, op="insert_in_method", method="f", after="b = ...", code="c = 3").encode()
    assert result == b"a = 1\r\ndef f():\n    b = 2\n    c = 3  # aerie set:e\n    return b\r\n"


def test_an_import_is_put_where_a_sorter_would_put_it() -> None:
    result = edit(MODEL, **{"op": "add_import", "from": ".interfaces", "name": "EagleMixin"})
    assert result.index("EagleMixin,") < result.index("MixtureOfExperts,")


def test_an_attribute_follows_the_ones_that_are_there() -> None:
    result = edit(MODEL, op="add_class_attribute", **{"class": "Model", "code": "over_pp = True"})
    assert "    flag = False  # why\n    over_pp = True  # aerie set:e\n" in result


def test_a_last_item_without_a_comma_gets_one_and_the_mark() -> None:
    data = b"from a import (\n    B\n)\n"
    assert (
        edit(data, op="add_import", **{"from": "a", "name": "c"})
        == "from a import (\n    B,  # aerie set:e\n    c  # aerie set:e\n)\n"
    )


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(MODEL.replace(b"\n", b"\r\n"), id="crlf"),
        pytest.param(MODEL.replace(b"    ", b"\t"), id="tabs"),
        pytest.param(b"\xef\xbb\xbf" + MODEL, id="byte order mark"),
        pytest.param(MODEL.rstrip(b"\n"), id="no last newline"),
        pytest.param(b"# -*- coding: latin-1 -*-\n" + MODEL.replace(b"a tap", b"\xe9t\xe9"), id="encoding line"),
        pytest.param(MODEL.replace(b"a tap", "\N{GREEK SMALL LETTER ALPHA} tap".encode()), id="utf-8"),
        pytest.param(MODEL.replace(b"taps = []", b"taps = []   "), id="trailing blanks"),
    ],
)
def test_every_other_byte_stays(data: bytes) -> None:
    edits = [
        {"id": "a", "op": "add_base", "class": "Model", "base": "Mixin"},
        {"id": "b", "op": "insert_in_method", **in_method(before="return x, taps", code="if x:\n    y = 1\n")},
        {
            "id": "c",
            "op": "insert_in_method",
            "class": "Wrapper",
            "method": "forward",
            "before": "return ...",
            "code": "z = 0",
        },
    ]
    result = apply_edits("m.py", data, "set", edits)
    kept = [line for line in result.splitlines(keepends=True) if b"# aerie" not in line]
    assert kept == [line for line in data.splitlines(keepends=True) if not line.startswith(b"class Model")]
    newline = b"\r\n" if b"\r\n" in data else b"\n"
    indent = b"\t" if b"\t" in data else b"    "
    added = indent * 2 + b"if x:  # aerie set:b" + newline + indent * 3 + b"y = 1  # aerie set:b" + newline
    assert added in result


def test_a_last_statement_without_a_newline_can_be_replaced() -> None:
    result = edit(b"def f():\n    return 1", op="replace_statement", method="f", statement="return 1", code="return 2")
    assert result == "def f():\n    return 2  # aerie set:e"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"op": "add_base", "class": "Absent", "base": "B"},
            "m.py, class Absent: looked for the class Absent, found 0, need exactly 1 (edit set:e)",
        ),
        (
            {"op": "insert_in_method", "class": "Model", "method": "absent", "before": "x = 1", "code": "y = 1"},
            "m.py, class Model, method absent: looked for the function absent, found 0, need exactly 1 (edit set:e)",
        ),
        (
            {"op": "replace_statement", **in_method(statement="taps = None", code="taps = 1")},
            "m.py, class Model, method forward: looked for the statement `taps = None`, found 0, need exactly 1",
        ),
        (
            {
                "op": "replace_statement",
                "class": "Model",
                "method": "__init__",
                "statement": "self.embed = ...",
                "code": "pass",
            },
            "looked for the statement `self.embed = ...`, found 2 (lines 31, 33), need exactly 1",
        ),
        ({"op": "add_base", "class": "Model", "base": "nn.Module"}, "has the base nn.Module already"),
        ({"op": "add_class_attribute", "class": "Model", "code": "flag = 1"}, "has the attribute flag already"),
        ({"op": "add_method", "class": "Model", "code": "def forward(self): ..."}, "has the method forward already"),
        ({"op": "add_import", "from": ".utils", "name": "make_layers"}, "make_layers is imported from .utils already"),
        ({"op": "add_import", "from": "absent", "name": "x"}, "looked for `from absent import ...`, found 0"),
        ({"op": "replace_loop", **in_method(statement="taps = ...", code="x in y")}, "needs the shape of a for"),
        ({"op": "replace_test", **in_method(statement="taps = ...", code="x")}, "needs the shape of an if or while"),
        ({"op": "extend_list", **in_method(statement="taps = ...", code="x")}, "an assignment of a filled list"),
        ({"op": "extend_list", "statement": "ALLOWED = [...]", "code": "x]"}, "must give items of a list"),
        ({"op": "add_method", "class": "Model", "code": "x = 1"}, "must define one function"),
        ({"op": "add_class_attribute", "class": "Model", "code": "f()"}, "must assign one name"),
        ({"op": "insert_in_method", **in_method(code="x = 1")}, "needs either `before` or `after`"),
        ({"op": "no_such_operation"}, "needs an id and one of the operations"),
        ({"op": "replace_statement", **in_method(statement="taps = ...", code="taps = (")}, "does not compile"),
        (
            {"op": "replace_statement", **in_method(statement="taps = ...", code='taps = """\n"""')},
            "a marker would land inside a string",
        ),
        ({"op": "replace_statement", **in_method(statement="a = 1; b = 2", code="pass")}, "one Python statement"),
        ({"op": "replace_statement", **in_method(statement="taps = ...")}, "needs `code`"),
    ],
)
def test_a_refusal_says_what_was_looked_for(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as refusal:
        edit(**fields)
    assert message in str(refusal.value)


def test_a_statement_that_shares_its_line_is_refused() -> None:
    with pytest.raises(Refusal, match="line 2: the statement shares its line with another"):
        edit(b"def f():\n    a = 1; b = 2\n", op="replace_statement", method="f", statement="a = 1", code="a = 3")


def test_two_edits_of_the_same_characters_are_refused() -> None:
    edits = [
        {"id": name, "op": "replace_statement", **in_method(statement="taps = ...", code="taps = 1")}
        for name in ("a", "b")
    ]
    with pytest.raises(Refusal, match="two edits change the same characters"):
        apply_edits("m.py", MODEL, "set", edits)


def test_source_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(Refusal, match=r"m\.py cannot be parsed by this Python"):
        edit(b"def f(:\n", op="add_base", **{"class": "Model", "base": "B"})


def test_insertions_at_one_place_keep_their_order() -> None:
    edits = [
        {"id": name, "op": "insert_in_method", **in_method(before="return x, taps", code=f"{name} = 1")}
        for name in "pq"
    ]
    result = apply_edits("m.py", MODEL, "set", edits).decode()
    assert "        p = 1  # aerie set:p\n        q = 1  # aerie set:q\n        return x, taps" in result


def test_a_shape_tells_true_from_one() -> None:
    for shape, code in (("x = 1", "x = True"), ("x = False", "x = 0"), ("x = 1", "x = 1.0")):
        with pytest.raises(Refusal, match="found 0"):
            edit(f"{code}\n".encode(), op="replace_statement", statement=shape, code="x = 2")
        assert edit(f"{shape}\n".encode(), op="replace_statement", statement=shape, code="x = 2") == (
            "x = 2  # aerie set:e\n"
        )
