# SPDX-License-Identifier: Apache-2.0
"""Tearing down asks first, and then leaves nothing. The last test of its hosts."""

from __future__ import annotations

from collections.abc import Callable

from scenario import Run, on_host

UNIT = "/etc/systemd/system/vllm.service"
LEFT = "ls -d /opt/aerie /etc/aerie /etc/systemd/system/vllm.service /var/lib/vllm /var/cache/vllm 2>/dev/null || true"


def test_teardown(playbook: Callable[..., Run]) -> None:
    assert "add -e confirm=yes" in playbook("playbooks/teardown.yml").messages
    assert len(on_host(LEFT).split()) == 5

    assert playbook("playbooks/teardown.yml", confirm="yes").messages == ""
    assert on_host(LEFT) == ""
    assert on_host("pgrep --full '[v]llm' || true") == ""
    assert on_host("getent passwd vllm || true") == ""

    # What is there now is of others.
    on_host(f"printf '[Service]\\nExecStart=sleep infinity\\n' | sudo tee {UNIT}; sudo systemctl start vllm")
    on_host("sudo useradd --system --home-dir /var/lib/vllm --create-home vllm")
    assert sum(playbook("playbooks/teardown.yml", confirm="yes").changed.values()) == 0
    assert on_host("systemctl is-active vllm; getent passwd vllm | cut -d: -f6") == "active\n/var/lib/vllm\n"
