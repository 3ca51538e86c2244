# SPDX-License-Identifier: Apache-2.0
"""The program of the numeric check where it needs neither torch nor vLLM: its stages, its faults and its exceptions.

Arrays of numpy stand for tensors, and a few files for the parts of vLLM that it asks. With both of them it runs in the
scenarios `default` (one stage) and `multi_host` (two stages).
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from ansible.module_utils.aerie.numeric_check import (
    HIDDEN,
    PROMPT,
    FaultError,
    Model,
    NotRunError,
    Place,
    Reference,
    Run,
    called,
    check_model,
    declare_taps,
    earlier_stages,
    meaning_of,
    parse,
    taken_apart,
    verdict_of,
)
from ansible.module_utils.aerie.tap_faults import FORMS, NORMALISED, STREAM, name_fault

PATIENCE_S = 20.0


def test_each_stage_but_the_last_is_a_process_and_none_outlives_the_block(tmp_path: Path) -> None:
    def stay(place: Place) -> None:
        (tmp_path / "partial").mkdir(exist_ok=True)
        (tmp_path / "partial" / str(place.stage)).write_text(f"{os.getpid()} {place.stages} {place.is_last}")
        (tmp_path / "partial" / str(place.stage)).rename(tmp_path / str(place.stage))
        signal.pause()

    told: list[list[str]] = []

    def fail() -> None:
        with earlier_stages(3, stay):
            deadline = time.monotonic() + PATIENCE_S
            while not all((tmp_path / name).exists() for name in "01"):
                assert time.monotonic() < deadline
            told.extend((tmp_path / name).read_text().split() for name in "01")
            raise FaultError("taps lost", "the last stage is not content")

    with pytest.raises(FaultError):
        fail()
    assert [words[1:] for words in told] == [["3", "False"]] * 2
    for words in told:
        assert int(words[0]) != os.getpid()
        with pytest.raises(ProcessLookupError):
            os.kill(int(words[0]), 0)


def test_one_stage_is_this_process_alone() -> None:
    with earlier_stages(1, lambda place: pytest.fail(str(place))):
        pass
    assert Place(0, 1).is_last
    assert Place(0, 1).receive() is None


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "meaning", "verdict"),
    [
        (FaultError("taps lost", "2 of 3"), ("taps lost", "2 of 3"), "failed"),
        (NotRunError("no memory"), ("", "no memory"), "not_run"),
        (OSError("no disk"), ("", "it ended early with OSError: no disk"), "not_run"),
    ],
)
def test_what_an_exception_means(error: Exception, meaning: tuple[str, str], verdict: str) -> None:
    # An earlier stage tells the last one the meaning, and the last one the result: the same.
    assert meaning_of(raised(error)) == meaning
    result: dict[str, Any] = {}
    verdict_of(raised(error), result)
    assert result["verdict"] == verdict
    assert meaning[1] in result["message"]
    name, message = meaning
    again = FaultError(name, message) if name else NotRunError(message)
    passed_on: dict[str, Any] = {}
    verdict_of(again, passed_on)
    assert passed_on == result


@pytest.mark.parametrize("arguments", [["--stages", "0"], ["--layers", "8", "--stages", "9"]])
def test_stages_that_cannot_be_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "--stages: from 1 to the number of layers" in capsys.readouterr().err


# --- What a model delivers

LAYERS = 6
DECLARED = Run("declared", (1, 3, 5))
SHAPE = (len(PROMPT), HIDDEN)
_GENERATOR = numpy.random.default_rng(20261130)
FORMS_OF = {form: {layer: _GENERATOR.normal(size=SHAPE) for layer in range(LAYERS + 1)} for form in FORMS}
TRUTH = Reference(FORMS_OF, FORMS_OF[NORMALISED][LAYERS])
RIGHT = [FORMS_OF[STREAM][id_] for id_ in DECLARED.ids]


class Delivers(Model):
    """A model that computes ``plain`` without taps, and with them gives ``final`` and ``taps``."""

    def __init__(self, taps: Sequence[Any], final: Any = TRUTH.final, plain: Any = TRUTH.final) -> None:  # noqa: ANN401
        self.taps, self.final, self.plain = list(taps), final, plain
        self.has_taps = False

    def declare(self, ids: Sequence[int]) -> None:
        self.has_taps = True

    def run(self) -> tuple[Any, list[Any]]:
        return taken_apart((self.final, self.taps) if self.has_taps else self.plain)


def fault_of(model: Model) -> tuple[str, str]:
    """Return the name and the message that the program gives for ``model``."""
    try:
        for taps, _ in check_model("Toy", model, [DECLARED], TRUTH):
            fault = name_fault(taps)
    except FaultError as error:
        return error.name, str(error)
    return fault.name, fault.detail


FAULTS: dict[str, tuple[Model, str, str]] = {
    "right": (Delivers(RIGHT), "matches", "3 of 3 taps"),
    "shifted": (Delivers([FORMS_OF[STREAM][id_ + 1] for id_ in DECLARED.ids]), "off by +1 layer", "tap 1"),
    "a tap too few": (Delivers(RIGHT[:2]), "taps lost", "Toy: 2 taps are delivered for the 3 ids 1, 3, 5"),
    "no taps": (Delivers([]), "taps lost", "Toy: 0 taps are delivered for the 3 ids"),
    "a tap twice": (Delivers([*RIGHT, RIGHT[0]]), "taps doubled", "Toy: 4 taps are delivered for the 3 ids 1, 3, 5"),
    "another output with taps": (
        Delivers(RIGHT, final=2 * TRUTH.final),
        "model changed",
        "Toy: capturing the taps 1, 3, 5 changes what the model itself computes",
    ),
    "another output without taps": (
        Delivers(RIGHT, plain=2 * TRUTH.final),
        "model differs",
        "Toy without taps differs from transformers by 1 (relative)",
    ),
    "a tap that is none": (
        Delivers([RIGHT[0], None, RIGHT[2]]),
        "misshapen output",
        "tap number 2 is NoneType, expected a tensor of shape (17, 64)",
    ),
    "a tap with rows of others": (
        Delivers([RIGHT[0], RIGHT[1][:-1], RIGHT[2]]),
        "misshapen output",
        "tap number 2 is a ndarray of shape (16, 64), expected",
    ),
    # numpy and torch would compare it with every row.
    "a tap with one row": (Delivers([RIGHT[0][:1], *RIGHT[1:]]), "misshapen output", "of shape (1, 64), expected"),
    "taps of another width": (
        Delivers([tap[:, :-1] for tap in RIGHT]),
        "misshapen output",
        "tap number 1 is a ndarray of shape (17, 63)",
    ),
    "a tensor in place of the taps": (
        Delivers(RIGHT, plain=(TRUTH.final, RIGHT[0])),
        "misshapen output",
        "a ndarray of shape (17, 64) is returned where the taps are expected",
    ),
    "no output": (Delivers(RIGHT, final=None), "misshapen output", "the model's own output is NoneType"),
    "more than an output and taps": (
        Delivers(RIGHT, plain=(TRUTH.final, RIGHT, [])),
        "misshapen output",
        "the model's own output is tuple",
    ),
}


@pytest.mark.parametrize(("model", "name", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_what_a_model_delivers_has_a_name(model: Model, name: str, message: str) -> None:
    found, said = fault_of(model)
    assert found == name
    assert message in said


# --- What a model raises

MODEL = "vllm/model_executor/models/deepseek_v2.py"
SEQUENCE = "def get(tensors, name):\n    return tensors[name]\n"
LAYER = "def call(layer):\n    return layer()\n"


def function(path: Path, name: str, **given: object) -> Any:  # noqa: ANN401
    """Return a function of the file at ``path``; ``given`` is what it imports."""
    return runpy.run_path(str(path), given)[name]


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def forward_of(root: Path, body: str, **given: object) -> Any:  # noqa: ANN401
    """Return the forward of a model. Its body may use ``get`` (vLLM's), ``call`` (torch's, of layers) and ``given``."""
    get = function(write(root, "vllm/sequence.py", SEQUENCE), "get")
    call = function(write(root, "torch/nn/modules/module.py", LAYER), "call")
    return function(write(root, MODEL, f"def forward(*inputs):\n    {body}\n"), "forward", get=get, call=call, **given)


RAISES = {
    # A tensor that no stage sent.
    "a missing slot": ("return get({}, 'aux_hidden_states_0')", "KeyError: 'aux_hidden_states_0'"),
    "in its own line": ("return None + 1", "TypeError: unsupported operand"),
    "a name that is not there": ("return taps", "NameError: name 'taps' is not defined"),
}


@pytest.mark.parametrize("has_taps", [False, True])
@pytest.mark.parametrize(("body", "message"), RAISES.values(), ids=RAISES.keys())
def test_what_the_models_own_code_raises_is_a_fault(tmp_path: Path, body: str, message: str, has_taps: bool) -> None:
    with pytest.raises(FaultError) as caught:
        called(forward_of(tmp_path, body), has_taps)
    assert meaning_of(caught.value)[0] == "raises"
    assert f"the model's code raises {message}" in str(caught.value)
    assert str(caught.value).endswith("(deepseek_v2.py:2)")


def test_a_layer_that_fails_with_taps_only_is_the_models_fault(tmp_path: Path) -> None:
    norm = function(write(tmp_path, "vllm/model_executor/layers/norm.py", "def norm():\n    1 / 0\n"), "norm")
    forward = forward_of(tmp_path, "return call(norm)", norm=norm)
    with pytest.raises(FaultError, match="the model's code raises ZeroDivisionError"):
        called(forward, True)
    # Without taps it may be this host's kernel.
    with pytest.raises(ZeroDivisionError) as caught:
        called(forward, False)
    assert meaning_of(caught.value) == ("", "it ended early with ZeroDivisionError: division by zero")


@pytest.mark.parametrize("kind", [MemoryError, NotImplementedError, type("OutOfMemoryError", (RuntimeError,), {})])
def test_what_the_host_lacks_is_no_fault(tmp_path: Path, kind: type[Exception]) -> None:
    def empty(*_: object) -> None:
        raise kind("no room")

    forward = forward_of(tmp_path, "return allocate()", allocate=empty)
    with pytest.raises(kind) as caught:
        called(forward, True)
    assert meaning_of(caught.value) == ("", f"it ended early with {kind.__name__}: no room")


def test_the_end_of_its_time_is_no_fault(tmp_path: Path) -> None:
    def over() -> None:
        raise NotRunError("its time was over")

    forward = forward_of(tmp_path, "return wait()", wait=over)
    with pytest.raises(NotRunError):
        called(forward, True)


def test_what_fails_before_the_model_is_no_fault() -> None:
    with pytest.raises(ZeroDivisionError):
        called(lambda: 1 // 0, True)


# --- What a model declares

INTERFACES = "vllm/model_executor/models/interfaces.py"
SUPPORTS = "def supports_eagle3(model):\n    return hasattr(model, 'set_aux_hidden_state_layers')\n"
UTILS = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
VERIFIES = """
def verify_supports_aux_hidden_states_over_pp(model, method):
    if not model.over_stages:
        raise ValueError(f"{type(model).__name__} does not support {method} with pipeline parallelism")
