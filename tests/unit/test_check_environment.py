# SPDX-License-Identifier: Apache-2.0
"""tests/locks/check_environment.py on small environments made here."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "locks/check_environment.py"
MODULES = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.kimi_k25",
    "vllm.model_executor.models.llama_eagle3",
)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with empty modules by the names that vLLM uses."""
    venv.create(tmp_path, with_pip=False, symlinks=True)
    for module in MODULES:
        path = site(tmp_path).joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def site(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3.*/site-packages")
    return found


def install(environment: Path, distribution: str, files: dict[str, str]) -> None:
    """Record files, given as path -> hash, as a distribution's."""
    record = site(environment) / f"{distribution}.dist-info/RECORD"
    record.parent.mkdir()
    lines = [f"{path},sha256={digest},1\n" for path, digest in files.items()]
    record.write_text("".join(lines) + f"{distribution}.dist-info/RECORD,,\n")


def check(environment: Path) -> tuple[int, list[str]]:
    result = subprocess.run(
        [sys.executable, str(PROGRAM), str(environment)], capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout.splitlines()


def test_a_clean_environment_has_no_problem(environment: Path) -> None:
    install(environment, "one-1.0", {"one/a.py": "aa"})
    install(environment, "two-1.0", {"two/a.py": "bb"})
    assert check(environment) == (0, [])


def test_two_owners_of_one_path_are_named(environment: Path) -> None:
    install(environment, "one-1.0", {"shared/a.py": "aa", "shared/b.py": "bb"})
    install(environment, "two-1.0", {"shared/a.py": "cc", "shared/../shared/b.py": "dd"})
    status, (problem,) = check(environment)
    assert status == 1
    assert "one-1.0 and two-1.0" in problem
    assert "shared/a.py (of 2)" in problem


def test_the_same_file_in_two_distributions_is_no_problem(environment: Path) -> None:
    install(environment, "one-1.0", {"shared/__init__.py": "aa"})
    install(environment, "two-1.0", {"shared/__init__.py": "aa"})
    assert check(environment) == (0, [])


def test_a_module_that_fails_to_import_is_named_with_the_reason(environment: Path) -> None:
    (site(environment) / "vllm/model_executor/models/kimi_k25.py").write_text(
        "raise AttributeError('no attribute x')\n"
    )
    assert check(environment) == (
        1,
        ["does not import: vllm.model_executor.models.kimi_k25: AttributeError: no attribute x"],
    )


def test_a_module_of_newer_releases_counts_where_it_is(environment: Path) -> None:
    (site(environment) / "vllm/model_executor/models/deepseek_eagle3.py").write_text("import absent_module\n")
    status, (problem,) = check(environment)
    assert status == 1
    assert "deepseek_eagle3" in problem
    assert "absent_module" in problem


def test_an_import_that_ends_the_process_is_a_problem(environment: Path) -> None:
    (site(environment) / "vllm/model_executor/models/deepseek_v2.py").write_text("import os; os._exit(7)\n")
    status, (problem,) = check(environment)
    assert status == 1
    assert "status 7" in problem


def test_a_folder_that_is_no_environment_is_refused(tmp_path: Path) -> None:
    status, (problem,) = check(tmp_path)
    assert status == 1
    assert str(tmp_path) in problem
