# SPDX-License-Identifier: Apache-2.0
"""`make support` on released wheels: what it prints, what it leaves behind, and its exit status."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patchset import plan_set
from ansible.module_utils.aerie.wheel import package_of_wheel

ROOT = Path(__file__).parents[2]
MODEL = "model_executor/models/deepseek_v2.py"


def support(*arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "support.py"), *arguments]
    environment = {**os.environ, **({"AERIE_CACHE": str(cache)} if cache else {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment)


def made_up(cache: Path, wheel: Path, version: str, model: bytes) -> None:
    """Put a release into ``cache`` that is that of ``wheel`` with another number and another DeepSeek model."""
    folder = cache / "partial-wheels"
    folder.mkdir(parents=True)
    digest = base64.urlsafe_b64encode(hashlib.sha256(model).digest()).decode().rstrip("=")
    rows = re.compile(rf"^vllm/{re.escape(MODEL)},.*$".encode(), re.MULTILINE)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(folder / f"vllm-{version}-py3-none-any.whl", "w") as new:
        for name in old.namelist():
            data = model if name == f"vllm/{MODEL}" else old.read(name)
            if name.endswith(".dist-info/RECORD"):
                data = rows.sub(f"vllm/{MODEL},sha256={digest},{len(model)}".encode(), data)
            if name.endswith(".dist-info/METADATA"):
                data = re.sub(rb"^Version: .*$", f"Version: {version}".encode(), data, count=1, flags=re.MULTILINE)
            new.writestr(name, data)


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


@pytest.mark.parametrize(
    ("old", "new", "state", "ends"),
    [
        pytest.param(
            b"self.collect_remote_aux_hidden_states(intermediate_tensors)",
            b"[]",
            "native",
            r"pipeline_parallel: not supported, its own code fails the symbolic check: (\d+ of \d+ .*)\n"
            r"(.*\n)*Not proved: eagle3-pp: \1\n",
            id="its own code fails over stages",
        ),
        pytest.param(
            b"aux_hidden_state = hidden_states + residual",
            b"aux_hidden_state = hidden_states",
            "refused",
            r"Aerie refuses this release: (.*; )?eagle3-pp is refused for vLLM 0\.34\.0, which says that it has it .*: "
            r"its own code fails the symbolic check: .* first failure: pipeline size 1 .*\n",
            id="its own code fails on one stage",
        ),
        pytest.param(
            b"class DeepseekV2Model(",
            b"class Renamed(",
            "refused",
            "Aerie refuses this release: .*\n",
            id="no edit fits",
        ),
    ],
)
def test_a_release_that_is_not_proved_or_refused_is_named_with_a_failing_exit(
    tmp_path: Path,
    wheel_of: Callable[[str, str], Path],
    rendered: Callable[[str, str], dict[str, Any]],
    old: bytes,
    new: bytes,
    state: str,
    ends: str,
) -> None:
    wheel = wheel_of("vllm", "0.33.0")
    planned = plan_set(package_of_wheel(wheel), rendered("eagle3-pp", "0.33.0"), [61])
    (model,) = [file.patched for file in planned.files if file.path == MODEL]
    assert model.count(old) == 1
    made_up(tmp_path, wheel, "0.34.0", model.replace(old, new))
    run = support("0.34.0", cache=tmp_path)
    assert (run.returncode, run.stderr) == (1, "")
    assert run.stdout.startswith("vllm 0.34.0, from vllm-0.34.0-py3-none-any.whl\n")
    assert cells(run, "eagle3-pp")[1] == state
    assert re.search(rf"^{ends}\Z", run.stdout, re.MULTILINE)
    assert "Every proof holds." not in run.stdout


def test_a_number_of_layers_that_proves_nothing_is_no_argument() -> None:
    run = support("0.33.0", "--layers", "61", "0")
    assert run.returncode == 2
    assert "--layers: numbers of layers begin at 1" in run.stderr


def test_a_version_that_was_never_released_fails_with_a_sentence() -> None:
    run = support("0.0.99")
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("support: uv finds no wheel of vllm 0.0.99: check the version")
