# SPDX-License-Identifier: Apache-2.0
"""Whether a host's service runs a release, as its unit and its settings say, and answers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.aerie.endpoint import endpoint, environment, opener
from ansible.module_utils.aerie.release import Releases, running_service
from ansible.module_utils.aerie.replica import has_joined, is_worker

_HEALTH_S = 3.0
_RULES = ("/usr/sbin/nft", "list", "table", "inet", "aerie_replica")


class Fault(NamedTuple):
    """What is wrong with a service, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def service_faults(
    releases: Releases, identity: str, unit: Path, settings: Mapping[str, str | None]
) -> Iterator[Fault]:
    """Yield what is wrong with the service that is to run the release ``identity`` with these settings.

    ``settings`` are texts by the path of their file.
    """
    running = running_service(unit.name)
    if not running.pid:
        yield Fault(f"{unit.name} does not run", "run deploy.yml")
    elif running.release != identity:
        yield Fault(f"{unit.name} runs release {running.release or 'of another origin'}", "run deploy.yml")
    elif not running.has_settings(environment(settings)):
        yield Fault(f"{unit.name} runs with other settings", "run deploy.yml")
    elif not is_healthy(settings, unit.name):
        yield Fault(f"{unit.name} does not answer /health", f"see journalctl -u {unit.name}, or run deploy.yml")
    if running.pid and environment(settings).get("AERIE_REPLICA_HOSTS") and not is_guarded():
        yield Fault("others may connect to the replica's ports", "run nft -f /etc/aerie/replica.nft as root")
    if not releases.is_active(identity, unit):
        yield Fault(f"{unit} is not the unit of release {identity}", "run deploy.yml")


def is_guarded() -> bool:
    """Say whether the rules are loaded that keep others from a replica's ports."""
    return subprocess.run(_RULES, capture_output=True, check=False).returncode == 0


def is_healthy(settings: Mapping[str, str | None], unit: str = "vllm.service") -> bool:
    """Say whether the service with these settings answers /health, which it does once its engine is up.

    A part of a replica that no client asks is healthy once it has joined.
    """
    if is_worker(environment(settings)):
        return has_joined(unit)
    try:
        where = endpoint(settings)
        with opener(where.certificate).open(f"{where.url}/health", timeout=_HEALTH_S) as response:
            return bool(response.status == HTTPStatus.OK)
    except (OSError, ValueError):
        return False
