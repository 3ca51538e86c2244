# SPDX-License-Identifier: Apache-2.0
"""What the unit's last program says about memory, from trees in the shapes of both versions of cgroups."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from ansible.module_utils.aerie.vllm_log import root_cause

_FILE = Path(__file__).parents[2] / "roles" / "vllm_service" / "files" / "aerie_stopped.py"
_SPEC = importlib.util.spec_from_file_location("aerie_stopped", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
aerie_stopped = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(aerie_stopped)

V2 = "0::/system.slice/vllm.service\n"
HYBRID = (
    "12:pids:/system.slice/vllm.service\n4:memory:/system.slice/vllm.service\n"
    "1:name=systemd:/system.slice/vllm.service\n0::/system.slice/vllm.service\n"
)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(aerie_stopped, "_CGROUPS", tmp_path)
    return tmp_path


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / "system.slice" / "vllm.service" / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def said(groups: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    own = tmp_path / "own"
    own.write_text(groups)
    aerie_stopped.main(own)
    return capsys.readouterr().err


def test_a_limit_that_was_hit_is_named(cgroups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(cgroups, memory__events="low 0\nmax 41\noom 2\noom_kill 2\noom_group_kill 1\n", memory__max="2147483648\n")
    line = said(V2, tmp_path, capsys)
    assert "killed by the OOM killer (2 processes): its memory limit of 2.0 GiB (MemoryMax)" in line
    cause = root_cause(["Started vllm.service.", line.strip()])
    assert cause is not None
    assert cause.kind == "oom_killer"


def test_so_is_one_of_the_older_cgroups(cgroups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        cgroups / "memory",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        memory__limit_in_bytes="1073741824\n",
    )
    assert "(1 processes): its memory limit of 1.0 GiB" in said(HYBRID, tmp_path, capsys)


def test_a_host_without_a_limit_is_told_so(cgroups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(cgroups, memory__events="oom_kill 1\n", memory__max="max\n")
    assert "its memory limit (MemoryMax) or the host's memory is too small" in said(V2, tmp_path, capsys)


@pytest.mark.parametrize("events", ["oom 3\noom_kill 0\n", "oom_group_kill 7\n", "oom_kill many\n", ""])
def test_nothing_is_said_without_a_kill(
    cgroups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], events: str
) -> None:
    write(cgroups, memory__events=events)
    assert said(V2, tmp_path, capsys) == ""


def test_a_host_without_these_files_is_fine(cgroups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(HYBRID, tmp_path, capsys) == ""
