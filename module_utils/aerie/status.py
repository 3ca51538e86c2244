# SPDX-License-Identifier: Apache-2.0
"""What one host serves, since when, how well, and whether it is what was deployed; from one look, writing nothing."""

from __future__ import annotations

import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.endpoint import endpoint, environment, opener
from ansible.module_utils.aerie.files import read_text
from ansible.module_utils.aerie.journal import Journal
from ansible.module_utils.aerie.preflight_certificate import check_certificate
from ansible.module_utils.aerie.probe import idle
from ansible.module_utils.aerie.release import ReleaseError, Releases, running_service
from ansible.module_utils.aerie.replica import is_worker
from ansible.module_utils.aerie.serving import is_healthy, service_faults
from ansible.module_utils.aerie.speculation import parse_speculation
from ansible.module_utils.aerie.unit import UNIT_PROPERTIES, parse_unit
from ansible.module_utils.aerie.verification import DIGEST_CACHE, quick_check

_METRICS_S = 5.0
_MAX_METRICS = 4 << 20
_WATCHDOG = "aerie-watchdog.timer"


def status(root: Path, unit: Path, settings: list[Path]) -> dict[str, Any]:
    """Return the state of the host; ``problems`` has all that somebody should look at, one sentence each."""
    releases, journal = Releases(root), Journal(root)
    current = releases.current()
    installed = {str(path): read_text(path) for path in settings}
    faults = [str(fault) for fault in service_faults(releases, current, unit, installed)]
    found: dict[str, Any] = {
        "release": current,
        "running": running_service(unit.name).release,
        "healthy": is_healthy(installed),
        "worker": is_worker(environment(installed)),
        **_record(releases, current),
        **_deployment(releases, current),
        **_service(unit.name),
        "acceptance": _acceptance(installed),
        "switch": _under_way(journal),
    }
    if not current:
        return {**found, "problems": ["no release serves here: run deploy.yml"]}
    switch = found["switch"]
    watched = [_WATCHDOG] if (unit.parent / _WATCHDOG).exists() else []
    certificate = environment(installed).get("AERIE_CERTIFICATE", "")
    ends = check_certificate(Path(certificate), datetime.now(timezone.utc)) if certificate else ()
    problems = [
        *quick_check(releases, current, DIGEST_CACHE, remember=False),
        *(f"{finding.message}: {finding.remedy}" for finding in ends),
        *(f"{fault}: run deploy.yml" for fault in idle(watched)),
        # Whoever switches stops the service, and starts it again.
        *([_told(switch)] if switch else faults),
    ]
    return {**found, "problems": problems}


def _record(releases: Releases, identity: str) -> dict[str, Any]:
    try:
        inputs = releases.record(identity)["inputs"]
    except ReleaseError:
        return {"vllm": "", "patched": [], "drafter": "", "serves": {}}
    return {
        "vllm": inputs.get("vllm", ""),
        "patched": sorted(inputs.get("patches", {})),
        "drafter": inputs.get("drafter", ""),
        "serves": inputs.get("serves", {}),
    }


def _deployment(releases: Releases, identity: str) -> dict[str, str]:
    """Which deployment brought the current release, and when."""
    for entry in reversed(releases.ledger()):
        if entry.get("action") == "activate" and entry["to"] == identity:
            return {"deployment": entry["deployment"], "deployed": entry["time"]}
    return {"deployment": "", "deployed": ""}


def _service(unit: str) -> dict[str, Any]:
    command = ["systemctl", "show", unit, f"--property={','.join(UNIT_PROPERTIES)}"]
    state = parse_unit(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    runs = state.active == "active" and state.started_at is not None
    return {
        "service": state.active or "unknown",
        "uptime_s": round(time.monotonic() - (state.started_at or 0.0)) if runs else None,
        "restarts": state.restarts,
    }


def _acceptance(settings: dict[str, str | None]) -> dict[str, Any] | None:
    """Return what all traffic since the service's start moved; None without speculation, or without an answer."""
    try:
        where = endpoint(settings)
        with opener(where.certificate).open(f"{where.url}/metrics", timeout=_METRICS_S) as response:
            counters = parse_speculation(response.read(_MAX_METRICS).decode(errors="replace"))
    except (OSError, ValueError):
        return None
    if counters is None:
        return None
    length = round(1 + counters.accepted_tokens / counters.drafts, 2) if counters.drafts else None
    return {"drafts": counters.drafts, "accepted_tokens": counters.accepted_tokens, "length": length}


def _under_way(journal: Journal) -> dict[str, str] | None:
    if not journal.load():
        return None
    state = journal.state
    facts = {name: str(state[name]) for name in ("deployment", "who", "started", "phase")}
    return {**facts, "to": state["to"]["id"]}


def _told(switch: dict[str, str]) -> str:
    return f"a switch to {switch['to']} is under way (deployment {switch['deployment']}: {switch['phase']})"
