# SPDX-License-Identifier: Apache-2.0
"""Dumps of hidden states, and the name of what is different between two of them.

A dump is a safetensors file (docs/hidden-states.md): ``token_ids`` (tokens,), ``tap_ids`` in vLLM's dialect, and for
each of those ``hidden_states.<id>`` (tokens, hidden). It may also have what other layers' entrances hold, each as in
``tap_faults``: ``streams.<k>``, ``updates.<k>``, ``residuals.<k>``, ``normalised.<k>``.

What the drafter was trained on is the reference; what the deployed target gives must be the same but for rounding and
the target's quantisation. A sample of tokens and dimensions is compared, in plain Python.
"""

from __future__ import annotations

import array
import math
import operator
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ansible.module_utils.aerie.safetensors_header import Header, read_header, read_small_tensor
from ansible.module_utils.aerie.tap_faults import (
    MATCHES,
    NORMALISED,
    OTHER_MODEL,
    RESIDUAL,
    STREAM,
    UPDATE,
    Fault,
    Held,
    name_fault,
)

NOISE = "noise of quantisation"
# The names of tensors, by the form of what they hold.
TAPS = "hidden_states"
PREFIXES = {STREAM: "streams", UPDATE: "updates", RESIDUAL: "residuals", NORMALISED: "normalised"}

# Relative error of the median token: up to the first, rounding to bfloat16 explains it; up to the second, quantised
# weights or activations do.
ROUNDING, QUANTISED = 0.02, 0.3
# Below this cosine a tap has nothing to do with a stream.
RELATED = 0.7
# A tap is a normalised stream where this much of it stays unexplained at most, and a scalar explains three times less.
_NORM_RESIDUE, _NORM_ADVANTAGE = 0.1, 3.0
_SAME_SCALE = 0.05
_MAX_TOKENS, _MAX_DIMENSIONS = 64, 256
# With fewer tokens their mean says nothing.
_MIN_CENTRED = 8
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}

Rows = Sequence[Sequence[float]]


class DumpError(Exception):
    """Two files that cannot be compared, or one that is no dump; the text names the file and the remedy."""


