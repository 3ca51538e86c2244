# SPDX-License-Identifier: Apache-2.0
"""The switch of a host's service from one release to another: a program of its own, run by systemd on the host.

Ansible starts it, follows it and confirms it, but is not needed for its end: a release that fails a gate, that nobody
confirms, or that was being activated when the host or this program went down, makes way for the previous one. All that
is to be known for that stands in the journal, written before each step. The unit that runs the program is the lock.
A release that is ready waits as long as somebody follows: whoever confirms may wait for other hosts.

The hosts of one replica go together: what one of them decides, keep the release or go back, the others do, too. Before
its confirmation a host that hears no more goes back by itself; after it, it does nothing more before it knows of all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.acceptance import live_gate
from ansible.module_utils.aerie.credentials import forget
from ansible.module_utils.aerie.endpoint import endpoint, environment
from ansible.module_utils.aerie.files import read_text, write_atomically
from ansible.module_utils.aerie.host_key import LIFETIME_S, HostKeyError, host_key
from ansible.module_utils.aerie.journal import (
    ACTIVATE,
    ACTIVATING,
    AWAITING,
    CHECKING,
    CONFIRMED,
    CONFIRMING,
    MEASURING,
    NOT_RESTORED,
    REQUESTED,
    RESTORED,
    RESTORING,
    STARTING,
    STOP,
    STOPPING,
    Journal,
    SwitchError,
    boot_id,
)
from ansible.module_utils.aerie.leftovers import Service
from ansible.module_utils.aerie.mates import BACK, KEEPS, READY, Mates
from ansible.module_utils.aerie.proved import keep
from ansible.module_utils.aerie.readiness import Budget, Gate, phase_words
from ansible.module_utils.aerie.release import ReleaseError, Releases, running_service

_POLL_S = 0.2
_WATCH_S = 2.0
_CLEAR_S = 30.0
_ROOM_S = 1.0
# How old an answer of another host of the replica may be: all the time, and while nothing but it is waited for.
_HEARD_S, _HEARD_SOON_S = 1.0, 0.5
# What of a health gate's last look is kept.
_TOLD = ("model", "url", "phase", "elapsed_s", "speculation", "tap_ids_logged")
# What systemd says of a unit that runs, or that it tries to run.
_UP = ("active", "activating", "reloading")
# Failures with a text that is meant for users.
_TOLD_FAILURES = (SwitchError, ReleaseError, HostKeyError, OSError)


class Switch:
    """One switch, from its journal."""

    def __init__(self, root: Path, journal: Journal) -> None:
        self._releases = Releases(root)
        self._journal = journal
        state = journal.state
        self._unit = Path(state["unit"])
        self._from: dict[str, Any] = state["from"]
        self._to: dict[str, Any] = state["to"]
        self._mates = self._ask_mates()
        self._began = time.monotonic()
        self._followed = journal.followed()

    def run(self) -> str:
        """Switch, and return the outcome. What fails before the confirmation is undone."""
        try:
            self._meet(STOP)
            self._stop()
            self._check_numbers()
            self._meet(ACTIVATE)
            self._activate()
            self._start()
            self._measure()
            self._await_confirmation()
        except Exception as error:  # Whatever it is: nothing unproved stays.
            return self.restore(_words(error))
        return self.keep()

    def keep(self) -> str:
        """End a switch that was confirmed as its replica's other hosts do. May be repeated after an interruption."""
        try:
            self._await_mates()
        except SwitchError as error:
            return self.restore(str(error))
        state = self._journal.state
        entry = {"action": "confirm", "to": self._to["id"], "gates": state["gates"]}
        timing = {"start_s": state.get("start_s"), "downtime_s": state.get("downtime_s")}
        if self._last_action() != "confirm":
            self._write_to_ledger({**entry, **timing})
        # Nothing goes back to these settings any more: a key that was replaced does not stay.
        forget(self._from["settings"], self._to["settings"])
        self.close(CONFIRMED, f"release {self._to['id']} serves")
        return CONFIRMED

    def restore(self, reason: str, ready: Callable[[], None] = lambda: None) -> str:
        """Bring back what was there before, and return the outcome.

        ``ready`` is called when systemd may start the service: what it is to run is decided then. May be repeated.
        """
        self._journal.give_room()
        state = self._journal.state
        failed_phase = state.setdefault("failed_phase", state["phase"])
        reason = state.setdefault("reason", reason)
        # Where the disk is still full, the way back is taken without a note.
        with contextlib.suppress(OSError):
            self._journal.enter(RESTORING)
        try:
            if failed_phase == REQUESTED:
                ready()
                outcome, message = RESTORED, "nothing had been changed yet"
            else:
                with contextlib.suppress(SwitchError):
                    # What remains of the release that failed does not keep the previous one from being tried.
                    self._stop_service()
                self._put_back()
                ready()
                outcome, message = self._serve_again()
        except Exception as error:  # A program that dies here would be started again, and stop the service again.
            ready()
            outcome, message = NOT_RESTORED, _words(error)
        last = self._last_action()
        if last == "activate" or (outcome == NOT_RESTORED and last != "restore"):
            entry = {"action": "restore", "from": self._to["id"], "to": self._from["id"], "why": reason}
            self._write_to_ledger({**entry, "outcome": outcome})
        self.close(outcome, message)
        return outcome

    def close(self, outcome: str, message: str) -> None:
        """End the switch."""
        _with_room(lambda: self._journal.close(outcome, message))

    def _last_action(self) -> str:
        """Return what the ledger has last of this deployment."""
        deployment = self._journal.state["deployment"]
        same = [entry for entry in self._releases.ledger() if entry.get("deployment") == deployment]
        return str(same[-1]["action"]) if same else ""

    def _write_to_ledger(self, entry: Mapping[str, Any]) -> None:
        full = {"deployment": self._journal.state["deployment"], **entry}
        _with_room(lambda: self._releases.append_to_ledger(full))

    def _meet(self, step: str) -> None:
        """Wait until all hosts of the replica are as far, which the control node sees; alone, go on."""
        state = self._journal.state
        if not state["together"]:
            return
        state["waits_to"] = step
        self._journal.save()
        deadline = time.monotonic() + state["confirm_s"]
        while self._journal.told("proceed") != step:
            self._heed()
            if self._is_followed():
                deadline = time.monotonic() + state["confirm_s"]
            if time.monotonic() > deadline:
                budget = f"within {state['confirm_s']:g} s"
                raise SwitchError(f"nothing was heard of the replica's other hosts {budget}, to {step} together")
            time.sleep(_POLL_S)
        del state["waits_to"]

    def _stop(self) -> None:
        self._heed()
        self._journal.enter(STOPPING, stopped_at=time.monotonic())
        self._stop_service()
        self._heed()

    def _stop_service(self) -> None:
        settings = {path: read_text(Path(path)) for path in self._to["settings"]}
        where = endpoint(settings)
        service = Service(self._journal.state["user"], where.address, where.port)
        before = service.held()
        # 5: there is no such unit, before the first deploy.
        systemctl("stop", self._unit.name, fine=(0, 5))
        remains = service.clear(_CLEAR_S, before)
        if remains:
            raise SwitchError(f"the service was stopped, but this remains of it: {'; '.join(remains)}")

    def _check_numbers(self) -> None:
        """The numeric check of hidden states where it needs the GPUs, which are free now and only now."""
        numeric = self._journal.state["numeric"]
        if not numeric:
            return
        self._journal.enter(CHECKING)
        result = run_numeric(numeric["argv"], numeric["budget_s"])
        self._judge(result, numeric["mode"])
        if result["verdict"] == "passed" and numeric.get("note"):
            # A release of the same code need not do it again; where that cannot be noted, it does.
            with contextlib.suppress(OSError):
                keep(Path(numeric["note"]), numeric["evidence"], result)

    def _activate(self) -> None:
        self._journal.enter(ACTIVATING)
        self._heed()
        state = self._journal.state
        entry = {"action": "activate", "why": state["why"], "from": self._from["id"], "to": self._to["id"]}
        # Before it is done: whatever happens then, the ledger does not say less than what was.
        self._releases.append_to_ledger({"deployment": state["deployment"], **entry})
        for path, text in self._to["settings"].items():
            _put(Path(path), text)
        self._releases.activate(self._to["id"], self._unit)
        systemctl("daemon-reload")
        # A release that failed to start may have used up the starts that systemd allows.
        systemctl("reset-failed", self._unit.name, fine=None)
        systemctl("enable", self._unit.name)

    def _start(self) -> None:
        self._began = time.monotonic()
        self._journal.enter(STARTING)
        self._start_service()
        gate = self._watch(self._to, self._heed)
        seconds = {"start_s": round(time.monotonic() - self._began, 1)}
        seconds["downtime_s"] = round(time.monotonic() - self._journal.state["stopped_at"], 1)
        self._journal.state.update(seconds)
        self._judge(gate, "enforce")

    def _start_service(self) -> None:
        # Until it runs: before, it looks like one that has ended. The gate tells why it does not, and better.
        systemctl("start", self._unit.name, fine=None)

    def _measure(self) -> None:
        live = self._journal.state["live"]
        serves = self._serves(self._to)
        if live["mode"] == "off":
            return
        self._journal.enter(MEASURING)
        where = endpoint(self._to["settings"])
        config = {
            **live["config"],
            "url": where.url,
            "certificate": where.certificate,
            "model": serves["model"],
            "speculative_tokens": serves["speculative_tokens"],
            "exclusive": True,
            # A release that one goes back to is compared with itself: it may accept less than the one that it replaces.
            "last_good": last_good(self._releases, self._to["id"]) or last_good(self._releases, self._from["id"]),
        }
        with self._key() as key:
            self._judge(live_gate(config, key), live["mode"])

    def _await_confirmation(self) -> None:
        """Return once the control node, or another host of the replica, has the release kept."""
        running = running_service(self._unit.name)
        state = self._journal.state
        self._journal.enter(AWAITING)
        # Until all hosts of the replica are ready nobody confirms; the one with vLLM takes longer than the others.
        limit = deadline = time.monotonic() + state["start_s_budget"] + state["confirm_s"]
        budget = 0.0
        while Path(f"/proc/{running.pid}").exists():
            if self._is_followed() and budget:
                deadline = time.monotonic() + budget
            over = time.monotonic() > deadline
            others = self._mates.states(0 if over else _HEARD_S).values()
            if self._journal.told("confirm") is not None or KEEPS in others:
                break
            self._heed()
            if over:
                raise SwitchError(f"nobody confirmed the release within {budget or state['start_s_budget']:g} s")
            if deadline == limit and self._mates.all_are(READY, age_s=_HEARD_S):
                # Whoever confirms waits for all that are switched together.
                longer = 2 * (time.monotonic() - self._began) if state["mates"] else 0
                budget = round(state["confirm_s"] + longer, 1)
                deadline = time.monotonic() + budget
            time.sleep(_POLL_S)
        else:
            self._heed()
            raise SwitchError("the service ended while it waited for confirmation")
        self._journal.enter(CONFIRMING)

    def _await_mates(self) -> None:
        """Return once all hosts of the replica keep the release. Raises SwitchError if one went back.

        However long that takes: one that is not heard of may have gone back. The replica does not serve without it.
        """
        self._journal.tell_mates(KEEPS)
        while not self._mates.all_are(KEEPS, age_s=_HEARD_SOON_S):
            self._heed_mates_back()
            self._heed_abort()
            waits_for = self._mates.others_than(KEEPS)
            self._journal.progress({"phase": f"waits for {', '.join(waits_for)}", "waits_for": waits_for})
            time.sleep(_POLL_S)

    def _put_back(self) -> None:
        for path, text in self._from["settings"].items():
            _put(Path(path), text)
        if not self._from["enabled"]:
            systemctl("disable", self._unit.name, fine=None)
        if self._from["id"]:
            self._releases.activate(self._from["id"], self._unit)
        else:
            self._releases.deactivate(self._unit)
        systemctl("daemon-reload", fine=None)
        systemctl("reset-failed", self._unit.name, fine=None)

    def _serve_again(self) -> tuple[str, str]:
        if not self._from["id"]:
            return RESTORED, "no release serves, as before"
        if not self._from["up"]:
            return RESTORED, f"release {self._from['id']} is current and stopped, as before"
        self._start_service()
        # Its patience with the replica's other hosts begins anew.
        self._mates = self._ask_mates()
        several = "," in environment(self._from["settings"]).get("AERIE_REPLICA_HOSTS", "")
        try:
            gate = self._watch(self._from, self._heed_silence if several else lambda: None)
        except SwitchError as error:
            return NOT_RESTORED, f"release {self._from['id']} was put back, but: {error}"
        except HostKeyError as error:
            return NOT_RESTORED, f"release {self._from['id']} was started, but nobody could look: {error}"
        if gate["verdict"] != "passed":
            return NOT_RESTORED, f"release {self._from['id']} was put back, but: {gate['message']}"
        return RESTORED, f"release {self._from['id']} serves again"

    def _watch(self, release: Mapping[str, Any], heed: Callable[[], None]) -> dict[str, Any]:
        """Follow a start until it is ready or has failed, or ``heed`` raises; return the gate's result."""
        serves = self._serves(release)
        budget_s = self._journal.state["start_s_budget"]
        where = endpoint(release["settings"])
        deadline = time.monotonic() + budget_s
        start_id = ""
        with self._key() as key:
            gate = Gate(
                host=platform.node(),
                unit=self._unit.name,
                url=where.url,
                model=serves["model"],
                speculative=serves["speculative_tokens"] > 0,
                api_key=key,
                run=_output,
                budget=Budget(serves.get("target_bytes", 0), budget_s, self._journal.state["stuck_after_s"]),
                certificate=where.certificate,
            )
            while True:
                status = gate.watch(start_id, min(_WATCH_S, max(deadline - time.monotonic(), 0)), heed)
                start_id = status.start_id
                facts = {**status._asdict(), "model": serves["model"], "url": where.url, "words": phase_words(status)}
                facts["speculation"] = status.speculation._asdict() if status.speculation else None
                seen = {name: facts.pop(name) for name in ("evidence", "journal_tail")}
                fault = facts.pop("fault")
                told = {name: facts[name] for name in _TOLD}
                if status.ready:
                    return {"gate": "health", "verdict": "passed", "message": "a token was generated", **told}
                if not fault and time.monotonic() >= deadline:
                    fault = f"vLLM was not ready after {budget_s:g} s: it is at {phase_words(status)}"
                # Its processes end with the way back.
                if fault and status.evidence and self._journal.keep_evidence([fault, *status.evidence]):
                    fault = f"{fault} What its processes did is in {self._journal.evidence_path} on this host."
                if fault:
                    return {"gate": "health", "verdict": "failed", "message": fault, **told, **seen}
                self._journal.progress(facts)
                heed()

    def _judge(self, result: Mapping[str, Any], mode: str) -> None:
        """Note a gate's result; a failure of one that is not advisory ends the switch."""
        self._journal.state["gates"].append({**result, "mode": mode})
        if result["verdict"] == "failed" and mode == "enforce":
            self._journal.state["failed_gate"] = result["gate"]
            raise SwitchError(result["message"])

    def _serves(self, release: Mapping[str, Any]) -> dict[str, Any]:
        serves: dict[str, Any] = self._releases.record(release["id"])["inputs"]["serves"]
        return serves

    def _ask_mates(self) -> Mates:
        state = self._journal.state
        return Mates(state["deployment"], **(state["together"] or {"here": "", "port": 0, "others": ()}))

    def _is_followed(self) -> bool:
        """Say whether somebody looked since this was asked last."""
        before, self._followed = self._followed, self._journal.followed()
        return self._followed != before

    def _heed(self) -> None:
        """Raise SwitchError where the switch is to be undone: by whose word, or by what other hosts did."""
        self._heed_abort()
        self._heed_mates_back()
        self._heed_silence()

    def _heed_mates_back(self) -> None:
        states = self._mates.states(_HEARD_S)
        back = [address for address, state in states.items() if state == BACK]
        if back:
            raise SwitchError(f"another host of the replica ({', '.join(back)}) has its previous release back")

    def _heed_silence(self) -> None:
        seconds = self._journal.state["confirm_s"]
        self._mates.states(_HEARD_S)
        silent = self._mates.silent(seconds)
        if silent:
            others = ", ".join(silent)
            raise SwitchError(f"nothing was heard of another host of the replica ({others}) for {seconds:g} s")

    def _heed_abort(self) -> None:
        reason = self._journal.told("abort")
        if reason is not None:
            raise SwitchError(reason or "the switch was aborted")

    def _key(self) -> contextlib.AbstractContextManager[str]:
        state = self._journal.state
        return host_key(group=state["user"], lifetime_s=LIFETIME_S + state["start_s_budget"])


