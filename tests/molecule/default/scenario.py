# SPDX-License-Identifier: Apache-2.0
"""The scenario's hosts, looked at from outside, and how a playbook ended on them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
INVENTORY = Path(__file__).parent / "inventory"
STATE = Path(os.environ.get("AERIE_STATE", "/var/tmp/aerie"))


@dataclass(frozen=True)
class Run:
    """How a playbook ended: ``successful`` or ``failed``; the messages of failed tasks; changed tasks by host."""

    status: str
    messages: str
    changed: dict[str, int]


def on_host(command: str, host: str = "rot") -> str:
    """Return what ``command`` prints on a host, over SSH and without Ansible."""
    address = yaml.safe_load((INVENTORY / "hosts.yml").read_text())["inference"]["hosts"][host]["ansible_host"]
    known = f"UserKnownHostsFile={STATE}/known_hosts"
    ssh = ["ssh", "-i", str(STATE / "key"), "-o", known, f"ansible@{address}", command]
    return subprocess.run(ssh, capture_output=True, text=True, check=True).stdout
