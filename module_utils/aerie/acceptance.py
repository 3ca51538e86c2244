# SPDX-License-Identifier: Apache-2.0
"""The live gate: does a running vLLM accept drafts as it should? Real prompts, and differences of its counters.

As a gate (``exclusive``) the service has no other requests: none run before and after each round of prompts, and it
counts as many as were sent. A round in which others had requests is sent again, a few times. Otherwise (``verify``)
all traffic is measured, and the result says so. What counts mean is judged by ``acceptance_verdict``.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from ansible.module_utils.aerie.acceptance_prompts import PROMPTS
from ansible.module_utils.aerie.acceptance_verdict import (
    FAILED,
    LOOKS,
    MIN_ROUNDS,
    NOT_APPLICABLE,
    PASSED,
    WARNED,
    Conditions,
    Round,
    Verdict,
    acceptance_length,
    check_thresholds,
    comparable,
    judge,
    record_of,
    thresholds_for,
    total,
)
from ansible.module_utils.aerie.endpoint import opener
from ansible.module_utils.aerie.speculation import Speculation, parse_speculation

# Between two readings of the counters, and how long they may take to settle after the last answer; seconds.
_SETTLE_S = 0.05
_SETTLE_LIMIT_S = 5.0
# How long the gate waits for others' requests to end, before each round.
_IDLE_LIMIT_S = 15.0
# Rounds that are sent again because others' requests ran meanwhile.
_REPEATS = 3
_METRICS_S = 10.0
_MAX_BODY = 8 << 20
_PIECE = 1 << 16
_MAX_REASON = 300

# Tokens after the first of each answer, which is made without a draft: with so many, the first draft was counted.
_FLOWING = 16

_SERIES = re.compile(
    r"^(?P<name>vllm:num_requests_running|vllm:num_requests_waiting|vllm:request_success_total"
    r"|vllm:generation_tokens_total|process_start_time_seconds)(?:\{.{0,1000}\})? (?P<value>\S{1,40})$"
)


@dataclass(frozen=True)
class Settings:
    """The gate's configuration.

    ``url`` is the service's root; ``certificate`` the file with its certificate, empty without TLS;
    ``speculative_tokens`` what the release drafts per step, 0 without speculation.
    ``prompts`` none takes ours. ``thresholds``, ``baseline`` and ``last_good`` as in ``acceptance_verdict``. Seconds:
    ``request_timeout_s`` for one answer, ``budget_s`` for everything.
    """

    url: str
    model: str
    speculative_tokens: int
    prompts: Sequence[str] | None = None
    max_tokens: int = 128
    concurrency: int = 2
    thresholds: Mapping[str, Any] | None = None
    baseline: Mapping[str, Any] | None = None
    last_good: Mapping[str, Any] | None = None
    exclusive: bool = True
    request_timeout_s: float = 120.0
    budget_s: float = 600.0
    certificate: str = ""


class Reading(NamedTuple):
    """One look at /metrics, summed over engines; None for what it does not have.

    ``open`` are requests that run or wait, ``finished`` those that ended, ``tokens`` those generated, ``started`` when
    the process began.
    """

    open: int | None
    finished: int | None
    tokens: int | None
    started: float | None
    speculation: Speculation | None


class Fault(Exception):
    """The gate failed before there was anything to judge: a name for programs, and a sentence for the user."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _LateError(Exception):
    """The budget is used up."""