def last_good(releases: Releases, identity: str) -> dict[str, Any] | None:
    """Return the newest live gate that ``identity`` passed on this host, to compare with."""
    for entry in reversed(releases.ledger()):
        if entry.get("action") == "confirm" and entry["to"] == identity:
            for gate in entry["gates"]:
                if gate["gate"] == "live" and gate["verdict"] in ("passed", "warned"):
                    found: dict[str, Any] = gate
                    return found
    return None


def run_numeric(argv: list[str], budget_s: float) -> dict[str, Any]:
    """Run the program of the numeric check, which prints its verdict as the last line."""
    try:
        result = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=budget_s)
        verdict: dict[str, Any] = json.loads(result.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return {"gate": "numeric", "verdict": "not_run", "message": f"it took longer than {budget_s:g} s"}
    except (OSError, ValueError) as error:
        return {"gate": "numeric", "verdict": "not_run", "message": f"{argv[0]} gave no verdict: {error}"}
    return verdict


def systemctl(*arguments: str, fine: tuple[int, ...] | None = (0,)) -> None:
    """Call systemctl. Raises SwitchError with what it said where its status is not among ``fine`` (None: all are)."""
    result = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    if fine is not None and result.returncode not in fine:
        raise SwitchError(f"systemctl {' '.join(arguments)} failed: {result.stderr.strip()}")


def is_up(unit: str) -> bool:
    """Say whether systemd runs a unit, or tries to."""
    return _output(["systemctl", "show", "--property=ActiveState", "--value", unit]).strip() in _UP


def is_enabled(unit: str) -> bool:
    return _output(["systemctl", "is-enabled", unit]).strip() == "enabled"


def _put(path: Path, text: str | None) -> None:
    """Give a file this text, or have none; touch nothing where it is so already."""
    if text is None:
        path.unlink(missing_ok=True)
    elif read_text(path) != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, check=False)
    return result.stdout.decode(errors="replace") if result.returncode == 0 else ""


