# SPDX-License-Identifier: Apache-2.0
"""Is a vLLM service ready: what its systemd unit, its journal and its endpoints say, on the host that it runs on.

Ready means: the unit runs, /health is 200, the expected model id is served, a token was generated, and the counters of
speculative decoding are there exactly when the release speculates.

How long that may take follows from what the start does (`Budget`); a start that does nothing for long is stuck.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ansible.module_utils.aerie import vllm_log
from ansible.module_utils.aerie.endpoint import opener, stranger
from ansible.module_utils.aerie.evidence import bytes_read, stack_lines
from ansible.module_utils.aerie.replica import JOINED
from ansible.module_utils.aerie.speculation import Speculation, parse_speculation
from ansible.module_utils.aerie.unit import UNIT_PROPERTIES, Unit, parse_unit, unit_fault

# Between two looks at a service that is not ready, at its log, and between two readings of its counters; seconds.
_POLL_S = 0.5
_LOG_S = 5.0
_SETTLE_S = 0.1
_SETTLE_LIMIT_S = 2.0
# /health is answered without the engine: no answer for so long means that nothing serves it.
_HEALTH_S = 2.0
# The longest that the other answers may take together. Tokens of a slow service, or one under load, take their time: a
# request that is given up early is only sent again.
_ANSWERS_S = 30.0

# Enough for any start; the furthest phase and the root cause are found in the newest lines of a longer one.
_JOURNAL_LINES = 20000
_TAIL_LINES = 30
_EVIDENCE_LINES = 400
_MAX_REASON = 500
_MAX_BODY = 4 << 20

# The request that moves the speculation counters: some ten drafts.
_PROMPT = "one two three four five six seven eight nine ten"
_SAMPLE_TOKENS = 32

# State of a listening socket in /proc/net/tcp.
_TCP_LISTEN = "0A"

# What a start may take besides reading weights, in seconds: a cold disk under thousands of Python files, kernels that
# are compiled for the first time, graphs for many batch sizes. Far more than they need, since a start that does nothing
# is found by `stuck_after_s`.
_ALLOWED_S = {
    vllm_log.STARTING: 600.0,
    vllm_log.LOADING_DRAFTER: 300.0,
    vllm_log.COMPILING: 1800.0,
    vllm_log.CAPTURING: 900.0,
    vllm_log.WARMING_UP: 900.0,
}
# Until it is measured: a network file system that several hosts read at once. Bytes a second.
_SLOW_READ = 100e6
_READ_MARGIN = 1.5
_READ_SLACK_S = 60.0


class Budget(NamedTuple):
    """How long a start may take.

    ``target_bytes`` is the size of the checkpoint, 0 if it is not known. ``limit_s`` is never exceeded. A start that
    makes no progress for ``stuck_after_s`` is stuck.
    """

    target_bytes: int = 0
    limit_s: float = float("inf")
    stuck_after_s: float = 900.0

    def total_s(self, progress: vllm_log.Progress) -> float:
        """Return the seconds that a start may take from its beginning to its first token."""
        if progress.phase == vllm_log.DOWNLOADING:
            return self.limit_s
        return min(self.limit_s, sum(_ALLOWED_S.values()) + self._reading_s(progress))

    def _reading_s(self, progress: vllm_log.Progress) -> float:
        """Return what reading the weights took, or may take: as measured, otherwise by their size."""
        if progress.loaded_s is not None:
            return progress.loaded_s
        if progress.phase == vllm_log.LOADING and progress.fraction and progress.bar_s:
            return progress.bar_s / progress.fraction * _READ_MARGIN + _READ_SLACK_S
        return self.target_bytes / _SLOW_READ + _READ_SLACK_S

    def rate(self, progress: vllm_log.Progress) -> float | None:
        """Return the bytes a second that the weights are read with, None where it is not measured."""
        if progress.phase == vllm_log.LOADING and progress.fraction and progress.bar_s and self.target_bytes:
            return self.target_bytes * progress.fraction / progress.bar_s
        return None


def phase_left_s(progress: vllm_log.Progress) -> float | None:
    """Return the seconds until the phase is over at its pace so far, None where its bar does not tell."""
    if not progress.fraction or not progress.bar_s:
        return None
    return progress.bar_s * (1 - progress.fraction) / progress.fraction


class Moved(NamedTuple):
    """What a start had done when it last moved on (``mark``), and when that was on the monotonic clock."""

    mark: str = ""
    at: float = 0.0


_DEFAULT_BUDGET = Budget()
_NOT_YET = Moved()

# What a start is, as Status.state says it.
UNDER_WAY = "under way"
READY = "ready"
STUCK = "stuck"
FAILED = "failed"


class Status(NamedTuple):
    """What one look at a service found.

    ``fault`` is a sentence with its remedy if the service cannot become ready, None while it is ready or may become so.
    ``percent`` belongs to ``phase`` and is None where vLLM reports none. ``elapsed_s`` counts from the start of the
    unit's process. ``speculation`` is what one request of the gate moved (other requests at that moment count too),
    None without speculation. ``tap_ids_logged`` are the tap ids that vLLM's log names, None where it names none.
    ``state`` is UNDER_WAY, READY, STUCK or FAILED; the last two have a fault. ``done`` of ``total`` is what the phase's
    bar counts, ``rate`` is in bytes a second, ``left_s`` the estimate for the rest of the phase, ``budget_s`` what the
    whole start may take (None: any time). ``evidence`` shows what the processes of a stuck start do. ``moved`` is for a
    later Gate that goes on watching.
    """

    ready: bool
    fault: str | None
    phase: str
    percent: int | None
    elapsed_s: float
    start_id: str
    restarts: int
    speculation: Speculation | None
    tap_ids_logged: list[int] | None
    journal_tail: list[str]
    state: str = UNDER_WAY
    done: int | None = None
    total: int | None = None
    rate: float | None = None
    left_s: float | None = None
    budget_s: float | None = None
    evidence: tuple[str, ...] = ()
    moved: Moved = _NOT_YET


class _Probe(NamedTuple):
    ready: bool = False
    fault: str | None = None
    speculation: Speculation | None = None


class _Response(NamedTuple):
    status: int
    text: str


class _NoAnswer(Exception):
    """An endpoint did not answer in time, or said that it cannot yet."""


class _Refused(Exception):
    """An endpoint's answer shows that waiting does not help; the message is for the user."""


