# SPDX-License-Identifier: Apache-2.0
"""The header reader takes whole files, and names file and byte for every other one."""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
from ansible.module_utils.aerie.safetensors_header import (
    MAX_HEADER,
    SafetensorsError,
    read_header,
    read_small_tensor,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import BITS, TensorFile, bf16, int64, write_safetensors
from safetensors.numpy import save_file

MEGABYTE = 1 << 20
anywhere = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def written(path: Path, header: object, payload: int = 0) -> Path:
    """Write a file with ``header`` (JSON, or bytes as they are) and ``payload`` bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8")
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(payload))
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_the_reference_writer_and_this_reader_agree(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {
        "d2t": numpy.array([3, -1, 2**40], dtype=numpy.int64),
        "t2d": numpy.array([True, False, True]),
        "fc.weight": numpy.zeros((4, 6), dtype=numpy.float32),
        "empty": numpy.zeros((0, 5), dtype=numpy.float16),
    }
    save_file(arrays, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {name: tensor.shape for name, tensor in header.tensors.items()} == {
        name: array.shape for name, array in arrays.items()
    }
    assert header.metadata == {"format": "pt"}
    assert header.size == path.stat().st_size
    assert read_small_tensor(header, "d2t") == [3, -1, 2**40]
    assert read_small_tensor(header, "t2d") == [1, 0, 1]


def test_a_real_shape_is_read_from_a_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"fc.weight": bf16(7168, 21504)})
    assert read_header(path).tensors["fc.weight"].shape == (7168, 21504)
    assert path.stat().st_blocks * 512 < MEGABYTE


@pytest.mark.parametrize(
    ("entries", "payload", "offset", "problem"),
    [
        ({"a": entry(0, 4)}, 3, 3, r"truncated: \d+ bytes, but its header implies \d+"),
        ({"a": entry(0, 4)}, 5, 4, r"\d+ bytes, but its header implies \d+"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, 2, r"b overlaps a, which ends at byte \d+"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, 8, 4, r"2 bytes between a and b belong to no tensor"),
        ({"a": entry(1, 4)}, 4, 0, r"1 bytes between the header and a belong to no tensor"),
    ],
)
def test_tensors_that_do_not_fill_the_file_are_named_with_the_byte(
    tmp_path: Path, entries: dict[str, Any], payload: int, offset: int, problem: str
) -> None:
    path = written(tmp_path / "model.safetensors", entries, payload)
    with pytest.raises(SafetensorsError) as caught:
        read_header(path)
    place = path.stat().st_size - payload + offset
    assert re.match(f"{re.escape(str(path))}: at byte {place}: {problem}", str(caught.value))


@pytest.mark.parametrize(
    ("header", "offset", "problem"),
    [
        ({"a": entry(4, 0, shape=[])}, 9, "a: data_offsets [4, 0] are not a begin and an end"),
        ({"a": entry(0, 4, "BF16", [3])}, 9, "a: BF16 of shape [3] takes 6 bytes, its offsets give 4"),
        ({"a": entry(0, 1, "F4", [3])}, 9, "a: F4 of shape [3] takes 2 bytes, its offsets give 1"),
        ({"a": entry(0, 4, "Q7")}, 9, "a: unknown dtype Q7"),
        ({"a": entry(0, 4, shape=[True, 4])}, 9, "a: shape [True, 4] is not a list of sizes"),
        ({"a": entry(0, 4, shape=[-2, -2])}, 9, "a: shape [-2, -2] is not a list of sizes"),
        ({"a": entry(0, 0, shape=[2**62, 4, 0])}, 9, "is too large to be true"),
        ({"a": [0, 4]}, 9, "a: the entry is not dtype, shape and data_offsets"),
        ({"__metadata__": {"n": 1}}, 9, "__metadata__: it does not map strings to strings"),
        (b'{"a": 1, "b": 2, "a": 3}', 25, "the header has the key a twice"),
        (b'{"\xff": 1}', 10, "the header is not UTF-8"),
        (b'{"a": }', 14, "the header is not JSON"),
        (b'["a"]', 8, "the header begins with b'[', not with an opening brace"),
        (b"", 8, "the header begins with b'', not with an opening brace"),
        (b'{"a":' + b"[" * 100_000, 8, "the header cannot be parsed"),
    ],
)
def test_a_header_that_says_nonsense_is_named_with_the_byte(
    tmp_path: Path, header: object, offset: int, problem: str
) -> None:
    path = written(tmp_path / "model.safetensors", header, 4)
    with pytest.raises(SafetensorsError) as caught:
        read_header(path)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"{path}: at byte {offset}: ")


@pytest.mark.parametrize("size", range(8))
def test_a_file_that_ends_inside_the_length_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(SafetensorsError, match="ends inside the 8-byte header length") as caught:
        read_header(path)
    assert caught.value.offset == size


@pytest.mark.parametrize("declared", [100, MAX_HEADER, MAX_HEADER + 1, 2**63, 2**64 - 1])
def test_a_length_that_cannot_be_true_costs_no_memory(tmp_path: Path, declared: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(declared.to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    with pytest.raises(SafetensorsError, match=f"header of {declared} bytes declared"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    tracemalloc.stop()


def test_a_long_header_of_zeros_is_refused_at_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((MAX_HEADER - 1).to_bytes(8, "little"))
    with path.open("r+b") as stream:
        stream.truncate(2 * MAX_HEADER)
    tracemalloc.start()
    with pytest.raises(SafetensorsError, match="not with an opening brace"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    tracemalloc.stop()


@pytest.mark.parametrize("beginning", [b"{", b'{"a":"', '{"\N{GRINNING FACE}'.encode()])
def test_a_long_header_that_begins_well_and_ends_in_a_hole_is_held_once(tmp_path: Path, beginning: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(MAX_HEADER.to_bytes(8, "little") + beginning)
    with path.open("r+b") as stream:
        stream.truncate(20 * MAX_HEADER)
    tracemalloc.start()
    with pytest.raises(SafetensorsError, match=r"the header is not JSON \(control character b'.x00'\)") as caught:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.offset == 8 + len(beginning)
    assert peak < MAX_HEADER + MEGABYTE


def test_a_long_header_of_text_is_held_three_times(tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", b"{" + b" " * (MAX_HEADER - 1))
    tracemalloc.start()
    with pytest.raises(SafetensorsError, match="the header is not JSON"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * MAX_HEADER + MEGABYTE


def test_a_longer_header_is_not_read_and_the_remedy_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", b"{" + b" " * MAX_HEADER)
    tracemalloc.start()
    with pytest.raises(SafetensorsError, match=r"more than 4194304; if that is true, save the weights in more shards"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEGABYTE


def test_a_shard_of_50_gigabytes_of_kimi_k25_is_read(tmp_path: Path) -> None:
    """The largest that transformers writes unless told otherwise, of the model with the most tensors for its size."""
    path = tmp_path / "model-00001-of-00012.safetensors"
    tensors: dict[str, TensorFile] = {}
    for layer, expert, name in itertools.product(range(1, 6), range(384), ("gate", "up", "down")):
        rows, columns = (7168, 2048) if name == "down" else (2048, 7168)
        weight = f"language_model.model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
        tensors[f"{weight}_packed"] = TensorFile("I32", (rows, columns // 8))
        tensors[f"{weight}_scale"] = bf16(rows, columns // 32)
        tensors[f"{weight}_shape"] = TensorFile("I64", (2,))
    write_safetensors(path, tensors)
    assert 47e9 < path.stat().st_size < 50e9
    assert len(read_header(path).tensors) == len(tensors) == 17280


def test_weights_are_not_read_as_a_vocabulary_map(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"d2t": bf16(8), "t2d": TensorFile("I64", (1 << 22,))})
    header = read_header(path)
    with pytest.raises(SafetensorsError, match="d2t is BF16, expected integers or booleans"):
        read_small_tensor(header, "d2t")
    with pytest.raises(SafetensorsError, match="t2d is 33554432 bytes, too large"):
        read_small_tensor(header, "t2d")


def test_a_file_that_shrank_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"d2t": int64(range(8))})
    header = read_header(path)
    with path.open("r+b") as stream:
        stream.truncate(header.size - 4)
    with pytest.raises(SafetensorsError, match="d2t ends after 60 of its 64 bytes"):
        read_small_tensor(header, "d2t")


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.builds(TensorFile, st.sampled_from(sorted(set(BITS) - {"F4"})), shapes),
    max_size=6,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@anywhere
@given(content=tensors)
def test_every_well_formed_file_is_read_as_it_was_written(tmp_path: Path, content: dict[str, TensorFile]) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, content)
    header = read_header(path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in content.items()
    }
    assert max((tensor.end for tensor in header.tensors.values()), default=header.size) == header.size


@anywhere
@given(content=tensors, data=st.data())
def test_every_truncation_and_extension_is_noticed(
    tmp_path: Path, content: dict[str, TensorFile], data: st.DataObject
) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, content)
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(data.draw(st.integers(0, 2 * size).filter(lambda length: length != size)))
    with pytest.raises(SafetensorsError) as caught:
        read_header(path)
    assert caught.value.path == path
    assert 0 <= caught.value.offset <= max(size, path.stat().st_size)


@anywhere
@given(content=tensors, data=st.data())
def test_a_changed_header_is_read_or_refused_but_never_crashes(
    tmp_path: Path, content: dict[str, TensorFile], data: st.DataObject
) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, content)
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    assert_read_or_refused(path)


@anywhere
@given(content=tensors.filter(lambda content: any(0 not in file.shape for file in content.values())), data=st.data())
def test_every_wrong_size_and_place_is_refused(
    tmp_path: Path, content: dict[str, TensorFile], data: st.DataObject
) -> None:
    """Whatever one tensor claims besides the truth, it overlaps, leaves a gap, or is not of its own size."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, content)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    name = data.draw(st.sampled_from(sorted(name for name, file in content.items() if 0 not in file.shape)))
    begin, end = header[name]["data_offsets"]
    if data.draw(st.booleans()):
        delta = data.draw(st.integers(-begin, 2 * len(raw)).filter(bool))
        header[name]["data_offsets"] = [begin + delta, end + delta]
    else:
        bits = BITS[header[name]["dtype"]]
        header[name]["dtype"] = data.draw(st.sampled_from(sorted(name for name in BITS if BITS[name] != bits)))
    written(path, header, len(raw) - start)
    with pytest.raises(SafetensorsError) as caught:
        read_header(path)
    assert caught.value.path == path
    assert 0 <= caught.value.offset <= path.stat().st_size + 2 * len(raw)


@anywhere
@given(
    before=st.dictionaries(st.text(max_size=8), st.integers(), max_size=3),
    name=st.text(max_size=8),
    depth=st.booleans(),
)
def test_every_duplicate_key_is_refused_at_its_place(
    tmp_path: Path, before: dict[str, int], name: str, depth: bool
) -> None:
    key = json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")
    inner = b", ".join([*(json.dumps(k).encode() + b": 0" for k in before if k != name), key + b": 1", key + b": 2"])
    text = b'{"a": {' + inner + b"}}" if depth else b"{" + inner + b"}"
    path = written(tmp_path / "model.safetensors", text)
    with pytest.raises(SafetensorsError, match=r"the header has the key .* twice") as caught:
        read_header(path)
    assert caught.value.offset == 8 + text.rindex(key)


@anywhere
@given(text=st.binary(min_size=1, max_size=64), data=st.data())
def test_every_byte_that_is_not_utf8_is_refused_at_its_place(tmp_path: Path, text: bytes, data: st.DataObject) -> None:
    good = b'{"' + bytes(byte % 26 + 97 for byte in text)
    bad = data.draw(st.sampled_from([b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\x80"]))
    path = written(tmp_path / "model.safetensors", good + bad + b'": {}}')
    with pytest.raises(SafetensorsError, match="the header is not UTF-8") as caught:
        read_header(path)
    assert caught.value.offset == 8 + len(good)


@settings(parent=anywhere, max_examples=30)
@given(
    declared=st.integers(0, 2 * MAX_HEADER) | st.integers(0, 2**64 - 1),
    opening=st.sampled_from([b"", b"{", b'{"']),
    content=st.binary(max_size=64),
    hole=st.integers(0, 1 << 40),
)
def test_no_declared_length_costs_more_than_a_few_megabytes(
    tmp_path: Path, declared: int, opening: bytes, content: bytes, hole: int
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(declared.to_bytes(8, "little") + opening + content)
    with path.open("r+b") as stream:
        stream.truncate(max(hole, 8 + len(opening + content)))
    tracemalloc.start()
    with pytest.raises(SafetensorsError) as caught:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_HEADER + MEGABYTE
    assert (caught.value.path, caught.value.offset >= 0) == (path, True)


@anywhere
@given(header=st.dictionaries(st.text(max_size=8), json_values, max_size=4), payload=st.integers(0, 64))
def test_any_json_is_read_or_refused_but_never_crashes(tmp_path: Path, header: dict[str, Any], payload: int) -> None:
    assert_read_or_refused(written(tmp_path / "model.safetensors", header, payload))


@anywhere
@given(content=st.binary(max_size=256))
def test_any_bytes_are_read_or_refused_but_never_crash(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert_read_or_refused(path)


def assert_read_or_refused(path: Path) -> None:
    """What is accepted fills the file exactly; what is refused names the file and a byte of it."""
    size = path.stat().st_size
    try:
        header = read_header(path)
    except SafetensorsError as error:
        assert error.path == path
        assert error.offset >= 0
        assert len(str(error)) < 1000 + len(str(path))
    else:
        assert sum(tensor.end - tensor.begin for tensor in header.tensors.values()) <= size
        assert max((tensor.end for tensor in header.tensors.values()), default=size) == size