def _with_room(write: Callable[[], None]) -> None:
    """Write, and wait on a full disk: a program that died of it would be started again, and stop the service again."""
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        time.sleep(_ROOM_S)


def _words(error: Exception) -> str:
    if isinstance(error, _TOLD_FAILURES):
        return str(error)
    traceback.print_exception(type(error), error, error.__traceback__)
    return f"{type(error).__name__}: {error}"


def _notify_systemd() -> None:
    """Tell systemd that the unit is up; what is ordered after it may start."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stream:
            stream.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            stream.sendall(b"READY=1")


def main(root: Path) -> int:
    """Run the switch that the journal below ``root`` asks for, or undo the one that was cut off."""
    # Read here, and not at the import: Ansible's modules import this file, too.
    os.umask(0o022)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    journal = Journal(root)
    if not journal.load():
        return 0
    switch = Switch(root, journal)
    state = journal.state
    rebooted = state["boot"] != boot_id()
    if "outcome" in state:
        _notify_systemd()
        outcome = state["outcome"]
        switch.close(outcome, state["message"])
    elif state["phase"] == REQUESTED and not rebooted:
        _notify_systemd()
        outcome = switch.run()
    elif state["phase"] == CONFIRMING:
        _notify_systemd()
        outcome = switch.keep()
    else:
        what = "the host was rebooted" if rebooted else "the switch program was killed"
        outcome = switch.restore(f"{what} while {state['phase']}", ready=_notify_systemd)
    print(f"{outcome}: {journal.state['message']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
