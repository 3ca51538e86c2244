# SPDX-License-Identifier: Apache-2.0
"""What the hosts of a replica must have alike: read from an environment, and compared by the role."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml
from modules import run_module
from test_inventories import ROOT

NAMES = {"vllm": "0.33.0", "torch": "2.13.0", "ray": "2.60.0", "nvidia_nccl_cu13": "2.28.9", "raymond": "1"}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Return an environment with a few distributions and a patched file."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    for name, version in NAMES.items():
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (packages / f"{name}-{version}.dist-info").mkdir()
        (packages / f"{name}-{version}.dist-info/METADATA").write_text(metadata)
    (packages / "vllm/models").mkdir(parents=True)
    (packages / "vllm/models/a.py").write_text("patched = True\n")
    return packages


def read(packages: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:  # noqa: ANN401
    python = str(packages.parents[2] / "bin/python")
    arguments = {"python": python, "package_dir": str(packages / "vllm"), "files": ["models/a.py"], **options}
    return run_module("replica_versions", arguments, capsys, check_mode=True)


def test_what_is_read(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read(environment, capsys)["versions"] == [
        "nvidia-nccl-cu13 2.28.9",
        f"python {'.'.join(map(str, sys.version_info[:3]))}",
        "ray 2.60.0",
        "torch 2.13.0",
        "vllm 0.33.0",
        f"vllm/models/a.py {hashlib.sha256(b'patched = True' + bytes([10])).hexdigest()}",
    ]


def test_what_cannot_be_read(environment: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert read(environment, capsys, python=str(tmp_path / "none"))["versions"] == []
    assert "b.py cannot be read (No such file" in read(environment, capsys, files=["b.py"])["msg"]
    result = read(environment, capsys, python="/bin/false")
    assert result["failed"] and result["msg"].startswith("/bin/false does not run (")
    assert result["msg"].endswith("remove its release and deploy again")


@pytest.mark.parametrize(
    ("other", "release", "words"),
    [
        (["python 3.12.3", "ray 2.60.0"], "1", ""),
        ([], "1", ""),
        (
            ["python 3.12.7", "ray 2.60.0"],
            "1",
            "h2 and h1 are one replica, and h2 has python 3.12.7 where h1 has python 3.12.3",
        ),
        (["python 3.12.3"], "1", "and h2 has less where h1 has ray 2.60.0"),
        (["python 3.12.3", "ray 2.60.0"], "2", "h2 and h1 are one replica, and their releases would be 2 and 1"),
    ],
)
def test_a_difference_between_hosts_is_named(other: list[str], release: str, words: str, tmp_path: Path) -> None:
    tasks = yaml.safe_load((ROOT / "roles/multi_node/tasks/alike.yml").read_text())
    compare = [task for task in tasks if "replica_versions" not in task]
    hosts: dict[str, Any] = {
        name: {
            "multi_node_installed": {"versions": versions},
            "multi_node_is_worker": name == "h2",
            "vllm_service_release": {"id": identity, "path": f"/opt/aerie/releases/{identity}"},
        }
        for name, versions, identity in (("h1", ["python 3.12.3", "ray 2.60.0"], "1"), ("h2", other, release))
    }
    shared = {"multi_node_hosts": ["h1", "h2"]}
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts, "vars": shared}}))
    play = {"hosts": "all", "gather_facts": False, "tasks": compare}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [str(program), "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode == 0) == (not words), result.stdout + result.stderr
    assert words in " ".join(result.stdout.split())
