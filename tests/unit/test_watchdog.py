# SPDX-License-Identifier: Apache-2.0
"""The watchdog, from outside: a real HTTP server in vLLM's place, and systemctl as a program that notes its calls."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ansible.module_utils.aerie import watchdog
from ansible.module_utils.aerie.endpoint import Endpoint, endpoint_of, parse_settings
from ansible.module_utils.aerie.host_key import host_key
from ansible.module_utils.aerie.watchdog import Look, Memory, progress_mark, remember, requests_in_flight
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
GROUP = grp.getgrgid(os.getgid()).gr_name
EVERY = 30.0
LIMIT = 300.0

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{{engine="0",model_name="kimi"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="kimi"}} 2.0
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="kimi"}} {steps}
vllm:iteration_tokens_total_count{{engine="0",model_name="kimi"}} {steps}
vllm:iteration_tokens_total_sum{{engine="0",model_name="kimi"}} {tokens}
vllm:iteration_tokens_total_created{{engine="0",model_name="kimi"}} 1.7e+09
vllm:prompt_tokens_total{{engine="0",model_name="kimi"}} 10.0
vllm:generation_tokens_total{{engine="0",model_name="kimi"}} 5.0
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="kimi"}} 1.0
"""


def metrics(steps: int = 3, tokens: int = 15, running: float = 1.0) -> str:
    return METRICS.format(steps=float(steps), tokens=float(tokens), running=running)


# --- What is remembered


def seen(*looks: Look, gap: float = 80.0) -> Memory:
    memory = Memory()
    for look in looks:
        memory = remember(memory, look, gap)
    return memory


def test_silence_adds_up_from_look_to_look() -> None:
    looks = [Look(30.0 * number, "a", True, "1") for number in range(6)]
    assert [seen(*looks[:count]).silent_s for count in range(1, 7)] == [0, 30, 60, 90, 120, 150]


@pytest.mark.parametrize(
    "alive",
    [
        Look(90, "a", True, "2"),
        Look(90, "a", False, "2"),
        Look(90, "a", True, "1", answered=True),
        Look(90, "a", True, "", answered=True),
    ],
)
def test_progress_or_an_answer_ends_the_silence(alive: Look) -> None:
    before = [Look(30.0 * number, "a", True, "1") for number in range(3)]
    assert seen(*before, alive).silent_s == 0
    assert seen(*before, alive, Look(100, "a", True, alive.mark)).silent_s == 10


def test_a_service_that_starts_is_not_silent() -> None:
    starting = [Look(30.0 * number, "a", False, "") for number in range(100)]
    assert seen(*starting) == Memory("a", False, "", 2970.0, 0.0)
    # Its first look at /health begins the watch, and from then on /health may fail.
    assert seen(*starting, Look(3000, "a", True, "0"), Look(3030, "a", False, "")).silent_s == 30


def test_another_start_is_a_new_one() -> None:
    silent = [Look(30.0 * number, "a", True, "1") for number in range(9)]
    again = seen(*silent, Look(300, "b", False, ""))
    assert again == Memory("b", False, "", 300, 0)


def test_no_answer_from_metrics_keeps_the_mark() -> None:
    memory = seen(Look(0, "a", True, "1"), Look(30, "a", True, ""), Look(60, "a", True, "1"))
    assert (memory.mark, memory.silent_s) == ("1", 60)


def test_time_that_nobody_looked_counts_little() -> None:
    memory = seen(Look(0, "a", True, "1"), Look(90000, "a", True, "1"))
    assert memory.silent_s == 80
    assert seen(Look(90, "a", True, "1"), Look(30, "a", True, "1")).silent_s == 0


# --- What counts as progress


def test_the_mark_moves_with_the_engines_steps_only() -> None:
    mark = progress_mark(metrics())
    assert progress_mark(metrics(running=4.0)) == mark
    assert progress_mark(metrics(steps=4)) != mark
    # A chunk of a long prompt.
    assert progress_mark(metrics(tokens=2063)) != mark
    assert progress_mark("") == progress_mark("# HELP nothing\nprocess_cpu_seconds_total 17\n") == ""


