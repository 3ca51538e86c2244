# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin with what the tests share: the hosts, their release, and a client that asks all the time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_stand_in
import yaml
from fleet import Machine, await_that, machines
from scenario import INVENTORY, ROOT, Run
from traffic import Traffic

REPLICAS = ("left", "right")


@pytest.fixture(scope="session")
def fleet() -> dict[str, Machine]:
    return machines(INVENTORY / "hosts.yml")


@pytest.fixture(scope="session")
def variables() -> dict[str, Any]:
    """Return what Ansible makes of the inventory for a replica."""
    command = [str(Path(sys.executable).with_name("ansible")), "left", "-i", str(INVENTORY), "-m", "debug"]
    command += ["-a", "msg={{ {'key': vllm_service_api_keys.values() | first, 'model': vllm_service_model_name} }}"]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return dict(yaml.safe_load(result.stdout.partition("=>")[2])["msg"])


@pytest.fixture(scope="session")
def traffic(variables: dict[str, Any]) -> Iterator[Traffic]:
    """Run a client through the gateway all the time."""
    address = yaml.safe_load((INVENTORY / "hosts.yml").read_text())["load_balancer"]["hosts"]["gate"]["ansible_host"]

    def expected(prompt: str, count: int) -> str:
        return "".join(vllm_stand_in.tokens(prompt, count))

    with Traffic((address, 8080), variables["key"], variables["model"], expected) as client:
        yield client


@pytest.fixture
def served(fleet: dict[str, Machine], playbook: Callable[..., Run]) -> str:
    """Return the release that both replicas serve, whatever the test before left."""
    for name in REPLICAS:
        await_that(fleet[name].is_quiet, f"{name} serves, and no switch is under way")
    release, other = (fleet[name].served().release for name in REPLICAS)
    if other != release:
        assert playbook("rollback.yml", to=release).messages == ""
    return release
