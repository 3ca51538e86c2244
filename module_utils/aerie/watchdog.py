# SPDX-License-Identifier: Apache-2.0
"""Find an engine that is stuck while /health says 200, and have systemd start the service again.

A timer runs this program (docs/decisions/0010). Each run is one look, and what must be known for the next one stands
below /run. A false alarm costs a start of many minutes, so the service is believed to live as long as it shows any
progress, and is asked for a token only when it shows none: behind a long prefill, no answer is no sign of death.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from ansible.module_utils.aerie.endpoint import Endpoint, endpoint_of, opener, parse_settings
from ansible.module_utils.aerie.evidence import stack_lines
from ansible.module_utils.aerie.host_key import HostKeyError, host_key
from ansible.module_utils.aerie.unit import UNIT_PROPERTIES, Unit, parse_unit

# While this unit is active, the service is stopped and started on purpose.
SWITCH_UNIT = "aerie-switch.service"

_STATE = Path("/run/aerie/watchdog.json")
_JOURNAL_SOCKET = "/run/systemd/journal/socket"

_HEALTH_S = 5.0
_METRICS_S = 10.0
_ANSWER_S = 20.0
_KEY_S = 120.0
_MAX_BODY = 8 << 20
_ERROR = 3

# Counters that move when the engine does anything: the tokens of each of its steps, prompts, answers, and ends of
# requests (vLLM 0.11 to 0.33).
_PROGRESS = re.compile(
    r"^vllm:(?:iteration_tokens_total_sum|iteration_tokens_total_count|prompt_tokens_total|generation_tokens_total"
    r"|request_success_total)(?:\{.{0,1000}\})? ([0-9.eE+]{1,30})$",
    re.MULTILINE,
)
_RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.{0,1000}\})? ([0-9.eE+]{1,30})$", re.MULTILINE)


class Look(NamedTuple):
    """What one look found. ``at`` is on the monotonic clock.

    ``mark`` changes with the engine's progress, and is empty where /metrics does not answer. ``answered`` says whether
    the service gave an answer of its engine's; it is only asked if ``mark`` stands still.
    """

    at: float
    start_id: str
    healthy: bool
    mark: str
    answered: bool = False


class Memory(NamedTuple):
    """What is known of one start: ``served`` says that it was over once, ``silent_s`` how long nothing has moved."""

    start_id: str = ""
    served: bool = False
    mark: str = ""
    looked_at: float = 0.0
    silent_s: float = 0.0


def remember(memory: Memory, look: Look, longest_gap_s: float) -> Memory:
    """Return what is known after ``look``.

    Time that nobody looked, because the host was asleep or too busy for this program as well, counts for
    ``longest_gap_s`` at most.
    """
    same = memory.start_id == look.start_id
    served = look.healthy or (same and memory.served)
    silent_s = 0.0
    if same and memory.served and not look.answered and look.mark in ("", memory.mark):
        silent_s = memory.silent_s + min(max(look.at - memory.looked_at, 0.0), longest_gap_s)
    return Memory(look.start_id, served, look.mark or (memory.mark if same else ""), look.at, silent_s)


def progress_mark(metrics: str) -> str:
    """Return a text that changes when the engine makes progress; empty if ``metrics`` has no counters of an engine."""
    return " ".join(match[1] for match in _PROGRESS.finditer(metrics))


def requests_in_flight(metrics: str) -> int:
    """Return how many requests run or wait."""
    total = 0.0
    for match in _RUNNING.finditer(metrics):
        with contextlib.suppress(ValueError):
            total += float(match[1])
    return int(total) if total < float("inf") else 0


class Watchdog:
    """One look at a service, from its own host.

    ``run`` executes an argument list and returns its standard output, "" where it fails.
    """

    def __init__(self, unit: str, where: Endpoint, group: str, run: Callable[[list[str]], str]) -> None:
        self._unit = unit
        self._url = where.url
        self._group = group
        self._run = run
        self._opener = opener(where.certificate)
        self.in_flight = 0

    def show(self) -> Unit:
        """Return the unit's state."""
        return parse_unit(self._run(["systemctl", "show", self._unit, f"--property={','.join(UNIT_PROPERTIES)}"]))

    def is_switching(self) -> bool:
        """Say whether the service is stopped and started on purpose at this moment."""
        state = self._run(["systemctl", "show", SWITCH_UNIT, "--property=ActiveState", "--value"]).strip()
        return state in ("active", "activating", "reloading", "deactivating")

    def look(self, memory: Memory, unit: Unit) -> Look:
        """Look at a running service: at its progress first, and only then with a request of its own."""
        healthy = self._get("/health", _HEALTH_S) is not None
        metrics = self._get("/metrics", _METRICS_S) or ""
        self.in_flight = requests_in_flight(metrics)
        look = Look(time.monotonic(), unit.start_id, healthy, progress_mark(metrics))
        stands_still = look.mark in ("", memory.mark)
        if not (memory.served and memory.start_id == unit.start_id and stands_still):
            return look
        answered = self._answers()
        return look._replace(at=time.monotonic(), answered=answered)

    def _answers(self) -> bool:
        """Ask for one token. An answer that says nothing about the engine counts as one: it is no sign of death."""
        with host_key(self._group, lifetime_s=_KEY_S) as key:
            models = self._get("/v1/models", _HEALTH_S, key)
            try:
                model = json.loads(models)["data"][0]["id"] if models else ""
            except (ValueError, LookupError, TypeError):
                model = ""
            body = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
            return self._get("/v1/completions", _ANSWER_S, key, body) is not None

    def _get(self, path: str, timeout_s: float, key: str = "", body: dict[str, object] | None = None) -> str | None:
        """Return the answer's text; None without an answer in time, and where the server says that it cannot."""
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        data = json.dumps(body).encode() if body is not None else None
        try:
            request = urllib.request.Request(f"{self._url}{path}", data, headers)
            with self._opener.open(request, timeout=timeout_s) as response:
                return str(response.read(_MAX_BODY).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                return "" if error.code < HTTPStatus.INTERNAL_SERVER_ERROR else None
        except (OSError, http.client.HTTPException):
            return None

    def kill(self, unit: Unit, reason: str) -> None:
        """Write the reason and the evidence to the journal, and end the service; systemd starts it again.

        SIGKILL for all, since a process that is stuck heeds no other signal. Not a restart: so it counts as a failure,
        and the limit of starts holds.
        """
        for line in (reason, *stack_lines(unit.control_group, self._run)):
            log(line, unit.main_pid)
        self._run(["systemctl", "kill", "--kill-who=all", "--signal=SIGKILL", self._unit])


def log(message: str, about: int) -> None:
    """Write a line to the journal, which `journalctl -u` shows for the unit of the process ``about`` as well."""
    print(message, flush=True)
    entry = f"MESSAGE={message}\nPRIORITY={_ERROR}\nSYSLOG_IDENTIFIER=aerie-watchdog\nOBJECT_PID={about}\n"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stream:
        stream.sendto(entry.encode(), _JOURNAL_SOCKET)


def load(path: Path) -> Memory:
    """Return what an earlier run remembered; nothing if that cannot be read."""
    try:
        state = json.loads(path.read_text())
        return Memory(
            str(state["start_id"]),
            bool(state["served"]),
            str(state["mark"]),
            float(state["looked_at"]),
            float(state["silent_s"]),
        )
    except (OSError, ValueError, TypeError, LookupError):
        return Memory()


def save(path: Path, memory: Memory) -> None:
    """Keep ``memory`` for the next run."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(memory._asdict()))
    new.replace(path)


def watch(watchdog: Watchdog, state: Path, limit_s: float, every_s: float, unit_name: str) -> None:
    """Look once, and end the service if it was silent for ``limit_s`` seconds."""
    unit = watchdog.show()
    if watchdog.is_switching() or (unit.active, unit.sub) != ("active", "running"):
        state.unlink(missing_ok=True)
        return
    memory = load(state)
    memory = remember(memory, watchdog.look(memory, unit), 2 * every_s + _ANSWER_S)
    if memory.silent_s < limit_s:
        save(state, memory)
        return
    # It took a while to look.
    if watchdog.is_switching() or watchdog.show().start_id != unit.start_id:
        return
    state.unlink(missing_ok=True)
    watchdog.kill(
        unit,
        f"{unit_name} is ended, to be started again: for {memory.silent_s:.0f} s its engine made no progress and "
        f"answered no request ({watchdog.in_flight} in flight).",
    )


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, check=False)
    return result.stdout.decode(errors="replace") if result.returncode == 0 else ""


def main(arguments: list[str]) -> int:
    """Run one look with the arguments that the unit gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit", default="vllm.service")
    parser.add_argument("--settings", type=Path, default=Path("/etc/aerie/vllm.env"))
    parser.add_argument("--group", default="vllm")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of silence")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two looks")
    options: Any = parser.parse_args(arguments)
    try:
        text = options.settings.read_text()
    except OSError as error:
        print(f"{options.settings} cannot be read: {error.strerror}. Deploy the service first.", flush=True)
        return 1
    where = endpoint_of(parse_settings(text))
    try:
        watchdog = Watchdog(options.unit, where, options.group, _output)
    except (OSError, ValueError) as error:
        print(f"The certificate {where.certificate} cannot be read: {error}. Deploy the service again.", flush=True)
        return 1
    try:
        watch(watchdog, _STATE, options.limit, options.every, options.unit)
    except HostKeyError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main(sys.argv[1:]))
