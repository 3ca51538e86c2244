# SPDX-License-Identifier: Apache-2.0
"""What is to be done on a host, from one look at it: cheap enough for every run, and without writing anything."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ansible.module_utils.aerie.checkpoint import CheckpointError
from ansible.module_utils.aerie.credentials import faults
from ansible.module_utils.aerie.endpoint import environment
from ansible.module_utils.aerie.files import read_text
from ansible.module_utils.aerie.journal import Journal
from ansible.module_utils.aerie.release import ReleaseError, Releases, running_service
from ansible.module_utils.aerie.serving import is_healthy, service_faults
from ansible.module_utils.aerie.target import inspect_target
from ansible.module_utils.aerie.verification import quick_check

UNDER_WAY = "a switch is under way"


class Desired(NamedTuple):
    """What a host is to have. ``request``: digests of all that the release is planned from, by name.

    ``settings`` are texts of files that the service reads at its start, by path, None for one that is not to be there;
    ``reread`` of those that it reads again whenever they change. ``target`` is the target's directory. ``timers`` are
    systemd's, to run from boot on.
    """

    request: Mapping[str, str]
    settings: Mapping[str, str | None]
    reread: Mapping[str, str]
    target: Path
    timers: Iterable[str] = ()


def reasons(releases: Releases, unit: Path, desired: Desired, cache: Path, remember: bool) -> list[str]:
    """Return why there is something to be done on this host, one phrase each; nothing if all is as desired."""
    if Journal(releases.root).load():
        return [UNDER_WAY]
    current = releases.current()
    if not current:
        return ["no release serves here yet"]
    return [
        *_other_request(releases.completion(current).get("request", {}), desired.request),
        *_other_target(releases, current, desired.target),
        *(f"{path} has other settings" for path in _different(desired.settings)),
        *(f"{path} is to be written" for path in _different(desired.reread)),
        *faults(desired.settings),
        *idle(desired.timers),
        *quick_check(releases, current, cache, remember),
        *(fault.what for fault in service_faults(releases, current, unit, desired.settings)),
    ]


def describe(root: Path, unit: Path, settings: Mapping[str, str | None]) -> dict[str, Any]:
    """Return what there is on a host: its releases, what serves, and what served before."""
    releases = Releases(root)
    current = releases.current()
    confirmed = [entry for entry in releases.ledger() if entry.get("action") == "confirm" and entry["to"] == current]
    installed = {path: read_text(Path(path)) for path in settings}
    variables = environment(installed)
    certificate = variables.get("AERIE_CERTIFICATE", "")
    return {
        "current": current,
        "running": running_service(unit.name).release,
        "healthy": is_healthy(installed),
        "listens": {"address": variables.get("AERIE_HOST", ""), "port": variables.get("AERIE_PORT", "")},
        "certificate": (read_text(Path(certificate)) if certificate else None) or "",
        "deployments": releases.deployments()[:2],
        "last_start_s": confirmed[-1].get("start_s") if confirmed else None,
        "releases": releases.identities(),
    }


def idle(timers: Iterable[str]) -> Iterator[str]:
    """Yield which of systemd's timers do not run, or would not after a reboot."""
    for timer in timers:
        command = ["systemctl", "show", timer, "--property=ActiveState,UnitFileState"]
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        if "ActiveState=active" not in state:
            yield f"{timer} does not run"
        elif "UnitFileState=enabled" not in state:
            yield f"{timer} is disabled"


def _other_request(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            yield f"{name} changed"


def _other_target(releases: Releases, identity: str, target: Path) -> Iterator[str]:
    try:
        found = inspect_target(target)["identity"]
    except (CheckpointError, OSError) as error:
        yield f"the target cannot be read: {error}"
        return
    with contextlib.suppress(ReleaseError):
        if releases.record(identity)["inputs"].get("target") != found:
            yield f"the target at {target} is another one"


def _different(files: Mapping[str, str | None]) -> list[str]:
    return sorted(path for path, text in files.items() if read_text(Path(path)) != text)
