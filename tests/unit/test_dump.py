# SPDX-License-Identifier: Apache-2.0
"""Dumps of hidden states: every planted fault is named, at two sizes, rounded to bfloat16 or not."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from ansible.module_utils.aerie.tap_dump import Dump, DumpError, compare_files
from modules import run_module

ROOT = Path(__file__).parents[2]
Array = npt.NDArray[np.floating[Any]]
TOKENS = 40
PROMPT = list(range(100, 100 + TOKENS))


class Network(NamedTuple):
    """A residual network's layers, each (tokens, hidden), as a large model has them: a few huge dimensions."""

    ids: tuple[int, ...]
    streams: list[Any]
    updates: dict[int, Any]
    residuals: dict[int, Any]
    normalised: dict[int, Any]


def network(layers: int, hidden: int, seed: int = 0) -> Network:
    rng = np.random.default_rng(seed)
    stream = rng.normal(size=(TOKENS, hidden))
    # Dimensions in which all tokens are large and alike, and tokens of different lengths.
    stream[:, : hidden // 32] += 30.0
    stream *= rng.uniform(0.5, 2.0, size=(TOKENS, 1))
    streams, updates, residuals, normalised = [stream], {}, {}, {}
    for layer in range(1, layers + 1):
        residuals[layer] = stream + 0.2 * rng.normal(size=stream.shape)
        updates[layer] = 0.2 * rng.normal(size=stream.shape)
        stream = residuals[layer] + updates[layer]
        streams.append(stream)
        gain = rng.uniform(0.5, 1.5, size=hidden)
        normalised[layer] = stream / np.sqrt((stream**2).mean(axis=1, keepdims=True)) * gain
    ids = (2, layers // 2, layers - 3)
    return Network(ids, streams, updates, residuals, normalised)


SIZES = {"small": (12, 64), "large": (61, 512)}


def rounded(values: Array) -> npt.NDArray[np.uint16]:
    """Return the bfloat16 nearest to each value, as its 16 bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> Path:
    """Write a safetensors file; sixteen bits without a sign are bfloat16, as numpy has none."""
    names = {np.dtype(kind): name for kind, name in ((np.int64, "I64"), (np.uint16, "BF16"), (np.float32, "F32"))}
    names[np.dtype(np.float16)] = "F16"
    header: dict[str, Any] = {"__metadata__": {"format": "aerie-hidden-states"}}
    body = b""
    for name, values in tensors.items():
        offsets = [len(body), len(body) + values.nbytes]
        header[name] = {"dtype": names[values.dtype], "shape": list(values.shape), "data_offsets": offsets}
        body += values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


class Pair:
    """Two dumps of one network."""

    def __init__(self, folder: Path, model: Network, bfloat16: bool) -> None:
        self.folder, self.model, self.bfloat16 = folder, model, bfloat16

    def dump(self, name: str, taps: Mapping[int, Array], others: Mapping[str, Array] | None = None) -> Path:
        values = {f"hidden_states.{id_}": tap for id_, tap in taps.items()} | dict(others or {})
        # The reference stays as it is computed.
        low = self.bfloat16 and name == "deployed"
        tensors: dict[str, Any] = {key: rounded(one) if low else one.astype(np.float32) for key, one in values.items()}
        tensors |= {"token_ids": np.array(PROMPT), "tap_ids": np.array(sorted(taps))}
        return write(self.folder / f"{name}.safetensors", tensors)

    def taps(self) -> dict[int, Array]:
        return {id_: self.model.streams[id_] for id_ in self.model.ids}

    def reference(self, neighbours: bool = True, forms: bool = True) -> Path:
        others: dict[str, Array] = {}
        if neighbours:
            others |= {f"streams.{layer}": values for layer, values in enumerate(self.model.streams)}
        if forms:
            for name in ("updates", "residuals", "normalised"):
                others |= {f"{name}.{id_}": getattr(self.model, name)[id_] for id_ in self.model.ids}
        return self.dump("reference", self.taps(), others)

    def against(self, taps: Mapping[int, Array], **reference: bool) -> dict[str, Any]:
        return compare_files(self.reference(**reference), self.dump("deployed", taps))


@pytest.fixture(params=[(size, low) for size in SIZES for low in (False, True)], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    size, bfloat16 = request.param
    return Pair(tmp_path, network(*SIZES[size]), bfloat16)


def test_equal_dumps_match(pair: Pair) -> None:
    result = pair.against(pair.taps())
    assert (result["verdict"], result["fault"]) == ("passed", "matches")
    # Half of the last of 8 bits, on average; nothing without rounding.
    assert 1e-3 < result["noise"] < 4e-3 if pair.bfloat16 else result["noise"] < 1e-6
    assert [tap["best"]["layer"] for tap in result["taps"]] == sorted(pair.model.ids)


FAULTS: dict[str, Callable[[Network, int], Array]] = {
    "off by +1 layer": lambda model, id_: model.streams[id_ + 1],
    "off by -1 layer": lambda model, id_: model.streams[id_ - 1],
    "off by +3 layers": lambda model, id_: model.streams[id_ + 3],
    "residual missing": lambda model, id_: model.updates[id_],
    "only the residual": lambda model, id_: model.residuals[id_],
    "normalised stream": lambda model, id_: model.normalised[id_],
    "scaled by 0.125": lambda model, id_: 0.125 * model.streams[id_],
    "taps permuted": lambda model, id_: model.streams[dict(zip(model.ids, model.ids[1:] + model.ids[:1]))[id_]],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(pair: Pair, fault: str) -> None:
    result = pair.against({id_: FAULTS[fault](pair.model, id_) for id_ in pair.model.ids})
    assert (result["verdict"], result["fault"]) == ("failed", fault)
    assert result["message"].startswith(f"{fault}: 3 of 3 taps are wrong: tap 2 holds ")


def test_another_model_is_named(pair: Pair) -> None:
    other = network(len(pair.model.streams) - 1, pair.model.streams[0].shape[1], seed=1)
    result = pair.against({id_: other.streams[id_] for id_ in pair.model.ids})
    assert (result["verdict"], result["fault"]) == ("failed", "other model")


def test_another_width_is_another_model(tmp_path: Path) -> None:
    small, large = (Pair(tmp_path, network(12, hidden), False) for hidden in (64, 96))
    result = compare_files(small.reference(), large.dump("deployed", large.taps()))
    assert (result["verdict"], result["fault"]) == ("failed", "other model")
    assert "hidden size 96 in" in result["message"] and "64 in" in result["message"]


@pytest.mark.parametrize("amount", [0.05, 0.2])
def test_noise_of_quantisation_is_measured(pair: Pair, amount: float) -> None:
    rng = np.random.default_rng(3)
    taps = {}
    for id_, stream in pair.taps().items():
        noise = rng.normal(size=stream.shape)
        lengths = np.linalg.norm(stream, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
        # In dimensions that are not outliers, too, noise is what all streams but the own one are further away.
        taps[id_] = stream + amount * 0.2 * lengths * noise
    result = pair.against(taps)
    assert result["verdict"] == "passed"
    assert result["fault"] == ("noise of quantisation" if result["noise"] > 0.02 else "matches")
    assert result["noise"] == pytest.approx(0.2 * amount, rel=0.2)


def test_noise_beyond_quantisation_fails(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    pair = Pair(tmp_path, network(12, 64), False)
    # Where every dimension is one of the huge ones, much noise leaves the stream recognisable.
    spread = np.abs(pair.model.streams[2]).max(axis=1, keepdims=True)
    pair.model.streams[:] = [one + spread * rng.normal(size=one.shape) for one in pair.model.streams]
    result = pair.against({id_: one + 0.5 * spread * rng.normal(size=one.shape) for id_, one in pair.taps().items()})
    assert (result["verdict"], result["fault"]) == ("failed", "noise of quantisation")
    assert "more than quantisation explains (0.3)" in result["message"]


# --- What a dump without other streams can tell


def test_permuted_taps_need_no_other_streams(pair: Pair) -> None:
    result = pair.against(
        {id_: FAULTS["taps permuted"](pair.model, id_) for id_ in pair.model.ids}, neighbours=False, forms=False
    )
    assert result["fault"] == "taps permuted"


def test_a_norm_is_found_without_the_normalised_streams(pair: Pair) -> None:
    result = pair.against({id_: pair.model.normalised[id_] for id_ in pair.model.ids}, forms=False)
    assert result["fault"] == "normalised stream"


def test_the_deployed_targets_own_streams_name_the_layer(pair: Pair) -> None:
    """The reference has only what was trained on, as other tools write it: one layer later than the ids say."""
    streams = pair.model.streams
    reference = pair.dump("reference", {id_: streams[id_ + 1] for id_ in pair.model.ids})
    deployed = pair.dump("deployed", pair.taps(), {f"streams.{layer}": one for layer, one in enumerate(streams)})
    assert compare_files(reference, deployed)["fault"] == "off by -1 layer"


def test_what_may_be_another_layer_is_no_pass(tmp_path: Path) -> None:
    pair = Pair(tmp_path, network(61, 256), False)
    taps = {id_: pair.model.streams[id_ + 1] for id_ in pair.model.ids}
    result = pair.against(taps, neighbours=False, forms=False)
    assert (result["verdict"], result["fault"]) == ("warned", "noise of quantisation")
    assert "no dump has the neighbouring streams, so this may be another layer's" in result["message"]


# --- Files


def test_numbers_are_read_as_they_are(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32) * 100
    kinds: dict[str, npt.NDArray[Any]] = {"F32": values, "F16": values.astype(np.float16), "BF16": rounded(values)}
    expected: dict[str, Array] = {
        "F32": values,
        "F16": kinds["F16"],
        "BF16": (kinds["BF16"].astype(np.uint32) << 16).view(np.float32),
    }
    for kind, stored in kinds.items():
        ids = {"token_ids": np.arange(3), "tap_ids": np.array([2])}
        dump = Dump(write(tmp_path / kind, {"hidden_states.2": stored, **ids}))
        assert np.array_equal(np.array(dump.sample("hidden_states.2")), expected[kind].astype(np.float64))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": None}, "has no tensor token_ids: make it with tools/dump_hidden_states.py"),
        ({"token_ids": np.arange(5)}, "5 token ids for hidden states of 3 tokens"),
        ({"hidden_states.4": None}, "has no tensor hidden_states.4, though tap_ids names it"),
        ({"hidden_states.4": np.arange(3)}, "hidden_states.4 is I64 [3], not (tokens, hidden) floats"),
        ({"streams.3": np.zeros((3, 9), np.float32)}, "have the shapes [(3, 8), (3, 9)], and must all have one"),
        ({"tap_ids": np.array([], np.int64)}, "has no tensor hidden_states, though tap_ids names it"),
    ],
)
def test_what_is_no_dump_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    taps = {f"hidden_states.{id_}": np.ones((3, 8), np.float32) for id_ in (2, 4)}
    tensors = {"token_ids": np.arange(3), "tap_ids": np.array([2, 4]), **taps, **changes}
    path = write(tmp_path / "dump", {name: values for name, values in tensors.items() if values is not None})
    with pytest.raises(DumpError) as caught:
        Dump(path)
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_dumps_of_other_tokens_or_ids_are_not_compared(tmp_path: Path) -> None:
    taps = {"hidden_states.2": np.ones((3, 8), np.float32), "hidden_states.4": np.ones((3, 8), np.float32)}
    first = write(tmp_path / "first", {"token_ids": np.arange(3), "tap_ids": np.array([2, 4]), **taps})
    tokens = write(tmp_path / "tokens", {"token_ids": np.arange(3) + 1, "tap_ids": np.array([2, 4]), **taps})
    ids = write(tmp_path / "ids", {"token_ids": np.arange(3), "tap_ids": np.array([2]), **taps})
    with pytest.raises(DumpError, match="make both dumps of one list of token ids"):
        compare_files(first, tokens)
    with pytest.raises(DumpError, match=r"has the tap ids \[2\], .* has \[2, 4\]"):
        compare_files(first, ids)


@pytest.mark.parametrize(
    ("streams", "ids"),
    [
        ("none", [0, 4, 12]),
        ("near", [0, 1, 2, 3, 4, 5, 6, 10, 11, 12]),
        ("all", list(range(13))),
    ],
)
def test_ids_that_a_release_may_lose_are_captured_only_as_taps(streams: str, ids: list[int]) -> None:
    program = runpy.run_path(str(ROOT / "roles/hidden_states/files/dump_deployed.py"))
    assert program["wanted_ids"]([0, 4, 12], 12, streams) == ids
    assert not {0, 12} & set(program["wanted_ids"]([4], 12, streams))


def test_the_module_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair(tmp_path, network(12, 64), True)
    files = {"reference": str(pair.reference()), "deployed": str(pair.dump("deployed", pair.taps()))}
    result = run_module("hidden_state_check", {"level": "dump", **files}, capsys)
    assert (result["verdict"], result["fault"], result["failed"]) == ("passed", "matches", False)
    pair.dump("deployed", {id_: pair.model.updates[id_] for id_ in pair.model.ids})
    result = run_module("hidden_state_check", {"level": "dump", **files}, capsys)
    assert (result["fault"], result["failed"]) == ("residual missing", True)
    Path(files["deployed"]).write_bytes(b"x")
    result = run_module("hidden_state_check", {"level": "dump", **files}, capsys)
    assert result["failed"] and files["deployed"] in result["msg"]
