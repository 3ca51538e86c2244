# SPDX-License-Identifier: Apache-2.0
"""The program of the numeric check where it needs neither torch nor vLLM: its stages, and what it says of exceptions.

With them it runs in the scenarios `default` (one stage) and `multi_host` (two stages).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.numeric_check import (
    FaultError,
    NotRunError,
    Place,
    earlier_stages,
    meaning_of,
    parse,
    verdict_of,
)

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
