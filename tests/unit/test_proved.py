# SPDX-License-Identifier: Apache-2.0
"""What the numeric check found is asked for again only where the code, or the question, is another."""

from __future__ import annotations

import getpass
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import proved
from modules import run_module

VERDICT = {"gate": "numeric", "verdict": "passed", "fault": "matches", "message": "130 taps hold.", "taps": []}
OPTIONS = {"layers": 8, "tap_ids": [2, 4], "every_id": True, "stages": 2, "partition": "5,3"}
PACKAGES = "lib/python3.12/site-packages"


class Environments:
    """Environments of releases, with an interpreter that counts how often the check was run, and says ``verdict``."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self._capsys = capsys
        self.verdict: dict[str, Any] = VERDICT
        self.interpreter = root / "python3.12"
        self.interpreter.write_text(f"#!/bin/sh\necho >> {root}/runs\ncat {root}/verdict\n")
        self.interpreter.chmod(0o755)

    def make(self, name: str) -> Path:
        packages = self.root / name / PACKAGES
        for path, text in {
            "vllm/models/kimi.py": "taps = []\n",
            "vllm-0.32.0.dist-info/RECORD": f"vllm/models/kimi.py,sha256=abc,10\n../../../bin/vllm,sha256={name},9\n",
            "torch-2.0.dist-info/RECORD": f"torch/a.so,sha256=def,10\ntorch-2.0.dist-info/uv_cache.json,{name},1\n",
        }.items():
            (packages / path).parent.mkdir(parents=True, exist_ok=True)
            (packages / path).write_text(text)
        (self.root / name / "bin").mkdir()
        (self.root / name / "bin/python").symlink_to(self.interpreter)
        return packages

    def check(self, name: str, check_mode: bool = False, **other: object) -> dict[str, Any]:
        (self.root / "verdict").write_text(json.dumps(self.verdict))
        arguments = {
            **{"level": "numeric", "python": str(self.root / name / "bin/python"), "user": getpass.getuser()},
            **{"tools": str(self.root / "tools"), "note": str(self.note(name)), **OPTIONS, **other},
        }
        return run_module("hidden_state_check", arguments, self._capsys, check_mode)

    def note(self, name: str) -> Path:
        return self.root / "proved" / f"{name}.json"

    def runs(self) -> int:
        counted = self.root / "runs"
        return len(counted.read_text().splitlines()) if counted.exists() else 0


@pytest.fixture
def environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Environments:
    return Environments(tmp_path, capsys)


def test_a_release_of_the_same_code_is_not_checked_again(environments: Environments) -> None:
    environments.make("one")
    environments.make("two")
    first = environments.check("one")
    second = environments.check("two", threads=4, budget_s=7, device="1")
    assert (first["message"], first["verdict"], environments.runs()) == (VERDICT["message"], "passed", 1)
    assert second["message"].startswith(f"{VERDICT['message']} Found with release one at 20")
    assert {name: second[name] for name in VERDICT.keys() - {"message"}} == {
        name: VERDICT[name] for name in VERDICT.keys() - {"message"}
    }
    # Its own note outlives that of the release that was checked.
    environments.note("one").unlink()
    third = environments.check("two")
    assert (third["message"], environments.runs()) == (second["message"], 1)


OTHER_CODE: dict[str, Callable[[Environments, Path], object]] = {
    "a file of vLLM was patched": lambda _, packages: (packages / "vllm/models/kimi.py").write_text("taps = [1]\n"),
    "a file of vLLM was added": lambda _, packages: (packages / "vllm/plugin.py").write_text(""),
    "another distribution": lambda _, packages: (packages / "torch-2.0.dist-info/RECORD").write_text("torch/b.so,,\n"),
    "one distribution more": lambda _, packages: shutil.copytree(
        packages / "torch-2.0.dist-info", packages / "plugin-1.0.dist-info"
    ),
    "another interpreter": lambda environments, _: environments.interpreter.write_text(
        environments.interpreter.read_text() + "\n"
    ),
}


@pytest.mark.parametrize("change", OTHER_CODE.values(), ids=OTHER_CODE.keys())
def test_other_code_is_checked(environments: Environments, change: Callable[[Environments, Path], object]) -> None:
    environments.make("one")
    environments.check("one")
    change(environments, environments.make("two"))
    assert environments.check("two")["message"] == VERDICT["message"]
    assert environments.runs() == 2


@pytest.mark.parametrize(
    "other", [{"layers": 9}, {"tap_ids": [2, 5]}, {"every_id": False}, {"stages": 4}, {"partition": "4,4"}], ids=str
)
def test_another_question_is_asked(environments: Environments, other: dict[str, Any]) -> None:
    environments.make("one")
    environments.check("one")
    environments.check("one", **other)
    assert environments.runs() == 2


def test_another_driver_of_the_gpus_is_other_code(
    environments: Environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments.make("one")
    environments.check("one")
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 570.86.15\n")
    monkeypatch.setattr(proved, "_DRIVER", driver)
    environments.check("one")
    environments.check("one")
    assert environments.runs() == 2


@pytest.mark.parametrize("verdict", ["failed", "not_run"])
def test_what_did_not_pass_is_not_kept(environments: Environments, verdict: str) -> None:
    environments.make("one")
    environments.verdict = {**VERDICT, "verdict": verdict}
    for _ in range(2):
        assert environments.check("one")["verdict"] == verdict
    assert environments.runs() == 2
    assert not environments.note("one").exists()


def test_check_mode_reads_notes_and_writes_none(environments: Environments) -> None:
    environments.make("one")
    environments.make("two")
    environments.check("one", check_mode=True)
    assert not environments.note("one").parent.exists()
    environments.check("one")
    assert environments.check("two", check_mode=True)["verdict"] == "passed"
    # A program of check mode lies elsewhere, and is the same.
    assert environments.runs() == 2
    assert not environments.note("two").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"evidence": 1}', "\x00"])
def test_a_damaged_note_proves_nothing(environments: Environments, text: str) -> None:
    environments.make("one")
    environments.check("one")
    environments.note("one").write_text(text)
    assert environments.check("one")["verdict"] == "passed"
    assert environments.runs() == 2


def test_without_a_note_it_is_run_each_time(environments: Environments) -> None:
    environments.make("one")
    assert "evidence" not in environments.check("one", note="")
    environments.check("one", note="")
    assert environments.runs() == 2
