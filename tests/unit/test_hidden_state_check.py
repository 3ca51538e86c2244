# SPDX-License-Identifier: Apache-2.0
"""hidden_state_check: the symbolic level on an installed package, and what the numeric level makes of its program."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import toy_vllm
from ansible.module_utils.aerie import hidden_state_gates
from ansible.module_utils.aerie.tap_faults import NORMALISED, RESIDUAL, STREAM, UPDATE, Held, name_fault
from modules import run_module
from patched_host import Host, plan_of

Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    return lambda level, check_mode=False, **arguments: run_module(
        "hidden_state_check", {"level": level, **arguments}, capsys, check_mode
    )


# --- Names of faults

RIGHT = [Held(id_, STREAM, id_) for id_ in (2, 4, 6)]


@pytest.mark.parametrize(
    ("taps", "name"),
    [
        (RIGHT, "matches"),
        ([Held(0, STREAM, 0), *RIGHT], "matches"),
        ([Held(id_, STREAM, id_ + 1) for id_ in (2, 4, 6)], "off by +1 layer"),
        ([Held(id_, STREAM, id_ - 1) for id_ in (2, 4, 6)], "off by -1 layer"),
        ([Held(id_, STREAM, id_ + 2) for id_ in (2, 4, 6)], "off by +2 layers"),
        ([Held(2, STREAM, 6), Held(4, STREAM, 4), Held(6, STREAM, 2)], "taps permuted"),
        ([Held(2, STREAM, 4), Held(4, STREAM, 6), Held(6, STREAM, 2)], "taps permuted"),
        # Id 0 has no residual, so it is right without one.
        ([Held(0, STREAM, 0), Held(2, UPDATE, 2), Held(4, UPDATE, 4)], "residual missing"),
        ([Held(id_, RESIDUAL, id_) for id_ in (2, 4)], "only the residual"),
        ([Held(id_, NORMALISED, id_) for id_ in (2, 4)], "normalised stream"),
        ([Held(id_, STREAM, id_, 0.5) for id_ in (2, 4)], "scaled by 0.5"),
        ([Held(2, STREAM, 2, 0.5), Held(4, STREAM, 4, 2.0)], "several faults"),
        ([Held(2, STREAM, 3), Held(4, UPDATE, 4)], "several faults"),
        ([Held(2, STREAM, 3), Held(4, STREAM, 6)], "several faults"),
        ([Held(2, UPDATE, 3), Held(4, UPDATE, 5)], "several faults"),
        ([Held(2, "", 0), Held(4, "", 0)], "other model"),
        ([Held(2, STREAM, 2), Held(4, "", 0)], "several faults"),
        ([Held(2, "", 0), Held(4, STREAM, 5)], "several faults"),
    ],
)
def test_a_fault_has_one_name(taps: Sequence[Held], name: str) -> None:
    assert name_fault(taps).name == name


def test_a_fault_says_which_taps_show_it() -> None:
    fault = name_fault([Held(2, STREAM, 2), *(Held(id_, UPDATE, id_) for id_ in range(3, 8))])
    assert fault.detail == (
        "5 of 6 taps are wrong: tap 3 holds stream 3 without the residual; tap 4 holds stream 4 without the residual; "
        "tap 5 holds stream 5 without the residual and 2 more"
    )


# --- Symbolic


def symbolic(check: Check, host: Host, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    return check(
        "symbolic", package_dir=str(host.package_dir), patch_sets=[toy_vllm.patch_set()], layers=8, **arguments
    )


def test_an_installed_patch_is_proved(check: Check, tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert symbolic(check, host)["verdict"] == "not_applicable"
    host.run(plan_of())
    result = symbolic(check, host, check_mode=True)
    assert (result["verdict"], result["cases"]["run"] > 50) == ("passed", True)
    assert result["cases"]["run"] == result["cases"]["passed"]
    assert result["first_failure"] == ""


@pytest.mark.parametrize("mode", ["enforce", "advisory"])
def test_a_tampered_patch_fails_with_its_first_case(check: Check, tmp_path: Path, mode: str) -> None:
    host = Host(tmp_path)
    host.run(plan_of())
    model = host.package_dir / toy_vllm.MODEL
    model.write_text(model.read_text().replace("self.gathered(hidden_states + residual", "self.gathered(hidden_states"))
    result = symbolic(check, host, mode=mode)
    assert (result["verdict"], result["failed"]) == ("failed", mode == "enforce")
    assert "pipeline size 1" in result["first_failure"]
    assert result["message"] in (result["msg"] if mode == "enforce" else str(result["warnings"]))
    assert result["cases"]["passed"] < result["cases"]["run"]


def test_a_directory_without_vllm_is_named(check: Check, tmp_path: Path) -> None:
    result = check("symbolic", package_dir=str(tmp_path / "vllm"), patch_sets=[])
    assert result["failed"]
    assert str(tmp_path / "vllm") in result["msg"]


# --- Numeric

VERDICT = {"gate": "numeric", "verdict": "passed", "fault": "matches", "message": "130 taps hold", "taps": []}


def interpreter(folder: Path, script: str) -> Path:
    """Write a stand-in for a release's interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def numeric(check: Check, folder: Path, script: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    options = {"tools": str(folder / "tools"), "user": getpass.getuser(), **arguments}
    return check("numeric", python=str(interpreter(folder, script)), **options)


