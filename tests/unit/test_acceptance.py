# SPDX-License-Identifier: Apache-2.0
"""The live gate, from outside: a real HTTP server that drafts, accepts and counts as it is told."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import acceptance
from ansible.module_utils.aerie.acceptance import live_gate, parse_reading, prompts_digest
from ansible.module_utils.aerie.acceptance_prompts import PROMPTS
from certificates_made import pair, wrap
from hypothesis import given
from hypothesis import strategies as st

KEY = "sk-not-to-be-seen"
# Kimi-K2.6 with a public drafter on long chats, and the same with tap ids off by one (FIELD.md).
HEALTHY = (0.633, 0.404, 0.264)
OFF_BY_ONE = (0.10, 0.02, 0.01)
START = 1700000000.25


class Vllm:
    """A server with vLLM's endpoints and counters. What it does is set by its attributes and hooks.

    ``rates`` are the shares of drafts that are accepted at least up to each position; None serves without speculation.
    An answer's last step is booked when /metrics was read once more, as vLLM books it just after answering.
    """

    def __init__(self, rates: Sequence[float] | None = HEALTHY) -> None:
        self.rates = rates
        self.answer_tokens = 100
        self.books_drafts = True
        self.chat_template = True
        self.request_counters = True
        self.extra_metrics = ""
        self.metrics_status = 200
        self.answer_status = 200
        self.answer_text: str | None = None
        self.started = START
        self.prompts: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.on_answer: Callable[[int], None] = lambda count: None
        self.on_metrics: Callable[[int], None] = lambda count: None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.lock = threading.Lock()
        self.looks = 0
        self.open = 0
        self.reset()
        vllm = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(b"")

            def do_POST(self) -> None:
                self.answer(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, body: bytes) -> None:
                status, text = vllm.respond(self.path, self.headers.get("Authorization", ""), body)
                # The gate may have given up.
                with suppress(ConnectionError):
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def reset(self) -> None:
        """Begin to count anew, as a restart does."""
        self.finished = 0
        self.tokens = 0
        self.drafts = 0
        self.drafted = 0
        self.positions = [0] * len(self.rates or ())
        self.late: list[Callable[[], None]] = []

    def stop(self) -> None:
        self.may_answer.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def respond(self, path: str, authorization: str, body: bytes) -> tuple[int, str]:
        self.paths.append(path)
        if path == "/metrics":
            with self.lock:
                self.looks += 1
                text = self.metrics()
                for book in self.late:
                    book()
                self.late = []
            self.on_metrics(self.looks)
            return self.metrics_status, text
        if authorization != f"Bearer {KEY}":
            return 401, '{"error": "Unauthorized"}'
        request = json.loads(body)
        if path.endswith("/chat/completions"):
            if not self.chat_template:
                return 400, '{"error": {"message": "you must provide a chat template if the tokenizer has none"}}'
            prompt = request["messages"][0]["content"]
        else:
            prompt = request["prompt"]
        with self.lock:
            self.open += 1
            self.prompts.append(prompt)
            self.bodies.append(request)
        self.on_answer(len(self.prompts))
        self.may_answer.wait()
        tokens = min(self.answer_tokens, request["max_tokens"])
        with self.lock:
            self.open -= 1
            if self.answer_status == 200:
                self.run(prompt, tokens)
        if self.answer_text is not None or self.answer_status != 200:
            return self.answer_status, self.answer_text or "broken"
        return 200, json.dumps({"usage": {"completion_tokens": tokens}})

    def run(self, prompt: str, tokens: int) -> None:
        """Generate ``tokens`` tokens and count; the first one needs no draft, the last step is booked late."""
        chance = random.Random(prompt)
        made = 1
        self.tokens += 1
        while made < tokens:
            accepted = self.accepted(chance)
            step = min(accepted + 1, tokens - made)
            made += step
            if made < tokens:
                self.count(accepted, step)
            else:
                self.late.append(lambda accepted=accepted, step=step: self.count(accepted, step))  # type: ignore[misc]
        self.late.append(self.finish)

    def accepted(self, chance: random.Random) -> int:
        draw = chance.random()
        return sum(draw < rate for rate in self.rates or ())

    def count(self, accepted: int, step: int) -> None:
        self.tokens += step
        if self.rates is not None and self.books_drafts:
            self.drafts += 1
            self.drafted += len(self.rates)
            for position in range(accepted):
                self.positions[position] += 1

    def finish(self) -> None:
        self.finished += 1

    def foreign(self, tokens: int = 20) -> None:
        """Somebody else's request, from beginning to end."""
        with self.lock:
            self.run("somebody else's", tokens)
            for book in self.late:
                book()
            self.late = []

    def metrics(self) -> str:
        label = 'engine="0",model_name="kimi"'
        lines = ["# HELP process_start_time_seconds x", f"process_start_time_seconds {self.started}"]
        if self.request_counters:
            lines += [
                f"vllm:num_requests_running{{{label}}} {float(self.open)}",
                f"vllm:num_requests_waiting{{{label}}} 0.0",
                f'vllm:request_success_total{{{label},finished_reason="length"}} {float(self.finished)}',
                f'vllm:request_success_total{{{label},finished_reason="abort"}} 0.0',
                f"vllm:generation_tokens_total{{{label}}} {float(self.tokens)}",
            ]
        if self.rates is not None:
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{label}}} {float(self.drafts)}",
                f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {float(self.drafted)}",
                f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {float(sum(self.positions))}",
            ]
            for position, count in enumerate(self.positions):
                labels = f'{label},position="{position}"'
                lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {float(count)}")
        return "\n".join(lines) + "\n" + self.extra_metrics


