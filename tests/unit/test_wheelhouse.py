# SPDX-License-Identifier: Apache-2.0
"""A wheelhouse on the control node, filled by the real pip from a directory or from indexes on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from ansible.module_utils.aerie.lockfile import Lock, parse_lock
from ansible.module_utils.aerie.wheelhouse import WheelhouseError, download, find
from tiny_wheels import make_wheel, pin, serve, sha256

HEADER = f"# python: {sys.version_info[0]}.{sys.version_info[1]}; platform: manylinux_2_31_x86_64\n"
NOWHERE = "0" * 64


@pytest.fixture(autouse=True)
def pip_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip without this machine's configuration, and with no index unless a test names one."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


def lock_of(*lines: str) -> Lock:
    return parse_lock(HEADER + "".join(lines), "x.txt")


def fetch(lock: Lock, directory: Path) -> None:
    """Download what ``find`` misses."""
    download(lock, find(lock, directory)[1], directory)


# ----------------------------------------------------------------------------------------------------------------- find


def test_the_files_of_a_lock_are_found_by_their_digests(tmp_path: Path) -> None:
    one = make_wheel(tmp_path, "one", "1.0")
    two = make_wheel(tmp_path, "two", "2.0")
    make_wheel(tmp_path, "one", "1.1")
    make_wheel(tmp_path, "unrelated", "1.0")
    (tmp_path / "no-wheel.txt").touch()
    (tmp_path / "nodash.whl").touch()
    lock = lock_of(pin(one), pin(two), f"three==3.0 --hash=sha256:{NOWHERE}\n")
    files, missing = find(lock, tmp_path)
    assert [file.as_dict() for file in files] == [
        {"path": str(wheel), "name": wheel.name, "sha256": sha256(wheel), "size": wheel.stat().st_size}
        for wheel in (one, two)
    ]
    assert [requirement.key for requirement in missing] == ["three==3.0"]


def test_a_file_with_other_bytes_is_missing(tmp_path: Path) -> None:
    one = make_wheel(tmp_path, "one", "1.0")
    lock = lock_of(pin(one))
    one.write_bytes(one.read_bytes()[:-1])
    assert (find(lock, tmp_path)[0], [entry.key for entry in find(lock, tmp_path)[1]]) == ([], ["one==1.0"])


def test_of_two_files_for_a_requirement_one_with_a_pinned_digest_is_taken(tmp_path: Path) -> None:
    first = make_wheel(tmp_path, "one", "1.0", tag="py2-none-any")
    second = make_wheel(tmp_path, "one", "1.0", tag="py3-none-any")
    (both,) = find(lock_of(pin(first, second)), tmp_path)[0]
    assert both.path == str(first)
    (only,) = find(lock_of(pin(second)), tmp_path)[0]
    assert (only.path, only.sha256) == (str(second), sha256(second))


def test_an_empty_or_missing_wheelhouse_has_nothing(tmp_path: Path) -> None:
    files, missing = find(lock_of(f"one==1.0 --hash=sha256:{NOWHERE}\n"), tmp_path / "new/wheels")
    assert (files, [entry.key for entry in missing]) == ([], ["one==1.0"])


# ------------------------------------------------------------------------------------------------------------- download


def test_what_is_missing_or_damaged_is_downloaded_for_the_locks_python_and_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, wheels = tmp_path / "source", tmp_path / "new/wheels"
    machine = make_wheel(source, "one", "1.0", tag="cp313-cp313-manylinux_2_28_aarch64")
    make_wheel(source, "one", "1.0", tag="cp313-cp313-manylinux_2_99_aarch64")
    two = make_wheel(source, "two", "2.0")
    lock = parse_lock("# python: 3.13; platform: manylinux_2_31_aarch64\n" + pin(machine) + pin(two), "x.txt")
    make_wheel(wheels, "two", "2.0").write_bytes(b"damaged")
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    fetch(lock, wheels)
    files, missing = find(lock, wheels)
    assert ([file.name for file in files], missing) == ([machine.name, two.name], [])
    assert {path.name for path in wheels.glob("*.whl")} == {machine.name, two.name}


def test_a_distribution_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    lock = lock_of(*(f"{name}==9.9 --hash=sha256:{NOWHERE}\n" for name in ("ghost", "ghoul", "spook", "spirit")))
    with pytest.raises(WheelhouseError) as caught:
        fetch(lock, tmp_path)
    message = str(caught.value)
    assert message.startswith("cannot download ghost==9.9, ghoul==9.9, spook==9.9, ...: ")
    assert "No matching distribution found for ghost==9.9" in message
    assert "from versions" not in message


def test_a_digest_that_does_not_match_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "source", "one", "1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "source"))
    with pytest.raises(WheelhouseError, match=r"^cannot download one==1\.0: .*DO NOT MATCH THE HASHES"):
        fetch(lock_of(f"one==1.0 --hash=sha256:{NOWHERE}\n"), tmp_path / "wheels")
    assert list((tmp_path / "wheels").glob("*.whl")) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no room left')", "no room left"),
        ("print('no room left'); raise SystemExit(1)", "no room left"),
        ("import os; os.kill(os.getpid(), 9)", "pip was killed"),
    ],
)
def test_a_pip_that_does_not_work_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "pip/__main__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WheelhouseError) as caught:
        fetch(lock_of(f"one==1.0 --hash=sha256:{NOWHERE}\n"), tmp_path / "wheels")
    assert str(caught.value) == f"cannot download one==1.0: {said}"


def test_the_fallback_index_is_asked_for_local_versions_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    (tmp_path / "main").mkdir()
    local = make_wheel(tmp_path / "local", "torch", "2.13.0+cpu")
    # The fallback index has it, but it is not where a plain version comes from.
    plain = make_wheel(tmp_path / "local", "plain", "1.0")
    lock = lock_of(pin(plain), pin(local))
    lines: list[str] = []
    with serve(main=tmp_path / "main", local=tmp_path / "local") as index:
        monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/main")
        fallback = f"{index.url}/local"
        with pytest.raises(WheelhouseError, match=r"^cannot download plain==1\.0: "):
            download(lock, lock.requirements, tmp_path / "wheels", fallback_index=fallback, progress=lines.append)
    assert {name: set(projects) for name, projects in index.asked.items()} == {
        "main": {"plain", "torch"},
        "local": {"torch"},
    }
    assert [file.name for file in find(lock, tmp_path / "wheels")[0]] == [local.name]
    assert f"torch==2.13.0+cpu is not on the configured index; asking {fallback}" in lines
    downloads = [line.split()[1].rpartition("/")[2] for line in lines if line.startswith("Downloading")]
    assert [unquote(name) for name in downloads] == [local.name]