def printing(verdict: dict[str, Any], status: int = 0) -> str:
    return f"echo noise; echo '{json.dumps(verdict)}'; exit {status}"


def test_a_verdict_is_passed_on_with_the_command(check: Check, tmp_path: Path) -> None:
    script = f"env > {tmp_path}/environment; {printing(VERDICT)}"
    options = {"layers": 8, "tap_ids": [2, 4], "every_id": True, "device": "1"}
    options |= {"stages": 2, "partition": "5,3"}
    result = numeric(check, tmp_path, script, **options)
    assert {name: result[name] for name in VERDICT} == VERDICT
    assert not result["failed"] and not result["changed"]
    program = result["argv"][result["argv"].index("-m") :]
    assert program == [
        *("-m", "ansible.module_utils.aerie.numeric_check", "--layers", "8", "--ids", "2,4", "--every-id"),
        *("--stages", "2", "--partition", "5,3", "--device", "1", "--threads", "1", "--budget-s", "60"),
    ]
    seen = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    assert seen.keys() - {"PWD", "OLDPWD", "SHLVL", "_"} == {"PATH", "LANG", "PYTHONPATH"}
    assert Path(seen["PYTHONPATH"]).parent == tmp_path / "tools"
    assert seen["PWD"] == "/"


def test_check_mode_runs_it_and_keeps_nothing(check: Check, tmp_path: Path) -> None:
    result = numeric(check, tmp_path, printing(VERDICT), check_mode=True)
    assert result["verdict"] == "passed"
    assert not (tmp_path / "tools").exists()


@pytest.mark.parametrize("mode", ["enforce", "advisory"])
def test_a_failure_fails_or_warns(check: Check, tmp_path: Path, mode: str) -> None:
    verdict = {**VERDICT, "verdict": "failed", "fault": "residual missing", "message": "residual missing: 3 of 3"}
    result = numeric(check, tmp_path, printing(verdict, 1), mode=mode)
    assert (result["fault"], result["failed"]) == ("residual missing", mode == "enforce")
    assert "residual missing: 3 of 3" in (result["msg"] if mode == "enforce" else str(result["warnings"]))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo no module named vllm >&2; exit 1",
            "it ended with status 1 and no verdict, and said no module named vllm",
        ),
        ("echo '[1]'", "its output is no verdict"),
        ('echo \'{"verdict": "well"}\'', "its output is no verdict"),
    ],
)
def test_without_a_verdict_it_was_not_run(check: Check, tmp_path: Path, script: str, reason: str) -> None:
    result = numeric(check, tmp_path, script)
    assert (result["verdict"], result["failed"]) == ("not_run", False)
    assert result["message"] == f"The numeric check was not run: {reason}."


def test_before_there_is_an_environment_it_was_not_run(check: Check, tmp_path: Path) -> None:
    result = check("numeric", check_mode=True, python=str(tmp_path / "venv/bin/python"))
    assert result["verdict"] == "not_run"
    assert f"there is no environment at {tmp_path}/venv/bin/python yet" in result["message"]


def test_after_its_time_nothing_of_it_is_left(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_state_gates, "_GRACE_S", 0.5)
    result = numeric(check, tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; wait", budget_s=0)
    assert result["message"] == "The numeric check was not run: it took longer than 0 s."
    child = int((tmp_path / "child").read_text())
    # Gone, or dead and not yet collected by whoever adopted it.
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_user_that_does_not_exist_yet_is_nobody() -> None:
    assert hidden_state_gates.account("no-such-user").pw_name == "nobody"
    assert hidden_state_gates.account(getpass.getuser()).pw_uid == os.getuid()


def test_the_program_itself_says_why_it_cannot_run_here() -> None:
    # This environment has no torch.
    command = [sys.executable, "-c", LOADER, "--budget-s", "60"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    verdict = json.loads(result.stdout)
    assert (verdict["gate"], verdict["verdict"]) == ("numeric", "not_run")
    assert "No module named 'torch'" in verdict["message"] or "MB of memory" in verdict["message"]


LOADER = f"""
import ansible.module_utils, sys
ansible.module_utils.__path__.append({str(Path(__file__).parents[2] / "module_utils")!r})
from ansible.module_utils.aerie.numeric_check import main
sys.exit(main())
"""