def listeners(table: str, port: int) -> set[str]:
    """Return the socket inodes that listen on ``port``, from the text of /proc/net/tcp or tcp6."""
    found = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _TCP_LISTEN and fields[1].rpartition(":")[2] == f"{port:04X}":
            found.add(fields[9])
    return found


def other_listener(port: int, control_group: str, proc: Path = Path("/proc")) -> str | None:
    """Name a process that listens on ``port`` while none of ``control_group`` does; None otherwise.

    None too if nobody listens there, or if this process may not look at who does.
    """
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            inodes |= listeners((proc / "net" / table).read_text(), port)
    stranger = None
    for process in proc.glob("[0-9]*"):
        try:
            if not _holds(process, inodes):
                continue
            if _in_group(process, control_group):
                return None
            stranger = f"{(process / 'comm').read_text().strip()}, pid {process.name}"
        except OSError:
            # It ended, or belongs to someone else.
            continue
    return stranger


def _holds(process: Path, inodes: set[str]) -> bool:
    return any(str(entry.readlink())[len("socket:[") : -1] in inodes for entry in (process / "fd").iterdir())


def _in_group(process: Path, control_group: str) -> bool:
    paths = [line.split(":", 2)[2] for line in (process / "cgroup").read_text().splitlines()]
    return any(path == control_group or path.startswith(control_group.rstrip("/") + "/") for path in paths)


