# SPDX-License-Identifier: Apache-2.0
"""A host's part of a replica over several hosts, as seen from the host: the head's, which answers, or another's.

roles/multi_node/files/aerie_node.py is what runs there; it tells systemd how far it is.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

# How the status of the unit begins once its host is a part of the replica.
JOINED = "joined "


def is_worker(settings: Mapping[str, str]) -> bool:
    """Say whether a service with these variables is another part than the head, so that no client asks it."""
    head = settings.get("AERIE_REPLICA_HOSTS", "").split(",")[0]
    return bool(head) and settings.get("VLLM_HOST_IP") != head


def has_joined(unit: str) -> bool:
    """Say whether the part that ``unit`` runs has joined its head and is there."""
    command = ["systemctl", "show", unit, "--property=ActiveState,StatusText"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return "ActiveState=active" in shown and any(line.startswith(f"StatusText={JOINED}") for line in shown)
