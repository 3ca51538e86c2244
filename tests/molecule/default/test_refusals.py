# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused with the thing and the remedy, and the hosts stay as they are. Run by verify.yml."""

from __future__ import annotations

import json
import shutil
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from scenario import STATE, Run, on_host

# All that a deploy writes, and the process that serves.
SNAPSHOT = (
    "sudo find /opt/aerie /etc/aerie /etc/systemd/system -maxdepth 4 -printf '%p %i %s %T@\\n' | sort;"
    "systemctl show vllm.service --property=MainPID,InvocationID"
)


@pytest.fixture
def deploy(playbook: Callable[..., Run]) -> Iterator[Callable[..., str]]:
    """Return a function that deploys with extra variables and returns the failure's message; nothing may change."""
    before = on_host(SNAPSHOT)

    def run(inventories: tuple[Path, ...] = (), **variables: object) -> str:
        result: Run = playbook("deploy.yml", inventories, **variables)
        assert result.status == "failed"
        assert sum(result.changed.values()) == 0
        return result.messages

    yield run
    assert on_host(SNAPSHOT) == before


def test_misspelt_variable(deploy: Callable[..., str]) -> None:
    assert "'vllm_service_prot'" in (message := deploy(vllm_service_prot=9000))
    assert "did you mean 'vllm_service_port'?" in message


def test_two_hosts_with_one_address(deploy: Callable[..., str], tmp_path: Path) -> None:
    twin = tmp_path / "twin.yml"
    twin.write_text(yaml.safe_dump({"inference": {"hosts": {"twin": {"ansible_host": "10.77.1.11"}}}}))
    message = deploy(inventories=(twin,))
    assert "have the same address 10.77.1.11" in message


def test_no_python(deploy: Callable[..., str]) -> None:
    message = deploy(ml_env_python="/usr/bin/python3.9")
    assert "there is no Python at /usr/bin/python3.9: install Python 3.11, or set ml_env_python" in message


def test_python_of_another_release(deploy: Callable[..., str]) -> None:
    message = deploy(ml_env_lock="vllm-0.33.0-cu130-py312", ml_env_python="/usr/bin/python3.11")
    assert "/usr/bin/python3.11 is Python 3.11, but the lock is for 3.12" in message
    # All problems at once.
    assert "nvidia-smi does not answer" in message


def test_disk_too_small(deploy: Callable[..., str]) -> None:
    # Another lock: a release from the one that is there would share its files.
    message = deploy(ml_env_lock="vllm-0.33.0-cu130-py312", preflight_disk_mb=900_000_000)
    assert "/opt/aerie needs 900000000 MB for a release" in message
    assert "set aerie_root to a larger file system" in message


def test_port_in_use(deploy: Callable[..., str]) -> None:
    message = deploy(vllm_service_port=22)
    assert "port 22 is in use by sshd" in message
    assert "set vllm_service_port" in message


def test_no_target(deploy: Callable[..., str]) -> None:
    assert "/srv/models/nothing" in deploy(target_model_path="/srv/models/nothing")


def test_target_that_the_service_may_not_read(deploy: Callable[..., str]) -> None:
    on_host("sudo cp -r /srv/models/rot/target /srv/private && sudo chmod 0700 /srv/private")
    message = deploy(target_model_path="/srv/private")
    assert "/srv/private" in message
    assert "vllm" in message


def test_drafter_that_does_not_fit(deploy: Callable[..., str], tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(STATE / "models/rot/drafter", drafter)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "hidden_size": 96}))
    message = deploy(drafter_path=str(drafter))
    assert "96" in message
    assert "128" in message
    assert str(drafter / "config.json") in message
    assert "/srv/models/rot/target/config.json" in message


def test_drafter_whose_d2t_holds_target_ids(deploy: Callable[..., str], tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(STATE / "models/rot/drafter", drafter)
    tensors = load_file(drafter / "model.safetensors")
    save_file({**tensors, "d2t": tensors["d2t"] + np.arange(len(tensors["d2t"]))}, drafter / "model.safetensors")
    message = deploy(drafter_path=str(drafter))
    assert "d2t holds target ids, and vLLM adds the draft id to each" in message
    assert str(drafter / "model.safetensors") in message


def test_vllm_that_cannot_serve_eagle3_for_the_model(deploy: Callable[..., str], tmp_path: Path) -> None:
    name = "vllm-0.9.0-py3-none-any.whl"
    files = {"vllm/__init__.py": b"", "vllm/model_executor/models/deepseek_v2.py": b"class DeepseekV2Model: ...\n"}
    digests = {path: urlsafe_b64encode(sha256(data).digest()).decode().rstrip("=") for path, data in files.items()}
    record = "".join(f"{path},sha256={digest},{len(files[path])}\n" for path, digest in digests.items())
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
        wheel.writestr("vllm-0.9.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.0\n")
        wheel.writestr("vllm-0.9.0.dist-info/RECORD", record)
    digest = sha256((tmp_path / name).read_bytes()).hexdigest()
    lock = tmp_path / "old.txt"
    lock.write_text(
        f"# python: 3.11; platform: manylinux_2_31_x86_64; vllm: 0.9.0\nvllm==0.9.0 --hash=sha256:{digest}\n"
    )
    shutil.copy(next((STATE / "cache/wheels").glob("uv-*.whl")), tmp_path)
    message = deploy(ml_env_lock=str(lock), ml_env_wheel_cache=str(tmp_path))
    assert "vLLM 0.9.0 has no model KimiK25ForConditionalGeneration" in message
    assert "install a release that has it" in message