@pytest.fixture(autouse=True)
def briskly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "_SETTLE_S", 0.002)


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    server = Vllm()
    yield server
    server.stop()


def gate(vllm: Vllm, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """Run the gate as its users do, over JSON both ways."""
    k = len(vllm.rates) if vllm.rates is not None else 0
    config = {"url": vllm.url, "model": "kimi", "speculative_tokens": k, **changes}
    result = json.loads(json.dumps(live_gate(json.loads(json.dumps(config)), KEY)))
    assert KEY not in json.dumps(result)
    assert result["gate"] == "live"
    assert result["message"].endswith(".")
    return result  # type: ignore[no-any-return]


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long for counters that never settle and traffic that never ends."""
    monkeypatch.setattr(acceptance, "_SETTLE_LIMIT_S", 0.2)
    monkeypatch.setattr(acceptance, "_IDLE_LIMIT_S", 0.2)


# --- What is measured


def test_a_healthy_drafter_passes_on_half_of_the_prompts(vllm: Vllm) -> None:
    result = gate(vllm, thresholds={"warn_length": 2.0, "warn_position_0": 0.5})
    assert (result["verdict"], result["reason"], result["others"]) == ("passed", "", False)
    assert (result["requests"], result["tokens"], len(result["rounds"])) == (24, 2400, 12)
    assert sorted(vllm.prompts) == sorted(PROMPTS[:24])
    assert result["prompts_sha256"] == prompts_digest(PROMPTS[:24])
    # All that the server counted, the steps that were booked late too.
    assert (result["drafts"], result["draft_tokens"]) == (vllm.drafts, 3 * vllm.drafts)
    assert result["accepted_tokens"] == sum(vllm.positions)
    assert result["acceptance_length"] == round(1 + sum(vllm.positions) / vllm.drafts, 4)
    assert result["per_position"] == [round(count / vllm.drafts, 4) for count in vllm.positions]
    assert result["bounds"]["acceptance_length"][0] < result["acceptance_length"] < 2.6
    assert result["bounds"]["confidence"] == 0.95
    assert f"{vllm.drafts} drafts in 24 answers, 3 tokens each" in result["message"]


def test_what_was_counted_before_does_not_count(vllm: Vllm) -> None:
    with vllm.lock:
        vllm.drafts, vllm.drafted, vllm.finished, vllm.tokens = 10**6, 3 * 10**6, 5000, 10**6
        vllm.positions = [5, 1, 0]
    result = gate(vllm)
    assert result["per_position"][0] == pytest.approx(0.633, abs=0.08)
    assert result["verdict"] != "failed"


def test_prompts_are_greedy_and_of_one_length(vllm: Vllm) -> None:
    result = gate(vllm, max_tokens=33)
    assert {(body["temperature"], body["max_tokens"], body["model"]) for body in vllm.bodies} == {(0, 33, "kimi")}
    assert result["sampling"] == {"endpoint": "chat", "temperature": 0, "max_tokens": 33}


def test_prompts_run_together(vllm: Vllm) -> None:
    together = threading.Barrier(4)

    def wait(count: int) -> None:
        together.wait(timeout=10)

    vllm.on_answer = wait
    assert gate(vllm, concurrency=4)["requests"] == 24


def test_own_prompts(vllm: Vllm) -> None:
    own = [f"Count to {number}" for number in range(20)]
    result = gate(vllm, prompts=own, concurrency=1)
    assert sorted(vllm.prompts) == sorted(own[: result["requests"]])
    assert result["prompts_sha256"] == prompts_digest(own[: result["requests"]])


def test_a_base_model_gets_its_prompts_as_texts(vllm: Vllm) -> None:
    vllm.chat_template = False
    result = gate(vllm)
    assert result["sampling"]["endpoint"] == "completions"
    assert result["requests"] == 24
    assert all("prompt" in body for body in vllm.bodies)


def test_one_drafted_token_is_judged_by_what_it_can_reach(vllm: Vllm) -> None:
    vllm.rates = (0.66,)
    vllm.reset()
    result = gate(vllm)
    assert result["verdict"] == "passed"
    assert result["acceptance_length"] < 2
    assert result["thresholds"]["warn_length"] == pytest.approx(1.6)


def test_everything_accepted(vllm: Vllm) -> None:
    vllm.rates = (1.0, 1.0, 1.0)
    result = gate(vllm)
    assert (result["verdict"], result["acceptance_length"], result["per_position"]) == ("passed", 4.0, [1.0, 1.0, 1.0])


# --- What fails


def test_tap_ids_off_by_one_fail_and_the_remedy_says_so(vllm: Vllm) -> None:
    vllm.rates = OFF_BY_ONE
    result = gate(vllm)
    assert (result["verdict"], result["reason"]) == ("failed", "below_threshold")
    assert result["requests"] == 24
    assert "below 1.60 (defaults for 3 drafted tokens), by its bound too" in result["message"]
    assert "off by one: measure that with playbooks/probe_taps.yml" in result["message"]
    assert result["bounds"]["position_0"][1] < 0.30


def test_random_weights_fail(vllm: Vllm) -> None:
    vllm.rates = (0.0, 0.0, 0.0)
    result = gate(vllm)
    assert (result["verdict"], result["acceptance_length"]) == ("failed", 1.0)
    assert "Almost nothing is accepted" in result["message"]


def test_a_poor_drafter_warns(vllm: Vllm) -> None:
    vllm.rates = (0.55, 0.30, 0.15)
    result = gate(vllm)
    assert (result["verdict"], result["reason"]) == ("warned", "low")
    assert "is below 2.30" in result["message"]


def test_later_positions_that_collapse_are_named(vllm: Vllm) -> None:
    vllm.rates = (0.70, 0.02, 0.0)
    assert "norm_before_residual" in gate(vllm)["message"]


def test_near_the_threshold_all_prompts_are_sent_and_it_passes_with_a_warning(vllm: Vllm) -> None:
    vllm.rates = (0.40, 0.15, 0.05)
    vllm.answer_tokens = 20
    result = gate(vllm)
    assert result["requests"] == len(PROMPTS)
    assert (result["verdict"], result["reason"]) == ("warned", "sample_too_small")
    assert "give more prompts" in result["message"]


def test_few_prompts_are_too_small_a_sample(vllm: Vllm) -> None:
    vllm.rates = OFF_BY_ONE
    result = gate(vllm, prompts=["one", "two", "three"])
    assert (result["verdict"], result["reason"], result["requests"]) == ("warned", "sample_too_small", 3)
    assert "2 rounds of 6 at least" in result["message"]


def test_answers_of_one_token_have_no_drafts(vllm: Vllm) -> None:
    vllm.answer_tokens = 1
    result = gate(vllm)
    assert (result["reason"], result["drafts"], result["acceptance_length"]) == ("sample_too_small", 0, None)
    assert result["per_position"] == []


def test_a_baseline_sets_the_thresholds(vllm: Vllm) -> None:
    strong = {"speculative_tokens": 3, "acceptance_length": 3.9, "per_position": [0.99, 0.97, 0.94]}
    result = gate(vllm, baseline=strong)
    assert (result["verdict"], result["thresholds"]["source"]) == ("failed", "the drafter's baseline, of other prompts")
    weak = {"speculative_tokens": 3, "acceptance_length": 1.12, "per_position": [0.1, 0.02, 0.0]}
    vllm.rates = OFF_BY_ONE
    assert gate(vllm, baseline=weak)["verdict"] in ("passed", "warned")


def test_the_last_good_release(vllm: Vllm) -> None:
    first = gate(vllm)
    again = gate(vllm, last_good=first)
    assert again["verdict"] == first["verdict"]
    assert again["acceptance_length"] == first["acceptance_length"]
    vllm.rates = (0.56, 0.30, 0.16)
    worse = gate(vllm, last_good=first)
    assert (worse["verdict"], worse["reason"]) == ("failed", "below_last_good")
    assert "0.9 of the last good release's" in worse["message"]
    # Without it, the same is no failure; nor is it with other conditions.
    assert gate(vllm)["reason"] == "low"
    assert gate(vllm, last_good=first, max_tokens=99)["reason"] == "low"
    assert gate(vllm, last_good={**first, "speculative_tokens": 4})["reason"] == "low"


def test_all_prompts_are_sent_where_the_last_good_release_had_all(vllm: Vllm) -> None:
    vllm.rates = (0.40, 0.15, 0.05)
    vllm.answer_tokens = 20
    first = gate(vllm)
    assert first["requests"] == len(PROMPTS)
    vllm.rates = (0.9, 0.8, 0.7)
    assert gate(vllm, last_good=first)["requests"] == len(PROMPTS)


# --- Counters


def test_no_counters_though_the_release_speculates(vllm: Vllm) -> None:
    vllm.rates = None
    result = gate(vllm, speculative_tokens=3)
    assert (result["verdict"], result["reason"]) == ("failed", "counters_absent")
    assert vllm.prompts == []


def test_counters_that_do_not_move_while_tokens_flow(vllm: Vllm) -> None:
    vllm.books_drafts = False
    result = gate(vllm)
    assert (result["verdict"], result["reason"]) == ("failed", "counters_stuck")
    assert "generated 200 tokens and drafted none" in result["message"]


def test_without_speculation_it_does_not_apply(vllm: Vllm) -> None:
    vllm.rates = None
    result = gate(vllm)
    assert (result["verdict"], result["requests"], vllm.prompts) == ("not_applicable", 0, [])


def test_counters_of_a_release_without_speculation(vllm: Vllm) -> None:
    result = gate(vllm, speculative_tokens=0)
    assert (result["verdict"], result["reason"]) == ("failed", "counters_unexpected")


def test_another_number_of_drafted_tokens(vllm: Vllm) -> None:
    result = gate(vllm, speculative_tokens=4)
    assert (result["verdict"], result["reason"]) == ("failed", "counters_contradict")
    assert "it counts 3 draft positions, the release drafts 4 tokens" in result["message"]


def test_several_engines_are_summed(vllm: Vllm) -> None:
    vllm.extra_metrics = (
        'vllm:spec_decode_num_drafts_total{engine="1"} 7.0\nvllm:request_success_total{engine="1"} 3.0\n'
    )
    assert gate(vllm)["drafts"] == vllm.drafts
    reading = parse_reading(vllm.metrics())
    assert reading.finished == vllm.finished + 3
    assert reading.speculation is not None and reading.speculation.drafts == vllm.drafts + 7


@given(st.text(st.characters() | st.sampled_from('vlm:_{}=" 0123456789.eE+-NaInf\n'), max_size=300))
def test_any_text_is_read(noise: str) -> None:
    line = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
    assert parse_reading(line + noise).open is not None


def test_metrics_that_are_garbage(vllm: Vllm) -> None:
    vllm.request_counters = False
    vllm.extra_metrics = (
        "vllm:num_requests_running{} NaN\nvllm:num_requests_waiting +Inf\nvllm:request_success_total{ -3\n"
        "vllm:generation_tokens_total{} 1e\nvllm:spec_decode_num_drafts_total{} NaN\n\x00\xff{}}{\n"
    )
    result = gate(vllm)
    assert result["drafts"] == vllm.drafts
    # Whose requests were measured is not known, so it is not passed.
    assert (result["verdict"], result["others"]) == ("warned", None)
    assert "/metrics has no request counters" in result["message"]


def test_drafts_that_are_not_a_number_contradict_what_was_accepted(vllm: Vllm) -> None:
    text = vllm.metrics
    vllm.metrics = lambda: text().replace("num_drafts_total{", "num_drafts_total_gone{")  # type: ignore[method-assign]
    result = gate(vllm)
    assert (result["verdict"], result["reason"]) == ("failed", "counters_contradict")


# --- Others


def test_requests_of_others_in_between_are_not_counted(vllm: Vllm) -> None:
    vllm.on_answer = lambda count: vllm.foreign() if count == 3 else None
    result = gate(vllm)
    assert (result["others"], len(result["rounds"]), result["requests"]) == (False, 12, 24)
    # The second round was sent again, and what was counted in its first try is not in the numbers.
    assert len(vllm.prompts) == 26
    assert result["drafts"] < vllm.drafts
    assert vllm.prompts.count(PROMPTS[2]) == 2


def test_others_that_never_stop_make_a_pass_a_warning(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    vllm.rates = (0.9, 0.8, 0.7)
    vllm.on_answer = lambda count: vllm.foreign()
    result = gate(vllm)
    assert (result["verdict"], result["reason"], result["others"]) == ("warned", "others", True)
    assert "ran in 3 rounds that were sent again" in result["message"]
    assert "Drain the replica" in result["message"]


def test_a_request_that_stays_open(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    vllm.rates = (0.9, 0.8, 0.7)
    vllm.open = 1
    result = gate(vllm)
    assert (result["verdict"], result["reason"], result["others"]) == ("warned", "others", True)


def test_the_gate_waits_until_others_requests_have_ended(vllm: Vllm) -> None:
    vllm.open = 1

    def ends(count: int) -> None:
        if count == 4:
            vllm.open = 0

    vllm.on_metrics = ends
    result = gate(vllm)
    assert result["others"] is False
    assert len(vllm.prompts) == 24


def test_others_do_not_excuse_a_drafter_that_fails(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    vllm.rates = OFF_BY_ONE
    vllm.on_answer = lambda count: vllm.foreign()
    result = gate(vllm)
    assert (result["verdict"], result["reason"]) == ("failed", "below_threshold")
    assert "Others' requests were measured too" in result["message"]


def test_verify_measures_all_traffic_and_says_so(vllm: Vllm) -> None:
    vllm.rates = (0.9, 0.8, 0.7)
    vllm.on_answer = lambda count: vllm.foreign()
    result = gate(vllm, exclusive=False)
    assert (result["verdict"], result["others"], len(vllm.prompts)) == ("passed", True, 24)
    assert result["message"].endswith("All traffic was measured.")


def test_verify_without_traffic(vllm: Vllm) -> None:
    result = gate(vllm, exclusive=False)
    assert result["others"] is False
    assert "All traffic" not in result["message"]
    assert result["drafts"] == vllm.drafts


# --- Servers in trouble


@pytest.mark.parametrize("new_process", [True, False])
def test_a_restart_in_the_middle(vllm: Vllm, new_process: bool) -> None:
    def restart(count: int) -> None:
        if count == 8:
            with vllm.lock:
                vllm.reset()
                if new_process:
                    # It has counted more than before meanwhile.
                    vllm.started, vllm.finished = START + 60, 100

    vllm.on_answer = restart
    result = gate(vllm)
    assert (result["verdict"], result["reason"]) == ("failed", "restarted")


def test_a_key_that_is_refused(vllm: Vllm) -> None:
    result = live_gate({"url": vllm.url, "model": "kimi", "speculative_tokens": 3}, "another")
    assert (result["verdict"], result["reason"]) == ("failed", "refused")
    assert "401" in result["message"]
    assert "another" not in json.dumps(result)


def test_nobody_listens(vllm: Vllm) -> None:
    vllm.stop()
    result = gate(vllm)
    assert (result["verdict"], result["reason"]) == ("failed", "no_answer")
    assert "Connection refused" in result["message"]


def test_a_server_that_hangs(vllm: Vllm) -> None:
    vllm.may_answer.clear()
    result = gate(vllm, request_timeout_s=0.2)
    assert (result["verdict"], result["reason"]) == ("failed", "no_answer")
    assert "within 0.2 s" in result["message"]


def test_the_budget_bounds_everything(vllm: Vllm) -> None:
    vllm.may_answer.clear()
    result = gate(vllm, budget_s=0.3)
    assert (result["verdict"], result["reason"]) == ("failed", "no_answer")
    assert "within 0.3 s" in result["message"]


def test_a_slow_server_is_judged_by_what_it_answered_in_time(vllm: Vllm) -> None:
    def slow(count: int) -> None:
        if count > 8:
            vllm.may_answer.clear()

    vllm.on_answer = slow
    result = gate(vllm, budget_s=1)
    assert (result["verdict"], result["reason"]) == ("warned", "sample_too_small")
    assert 0 < result["requests"] <= 8


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("<html>", 200, "without a generated token"),
        ('{"usage": {"completion_tokens": 0}}', 200, "without a generated token"),
        ("[]", 200, "without a generated token"),
        ("The model `kimi` does not exist.\n", 404, "with status 404: The model `kimi` does not exist."),
        ("EngineCore died", 500, "with status 500: EngineCore died"),
    ],
)
def test_answers_that_are_none(vllm: Vllm, text: str, status: int, said: str) -> None:
    vllm.answer_text, vllm.answer_status = text, status
    result = gate(vllm)
    assert (result["verdict"], result["reason"]) == ("failed", "bad_answer")
    assert said in result["message"]


def test_no_metrics_there(vllm: Vllm) -> None:
    vllm.metrics_status = 404
    result = gate(vllm)
    assert (result["verdict"], result["reason"]) == ("failed", "no_metrics")
    assert "status 404" in result["message"]


def test_a_service_with_tls_is_measured(tmp_path: Path) -> None:
    vllm, shown = Vllm(), pair()
    wrap(vllm.server, tmp_path, shown)
    file = tmp_path / "certificate.pem"
    tls = {"url": vllm.url.replace("http:", "https:"), "certificate": str(file)}
    try:
        file.write_text(shown.pem)
        assert gate(vllm, **tls)["requests"] == 24
        file.write_text(pair().pem)
        stranger = gate(vllm, **tls)
    finally:
        vllm.stop()
    assert (stranger["verdict"], stranger["reason"]) == ("failed", "no_answer")
    assert "CERTIFICATE_VERIFY_FAILED" in stranger["message"]


def test_the_key_goes_to_the_service_only(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert gate(vllm)["requests"] == 24


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"speculativ": 3}, "there is no speculativ; there are url, model"),
        ({"thresholds": {"fail_lenght": 1.2}}, "thresholds has fail_lenght: 1.2; there are the numbers fail_length"),
        ({"thresholds": {"fail_length": "much"}}, "thresholds has fail_length: 'much'"),
        ({"max_tokens": 0}, "max_tokens is 0: it must be a number from 1 on"),
        ({"speculative_tokens": "3"}, "speculative_tokens is '3'"),
        ({"prompts": "Hello"}, "prompts must be a list of texts"),
        ({"url": "vllm"}, "unknown url type"),
        ({"certificate": "/nowhere/vllm.pem"}, "the certificate /nowhere/vllm.pem cannot be read"),
    ],
)
def test_a_wrong_configuration(vllm: Vllm, wrong: dict[str, Any], said: str) -> None:
    result = gate(vllm, **wrong)
    assert (result["verdict"], result["reason"]) == ("failed", "configuration")
    assert said in result["message"]
    assert vllm.paths == []
