# SPDX-License-Identifier: Apache-2.0
"""Changes the files of an environment that Aerie did not make, while the user's own unit that runs it is stopped.

A run that is cut off between the stop and the start leaves a note in the store: the next one starts the unit.
"""

from __future__ import annotations

import contextlib
import http.client
import platform
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import sha256_bytes, sync_directory, write_atomically
from ansible.module_utils.aerie.patcher import Patcher, Work
from ansible.module_utils.aerie.release import Releases
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.unit import UNIT_PROPERTIES, Unit, parse_unit, unit_fault
from ansible.module_utils.aerie.vllm_log import root_cause
from ansible.module_utils.aerie.wheel import Package

_POLL_S = 0.5
_ANSWER_S = 5
# Without a URL to ask: a process that lives for so long has at least been able to load its code.
_SETTLE_S = 5
_JOURNAL_LINES = 5000
_MAX_REASON = 500
_ENDED = ("inactive", "failed")


@dataclass(frozen=True)
class UserUnit:
    """The unit that runs an environment. ``health_url`` answers 200 once it serves; "" asks nothing.

    ``budget_s`` is how long a start may take. ``note`` is there while the unit is stopped and has to be started.
    """

    name: str
    health_url: str
    budget_s: float
    note: Path

    def refuse_unusable(self) -> None:
        """Refuse a name that systemd has no unit for, and a URL that cannot be asked."""
        if self.health_url and not self.health_url.startswith(("http://", "https://")):
            raise Refusal(
                f"vllm_patch_adopted_health_url is {self.health_url}: begin it with http:// or https://, or empty it"
            )
        if self._show().load != "loaded":
            raise Refusal(f"{self.name} is no unit of this host: correct aerie_adopted_unit")

    def is_owed(self) -> bool:
        """Tell whether an interrupted run left the unit stopped."""
        return self.note.exists()

    def state(self) -> str:
        """Return what systemd calls its state, such as active."""
        return self._show().active

    def runs(self) -> bool:
        """Tell whether the unit runs, or has to. One that systemd starts again and again runs too."""
        return self.is_owed() or self.state() not in _ENDED

    def stop(self) -> None:
        """Stop the unit, and note that it has to run."""
        if not self.is_owed():
            self.note.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_atomically(self.note, f"{self.name}\n".encode())
        result = self._systemctl("stop")
        if result:
            raise Refusal(f"{self.name} cannot be stopped, so nothing was changed: {result}")

    def start(self) -> str:
        """Start the unit, and wait until it is back; say why it is not, or nothing."""
        deadline = time.monotonic() + self.budget_s
        self._systemctl("reset-failed")
        problem = self._systemctl("start")
        fault = self._await(deadline)
        if self.state() not in _ENDED:
            # It runs, or systemd starts it again.
            self.note.unlink(missing_ok=True)
            sync_directory(self.note.parent)
        return fault and (fault if not problem else f"{fault} (systemctl: {problem})")

    def _await(self, deadline: float) -> str:
        start_id = ""
        while True:
            unit = self._show()
            fault = unit_fault(unit, start_id)
            if fault is not None:
                return self._cause(start_id or unit.start_id, fault)
            start_id = start_id or unit.start_id
            if unit.active == "active" and self._serves(unit):
                return ""
            if time.monotonic() >= deadline:
                missing = f"{self.health_url} did not answer 200" if self.health_url else f"it was {unit.active}"
                return f"{missing} after {self.budget_s:g} s"
            time.sleep(_POLL_S)

    def _serves(self, unit: Unit) -> bool:
        if not self.health_url:
            return unit.started_at is None or time.monotonic() - unit.started_at >= _SETTLE_S
        # A proxy of the environment must not answer for the service.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.health_url, timeout=_ANSWER_S) as response:
                return bool(response.status == HTTPStatus.OK)
        except (OSError, http.client.HTTPException):
            return False

    def _cause(self, start_id: str, fault: str) -> str:
        """Return what the journal of one start names as its end, or how systemd saw it."""
        match = f"_SYSTEMD_INVOCATION_ID={start_id}"
        command = ["journalctl", "--no-pager", "--quiet", "--output=cat", f"--lines={_JOURNAL_LINES}", match]
        lines = _run(*command).stdout.splitlines() if start_id else []
        cause = root_cause(lines)
        if cause is not None:
            return f"it {fault}: {cause.line[:_MAX_REASON].rstrip('. ')}. {cause.remedy}".rstrip(". ")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"it {fault}{last and f': {last[:_MAX_REASON]}'}"

    def _show(self) -> Unit:
        return parse_unit(_run("systemctl", "show", self.name, f"--property={','.join(UNIT_PROPERTIES)}").stdout)

    def _systemctl(self, verb: str) -> str:
        """Do ``verb``; return what systemctl complains of."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            result = _run("systemctl", verb, self.name, timeout=self.budget_s)
            return result.stderr.strip() or "it failed" if result.returncode else ""
        return f"no end after {self.budget_s:g} s"


def _run(*command: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=timeout)


@dataclass(frozen=True)
class Adopted:
    """An environment, with the unit that runs it (none is stopped without), and what a ledger line says of this run.

    ``entry`` is empty where no ledger is kept.
    """

    patcher: Patcher
    package: Package
    unit: UserUnit | None
    entry: Mapping[str, Any]

    def change(self, work: Work) -> None:
        """Do ``work`` with the unit stopped, and start it. If it does not come back, undo the work and say why.

        Another run is kept out from the stop to the end, and the unit is not stopped for work that one has overtaken.
        """
        unit = self.unit
        if unit is None:
            self._write(work)
            return
        with self.patcher.lock():
            self.patcher.refuse_stale(work, self.package)
            if unit.runs() and (work.changed or unit.is_owed()):
                self._change_stopped(work, unit)
            else:
                self._write(work)

    def _change_stopped(self, work: Work, unit: UserUnit) -> None:
        unit.stop()
        try:
            self._write(work)
        except (Refusal, OSError) as error:
            fault = unit.start()
            raise Refusal(f"{error}\n{unit.name} does not run: {fault}" if fault else str(error)) from error
        fault = unit.start()
        if fault:
            raise Refusal(self._undo(work, unit, fault))

    def _undo(self, work: Work, unit: UserUnit, fault: str) -> str:
        """Put back what was there before ``work``, or the pristine files where that was a change cut short."""
        what = f"{unit.name} on {platform.node()} did not come back with the changed files: {fault}"
        try:
            unit.stop()
            back = work.undone() if work.moves and not work.interrupted else self.patcher.absent(self.package)
            self._write(back, why=what)
        except (Refusal, OSError) as error:
            unit.start()
            return f"{what}. They could not be put back: {error}"
        files = "The files are as they were" if back.moves else "No file was changed"
        still = unit.start()
        return f"{what}. {files}, and {unit.name} {f'does not run either: {still}' if still else 'runs again'}"

    def _write(self, work: Work, why: str = "") -> None:
        self.patcher.write(work, self.package)
        if self.entry and work.moves:
            files = {
                move.path: {"before": sha256_bytes(move.before), "after": sha256_bytes(move.after)}
                for move in work.moves
            }
            entry = {
                **self.entry,
                "action": "patch" if work.outcome else "unpatch",
                "package_dir": str(self.patcher.package_dir),
                "from": _set(work.before),
                "to": _set(work.outcome),
                "files": files,
            }
            Releases(self.patcher.store).append_to_ledger({**entry, "why": why} if why else entry)


def _set(record: Mapping[str, Any] | None) -> str:
    """Return the patch set that a record of the store names."""
    return str((record or {}).get("set") or "")