"""


class Plain:
    """A model without the interface."""


class Eagle3:
    """A model with it, which notes what is declared."""

    def __init__(self, *, over_stages: bool = False) -> None:
        self.over_stages = over_stages
        self.ids: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, ids: tuple[int, ...]) -> None:
        self.ids = ids


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory from which ``vllm`` is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, INTERFACES, SUPPORTS)
    yield tmp_path
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]


def refusal(model: object, stages: int) -> tuple[str, str]:
    with pytest.raises(FaultError) as caught:
        declare_taps(model, [1, 3], stages)
    return caught.value.name, str(caught.value)


def test_a_model_without_the_interface_is_named(vllm: Path) -> None:
    message = "Plain does not declare SupportsEagle3: the runner refuses it"
    assert refusal(Plain(), 1) == ("no interface", message)


def test_a_model_that_cannot_carry_taps_over_stages_is_named(vllm: Path) -> None:
    message = "this vLLM has no EAGLE-3 over pipeline stages: use one stage"
    assert refusal(Eagle3(), 2) == ("no pipeline stages", message)
    write(vllm, UTILS, VERIFIES)
    message = "Eagle3 does not support eagle3 with pipeline parallelism"
    assert refusal(Eagle3(), 2) == ("no pipeline stages", message)


@pytest.mark.parametrize(("model", "stages"), [(Eagle3(), 1), (Eagle3(over_stages=True), 2)])
def test_taps_are_declared_as_the_runner_does(vllm: Path, model: Eagle3, stages: int) -> None:
    write(vllm, UTILS, VERIFIES)
    declare_taps(model, [1, 3], stages)
    assert model.ids == (1, 3)