def live_gate(config: Mapping[str, Any], api_key: str) -> dict[str, Any]:
    """Measure acceptance on a running service and judge it; ``config`` has the fields of ``Settings``.

    Returns JSON-able data: gate, verdict (passed, warned, failed, not_applicable), reason (a name, empty if passed),
    message, drafts, draft_tokens, accepted_tokens, acceptance_length, per_position, bounds, thresholds,
    speculative_tokens, prompts_sha256, sampling, requests, tokens, rounds, others (whether the numbers hold others'
    requests; None if that cannot be told). A wrong configuration is a failed gate, too.
    """
    settings = Settings("", "", 0)
    try:
        settings = settings_of(config)
        measurement = _Measurement(settings, _Service(settings, api_key))
        verdict = measurement.run()
    except (TypeError, ValueError) as error:
        nothing = Settings("", "", 0)
        measurement = _Measurement(nothing, _Service(nothing, ""))
        verdict = Verdict(FAILED, "configuration", f"The live gate cannot be run as configured: {error}.", True, {})
    except Fault as fault:
        verdict = Verdict(FAILED, fault.reason, str(fault), True, {})
    except _LateError:
        said = f"vLLM answered no prompts within {settings.budget_s:g} s. Read its journal."
        verdict = Verdict(FAILED, "no_answer", said, True, {})
    return measurement.result(verdict)


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Return the settings that ``config`` names; what is None is the default.

    Raises ValueError or TypeError, naming what is wrong.
    """
    unknown = config.keys() - Settings.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(
            f"there is no {', '.join(sorted(unknown))}; there are {', '.join(Settings.__dataclass_fields__)}"
        )
    settings = Settings(**{key: value for key, value in config.items() if value is not None})
    for name, least in (("speculative_tokens", 0), ("max_tokens", 1), ("concurrency", 1)):
        value = getattr(settings, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}: it must be a number from {least} on")
    if isinstance(settings.prompts, str):
        raise ValueError("prompts must be a list of texts")
    check_thresholds(settings.thresholds)
    return settings


def parse_reading(metrics: str) -> Reading:
    """Read a /metrics text; a number that is none, infinite or negative is left out."""
    sums: dict[str, float] = {}
    for line in metrics.splitlines():
        match = _SERIES.match(line)
        value = _number(match["value"]) if match else None
        if match is not None and value is not None:
            sums[match["name"]] = sums.get(match["name"], 0.0) + value

    def count(name: str) -> int | None:
        return int(sums[name]) if name in sums else None

    running, waiting = count("vllm:num_requests_running"), count("vllm:num_requests_waiting")
    return Reading(
        None if running is None or waiting is None else running + waiting,
        count("vllm:request_success_total"),
        count("vllm:generation_tokens_total"),
        sums.get("process_start_time_seconds"),
        parse_speculation(metrics),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def restarted(before: Reading, after: Reading) -> bool:
    """Say whether the service began anew between two readings: another process, or a counter that went back."""
    pairs = [(before.finished, after.finished), (before.tokens, after.tokens)]
    if before.speculation is not None and after.speculation is not None:
        pairs += zip(before.speculation[:3], after.speculation[:3])
        pairs += zip(before.speculation.accepted_per_position, after.speculation.accepted_per_position)
    went_back = any(old is not None and new is not None and new < old for old, new in pairs)
    return went_back or (None not in (before.started, after.started) and before.started != after.started)


def others_had_requests(before: Reading, after: Reading, requests: int, tokens: int) -> bool | None:
    """Say whether requests other than our ``requests``, answered with ``tokens`` tokens, ran between two readings.

    None if /metrics does not tell.
    """
    if before.open or after.open:
        return True
    if before.finished is None or after.finished is None or before.open is None or after.open is None:
        return None
    if after.finished - before.finished != requests:
        return True
    return before.tokens is not None and after.tokens is not None and after.tokens - before.tokens > tokens


def contradiction(counted: Speculation, k: int) -> str | None:
    """Say how counts of one service contradict each other or ``k`` drafted tokens, None if they do not."""
    positions = counted.accepted_per_position
    if len(positions) != k:
        return f"it counts {len(positions)} draft positions, the release drafts {k} tokens"
    if not counted.accepted_tokens <= counted.draft_tokens <= k * counted.drafts:
        return f"{counted.accepted_tokens} accepted of {counted.draft_tokens} drafted tokens in {counted.drafts} drafts"
    if sum(positions) != counted.accepted_tokens:
        return f"{counted.accepted_tokens} tokens were accepted, {sum(positions)} of them at a position"
    if any(later > earlier for earlier, later in zip((counted.drafts, *positions), positions)):
        return f"accepted at {', '.join(map(str, positions))} times in {counted.drafts} drafts"
    return None


def prompts_digest(prompts: Sequence[str]) -> str:
    """Return the sha256 that names a list of prompts."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