def test_requests_in_flight_are_those_that_run_and_wait() -> None:
    assert requests_in_flight(metrics(running=3.0)) == 5
    assert requests_in_flight("") == 0


@given(
    st.lists(st.sampled_from(["vllm:", "num_requests_running", "generation_tokens_total", "{", "}", " ", "1e9", "\n"]))
)
def test_any_metrics_text_is_read(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert isinstance(progress_mark(text), str)
    assert requests_in_flight(text) >= 0


# --- A look at a server


class Vllm:
    """Answers like vLLM; `stuck` leaves completions without an answer, and the counters where they are."""

    def __init__(self, keys: Path) -> None:
        self.healthy = True
        self.metrics = metrics()
        self.completion = 200
        self.stuck = threading.Event()
        self.released = threading.Event()
        self.asked: list[str] = []
        vllm = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.answer()

            def answer(self) -> None:
                vllm.asked.append(self.path)
                status, text = vllm.respond(self.path, self.headers.get("Authorization", ""), keys)
                # The watchdog does not wait for a server that is stuck.
                with contextlib.suppress(BrokenPipeError):
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def respond(self, path: str, authorization: str, keys: Path) -> tuple[int, str]:
        if path == "/health":
            return (200 if self.healthy else 503), ""
        if path == "/metrics":
            return 200, self.metrics
        digest = hashlib.sha256(authorization.removeprefix("Bearer ").encode()).hexdigest()
        if digest not in [file.read_text().split()[0] for file in keys.glob("[!.]*")]:
            return 401, ""
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "kimi"}]})
        if self.stuck.is_set():
            self.released.wait()
        return self.completion, "{}"

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    keys = tmp_path / "api-keys.d"
    monkeypatch.setattr(watchdog, "host_key", lambda group, lifetime_s: host_key(group, keys, lifetime_s))
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.3)
    server = Vllm(keys)
    yield server
    server.stop()


class Host:
    """`systemctl` as a program, and the state that the watchdog keeps."""

    def __init__(self, directory: Path, vllm: Vllm) -> None:
        self.state = directory / "run" / "watchdog.json"
        self.calls = directory / "calls"
        self._answers = directory / "answers"
        self._answers.mkdir()
        program = directory / "systemctl"
        program.write_text(f'#!/bin/sh\necho "$*" >> {self.calls}\ncat {self._answers}/"$2" 2>/dev/null\n')
        program.chmod(0o755)
        self._vllm = vllm
        self.unit()
        self.switch("inactive")

    def unit(self, start: str = "a", active: str = "active", sub: str = "running") -> None:
        lines = f"LoadState=loaded\nActiveState={active}\nSubState={sub}\nInvocationID={start}\nMainPID={os.getpid()}\n"
        (self._answers / "vllm.service").write_text(lines)

    def switch(self, state: str) -> None:
        (self._answers / "aerie-switch.service").write_text(f"{state}\n")

    def look(self, count: int = 1, limit: float = LIMIT) -> None:
        """Look ``count`` times, with 60 s of silence from one look to the next."""
        for _ in range(count):
            dog = watchdog.Watchdog("vllm.service", Endpoint("127.0.0.1", self._vllm.port), GROUP, self._run)
            watchdog.watch(dog, self.state, limit, EVERY, "vllm.service")
            if self.state.exists():
                memory = watchdog.load(self.state)
                watchdog.save(self.state, memory._replace(looked_at=memory.looked_at - 60))

    @staticmethod
    def _run(command: list[str]) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    @property
    def killed(self) -> bool:
        return "kill --kill-who=all --signal=SIGKILL vllm.service" in self.calls.read_text().splitlines()


