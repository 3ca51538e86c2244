# SPDX-License-Identifier: Apache-2.0
"""`make support` on released wheels: what it prints, what it leaves behind, and its exit status."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible.module_utils.aerie.files import sha256_bytes

ROOT = Path(__file__).parents[2]


def support(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "support.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def cells(run: subprocess.CompletedProcess[str], name: str) -> list[str]:
    """Return the words of the line that starts with ``name``."""
    (line,) = [line for line in run.stdout.splitlines() if line.split(" ")[0] == name]
    return line.split()


@pytest.mark.parametrize(
    ("version", "applies", "states"),
    [
        ("0.12.0", "eagle3-interface", ["missing patched", "missing patched", "missing missing"]),
        ("0.17.1", "eagle3-interface", ["missing patched", "missing patched", "missing missing"]),
        ("0.20.0", "eagle3-taps", ["native native", "missing patched", "missing missing"]),
        ("0.33.0", "eagle3-pp", ["native native", "missing patched", "missing patched"]),
    ],
)
def test_a_release_is_answered_and_proved_and_its_files_are_left(
    tmp_path: Path, version: str, applies: str, states: list[str]
) -> None:
    started = time.monotonic()
    run = support(version, "--out", str(tmp_path))
    assert time.monotonic() - started < 30
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"vllm {version}, from vllm-{version}-")
    assert run.stdout.endswith("\nEvery proof holds.\n")
    assert cells(run, applies)[1] == "applies"
    assert [" ".join(cells(run, name)[1:3]) for name in ("interface", "taps", "pipeline")] == states
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path)) for path in left} == {
        line.removeprefix("changed: ") for line in run.stdout.splitlines() if line.startswith("changed: ")
    }
    for path in left:
        assert f"after  {sha256_bytes(path.read_bytes())}" in run.stdout
        compile(path.read_bytes(), path, "exec")


def test_a_version_that_was_never_released_fails_with_a_sentence() -> None:
    run = support("0.0.99")
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("support: uv finds no wheel of vllm 0.0.99: check the version")