def phase_words(status: Status) -> str:
    """Say how far a start is: `loading weights 40 % (26 of 64, 4.9 GB/s, about 78 s left)`."""
    words = status.phase if status.percent is None else f"{status.phase} {status.percent} %"
    details = []
    if status.done is not None and status.total is not None:
        details.append(f"{status.done} of {status.total}")
    if status.rate is not None:
        details.append(f"{status.rate / 1e9:.1f} GB/s" if status.rate >= 1e8 else f"{status.rate / 1e6:.1f} MB/s")
    if status.left_s is not None and status.percent != 100:
        details.append(f"about {status.left_s:.0f} s left")
    return f"{words} ({', '.join(details)})" if details else words


class Gate:
    """Watches one service from its own host until it is ready: unit, journal, endpoints.

    ``run`` executes an argument list and returns its standard output, "" where it fails. ``url`` is the service's root,
    without a trailing slash; ``host`` is the name that messages use. ``moved`` is what an earlier Gate saw of this
    start, where one watched it. ``certificate`` is the file with the service's certificate, empty without TLS.
    """

    def __init__(
        self,
        host: str,
        unit: str,
        url: str,
        model: str,
        speculative: bool,
        api_key: str | None,
        run: Callable[[list[str]], str],
        budget: Budget = _DEFAULT_BUDGET,
        moved: Moved = _NOT_YET,
        certificate: str = "",
    ) -> None:
        self._host = host
        self._unit = unit
        self._url = url.rstrip("/")
        parts = urllib.parse.urlsplit(self._url)
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._model = model
        self._speculative = speculative
        self._run = run
        self._budget = budget
        self._moved = moved
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._certificate = certificate
        self._opener = opener(certificate)

    def watch(self, start_id: str, window_s: float, heed: Callable[[], None] = lambda: None) -> Status:
        """Wait up to ``window_s`` seconds for readiness, less if the service is ready or cannot become so.

        ``start_id`` is the start to watch, as an earlier call reported it; "" takes the one that is under way, and
        any later start then counts as a failure. A start that is stuck, or takes longer than its budget, is at fault.
        The last look may go on for half a minute after the window; ``heed`` is called meanwhile, and ends the wait with
        what it raises.
        """
        deadline = time.monotonic() + window_s
        next_reading = time.monotonic() + _LOG_S
        while True:
            unit = self._show()
            watched = start_id or unit.start_id
            fault = unit_fault(unit, start_id)
            if fault is not None:
                return self._stopped(unit, watched, fault)
            probe = self._look(unit, heed)
            over = time.monotonic() >= deadline
            if probe.ready or probe.fault or over or time.monotonic() >= next_reading:
                status = self._status(unit, watched, probe)
                if over or status.state != UNDER_WAY:
                    return status
                next_reading = time.monotonic() + _LOG_S
            start_id = watched
            time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))

    def _show(self) -> Unit:
        properties = ",".join(UNIT_PROPERTIES)
        return parse_unit(self._run(["systemctl", "show", self._unit, f"--property={properties}"]))

    def _journal(self, start_id: str) -> list[str]:
        """Return what the service and systemd logged in one start, oldest first."""
        if not start_id:
            return []
        command = ["journalctl", "--no-pager", "--quiet", "--output=cat", f"--lines={_JOURNAL_LINES}"]
        # The service's own lines carry the first field, systemd's lines about it the second.
        match = [f"_SYSTEMD_INVOCATION_ID={start_id}", "+", f"INVOCATION_ID={start_id}"]
        return self._run([*command, *match]).splitlines()

    def _stopped(self, unit: Unit, start_id: str, fault: str) -> Status:
        lines = self._journal(start_id)
        cause = vllm_log.root_cause(lines)
        if cause is not None:
            reason = f"{cause.line[:_MAX_REASON].rstrip('. ')}. {cause.remedy}".rstrip()
        else:
            reason = f"{self._unit} {fault}. See `journalctl -u {self._unit}` on the host."
        return self._status(unit, start_id, _Probe(fault=f"vLLM on {self._host} did not start: {reason}"), lines)

    def _status(self, unit: Unit, start_id: str, probe: _Probe, lines: list[str] | None = None) -> Status:
        lines = self._journal(start_id) if lines is None else lines
        progress = vllm_log.Progress(vllm_log.SERVING) if probe.ready else vllm_log.read_progress(lines)
        elapsed_s = time.monotonic() - unit.started_at if unit.started_at is not None else 0.0
        budget_s = self._budget.total_s(progress)
        status = Status(
            ready=probe.ready,
            fault=probe.fault,
            phase=progress.phase,
            percent=progress.percent,
            elapsed_s=round(elapsed_s, 1),
            start_id=start_id,
            restarts=unit.restarts,
            speculation=probe.speculation,
            tap_ids_logged=vllm_log.tap_ids(lines),
            journal_tail=[line.strip("\r")[:_MAX_REASON] for line in lines if line.strip()][-_TAIL_LINES:],
            state=READY if probe.ready else FAILED if probe.fault else UNDER_WAY,
            done=progress.done,
            total=progress.total,
            rate=self._budget.rate(progress),
            left_s=phase_left_s(progress),
            budget_s=budget_s if budget_s < float("inf") else None,
        )
        return status if status.state != UNDER_WAY else self._patient(unit, progress, status)

    def _patient(self, unit: Unit, progress: vllm_log.Progress, status: Status) -> Status:
        """Return ``status``, with a fault if the start is given up."""
        mark = f"{status.start_id}: {progress.mark}, {bytes_read(unit.control_group) >> 20} MiB"
        now = time.monotonic()
        if mark != self._moved.mark:
            self._moved = Moved(mark, now)
        still_s = now - self._moved.at
        last = status.journal_tail[-1] if status.journal_tail else "none"
        if still_s >= self._budget.stuck_after_s:
            reason = (
                f"is stuck at {phase_words(status)}: for {still_s:.0f} s its log said nothing new and it read nothing. "
                f"Its last line: {last}. See what its processes do (evidence), or raise vllm_service_stuck_after."
            )
        elif status.budget_s is not None and status.elapsed_s > status.budget_s:
            reason = (
                f"is at {phase_words(status)} after {status.elapsed_s:.0f} s, and its start may take "
                f"{status.budget_s:.0f} s. If it still makes progress, raise vllm_service_start_budget."
            )
        else:
            return status._replace(moved=self._moved)
        stacks = stack_lines(unit.control_group, self._run)
        return status._replace(
            state=STUCK,
            fault=f"vLLM on {self._host} {reason}",
            evidence=tuple(line[:_MAX_REASON] for line in islice(stacks, _EVIDENCE_LINES)),
            moved=self._moved,
        )

    def _look(self, unit: Unit, heed: Callable[[], None]) -> _Probe:
        pool = ThreadPoolExecutor(1)
        probe = pool.submit(self._probe, unit)
        # What is asked when ``heed`` raises is not waited for: its answer counts no more.
        pool.shutdown(wait=False)
        while not wait([probe], _POLL_S).done:
            heed()
        return probe.result()

    def _probe(self, unit: Unit) -> _Probe:
        """Ask the endpoints, cheapest first. An answer that does not come in time means: not ready yet."""
        now = time.monotonic()
        over = (now if unit.started_at is None else unit.started_at) + self._budget.limit_s
        deadline = min(now + _ANSWERS_S, over)
        if unit.status.startswith(JOINED):
            # Whether the replica serves, its head is asked.
            return _Probe(ready=True)
        try:
            health = self._request("/health", now + _HEALTH_S)
            if health is None or health.status != HTTPStatus.OK:
                return _Probe()
            other = other_listener(self._port, unit.control_group)
            if other is not None:
                raise _Refused(
                    f"Port {self._port} on {self._host} is served by another process ({other}), not by "
                    f"{self._unit}. Stop it, or correct the port or the url."
                )
            self._check_model(deadline)
            self._complete(deadline, tokens=1)
            before = self._counters(deadline)
            if before is None:
                return _Probe(ready=True)
            self._complete(deadline, tokens=_SAMPLE_TOKENS)
            return _Probe(ready=True, speculation=self._settled_counters(before, deadline).since(before))
        except _NoAnswer:
            return _Probe()
        except _Refused as error:
            return _Probe(fault=str(error))

    def _check_model(self, deadline: float) -> None:
        answer = self._answer("/v1/models", deadline)
        entries = answer.get("data")
        served = (
            [str(entry.get("id")) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        )
        if self._model not in served:
            names = ", ".join(served) or "no model"
            raise _Refused(
                f"vLLM on {self._host} serves {names}, expected {self._model}. Correct served-model-name, or the url "
                f"{self._url} if this is another service."
            )

    def _complete(self, deadline: float, tokens: int) -> None:
        body = {"model": self._model, "prompt": _PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self._answer("/v1/completions", deadline, body)
        usage = answer.get("usage")
        if not isinstance(usage, dict) or not usage.get("completion_tokens"):
            raise _Refused(f"vLLM on {self._host} answered a completion without generating a token. Read its journal.")

    def _counters(self, deadline: float) -> Speculation | None:
        response = self._request("/metrics", deadline)
        if response is None or response.status != HTTPStatus.OK:
            raise _NoAnswer
        counters = parse_speculation(response.text)
        if self._speculative and counters is None:
            raise _Refused(
                f"vLLM on {self._host} serves without speculative decoding: {self._url}/metrics has no "
                "vllm:spec_decode counters. Check speculative-config, and that disable-log-stats is off."
            )
        if not self._speculative and counters is not None:
            raise _Refused(
                f"vLLM on {self._host} serves with speculative decoding, but this release has none. "
                "Check speculative-config of the running service."
            )
        return counters

    def _settled_counters(self, before: Speculation, deadline: float) -> Speculation:
        """Read the counters until two readings agree: vLLM books a request's last step just after answering it."""
        patience = time.monotonic() + _SETTLE_LIMIT_S
        last = before
        while True:
            now = self._counters(deadline)
            if now is None or (now == last and now.drafts > before.drafts) or time.monotonic() > patience:
                return now or last
            last = now
            time.sleep(_SETTLE_S)

    def _answer(self, path: str, deadline: float, body: dict[str, object] | None = None) -> dict[str, Any]:
        response = self._request(path, deadline, body)
        if response is None or response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _NoAnswer
        if response.status == HTTPStatus.UNAUTHORIZED:
            raise _Refused(
                f"vLLM on {self._host} refuses the API key (401 from {path}). Check that the key is one of those whose "
                "digest is in the service's key file."
            )
        if response.status != HTTPStatus.OK:
            raise _Refused(f"vLLM on {self._host} answers {path} with {response.status}: {response.text[:_MAX_REASON]}")
        try:
            answer = json.loads(response.text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise _Refused(
                f"{self._url}{path} on {self._host} is not vLLM: its answer is no JSON object. Correct the url."
            )
        return answer

    def _request(self, path: str, deadline: float, body: dict[str, object] | None = None) -> _Response | None:
        """Return the response, or None if none came before ``deadline`` (at least a second is waited)."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{self._url}{path}", data, self._headers)
        timeout = max(deadline - time.monotonic(), 1.0)
        try:
            with self._opener.open(request, timeout=timeout) as response:
                return _Response(response.status, response.read(_MAX_BODY).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                return _Response(error.code, error.read(_MAX_BODY).decode(errors="replace"))
        except (OSError, http.client.HTTPException) as error:
            who = stranger(error)
            if who:
                raise _Refused(
                    f"{self._url} on {self._host} answers {who} {self._certificate}. Stop what else listens there, or "
                    "deploy again, so that the service runs with its settings."
                ) from None
            return None