class _Measurement:
    """One run of the gate: what it sent and counted so far."""

    def __init__(self, settings: Settings, service: _Service) -> None:
        self._settings = settings
        self._service = service
        self._k = settings.speculative_tokens
        self._prompts = list(settings.prompts or PROMPTS)
        self._rounds: list[Round] = []
        self._sent = 0
        self._repeats = 0
        # Whether the counted rounds hold others' requests, as far as /metrics tells.
        self._others: bool | None = False

    def run(self) -> Verdict:
        """Send prompts until the verdict is clear, or all were sent, or the budget is used up."""
        if self._k == 0:
            return self._without_speculation()
        verdict = self._judge()
        try:
            self._read()
            for batches in self._looks():
                for prompts in batches:
                    self._rounds.append(self._round(prompts))
                    self._sent += len(prompts)
                    self._check_counters()
                verdict = self._judge()
                if verdict.verdict == FAILED or (verdict.decided and not self._last_good_has_more()):
                    break
        except _LateError:
            if not self._rounds:
                raise
            verdict = self._judge()
        return self._qualified(verdict)

    def result(self, verdict: Verdict) -> dict[str, Any]:
        """Return the gate's result."""
        counted = total(self._rounds)
        length = acceptance_length(counted)
        conditions = self._conditions()
        thresholds = thresholds_for(conditions, self._settings.baseline, self._settings.thresholds)
        return {
            "gate": "live",
            "verdict": verdict.verdict,
            "reason": verdict.reason,
            "message": verdict.message,
            "drafts": counted.drafts,
            "draft_tokens": counted.draft_tokens,
            "accepted_tokens": counted.accepted_tokens,
            "acceptance_length": None if length is None else round(length, 4),
            "per_position": [round(own / counted.drafts, 4) for own in counted.accepted_per_position]
            if counted.drafts
            else [],
            "bounds": verdict.bounds,
            "thresholds": thresholds._asdict() if self._k else {},
            **conditions._asdict(),
            "requests": sum(item.requests for item in self._rounds),
            "tokens": sum(item.tokens for item in self._rounds),
            "rounds": record_of(self._rounds),
            "others": self._others,
        }

    def _without_speculation(self) -> Verdict:
        if self._service.metrics().speculation is not None:
            raise Fault(
                "counters_unexpected",
                "vLLM serves with speculative decoding, but this release has none. Check speculative-config of the "
                "running service, and that it was restarted.",
            )
        return Verdict(NOT_APPLICABLE, "no_speculation", "The release does not speculate.", True, {})

    def _looks(self) -> Iterator[list[list[str]]]:
        """Yield, for each look at the data, the prompts that are sent together before it."""
        size = self._settings.concurrency
        batches = [self._prompts[start : start + size] for start in range(0, len(self._prompts), size)]
        first = max(math.ceil(len(batches) / LOOKS), MIN_ROUNDS)
        yield batches[:first]
        if batches[first:]:
            yield batches[first:]

    def _round(self, prompts: Sequence[str]) -> Round:
        """Send ``prompts`` together and count; again if others' requests ran meanwhile, a few times in a gate."""
        while True:
            wants_silence = self._settings.exclusive and self._repeats < _REPEATS
            before = self._quiet() if wants_silence else self._read()
            tokens = self._service.answer(prompts)
            after = self._settled(before, len(prompts), wants_silence)
            if restarted(before, after):
                raise Fault(
                    "restarted",
                    "vLLM was restarted while its acceptance was measured: its counters began anew. Read its journal.",
                )
            others = others_had_requests(before, after, len(prompts), tokens)
            if others and wants_silence:
                self._repeats += 1
                continue
            assert before.speculation is not None and after.speculation is not None
            counted = after.speculation.since(before.speculation)
            if not others:
                self._check_consistent(counted)
            self._others = True if others or self._others else (None if others is None else self._others)
            return Round(len(prompts), tokens, counted)

    def _read(self) -> Reading:
        reading = self._service.metrics()
        if reading.speculation is None:
            raise Fault(
                "counters_absent",
                f"vLLM serves without speculative decoding, but this release drafts {self._k} tokens: "
                f"{self._settings.url}/metrics has no vllm:spec_decode counters. Check speculative-config, and that "
                "disable-log-stats is off.",
            )
        if len(reading.speculation.accepted_per_position) != self._k:
            self._check_consistent(reading.speculation)
        return reading

    def _quiet(self) -> Reading:
        """Return a reading without open requests, or the last one if others' do not end."""
        patience = time.monotonic() + _IDLE_LIMIT_S
        last = self._read()
        while True:
            now = self._read()
            if (now == last and not now.open) or time.monotonic() > patience:
                return now
            last = now
            self._service.pause(_SETTLE_S)

    def _settled(self, before: Reading, requests: int, alone: bool) -> Reading:
        """Return the counters when they have settled: vLLM books a request's last step just after answering it.

        ``alone``: until they stand still. Otherwise others' requests may move them: until ours are booked.
        """
        patience = time.monotonic() + _SETTLE_LIMIT_S
        last = before
        while True:
            now = self._read()
            booked = last.finished is None or before.finished is None or last.finished - before.finished >= requests
            still = (now == last and not now.open) if alone else True
            if (booked and still and last is not before) or time.monotonic() > patience or restarted(before, now):
                return now
            last = now
            self._service.pause(_SETTLE_S)

    def _check_consistent(self, counted: Speculation) -> None:
        fault = contradiction(counted, self._k)
        if fault is not None:
            raise Fault(
                "counters_contradict",
                f"vLLM's speculation counters contradict each other or the release: {fault}. Check that "
                f"{self._settings.url} is this release's service.",
            )

    def _check_counters(self) -> None:
        """Fail if tokens flow and drafts do not."""
        tokens = sum(item.tokens - item.requests for item in self._rounds)
        if tokens >= _FLOWING and not total(self._rounds).drafts:
            raise Fault(
                "counters_stuck",
                f"vLLM generated {tokens + sum(item.requests for item in self._rounds)} tokens and drafted none: its "
                "speculation counters are there and do not move. Check the drafter's max_position_embeddings and "
                "vLLM's journal for a drafter that is switched off.",
            )

    def _conditions(self) -> Conditions:
        sampling = {"endpoint": self._service.endpoint, "temperature": 0, "max_tokens": self._settings.max_tokens}
        return Conditions(self._k, prompts_digest(self._prompts[: self._sent]), sampling)

    def _judge(self) -> Verdict:
        conditions = self._conditions()
        thresholds = thresholds_for(conditions, self._settings.baseline, self._settings.thresholds)
        last_good = None if self._others else self._settings.last_good
        return judge(self._rounds, conditions, thresholds, last_good)

    def _last_good_has_more(self) -> bool:
        """Say whether the last good release was measured with all prompts, and this one was not yet."""
        everything = self._conditions()._replace(prompts_sha256=prompts_digest(self._prompts))
        rounds = math.ceil(len(self._prompts) / self._settings.concurrency)
        last_good = self._settings.last_good
        return not self._others and comparable(last_good, everything, rounds) and self._sent < len(self._prompts)

    def _qualified(self, verdict: Verdict) -> Verdict:
        """Add to the verdict whose requests were measured."""
        if self._others is False:
            return verdict
        if not self._settings.exclusive:
            what = "All traffic was measured" if self._others else "/metrics does not tell whose requests were measured"
            return verdict._replace(message=f"{verdict.message} {what}.")
        what = (
            f"Others' requests were measured too: they ran in {self._repeats} rounds that were sent again. Drain the "
            "replica, and keep clients off its own port."
            if self._others
            else "Whether others' requests were measured cannot be told: /metrics has no request counters."
        )
        message = f"{verdict.message} {what}"
        if verdict.verdict == PASSED:
            return verdict._replace(verdict=WARNED, reason="others", message=message)
        return verdict._replace(message=message)


