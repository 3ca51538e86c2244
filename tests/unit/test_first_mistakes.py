# SPDX-License-Identifier: Apache-2.0
"""What a new user does wrong with a copy of the sample inventory, as the playbooks answer it: no host is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SERVICE = "group_vars/inference/service.yml"
VAULT = "group_vars/inference/vault.yml"


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """Return a copy of the sample whose two hosts refuse every connection, with a key and a drafter."""
    copy = tmp_path / "production"
    shutil.copytree(ROOT / "inventory/sample", copy)
    hosts = {name: {"ansible_host": f"127.0.0.{index}", "ansible_port": 1} for index, name in enumerate("ab", start=2)}
    (copy / "hosts.yml").write_text(yaml.safe_dump({"inference": {"children": {"h200": {"hosts": hosts}}}}))
    (copy / VAULT).write_text("vault_operations_key: sk-0123456789abcdef\n")
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    change(copy / SERVICE, drafter_path=str(drafter))
    return copy


def change(path: Path, **variables: str | None) -> None:
    """Set variables of a file; those that are None are left out."""
    now = {**yaml.safe_load(path.read_text()), **variables}
    path.write_text(yaml.safe_dump({name: value for name, value in now.items() if value is not None}))


def play(playbook: str, inventory: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit status, and what was said without the breaks of its lines."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), playbook, "-i", str(inventory), *arguments]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    environment.pop("ANSIBLE_VAULT_PASSWORD_FILE", None)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return run.returncode, " ".join((run.stdout + run.stderr).split())


def test_every_host_that_cannot_be_reached_is_in_one_table(inventory: Path) -> None:
    status, said = play("deploy.yml", inventory, "--check")
    assert status != 0 and "Nothing was changed. Mend these and run again:" in said
    for name, address in {"a": "127.0.0.2", "b": "127.0.0.3"}.items():
        assert f"{name} problem" in said and address in said
    assert "Nothing is to be done" not in said


def test_all_that_an_inventory_lacks_is_named_at_once(inventory: Path) -> None:
    (inventory / VAULT).unlink()
    change(inventory / SERVICE, ml_env_lock=None, target_model_path="", drafter_path=None)
    status, said = play("deploy.yml", inventory)
    assert status != 0 and "Nothing was changed." in said
    for name in ("ml_env_lock", "target_model_path", "drafter_path"):
        assert f"{name} of a, b is not set: inventory/sample shows what it is." in said
    assert "vllm_service_api_keys of a, b cannot be read, 'vault_operations_key' is undefined: define it" in said


def test_a_lock_that_there_is_not(inventory: Path) -> None:
    change(inventory / SERVICE, ml_env_lock="vllm-0.34.0-cu130-py312")
    status, said = play("deploy.yml", inventory, "--check")
    assert status != 0 and "ml_env_lock is vllm-0.34.0-cu130-py312, and there is no" in said
    assert "vllm-0.33.0-cu130-py312" in said.partition("take one of ")[2]


def test_a_group_of_another_name(inventory: Path) -> None:
    text = (inventory / "hosts.yml").read_text()
    (inventory / "hosts.yml").write_text(text.replace("inference:", "inferences:"))
    status, said = play("deploy.yml", inventory)
    assert status != 0 and "No host is in the group `inference`, to which Aerie deploys" in said


def test_a_rollback_to_an_empty_variable_of_the_shell(inventory: Path) -> None:
    status, said = play("rollback.yml", inventory, "-e", "to=")
    assert status != 0 and "Say what to roll back to: -e to=previous" in said