class Dump:
    """A dump of which tensors are read one at a time, and of them a sample."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises DumpError, SafetensorsError, OSError."""
        self.path = path
        self.header: Header = read_header(path)
        self.token_ids = self._integers("token_ids")
        self.tap_ids = sorted(set(self._integers("tap_ids")))
        shapes = {self._shape(name) for name in self._names()}
        if len(shapes) != 1:
            raise DumpError(f"{path}: its hidden states have the shapes {sorted(shapes)}, and must all have one")
        (self.tokens, self.hidden_size) = shapes.pop()
        if self.tokens != len(self.token_ids):
            raise DumpError(f"{path}: {len(self.token_ids)} token ids for hidden states of {self.tokens} tokens")

    def _integers(self, name: str) -> list[int]:
        if name not in self.header.tensors:
            raise DumpError(f"{self.path} has no tensor {name}: make it with tools/dump_hidden_states.py")
        return read_small_tensor(self.header, name)

    def _names(self) -> list[str]:
        taps = [f"{TAPS}.{id_}" for id_ in self.tap_ids]
        lacking = [name for name in taps if name not in self.header.tensors]
        if lacking or not taps:
            raise DumpError(f"{self.path} has no tensor {(lacking or [TAPS])[0]}, though tap_ids names it")
        return [*taps, *(name for name in self.header.tensors if name.partition(".")[0] in PREFIXES.values())]

    def _shape(self, name: str) -> tuple[int, int]:
        tensor = self.header.tensors[name]
        if tensor.dtype not in _WIDTHS or len(tensor.shape) != 2 or not all(tensor.shape):
            raise DumpError(f"{self.path}: {name} is {tensor.dtype} {list(tensor.shape)}, not (tokens, hidden) floats")
        return tensor.shape[0], tensor.shape[1]

    def layers(self, form: str) -> list[int]:
        """Return the layers whose ``form`` is there, taps not counted."""
        prefix = f"{PREFIXES[form]}."
        names = [name[len(prefix) :] for name in self.header.tensors if name.startswith(prefix)]
        return sorted(int(name) for name in names if name.isdecimal())

    def sample(self, name: str) -> Rows:
        """Return tensor ``name``: at most _MAX_TOKENS rows of at most _MAX_DIMENSIONS values, evenly chosen."""
        tensor = self.header.tensors[name]
        width = _WIDTHS[tensor.dtype]
        step = -(-self.hidden_size // _MAX_DIMENSIONS)
        with self.path.open("rb") as stream:
            return [
                _decoded(_row(stream, tensor.begin, token, self.hidden_size * width), tensor.dtype)[::step]
                for token in range(0, self.tokens, -(-self.tokens // _MAX_TOKENS))
            ]


def _row(stream: BinaryIO, begin: int, row: int, length: int) -> bytes:
    stream.seek(begin + row * length)
    return stream.read(length)


def _decoded(data: bytes, dtype: str) -> Sequence[float]:
    if dtype == "F16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    if dtype == "BF16":
        # The upper half of a float32.
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        data = bytes(wide)
    values = array.array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


# ---------------------------------------------------------------------------------------------------------------------
# Two tensors


class Fit(NamedTuple):
    """How well a tensor explains another: the centred ``cosine``, and the best ``scale``."""

    cosine: float
    scale: float


class Sample:
    """The sampled rows of one tensor, and what every comparison with it needs."""

    def __init__(self, rows: Rows) -> None:
        self.rows = [list(row) for row in rows]
        self._centred = _flat(_centred(self.rows))
        self._square = _dot(self._centred, self._centred)

    def fit(self, wanted: Sample) -> Fit:
        """Explain this tensor by ``wanted``.

        A few dimensions of a large model's stream are huge and alike for all tokens and layers; without the mean over
        tokens all layers would look alike.
        """
        dot = _dot(self._centred, wanted._centred)
        product = self._square * wanted._square
        if not (product > 0 and math.isfinite(product)):
            return Fit(0.0, 0.0)
        return Fit(dot / math.sqrt(product), dot / wanted._square)

    def error(self, wanted: Sample) -> float:
        """Return the relative error of the median token."""
        pairs = zip(self.rows, wanted.rows)
        errors = sorted(_norm(list(map(operator.sub, one, two))) / max(_norm(two), 1e-30) for one, two in pairs)
        return errors[len(errors) // 2] if all(map(math.isfinite, errors)) else math.inf

    def max_abs_error(self, wanted: Sample) -> float:
        """Return the largest difference, relative to the largest element of ``wanted``."""
        largest = max(abs(value) for value in _flat(wanted.rows))
        difference = max(map(abs, map(operator.sub, _flat(self.rows), _flat(wanted.rows))))
        return float(difference / max(largest, 1e-30))

    def norm_residue(self, wanted: Sample) -> float:
        """Return which part of this an RMS norm of ``wanted`` with free weights leaves unexplained (0 to 1)."""
        lengths = [max(_norm(row) / math.sqrt(len(row)), 1e-30) for row in wanted.rows]
        normed = [[value / length for value in row] for row, length in zip(wanted.rows, lengths)]
        unexplained = total = 0.0
        for ours, theirs in zip(zip(*self.rows), zip(*normed)):
            square, own, dot = _dot(theirs, theirs), _dot(ours, ours), _dot(ours, theirs)
            unexplained += max(own - dot * dot / square, 0.0) if square > 0 else own
            total += own
        return math.sqrt(unexplained / total) if total > 0 else 1.0


def _dot(one: Sequence[float], two: Sequence[float]) -> float:
    return float(sum(map(operator.mul, one, two)))


def _norm(row: Sequence[float]) -> float:
    return math.sqrt(_dot(row, row))


def _flat(rows: Rows) -> list[float]:
    return [value for row in rows for value in row]


def _centred(rows: Rows) -> Rows:
    if len(rows) < _MIN_CENTRED:
        return rows
    means = [sum(column) / len(rows) for column in zip(*rows)]
    return [list(map(operator.sub, row, means)) for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# Two dumps


def compare_files(reference: Path, deployed: Path) -> dict[str, Any]:
    """Compare the dump of the ``deployed`` target with the one that the drafter was trained on.

    Returns JSON-able data: gate (dump), verdict (passed, warned, failed), fault (its name), message, noise (relative
    error of the median token, of the worst tap), sample, taps. Raises DumpError, SafetensorsError, OSError.
    """
    truth, ours = Dump(reference), Dump(deployed)
    if truth.token_ids != ours.token_ids:
        raise DumpError(f"{deployed} is of other tokens than {reference}: make both dumps of one list of token ids")
    if truth.tap_ids != ours.tap_ids:
        raise DumpError(
            f"{deployed} has the tap ids {ours.tap_ids}, {reference} has {truth.tap_ids}: make it with those"
        )
    if truth.hidden_size != ours.hidden_size:
        sizes = f"hidden size {ours.hidden_size} in {deployed}, {truth.hidden_size} in {reference}"
        return _result(Fault(OTHER_MODEL, sizes), math.inf, True, [], ours)
    known = dict(_candidates(truth))
    pairs = [_held(id_, ours, truth, known) for id_ in ours.tap_ids]
    noise = max(record["error"] for _, record in pairs)
    streams = {layer for form, layer in known if form == STREAM} | set(ours.layers(STREAM))
    beside = all(streams & {id_ - 1, id_ + 1} for id_ in ours.tap_ids)
    return _result(name_fault([one for one, _ in pairs]), noise, beside, [record for _, record in pairs], ours)


def _result(fault: Fault, noise: float, neighbours: bool, taps: list[dict[str, Any]], dump: Dump) -> dict[str, Any]:
    name, verdict, message = fault.name, "failed", f"{fault.name}: {fault.detail}"
    if name == MATCHES and noise <= ROUNDING:
        verdict, message = "passed", f"{message}, with a relative error of {noise:.2g}"
    elif name == MATCHES:
        name = NOISE
        verdict = "failed" if noise > QUANTISED else "passed" if neighbours else "warned"
        message = f"{NOISE}: the taps differ from the reference by {noise:.2g} (relative, median token)"
        message += f", more than quantisation explains ({QUANTISED})" if noise > QUANTISED else ""
        message += "" if neighbours else "; no dump has the neighbouring streams, so this may be another layer's"
    return {
        "gate": "dump",
        "verdict": verdict,
        "fault": name,
        "message": message,
        "noise": noise if math.isfinite(noise) else None,
        "sample": {"tokens": min(dump.tokens, _MAX_TOKENS), "dimensions": min(dump.hidden_size, _MAX_DIMENSIONS)},
        "taps": taps,
    }


def _candidates(truth: Dump) -> Iterator[tuple[tuple[str, int], Sample]]:
    """Yield everything that the reference knows, by form and layer."""
    for form, prefix in PREFIXES.items():
        for layer in truth.layers(form):
            yield (form, layer), Sample(truth.sample(f"{prefix}.{layer}"))
    for id_ in truth.tap_ids:
        yield (STREAM, id_), Sample(truth.sample(f"{TAPS}.{id_}"))


def _held(id_: int, ours: Dump, truth: Dump, known: Mapping[tuple[str, int], Sample]) -> tuple[Held, dict[str, Any]]:
    tap, wanted = Sample(ours.sample(f"{TAPS}.{id_}")), known[STREAM, id_]
    error = tap.error(wanted)
    fits = {key: tap.fit(other) for key, other in known.items()}
    if error > ROUNDING:
        fits = {**_through_own_streams(id_, ours, wanted), **fits}
    (form, layer), best = max(fits.items(), key=lambda item: item[1].cosine)
    unexplained = math.sqrt(max(1 - best.cosine**2, 0.0))
    if error > ROUNDING and (NORMALISED, id_) not in known:
        residue = tap.norm_residue(wanted)
        if residue <= _NORM_RESIDUE and residue * _NORM_ADVANTAGE <= unexplained:
            form, layer, best = NORMALISED, id_, Fit(math.sqrt(1 - residue**2), 1.0)
    scale = 1.0 if abs(best.scale - 1) <= max(_SAME_SCALE, unexplained / 2) else best.scale
    record = {
        "id": id_,
        "max_abs_error": tap.max_abs_error(wanted),
        "cosine": fits[STREAM, id_].cosine,
        "error": error,
        "best": {"form": form, "layer": layer, "cosine": best.cosine, "scale": best.scale},
    }
    return Held(id_, form if best.cosine >= RELATED else "", layer, scale), record


def _through_own_streams(id_: int, ours: Dump, wanted: Sample) -> dict[tuple[str, int], Fit]:
    """Find the reference's tap among the streams that the deployed target has itself.

    Where the reference's tap of id k is its stream j, its own tap is k - j layers later than what was trained on.
    """
    return {
        (STREAM, 2 * id_ - layer): Sample(ours.sample(f"{PREFIXES[STREAM]}.{layer}")).fit(wanted)
        for layer in ours.layers(STREAM)
        if layer != id_
    }
