# SPDX-License-Identifier: Apache-2.0
"""The actions stage_files and wheelhouse in one real run of ansible-playbook, on a host that is this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_wheels import Index, make_wheel, pin, serve, sha256

ROOT = Path(__file__).parents[2]
HEADER = f"# python: {sys.version_info[0]}.{sys.version_info[1]}; platform: manylinux_2_31_x86_64; vllm: 0.33.0\n"


@dataclass
class Run:
    """What a playbook left: each task's result by its name, its output, and its directories."""

    root: Path
    results: dict[str, dict[str, Any]]
    output: str
    index: Index
    resumed_inode: int


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("actions")
    source = root / "source"
    source.mkdir()
    files = []
    for name in ("one.bin", "two.bin", "three.bin"):
        (source / name).write_bytes(name.encode() * 1000)
        files.append({"name": name, "path": str(source / name), "sha256": sha256(source / name)})
    wheels = [make_wheel(root / "index", *distribution) for distribution in (("one", "1.0"), ("vllm", "0.33.0"))]
    lock = root / "vllm-0.33.0.txt"
    lock.write_text(HEADER + "".join(pin(wheel) for wheel in wheels))
    bad_lock = root / "bad.txt"
    bad_lock.write_text(f"{HEADER}one>=1.0\n")
    # An earlier run brought one file before it was interrupted.
    incoming = root / "dest/.incoming"
    incoming.mkdir(parents=True)
    (incoming / "two.bin").write_bytes((source / "two.bin").read_bytes())
    cache = str(root / "cache/wheels")
    calls: list[tuple[str, dict[str, Any], bool]] = [
        ("stage_files", {"dest": f"{root}/dest", "files": files}, True),
        ("stage_files", {"dest": f"{root}/dest", "files": files}, False),
        ("stage_files", {"dest": f"{root}/dest", "files": files}, False),
        ("stage_files", {"dest": f"{root}/absent", "files": [{**files[0], "path": "/nowhere/one.bin"}]}, False),
        ("stage_files", {"dest": f"{root}/wrong", "files": [{**files[0], "sha256": "0" * 64}]}, False),
        ("wheelhouse", {"lock": str(lock), "path": cache}, True),
        ("wheelhouse", {"lock": str(lock), "path": cache}, False),
        ("wheelhouse", {"lock": str(lock), "path": cache, "only": ["one"]}, False),
        ("wheelhouse", {"lock": "/nowhere/vllm.txt", "path": cache}, False),
        ("wheelhouse", {"lock": str(bad_lock), "path": cache}, False),
    ]
    tasks: list[dict[str, Any]] = [
        {module: arguments, "check_mode": check_mode, "ignore_errors": True, "register": f"result_{number}"}
        for number, (module, arguments, check_mode) in enumerate(calls)
    ]
    results = "{{ [" + ", ".join(f"result_{number}" for number in range(len(calls))) + "] | to_json }}"
    tasks.append({"ansible.builtin.copy": {"content": results, "dest": f"{root}/results.json", "mode": "0600"}})
    play = {"hosts": "all", "gather_facts": False, "connection": "local", "tasks": tasks}
    (root / "play.yml").write_text(yaml.safe_dump([play]))
    inode = (incoming / "two.bin").stat().st_ino
    with serve(main=root / "index") as index:
        output = play_it(root, index)
    named = ["predicted", "staged", "again", "no source", "wrong digest"]
    named += ["wheels", "wheels again", "one wheel", "no lock", "bad lock"]
    found = json.loads((root / "results.json").read_text())
    return Run(root, dict(zip(named, found, strict=True)), output, index, inode)


def play_it(root: Path, index: Index) -> str:
    """Run the play as a user does, with pip asking ``index`` alone; return what was shown."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "ANSIBLE_"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{index.url}/main", "PIP_NO_CACHE_DIR": "1"}
    environment |= {
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_HOME": str(root / "ansible"),
    }
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "gpu-01,", str(root / "play.yml")]
    command += ["-e", f"ansible_python_interpreter={sys.executable}", "-e", f"ansible_remote_tmp={root}/tmp"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".sha256")}


def test_files_are_sent_once(run: Run) -> None:
    staged, again = run.results["staged"], run.results["again"]
    assert (staged["changed"], staged["missing"]) == (True, ["one.bin", "two.bin", "three.bin"])
    assert content(run.root / "dest") == content(run.root / "source")
    assert (again["changed"], again["missing"]) == (False, [])
    assert "gpu-01: sending file 1 of 2, 0 of 0 MB" in run.output


def test_check_mode_of_staging_predicts(run: Run) -> None:
    predicted, staged = run.results["predicted"], run.results["staged"]
    assert (predicted["changed"], predicted["missing"]) == (staged["changed"], staged["missing"])


def test_what_an_interrupted_run_sent_is_not_sent_again(run: Run) -> None:
    assert run.results["staged"]["unsent"] == ["one.bin", "three.bin"]
    assert (run.root / "dest/two.bin").stat().st_ino == run.resumed_inode


def test_a_file_that_the_control_node_lacks_is_named(run: Run) -> None:
    result = run.results["no source"]
    assert result["failed"] is True
    assert "/nowhere/one.bin: there is no such file on the control node to send" in result["msg"]
    assert not (run.root / "absent").exists()


def test_a_digest_that_is_not_the_files_is_refused(run: Run) -> None:
    result = run.results["wrong digest"]
    assert result["failed"] is True
    assert "one.bin arrived in" in result["msg"]
    assert list((run.root / "wrong").rglob("one.bin")) == []


def test_wheels_are_downloaded_once_and_shown(run: Run) -> None:
    # In check mode as well: the plan is made from them.
    first, again = run.results["wheels"], run.results["wheels again"]
    assert (first["changed"], again["changed"]) == (True, False)
    assert sorted(run.index.asked["main"]) == ["one", "vllm"]
    assert "wheelhouse: downloading one-1.0-py3-none-any.whl (1 of 2)" in run.output
    assert "wheelhouse: downloading vllm-0.33.0-py3-none-any.whl (2 of 2)" in run.output
    facts = ("files", "lock_sha256", "python", "vllm_version", "vllm_wheel")
    assert [again[fact] for fact in facts] == [first[fact] for fact in facts]


def test_the_facts_of_a_lock(run: Run) -> None:
    result = run.results["wheels again"]
    cache = run.root / "cache/wheels"
    assert result["lock_sha256"] == sha256(run.root / "vllm-0.33.0.txt")
    assert (result["python"], result["vllm_version"]) == (f"{sys.version_info[0]}.{sys.version_info[1]}", "0.33.0")
    assert result["vllm_wheel"] == str(cache / "vllm-0.33.0-py3-none-any.whl")
    assert [file["name"] for file in run.results["one wheel"]["files"]] == ["one-1.0-py3-none-any.whl"]
    assert run.results["one wheel"]["vllm_wheel"] == ""
    wheels = sorted(cache.glob("*.whl"))
    assert sorted(result["files"], key=lambda file: str(file["name"])) == [
        {"name": path.name, "path": str(path), "sha256": sha256(path), "size": path.stat().st_size} for path in wheels
    ]


def test_locks_that_cannot_be_used_are_named(run: Run) -> None:
    assert "/nowhere/vllm.txt: no such lock; the locks are in requirements/" in run.results["no lock"]["msg"]
    assert f"{run.root}/bad.txt: 'one>=1.0' is not" in run.results["bad lock"]["msg"]
    assert all(run.results[name]["failed"] for name in ("no lock", "bad lock"))
