# SPDX-License-Identifier: Apache-2.0
"""The journal of a switch: its state on the host, and the answers to it; written by who switches, read by others."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import write_atomically
from ansible.module_utils.aerie.mates import BACK, KEEPS, READY, UNDER_WAY, note
from ansible.module_utils.aerie.release import canonical

# In the first of them nothing of the host's has been changed.
REQUESTED = "requested"
STOPPING = "stopping the service"
CHECKING = "checking hidden states"
ACTIVATING = "activating the release"
STARTING = "starting the service"
MEASURING = "measuring acceptance"
AWAITING = "awaiting confirmation"
CONFIRMING = "confirming"
RESTORING = "restoring the previous release"

# What the other hosts of a replica learn of a phase; of all the others, that the switch is under way.
_STATES = {AWAITING: READY, CONFIRMING: KEEPS, RESTORING: BACK}

# What the hosts of one replica begin together: to stop the service, and to activate the release.
STOP, ACTIVATE = "stop", "activate"

CONFIRMED = "confirmed"
RESTORED = "restored"
NOT_RESTORED = "not restored"

# Room for the journal and the link when the way back is needed on a full disk.
_BALLAST = bytes(1 << 20)


class SwitchError(RuntimeError):
    """A step that failed; the text says which and why."""


class Journal:
    """The state of a switch, in a directory below the root of releases.

    ``journal.json`` is there while a switch is under way, ``last.json`` is that of the last one that ended. Who follows
    the switch leaves ``confirm`` or ``abort``, with the deployment's id in the first line and a reason in the second,
    and touches ``followed`` whenever it looks. ``evidence.txt`` has what the processes of a stuck start did, until the
    next switch.
    """

    def __init__(self, root: Path) -> None:
        self.directory = root / "switch"
        self.path = self.directory / "journal.json"
        self.last_path = self.directory / "last.json"
        # For the other hosts of the replica, by deployment.
        self.told_path = self.directory / "told"
        self.evidence_path = self.directory / "evidence.txt"
        self._followed_path = self.directory / "followed"
        self._ballast = self.directory / "ballast"
        self.state: dict[str, Any] = {}

    def load(self) -> bool:
        """Read the state; return whether a switch is under way."""
        self.state = _json(self.path)
        return bool(self.state)

    def last(self) -> dict[str, Any]:
        """Return the state in which the last switch ended, or nothing."""
        return _json(self.last_path)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else is about to begin a switch, and keep others from it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def open(self, request: Mapping[str, Any]) -> None:
        """Begin a switch."""
        # Answers to an earlier switch, what it saw, and what a killed program was about to write.
        answers = [self.directory / what for what in ("confirm", "abort", "proceed")]
        for path in (*answers, self.evidence_path, *self.directory.glob(".*")):
            path.unlink(missing_ok=True)
        self.state = {**request, "phase": REQUESTED, "phases": [], "gates": [], "progress": {}, "boot": boot_id()}
        try:
            self._ballast.write_bytes(_BALLAST)
            self.tell_mates(UNDER_WAY)
            self.save()
        except OSError as error:
            self.give_room()
            raise SwitchError(f"{self.directory} cannot be written: {error.strerror}. Nothing was restarted") from error

    def save(self) -> None:
        write_atomically(self.path, canonical(self.state))

    def enter(self, phase: str, **facts: object) -> None:
        """Note that ``phase`` begins, with what else is known by now. It does not if that cannot be written."""
        phases = [*self.state["phases"], {"phase": phase, "at": round(time.time(), 2)}]
        entered = {**self.state, **facts, "phase": phase, "phases": phases, "progress": {}}
        write_atomically(self.path, canonical(entered))
        self.state = entered
        self.tell_mates(_STATES.get(phase, UNDER_WAY))

    def tell_mates(self, state: str) -> None:
        """Have the other hosts of the replica know how the switch stands here."""
        if self.state["together"]:
            note(self.told_path, self.state["deployment"], state)

    def progress(self, facts: Mapping[str, Any]) -> None:
        """Note how far the phase is, for those who follow. The switch does not depend on it."""
        if facts != self.state["progress"]:
            self.state["progress"] = dict(facts)
            with contextlib.suppress(OSError):
                self.save()

    def keep_evidence(self, lines: Iterable[str]) -> bool:
        """Keep what was seen of a start, after that of the switch's earlier ones; return whether there was room."""
        try:
            with self.evidence_path.open("a") as stream:
                stream.writelines(f"{line}\n" for line in lines)
        except OSError:
            return False
        return True

    def close(self, outcome: str, message: str) -> None:
        """End the switch."""
        self.state.update(outcome=outcome, message=message, ended=round(time.time(), 2))
        self.save()
        self.give_room()
        self.tell_mates(KEEPS if outcome == CONFIRMED else BACK)
        self.path.replace(self.last_path)

    def give_room(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def told(self, what: str) -> str | None:
        """Return the reason or step that was given with an answer for this deployment; None if there is no answer."""
        try:
            deployment, _, reason = (self.directory / what).read_text().partition("\n")
        except OSError:
            return None
        return reason.strip() if deployment == self.state["deployment"] else None

    def follow(self) -> None:
        """Have the program know that somebody follows the switch."""
        with contextlib.suppress(OSError):
            self._followed_path.touch()

    def followed(self) -> int:
        """Return a number that changes whenever somebody looks who follows the switch."""
        try:
            return self._followed_path.stat().st_mtime_ns
        except OSError:
            return 0

    def tell(self, what: str, deployment: str, reason: str = "") -> None:
        """Leave ``confirm``, ``abort`` or ``proceed`` for the program."""
        write_atomically(self.directory / what, f"{deployment}\n{reason}\n".encode())


def whose(state: Mapping[str, Any]) -> str:
    """Say whose switch is under way, and what its finder can do."""
    who = f" by {state['who']}" if state["who"] else ""
    return (
        f"a switch to release {state['to']['id']} is under way on this host: deployment {state['deployment']}, started"
        f"{who} at {state['started']}, now {state['phase']}. Wait for its end with -e switch_in_progress=wait, or have "
        "it undone with -e switch_in_progress=take_over"
    )


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _json(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
