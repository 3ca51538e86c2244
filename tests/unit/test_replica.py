# SPDX-License-Identifier: Apache-2.0
"""A part of a replica that no client asks: whether it is ready is what it tells systemd."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ansible.module_utils.aerie.readiness import Gate, Status
from ansible.module_utils.aerie.replica import has_joined, is_worker
from ansible.module_utils.aerie.serving import is_healthy

HEAD = {"AERIE_REPLICA_HOSTS": "10.0.0.1,10.0.0.2", "VLLM_HOST_IP": "10.0.0.1"}
WORKER = {**HEAD, "VLLM_HOST_IP": "10.0.0.2"}
# Nobody listens there.
NOWHERE = {"AERIE_HOST": "127.0.0.1", "AERIE_PORT": "9"}


def test_the_first_host_is_the_head_and_one_host_is_no_worker() -> None:
    assert is_worker(WORKER)
    assert not is_worker(HEAD)
    assert not is_worker({"VLLM_HOST_IP": "10.0.0.2"})


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with what systemctl shows."""
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\n[ "$1 $2" = "show vllm.service" ] && cat {tmp_path}/shown\n')
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "shown"


@pytest.mark.parametrize(
    ("shown", "healthy"),
    [
        ("ActiveState=active\nStatusText=joined 10.0.0.1\n", True),
        ("ActiveState=active\nStatusText=waits for the head at 10.0.0.1\n", False),
        ("ActiveState=active\nStatusText=\n", False),
        ("ActiveState=deactivating\nStatusText=joined 10.0.0.1\n", False),
    ],
)
def test_a_worker_is_healthy_once_it_has_joined(told: Path, shown: str, healthy: bool) -> None:
    told.write_text(shown)
    assert has_joined("vllm.service") is healthy
    settings = {"/etc/aerie/vllm.env": "".join(f"{name}={value}\n" for name, value in {**WORKER, **NOWHERE}.items())}
    assert is_healthy(settings) is healthy
    # Of a head its status says nothing.
    settings = {"/etc/aerie/vllm.env": "".join(f"{name}={value}\n" for name, value in {**HEAD, **NOWHERE}.items())}
    assert not is_healthy(settings)


def look(status_text: str) -> Status:
    shown = (
        "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=1\nInvocationID=0a\n"
        f"ExecMainStartTimestampMonotonic={time.monotonic_ns() // 1000}\nStatusText={status_text}\n"
    )

    def run(command: list[str]) -> str:
        return shown if command[0] == "systemctl" else ""

    return Gate("h2", "vllm.service", "http://127.0.0.1:9", "m", True, None, run).watch("", 0.0)


def test_the_gate_passes_a_worker_that_has_joined() -> None:
    assert look("joined 10.0.0.1").ready
    waiting = look("waits for the head at 10.0.0.1")
    assert not waiting.ready and waiting.fault is None
    # A service alone tells nothing, and is asked.
    assert not look("").ready
