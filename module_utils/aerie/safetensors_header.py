# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, read and checked without touching the weights.

A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes. The header states every
tensor's place, so it also states the size that the file must have: a truncated download shows without reading it.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

# The largest header that is read, in bytes. The format allows 100 MB. A shard of Kimi-K2.5 (9 GB, 3500 tensors) has
# 0.5 MB, and one of 50 GB, as transformers 5 writes it, 2.6 MB. What is no text, such as a hole or weights, is held in
# memory once, text up to three times, and what JSON makes of it comes on top.
MAX_HEADER = 4 << 20
# read_small_tensor is for vocabulary maps; the largest vocabularies need about 2 MB.
MAX_SMALL_TENSOR = 16 << 20

_LENGTH_BYTES = 8
_MESSAGE_CHARACTERS = 120
# No file or tensor is larger; a header that says so was written by an overflow.
_MAX_SIZE = 1 << 63
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
# What JSON has nowhere, and a damaged file soon.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
_ARRAY_CODES = {
    "BOOL": "B",
    "U8": "B",
    "I8": "b",
    "U16": "H",
    "I16": "h",
    "U32": "I",
    "I32": "i",
    "U64": "Q",
    "I64": "q",
}


class SafetensorsError(Exception):
    """A file that is not a whole safetensors file: which one, at which byte, and what is wrong there."""

    def __init__(self, path: Path, offset: int, problem: str) -> None:
        super().__init__(f"{path}: at byte {offset}: {problem}")
        self.path = path
        self.offset = offset
        self.problem = problem


class Tensor(NamedTuple):
    """One tensor's entry: ``begin`` and ``end`` are byte offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """A checked header. ``size`` is the size of the file in bytes, ``sha256`` the digest of the header's JSON."""

    path: Path
    size: int
    sha256: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class _EntryError(Exception):
    """What is wrong with one entry of the header."""


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file at ``path``.

    Checked: the declared header length against the file and the format's bound, UTF-8, JSON, duplicate keys, every
    entry's dtype, shape and place, that the tensors fill the rest of the file without overlap or gap, and that the
    file is exactly as long as they need.

    Raises SafetensorsError for a file that breaks any of these, OSError for one that cannot be read.
    """
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        text = _read_text(path, size, stream)
    document = _parse(path, text)
    start = _LENGTH_BYTES + len(text)
    metadata: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in document.items():
        try:
            if name == "__metadata__":
                metadata = _metadata(value)
            else:
                tensors[name] = _entry(value, start)
        except _EntryError as error:
            raise SafetensorsError(path, _place(text, name), f"{_short(name)}: {error}") from None
    _check_layout(path, tensors, start, size)
    return Header(path, size, hashlib.sha256(text).hexdigest(), tensors, metadata)


def read_small_tensor(header: Header, name: str) -> list[int]:
    """Return the elements of the integer or boolean tensor ``name``, in storage order.

    Raises SafetensorsError if it is of another dtype, larger than MAX_SMALL_TENSOR bytes, or no longer there.
    """
    tensor = header.tensors[name]
    code = _ARRAY_CODES.get(tensor.dtype)
    if code is None:
        raise SafetensorsError(header.path, tensor.begin, f"{name} is {tensor.dtype}, expected integers or booleans")
    length = tensor.end - tensor.begin
    if length > MAX_SMALL_TENSOR:
        raise SafetensorsError(header.path, tensor.begin, f"{name} is {length} bytes, too large for a vocabulary map")
    with header.path.open("rb") as stream:
        stream.seek(tensor.begin)
        data = stream.read(length)
    if len(data) != length:
        raise SafetensorsError(header.path, tensor.begin, f"{name} ends after {len(data)} of its {length} bytes")
    elements = array.array(code)
    elements.frombytes(data)
    if sys.byteorder == "big":
        elements.byteswap()
    return elements.tolist()


def _read_text(path: Path, size: int, stream: BinaryIO) -> bytes:
    """Return the header's bytes. Nothing is read on the word of a length that cannot be true."""
    prefix = stream.read(_LENGTH_BYTES)
    if len(prefix) < _LENGTH_BYTES:
        raise SafetensorsError(path, len(prefix), f"the file ends inside the {_LENGTH_BYTES}-byte header length")
    declared = int.from_bytes(prefix, "little")
    if declared > MAX_HEADER:
        problem = f"header of {declared} bytes declared, more than {MAX_HEADER}"
        raise SafetensorsError(path, 0, f"{problem}; if that is true, save the weights in more shards")
    if declared > size - _LENGTH_BYTES:
        raise SafetensorsError(path, 0, f"header of {declared} bytes declared, but the file has {size} bytes in all")
    opening = stream.read(min(declared, 1))
    if opening != b"{":
        raise SafetensorsError(path, _LENGTH_BYTES, f"the header begins with {opening!r}, not with an opening brace")
    stream.seek(_LENGTH_BYTES)
    text = stream.read(declared)
    if len(text) != declared:
        raise SafetensorsError(path, _LENGTH_BYTES + len(text), f"the file ends inside its {declared}-byte header")
    return text