class _Service:
    """Calls one vLLM server; every wait ends, and is cut by the budget."""

    def __init__(self, settings: Settings, api_key: str) -> None:
        self._settings = settings
        self._url = settings.url.rstrip("/")
        self._deadline = time.monotonic() + settings.budget_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        try:
            self._opener = opener(settings.certificate)
        except (OSError, ValueError) as error:
            raise ValueError(f"the certificate {settings.certificate} cannot be read ({error})") from None
        self.endpoint = "chat"

    def pause(self, seconds: float) -> None:
        """Wait, unless the budget is used up."""
        if time.monotonic() + seconds >= self._deadline:
            raise _LateError
        time.sleep(seconds)

    def metrics(self) -> Reading:
        """Return what /metrics says now."""
        status, text = self._request("/metrics", None, _METRICS_S)
        if status != HTTPStatus.OK:
            raise Fault(
                "no_metrics", f"{self._url}/metrics answers with status {status}. Check that the url is vLLM's."
            )
        return parse_reading(text)

    def answer(self, prompts: Sequence[str]) -> int:
        """Send ``prompts`` at the same time and return the number of tokens in their answers."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return sum(pool.map(self._complete, prompts))

    def _complete(self, prompt: str) -> int:
        endpoint = self.endpoint
        status, text = self._send(prompt, endpoint)
        if status == HTTPStatus.BAD_REQUEST and endpoint == "chat" and "chat template" in text:
            # A base model: its prompts are texts to go on with.
            self.endpoint = "completions"
            status, text = self._send(prompt, self.endpoint)
        if status == HTTPStatus.UNAUTHORIZED:
            raise Fault(
                "refused",
                f"vLLM at {self._url} refuses the gate's API key (401). Check that the key's digest is in one of the "
                "files that the service reads.",
            )
        if status != HTTPStatus.OK:
            reason = " ".join(text.split())[:_MAX_REASON].rstrip(".")
            raise Fault("bad_answer", f"vLLM at {self._url} answers a prompt with status {status}: {reason}.")
        try:
            tokens = json.loads(text)["usage"]["completion_tokens"]
        except (ValueError, TypeError, KeyError):
            tokens = None
        if not isinstance(tokens, int) or tokens < 1:
            raise Fault(
                "bad_answer", f"{self._url} answers a prompt without a generated token. Check that the url is vLLM's."
            )
        return tokens

    def _send(self, prompt: str, endpoint: str) -> tuple[int, str]:
        body: dict[str, Any] = {
            "model": self._settings.model,
            "temperature": 0,
            "max_tokens": self._settings.max_tokens,
        }
        if endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
            return self._request("/v1/chat/completions", body, self._settings.request_timeout_s)
        return self._request("/v1/completions", {**body, "prompt": prompt}, self._settings.request_timeout_s)

    def _request(self, path: str, body: Mapping[str, Any] | None, longest_s: float) -> tuple[int, str]:
        """Return status and text of an answer that is complete within ``longest_s`` seconds."""
        now = time.monotonic()
        if now >= self._deadline:
            raise _LateError
        end = min(now + longest_s, self._deadline)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, self._headers)
        try:
            try:
                with self._opener.open(request, timeout=end - now) as response:
                    return response.status, self._text(response, end)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, self._text(error, end)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= self._deadline:
                raise _LateError from None
            late = time.monotonic() >= end
            what = f"within {longest_s:g} s" if late else f"({error or type(error).__name__})"
            raise Fault("no_answer", f"vLLM gave no answer to {self._url}{path} {what}. Read its journal.") from None

    @staticmethod
    def _text(response: Any, end: float) -> str:  # noqa: ANN401 - an answer or an HTTPError
        pieces: list[bytes] = []
        size = 0
        while size < _MAX_BODY:
            piece = response.read1(_PIECE)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if time.monotonic() >= end:
                raise TimeoutError("the answer does not end")
        return b"".join(pieces).decode(errors="replace")
