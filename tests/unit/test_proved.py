# SPDX-License-Identifier: Apache-2.0
"""What the numeric check found is asked for again only where the code, or the question, is another."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import proved
from modules import run_module

VERDICT = {"gate": "numeric", "verdict": "passed", "fault": "matches", "message": "130 taps hold.", "taps": []}
OPTIONS = {"layers": 8, "tap_ids": [2, 4], "every_id": True, "stages": 2, "partition": "5,3"}
PACKAGES = "lib/python3.12/site-packages"
# What environments share with the cache of packages.
SHARED = {
    "torch/a.py": "a = 1\n",
    "torch/b.so": "b",
    "vllm/_C.abi3.so": "c",
    "torch-2.0.dist-info/entry_points.txt": "",
}


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
        """Make an environment as uv does: what no installer writes anew is one file with that of all others."""
        packages = self.root / name / PACKAGES
        for path, text in {
            "vllm/models/kimi.py": "taps = []\n",
            "vllm-0.32.0.dist-info/RECORD": f"../../../bin/vllm,sha256={name},9\n",
            "torch-2.0.dist-info/uv_cache.json": name,
            "_virtualenv.py": "",
        }.items():
            (packages / path).parent.mkdir(parents=True, exist_ok=True)
            (packages / path).write_text(text)
        for path, text in SHARED.items():
            cached = self.root / "cache" / path
            if not cached.exists():
                cached.parent.mkdir(parents=True, exist_ok=True)
                cached.write_text(text)
            (packages / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(cached, packages / path)
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
    # Through the link that all environments and the cache have to it.
    "a shared file was edited": lambda _, packages: (packages / "torch/a.py").write_text("a = 2 \n"),
    "a library of vLLM is another": lambda _, packages: (packages / "vllm/_C.abi3.so").write_text("cc"),
    "a file that Python starts with was added": lambda _, packages: (packages / "sitecustomize.py").write_text(""),
    "one that is always there was edited": lambda _, packages: (packages / "_virtualenv.py").write_text("import x\n"),
    "a plugin of vLLM was added": lambda _, packages: (packages / "torch-2.0.dist-info/entry_points.txt").write_text(
        "x"
    ),
    "a module of no distribution": lambda _, packages: (packages / "torch/c.py").write_text(""),
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


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("driver/nvidia/version", "NVRM version: 570.86.15\n"),
        ("driver/nvidia/gpus/0000:17:00.0/information", "Model: NVIDIA H200\nIRQ: 17\n"),
        ("cpuinfo", "processor : 0\nflags : fpu avx512f\n"),
    ],
)
def test_another_machine_is_asked_again(
    environments: Environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, text: str
) -> None:
    proc = tmp_path / "proc"
    (proc / path).parent.mkdir(parents=True)
    monkeypatch.setattr(proved, "_PROC", proc)
    environments.make("one")
    environments.check("one")
    (proc / path).write_text(text)
    environments.check("one")
    # What changes from boot to boot makes no other machine.
    (proc / path).write_text(f"{text}cpu MHz : 2100\n".replace("IRQ: 17", "IRQ: 18"))
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


@pytest.mark.parametrize("text", ["", "[]", '{"evidence": 1}', "\x00", "no verdict", "a failure"])
def test_a_damaged_note_proves_nothing(environments: Environments, text: str) -> None:
    environments.make("one")
    environments.check("one")
    found = json.loads(environments.note("one").read_text())
    results = {"no verdict": {"message": "x"}, "a failure": {"message": "x", "verdict": "failed"}}
    if text in results:
        text = json.dumps({**found, "result": results[text]})
    environments.note("one").write_text(text)
    assert environments.check("one")["verdict"] == "passed"
    assert environments.runs() == 2


def test_without_a_note_it_is_run_each_time(environments: Environments) -> None:
    environments.make("one")
    assert "evidence" not in environments.check("one", note="")
    environments.check("one", note="")
    assert environments.runs() == 2