def _parse(path: Path, text: bytes) -> dict[str, object]:
    control = _CONTROL.search(text)
    if control is not None:
        problem = f"the header is not JSON (control character {control.group()!r})"
        raise SafetensorsError(path, _LENGTH_BYTES + control.start(), problem)
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise SafetensorsError(path, _LENGTH_BYTES + error.start, "the header is not UTF-8") from None
    except json.JSONDecodeError as error:
        offset = _LENGTH_BYTES + len(error.doc[: error.pos].encode("utf-8"))
        raise SafetensorsError(path, offset, f"the header is not JSON ({error.msg})") from None
    except _DuplicateKeyError as error:
        problem = f"the header has the key {_short(error.key)} twice"
        raise SafetensorsError(path, _place(text, error.key), problem) from None
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(path, _LENGTH_BYTES, f"the header cannot be parsed ({error})") from None
    # It begins with a brace, so what was parsed is an object.
    assert isinstance(document, dict)
    return document


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise _DuplicateKeyError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return document


def _place(text: bytes, key: str) -> int:
    """Return the byte of the file at which the header ``text`` last has ``key``, or begins if that is not to be found.

    A key may be written with escapes that differ from ours.
    """
    return _LENGTH_BYTES + max(0, text.rfind(json.dumps(key, ensure_ascii=False).encode("utf-8", "surrogatepass")))


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise _EntryError("it does not map strings to strings")
    return value


def _entry(value: object, start: int) -> Tensor:
    """Return one checked entry; ``start`` is where the tensors' bytes begin in the file."""
    if not isinstance(value, dict) or value.keys() != _ENTRY_KEYS:
        raise _EntryError("the entry is not dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _EntryError(f"unknown dtype {_short(dtype)}")
    if not _are_sizes(shape):
        raise _EntryError(f"shape {_short(shape)} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _EntryError(f"data_offsets {_short(offsets)} are not a begin and an end")
    elements = 1
    for dimension in shape:
        elements *= dimension
        if elements > _MAX_SIZE:
            raise _EntryError(f"shape {_short(shape)} is too large to be true")
    length = offsets[1] - offsets[0]
    if elements * bits != length * 8:
        needed = -(-elements * bits // 8)
        raise _EntryError(f"{dtype} of shape {_short(shape)} takes {needed} bytes, its offsets give {length}")
    return Tensor(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _are_sizes(value: object) -> bool:
    """Tell whether ``value`` is a list of sizes. A loop and not a generator: a large model has 200 000 tensors."""
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110
        # type() rather than isinstance(): JSON's true is not a size.
        if type(item) is not int or not 0 <= item <= _MAX_SIZE:
            return False
    return True


def _short(value: object) -> str:
    """Return ``value`` for a message: one line, cut to a length that a terminal bears, whatever the file holds."""
    text = value if isinstance(value, str) and value.isprintable() else reprlib.repr(value)
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]}..."


def _span(item: tuple[str, Tensor]) -> tuple[int, int]:
    return item[1].begin, item[1].end


def _check_layout(path: Path, tensors: Mapping[str, Tensor], start: int, size: int) -> None:
    """Check that the tensors lie end to end from ``start`` to ``size``."""
    position, previous = start, "the header"
    for name, tensor in sorted(tensors.items(), key=_span):
        if tensor.begin < position:
            problem = f"{_short(name)} overlaps {_short(previous)}, which ends at byte {position}"
            raise SafetensorsError(path, tensor.begin, problem)
        if tensor.begin > position:
            unclaimed = tensor.begin - position
            problem = f"{unclaimed} bytes between {_short(previous)} and {_short(name)} belong to no tensor"
            raise SafetensorsError(path, position, problem)
        position, previous = tensor.end, name
    if size < position:
        raise SafetensorsError(path, size, f"truncated: {size} bytes, but its header implies {position}")
    if size > position:
        raise SafetensorsError(path, position, f"{size} bytes, but its header implies {position}: not one whole file")