@pytest.fixture
def host(tmp_path: Path, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Host(tmp_path, vllm)


def test_an_idle_service_is_asked_for_a_token_and_left_alone(host: Host, vllm: Vllm) -> None:
    host.look(20)
    assert not host.killed
    assert watchdog.load(host.state).silent_s == 0
    assert vllm.asked.count("/v1/completions") == 19


def test_a_busy_service_is_not_asked(host: Host, vllm: Vllm) -> None:
    for step in range(20):
        vllm.metrics = metrics(steps=step)
        host.look()
    assert not host.killed
    assert set(vllm.asked) == {"/health", "/metrics"}


def test_a_stuck_engine_is_ended_with_the_reason(host: Host, vllm: Vllm, capsys: pytest.CaptureFixture[str]) -> None:
    vllm.stuck.set()
    host.look(4)
    assert not host.killed
    assert 180 <= watchdog.load(host.state).silent_s < 300
    host.look(2)
    assert host.killed
    output = capsys.readouterr().out
    assert "vllm.service is ended, to be started again: for 30" in output
    assert "its engine made no progress and answered no request (3 in flight)." in output
    assert not host.state.exists()


def test_a_long_prefill_is_no_death(host: Host, vllm: Vllm) -> None:
    # Requests wait for it, but its chunks are counted.
    vllm.stuck.set()
    for chunk in range(20):
        vllm.metrics = metrics(tokens=2048 * chunk)
        host.look()
    assert not host.killed


@pytest.mark.parametrize("status", [400, 401, 404, 429])
def test_an_answer_that_says_nothing_of_the_engine_is_no_death(host: Host, vllm: Vllm, status: int) -> None:
    vllm.completion = status
    host.look(20)
    assert not host.killed


def test_an_engine_that_is_known_to_be_dead_is_ended_too(host: Host, vllm: Vllm) -> None:
    host.look()
    vllm.healthy = False
    vllm.completion = 503
    host.look(7)
    assert host.killed


def test_a_start_is_left_alone(host: Host, vllm: Vllm) -> None:
    vllm.healthy = False
    vllm.metrics = ""
    vllm.stuck.set()
    host.look(20)
    assert not host.killed
    assert "/v1/completions" not in vllm.asked


@pytest.mark.parametrize("state", ["active", "activating", "deactivating"])
def test_a_switch_is_left_alone(host: Host, vllm: Vllm, state: str) -> None:
    vllm.stuck.set()
    host.look(5)
    host.switch(state)
    host.look(5)
    assert not host.killed
    assert not host.state.exists()


@pytest.mark.parametrize(
    ("active", "sub"), [("inactive", "dead"), ("activating", "auto-restart"), ("failed", "failed")]
)
def test_a_service_that_does_not_run_is_left_alone(host: Host, vllm: Vllm, active: str, sub: str) -> None:
    host.unit(active=active, sub=sub)
    host.look(20)
    assert not host.killed
    assert vllm.asked == []


def test_a_state_that_was_damaged_begins_anew(host: Host, vllm: Vllm) -> None:
    vllm.stuck.set()
    host.look(5)
    host.state.write_text('{"start_id": "a", "silent_s": ')
    host.look(4)
    assert not host.killed
    host.look(4)
    assert host.killed


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("# x\nAERIE_HOST=10.0.0.1\nAERIE_PORT=8000\n", "http://10.0.0.1:8000"),
        ("AERIE_HOST=0.0.0.0\nAERIE_PORT=9\n", "http://127.0.0.1:9"),
        ("AERIE_HOST=::\nAERIE_PORT=9\n", "http://[::1]:9"),
        ("AERIE_HOST=fd00::1\nAERIE_PORT=9\n", "http://[fd00::1]:9"),
    ],
)
def test_where_the_service_listens(text: str, url: str) -> None:
    assert endpoint_of(parse_settings(text)).url == url


def test_without_settings_the_program_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watchdog.main(["--settings", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().out.startswith(f"{tmp_path}/none cannot be read")


def test_the_module_predicts_what_it_would_install(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import conftest
from ansible.module_utils.testing import patch_module_args
import watchdog
with patch_module_args({{"root": {str(tmp_path)!r}, "limit_s": 7, "_ansible_check_mode": True}}):
    watchdog.main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    answer = json.loads(result.stdout)
    assert answer["changed"] is True
    assert "-m ansible.module_utils.aerie.watchdog --unit vllm.service" in answer["diff"]["after"]
    assert "--limit 7 " in answer["diff"]["after"]
    assert list(tmp_path.iterdir()) == []
