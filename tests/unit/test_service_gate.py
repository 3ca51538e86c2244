# SPDX-License-Identifier: Apache-2.0
"""The gate, from outside: a real HTTP server with vLLM's endpoints, and systemctl and journalctl as programs."""

from __future__ import annotations

import grp
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import readiness, speculation, unit
from ansible.module_utils.aerie.vllm_log import Progress
from ansible.module_utils.testing import patch_module_args
from certificates_made import pair, wrap
from hypothesis import given
from hypothesis import strategies as st

service_gate = importlib.import_module("service_gate")

ROOT = Path(__file__).parents[2]
LOGS = Path(__file__).parent / "logs"
GROUP = grp.getgrgid(os.getgid()).gr_name
START = "0b5c6a6e4e4f4f0f8f8e1f0c6f6a6b6c"


class Vllm:
    """Answers like vLLM's server. What it does is set by its attributes; `on_health` sees every look at /health."""

    def __init__(self) -> None:
        self.models = ["kimi"]
        self.health = 200
        self.completion: tuple[int, dict[str, Any]] = (200, {"usage": {"completion_tokens": 1}})
        self.speculative = True
        self.drafts = 100
        # Booked when /metrics is read the next time, as vLLM books the last step after the answer.
        self.late_drafts = 0
        self.on_health: Callable[[int], None] = lambda count: None
        self.hang = threading.Event()
        self.hang.set()
        self.keys = Path("/nowhere")
        self.repeats_the_key = False
        self.health_calls = 0
        self.seen: list[tuple[str, str]] = []
        vllm = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(b"")

            def do_POST(self) -> None:
                self.answer(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, body: bytes) -> None:
                status, text = vllm.respond(self.path, self.headers.get("Authorization", ""), body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def respond(self, path: str, authorization: str, body: bytes) -> tuple[int, str]:
        self.seen.append((path, authorization))
        if path == "/health":
            self.health_calls += 1
            self.on_health(self.health_calls)
            return self.health, ""
        if path == "/metrics":
            text = self.metrics()
            self.drafts += self.late_drafts
            self.late_drafts = 0
            return 200, text
        if hashlib.sha256(authorization.removeprefix("Bearer ").encode()).hexdigest() not in self.digests():
            return 401, '{"error": {"message": "Unauthorized"}}'
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": name} for name in self.models]})
        self.hang.wait()
        if self.speculative and json.loads(body)["max_tokens"] > 1:
            self.drafts += 5
            self.late_drafts += 3
        return self.completion[0], json.dumps(self.completion[1]) + authorization * self.repeats_the_key

    def digests(self) -> list[str]:
        """The keys that the middleware would accept: the first words of the directory's files."""
        return [path.read_text().split()[0] for path in self.keys.glob("[!.]*")]

    def metrics(self) -> str:
        text = '# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine="0"} 0.0\n'
        if self.speculative:
            label = 'engine="0",model_name="kimi"'
            text += (
                f"vllm:spec_decode_num_drafts_total{{{label}}} {self.drafts}.0\n"
                f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {3 * self.drafts}.0\n"
                f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {2 * self.drafts}.0\n"
                f"vllm:spec_decode_num_drafts_created{{{label}}} 1.7e+09\n"
            )
            for position, share in enumerate((1, 1, 0)):
                labels = f'{label},position="{position}"'
                text += f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {share * self.drafts}.0\n"
        return text

    def stop(self) -> None:
        self.hang.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


class Systemd:
    """`systemctl` and `journalctl` that print files; the test writes the files."""

    def __init__(self, directory: Path) -> None:
        self._unit = directory / "unit"
        self._journal = directory / "journal"
        self.asked = directory / "asked"
        for name, file in (("systemctl", self._unit), ("journalctl", self._journal)):
            program = directory / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.asked}\ncat {file}\n')
            program.chmod(0o755)
        self.log("loading")
        self.unit()

    def unit(self, **changes: str) -> None:
        # Its processes are this very test's, so the server is the unit's.
        own_group = Path("/proc/self/cgroup").read_text().splitlines()[0].split(":", 2)[2]
        values = {
            "LoadState": "loaded",
            "ActiveState": "active",
            "SubState": "running",
            "MainPID": "4711",
            "NRestarts": "0",
            "InvocationID": START,
            "Result": "success",
            "ExecMainCode": "0",
            "ExecMainStatus": "0",
            "ExecMainStartTimestampMonotonic": str(int(time.monotonic() * 1e6) - 3_000_000),
            "ControlGroup": own_group,
            **changes,
        }
        new = self._unit.with_suffix(".new")
        new.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        new.replace(self._unit)

    def log(self, name: str) -> None:
        self._journal.write_text((LOGS / f"{name}.log").read_text())


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Vllm]:
    server = Vllm()
    server.keys = tmp_path / "run" / "api-keys.d"
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def keys_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the module put its keys where this test's server looks."""
    monkeypatch.setitem(service_gate.ARGUMENT_SPEC["keys_dir"], "default", str(tmp_path / "run" / "api-keys.d"))
    monkeypatch.setitem(service_gate.ARGUMENT_SPEC["group"], "default", GROUP)


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Systemd(tmp_path)


def gate(port: int, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Run the module as Ansible does and return what it printed."""
    arguments = {
        "url": f"http://127.0.0.1:{port}",
        "model": "kimi",
        "speculative": True,
        "window_s": 0.1,
        "host": "host-1",
        **options,
    }
    output = io.StringIO()
    with patch_module_args(arguments), redirect_stdout(output), pytest.raises(SystemExit):
        service_gate.main()
    result = json.loads(output.getvalue())
    assert result.get("changed", False) is False
    return result  # type: ignore[no-any-return]


def closed_port() -> int:
    server = Vllm()
    server.stop()
    return server.port


def test_ready_with_speculation(vllm: Vllm, systemd: Systemd) -> None:
    systemd.log("ready")
    result = gate(vllm.port)
    assert (result["ready"], result["phase"], result["start_id"]) == (True, "serving", START)
    # What one request moved, the late part of it too, not what was counted before.
    assert result["speculation"] == {
        "drafts": 8,
        "draft_tokens": 24,
        "accepted_tokens": 16,
        "accepted_per_position": [8, 8, 0],
    }
    assert result["tap_ids_logged"] == [2, 4, 6]
    assert result["elapsed_s"] > 0
    assert f"_SYSTEMD_INVOCATION_ID={START} + INVOCATION_ID={START}" in systemd.asked.read_text()


def test_ready_without_speculation(vllm: Vllm, systemd: Systemd) -> None:
    vllm.speculative = False
    result = gate(vllm.port, speculative=False)
    assert (result["ready"], result["speculation"]) == (True, None)


def test_the_key_is_made_on_the_host_and_lives_as_long_as_the_call(
    tmp_path: Path, vllm: Vllm, systemd: Systemd
) -> None:
    vllm.completion = (400, {"error": {"message": "no such adapter"}})
    vllm.repeats_the_key = True
    result = gate(vllm.port)
    keys = {authorization.removeprefix("Bearer ") for _, authorization in vllm.seen}
    assert len(keys) == 1
    assert "no such adapter" in result["msg"]
    for seen in (json.dumps(result), systemd.asked.read_text()):
        assert not any(key in seen for key in keys)
    assert list((tmp_path / "run" / "api-keys.d").iterdir()) == []


def test_a_key_that_the_service_refuses_is_reported(tmp_path: Path, vllm: Vllm, systemd: Systemd) -> None:
    vllm.keys = tmp_path / "elsewhere"
    refused = gate(vllm.port)
    assert refused["failed"] is True
    assert "vLLM on host-1 refuses the API key (401 from /v1/models)" in refused["msg"]


def test_a_group_that_is_missing_fails_with_the_remedy(systemd: Systemd) -> None:
    result = gate(closed_port(), group="no-such-group")
    assert result["msg"] == "The group no-such-group does not exist on this host: deploy the service first."


@pytest.mark.parametrize(
    ("log", "phase", "percent"), [("loading", "loading weights", 40), ("capturing", "capturing graphs", 41)]
)
def test_a_start_that_is_under_way(systemd: Systemd, log: str, phase: str, percent: int) -> None:
    systemd.log(log)
    result = gate(closed_port())
    assert "failed" not in result
    assert (result["ready"], result["phase"], result["percent"]) == (False, phase, percent)


def test_readiness_is_noticed_within_the_window(vllm: Vllm, systemd: Systemd) -> None:
    vllm.health = 503

    def third_look(count: int) -> None:
        if count == 3:
            vllm.health = 200

    vllm.on_health = third_look
    assert gate(vllm.port, window_s=10)["ready"] is True
    assert vllm.health_calls == 3


def test_death_is_noticed_within_the_window(vllm: Vllm, systemd: Systemd) -> None:
    vllm.health = 503

    def dies(count: int) -> None:
        systemd.log("missing_weights")
        systemd.unit(ActiveState="failed", SubState="failed", Result="exit-code", ExecMainCode="1", ExecMainStatus="1")

    vllm.on_health = dies
    result = gate(vllm.port, window_s=10)
    assert vllm.health_calls == 1
    assert result["msg"] == (
        "vLLM on host-1 did not start: RuntimeError: Cannot find any model weights with `/srv/models/kimi`. "
        "The checkpoint on the host is incomplete: copy its weight files again."
    )
    assert len(result["journal_tail"]) == 30
    assert result["journal_tail"][-1].startswith("RuntimeError: Engine core initialization failed.")


DEAD = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code"}


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        ({**DEAD, "ExecMainCode": "1", "ExecMainStatus": "3"}, "vllm.service exited with status 3"),
        ({**DEAD, "ExecMainCode": "2", "ExecMainStatus": "9"}, "vllm.service was ended by signal 9"),
        ({**DEAD, "Result": "oom-kill", "ExecMainCode": "2"}, "vllm.service was killed by the OOM killer"),
        ({**DEAD, "Result": "resources", "ExecMainStartTimestampMonotonic": "0"}, "failed before its process ran"),
        ({"ActiveState": "inactive", "SubState": "dead", "ExecMainCode": "1"}, "exited with status 0"),
        ({"ActiveState": "inactive", "ExecMainStartTimestampMonotonic": "0"}, "ended by itself with exit status 0"),
        ({"ActiveState": "activating", "SubState": "auto-restart", "ExecMainCode": "1"}, "waits for its restart"),
        ({"InvocationID": "f" * 32, "NRestarts": "1"}, "was started again meanwhile (restarts by systemd: 1)"),
        ({"LoadState": "not-found"}, "systemd reports it as not-found"),
        ({"LoadState": "bad-setting"}, "systemd reports it as bad-setting"),
    ],
)
def test_a_unit_that_cannot_become_ready_fails_at_once(systemd: Systemd, unit: dict[str, str], said: str) -> None:
    systemd.unit(**unit)
    result = gate(closed_port(), window_s=10, start_id=START)
    assert result["failed"] is True
    assert said in result["msg"]
    assert result["msg"].startswith("vLLM on host-1 did not start: ")
    assert "`journalctl -u vllm.service`" in result["msg"]


def test_the_cause_is_read_from_the_start_that_died_not_from_the_next(systemd: Systemd) -> None:
    systemd.unit(InvocationID="f" * 32)
    systemd.log("drafter_shape")
    assert "Tried to load weights of size" in gate(closed_port(), start_id=START)["msg"]
    assert f"INVOCATION_ID={START}" in systemd.asked.read_text()
    assert "INVOCATION_ID=ffff" not in systemd.asked.read_text()


def test_a_unit_that_was_never_started(systemd: Systemd) -> None:
    systemd.unit(ActiveState="inactive", SubState="dead", InvocationID="", ExecMainStartTimestampMonotonic="0")
    result = gate(closed_port())
    assert "vllm.service is not running" in result["msg"]
    assert result["journal_tail"] == []


def test_without_systemctl_the_unit_is_unknown(tmp_path: Path, systemd: Systemd) -> None:
    (tmp_path / "systemctl").write_text("#!/bin/sh\nexit 1\n")
    assert "systemd reports it as unknown" in gate(closed_port())["msg"]


def test_another_model_on_the_port(vllm: Vllm, systemd: Systemd) -> None:
    vllm.models = ["llama", "llama-lora"]
    assert "vLLM on host-1 serves llama, llama-lora, expected kimi" in gate(vllm.port)["msg"]


def test_another_process_on_the_port_is_not_taken_for_the_service(vllm: Vllm, systemd: Systemd) -> None:
    systemd.unit(ControlGroup="/system.slice/vllm.service")
    result = gate(vllm.port)
    assert result["failed"] is True
    assert f"Port {vllm.port} on host-1 is served by another process" in result["msg"]
    assert f"pid {os.getpid()}" in result["msg"]
    assert {path for path, _ in vllm.seen} == {"/health"}


@pytest.mark.parametrize(("served", "expected"), [(True, False), (False, True)])
def test_speculation_counters_must_be_there_exactly_when_expected(
    vllm: Vllm, systemd: Systemd, served: bool, expected: bool
) -> None:
    vllm.speculative = served
    result = gate(vllm.port, speculative=expected)
    assert result["failed"] is True
    assert ("without" if expected else "with") + " speculative decoding" in result["msg"]


def test_a_refused_completion_is_quoted(vllm: Vllm, systemd: Systemd) -> None:
    vllm.completion = (400, {"error": {"message": "no such adapter"}})
    result = gate(vllm.port)
    assert "answers /v1/completions with 400" in result["msg"]
    assert "no such adapter" in result["msg"]


def test_a_completion_without_a_token_is_not_ready(vllm: Vllm, systemd: Systemd) -> None:
    vllm.completion = (200, {"usage": {"completion_tokens": 0}})
    assert "without generating a token" in gate(vllm.port)["msg"]


def test_an_engine_that_cannot_answer_yet_is_waited_for(vllm: Vllm, systemd: Systemd) -> None:
    vllm.completion = (503, {"error": {"message": "overloaded"}})
    assert gate(vllm.port)["ready"] is False


def test_an_engine_that_hangs_is_not_ready(vllm: Vllm, systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_ANSWERS_S", 0.1)
    vllm.hang.clear()
    assert gate(vllm.port)["ready"] is False


def watcher(port: int, budget: readiness.Budget, key: str = "") -> readiness.Gate:
    def run(command: list[str]) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    return readiness.Gate("host-1", "vllm.service", f"http://127.0.0.1:{port}", "kimi", True, key, run, budget)


def with_key(vllm: Vllm) -> str:
    vllm.keys.mkdir(parents=True)
    (vllm.keys / "digest").write_text(hashlib.sha256(b"key").hexdigest())
    return "key"


def test_tokens_that_come_after_the_window_make_it_ready(vllm: Vllm, systemd: Systemd) -> None:
    """A slow service, such as one of 12 tokens a second, whose sample takes longer than the switch's windows."""
    systemd.log("ready")
    vllm.hang.clear()
    began = time.monotonic()

    def heed() -> None:
        # Longer than any request is waited for at least.
        if time.monotonic() - began > 1.5:
            vllm.hang.set()

    status = watcher(vllm.port, readiness.Budget(), with_key(vllm)).watch("", 0, heed)
    assert (status.ready, status.state, time.monotonic() - began > 1.5) == (True, "ready", True)
    assert [path for path, _ in vllm.seen].count("/v1/completions") == 2


def test_whoever_waits_for_tokens_may_be_told_to_stop(vllm: Vllm, systemd: Systemd) -> None:
    vllm.hang.clear()

    def heed() -> None:
        raise InterruptedError("aborted")

    with pytest.raises(InterruptedError, match="aborted"):
        watcher(vllm.port, readiness.Budget(), with_key(vllm)).watch("", 3600, heed)
    # It was still waited for.
    assert not vllm.hang.is_set()


def test_tokens_are_not_waited_for_beyond_the_limit_of_a_start(
    vllm: Vllm, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "_LOG_S", 0.05)
    vllm.hang.clear()
    began = time.monotonic()
    status = watcher(vllm.port, readiness.Budget(limit_s=3), with_key(vllm)).watch("", 3600)
    assert status.state == "stuck"
    assert status.fault is not None
    assert "its start may take 3 s" in status.fault
    # A look alone may take half a minute.
    assert time.monotonic() - began < 20


def test_check_mode_asks_nobody(systemd: Systemd) -> None:
    result = gate(closed_port(), _ansible_check_mode=True)
    assert (result["ready"], result["phase"], result["skipped"]) == (None, "not started", True)
    assert not systemd.asked.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window_s": 11}, "window_s is 11; choose more than 0 and at most 10"),
        ({"window_s": 0}, "window_s is 0"),
        ({"budget_s": -1}, "budget_s is -1"),
        ({"url": "127.0.0.1:8000"}, "url is 127.0.0.1:8000; it must begin with http:// or https://"),
    ],
)
def test_options_out_of_range(systemd: Systemd, options: dict[str, Any], said: str) -> None:
    assert said in gate(closed_port(), **options)["msg"]


@given(st.text())
def test_any_unit_text_is_read(text: str) -> None:
    read = unit.parse_unit(text)
    assert read.restarts >= 0 or "NRestarts=-" in text
    unit.unit_fault(read, "")


@given(
    st.lists(
        st.sampled_from(["vllm:spec_decode_num_", "drafts", "_total", "{", 'position="1"', "}", " ", "1e9", "e.+"])
    )
)
def test_any_metrics_text_is_read(pieces: list[str]) -> None:
    counters = speculation.parse_speculation("".join(pieces))
    assert counters is None or counters.drafts >= 0


def test_counters_of_several_engines_are_summed() -> None:
    text = "".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"{extra}}} {value}\n'
        for engine in (0, 1)
        for name, extra, value in (
            ("drafts", "", "10.0"),
            ("draft_tokens", "", "30.0"),
            ("accepted_tokens", "", "1.2e+01"),
            ("accepted_tokens_per_pos", ',position="0"', "9.0"),
            ("accepted_tokens_per_pos", ',position="2"', "3.0"),
        )
    )
    assert speculation.parse_speculation(text) == (20, 60, 24, (18, 0, 6))


def loading(done: int, seconds: float) -> Progress:
    return Progress("loading weights", 100 * done // 64, done, 64, seconds)


def test_a_budget_follows_size_then_rate_then_what_loading_took() -> None:
    kimi = readiness.Budget(595_000_000_000)
    tiny = readiness.Budget(9_000_000)
    besides = tiny.total_s(Progress("compiling", loaded_s=0.0))
    # By size, while nothing is measured: a slow file system is given its time.
    assert kimi.total_s(Progress("starting")) == pytest.approx(besides + 60 + 5950)
    assert tiny.total_s(Progress("starting")) == pytest.approx(besides + 60, abs=1)
    # As measured: 32 of 64 shards in 60 s are half of 120 s; at a hundredth of that rate, 12000 s.
    assert kimi.total_s(loading(32, 60)) == pytest.approx(besides + 60 + 1.5 * 120)
    assert kimi.total_s(loading(32, 6000)) == pytest.approx(besides + 60 + 1.5 * 12000)
    # Nothing is measured yet.
    assert kimi.total_s(loading(0, 0)) == kimi.total_s(Progress("starting"))
    # The drafter's bar says nothing about the target.
    assert kimi.total_s(Progress("loading drafter", 50, 1, 2, 1.0, loaded_s=100.0)) == besides + 100
    assert kimi.total_s(Progress("capturing graphs", 41, 21, 51, 3.0, loaded_s=100.0)) == besides + 100


def test_a_budget_has_a_limit_and_a_download_nothing_else() -> None:
    assert readiness.Budget(595_000_000_000, limit_s=600).total_s(loading(1, 1000)) == 600
    assert readiness.Budget(limit_s=600).total_s(Progress("downloading")) == 600
    assert readiness.Budget().total_s(Progress("downloading")) == float("inf")


@pytest.mark.parametrize(
    ("progress", "rate", "left"),
    [
        (loading(32, 60), 595e9 / 120, 60.0),
        (loading(64, 120), 595e9 / 120, 0.0),
        (loading(0, 0), None, None),
        (Progress("loading weights"), None, None),
        (Progress("capturing graphs", 50, 10, 20, 5.0), None, 5.0),
    ],
)
def test_rate_and_estimate(progress: Progress, rate: float | None, left: float | None) -> None:
    assert readiness.Budget(595_000_000_000).rate(progress) == (rate and pytest.approx(rate))
    assert readiness.phase_left_s(progress) == left


def test_phase_percentage_rate_and_estimate_are_shown(systemd: Systemd) -> None:
    systemd.log("loading")
    result = gate(closed_port(), target_bytes=64_000_000_000)
    assert result["words"] == "loading weights 40 % (26 of 64, 0.5 GB/s, about 76 s left)"
    assert (result["state"], result["evidence"]) == ("under way", [])
    assert result["budget_s"] == pytest.approx(4500 + 60 + 1.5 * 52 * 64 / 26)


def test_a_start_that_does_nothing_is_stuck_with_evidence(tmp_path: Path, systemd: Systemd) -> None:
    systemd.log("loading")
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "Thread $3 (active): all_reduce (distributed.py:1)"\n')
    spy.chmod(0o755)
    first = gate(closed_port(), stuck_after_s=30)
    assert first["state"] == "under way"
    before = {"mark": first["moved"]["mark"], "at": first["moved"]["at"] - 31}
    stuck = gate(closed_port(), stuck_after_s=30, moved=before, start_id=START)
    assert (stuck["failed"], stuck["ready"], stuck["state"]) == (True, False, "stuck")
    assert stuck["msg"].startswith(
        "vLLM on host-1 is stuck at loading weights 40 % (26 of 64, about 76 s left): for 31 s "
    )
    assert "Its last line: Loading safetensors checkpoint shards:  40%" in stuck["msg"]
    assert "vllm_service_stuck_after" in stuck["msg"]
    # Its line moves the start on: the clock begins anew.
    systemd.log("capturing")
    assert gate(closed_port(), stuck_after_s=30, moved=before, start_id=START)["state"] == "under way"


def test_a_stuck_start_is_a_fault_within_one_long_window(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd.log("loading")
    monkeypatch.setattr(readiness, "_LOG_S", 0.05)
    began = time.monotonic()
    status = watcher(closed_port(), readiness.Budget(stuck_after_s=0.3)).watch("", 60)
    assert time.monotonic() - began < 30
    assert (status.state, status.ready) == ("stuck", False)
    assert status.fault is not None
    assert "is stuck at loading weights 40 %" in status.fault


def test_a_service_with_tls_is_known_by_its_certificate(vllm: Vllm, systemd: Systemd, tmp_path: Path) -> None:
    shown = pair(days=-1)
    wrap(vllm.server, tmp_path, shown)
    systemd.log("ready")
    file = tmp_path / "certificate.pem"
    url = f"https://127.0.0.1:{vllm.port}"
    file.write_text(shown.pem)
    assert gate(vllm.port, url=url, certificate=str(file), window_s=5)["ready"] is True
    file.write_text(pair().pem)
    stranger = gate(vllm.port, url=url, certificate=str(file), window_s=5)
    assert stranger["failed"] is True
    assert stranger["msg"].startswith(f"{url} on host-1 answers with another certificate than {file}. ")
    assert "cannot be read" in gate(vllm.port, url=url, certificate=str(tmp_path / "none.pem"))["msg"]


def test_a_service_without_the_tls_of_its_settings_is_said(vllm: Vllm, systemd: Systemd, tmp_path: Path) -> None:
    file = tmp_path / "certificate.pem"
    file.write_text(pair().pem)
    plain = gate(vllm.port, url=f"https://127.0.0.1:{vllm.port}", certificate=str(file), window_s=5)
    assert "answers without TLS, and its settings name " in plain["msg"]


def test_a_start_that_outlives_its_budget_fails(systemd: Systemd) -> None:
    systemd.log("loading")
    systemd.unit(ExecMainStartTimestampMonotonic=str(int(time.monotonic() * 1e6) - 9_000_000_000))
    result = gate(closed_port())
    assert result["failed"] is True
    assert "after 9000 s, and its start may take 4752 s" in result["msg"]
    assert "vllm_service_start_budget" in result["msg"]


@pytest.mark.parametrize("moved", [{"mark": "x", "at": "soon"}, {"at": []}])
def test_a_moved_that_is_none_is_refused(systemd: Systemd, moved: dict[str, Any]) -> None:
    assert "not what an earlier call returned" in gate(closed_port(), moved=moved)["msg"]


PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - name: Wait until vLLM is ready
      service_gate:
        url: "http://127.0.0.1:{{ port }}"
        model: kimi
        speculative: true
        group: "{{ group }}"
        keys_dir: "{{ keys_dir }}"
        budget_s: "{{ budget }}"
        window_s: 1
"""


def play(directory: Path, **variables: Any) -> tuple[int, str]:  # noqa: ANN401
    """Run the playbook on this machine as host-1 and return its exit status and everything that it printed."""
    playbook = directory / "play.yml"
    playbook.write_text(PLAYBOOK)
    values = json.dumps(
        {
            "group": GROUP,
            "keys_dir": str(directory / "run" / "api-keys.d"),
            "ansible_python_interpreter": sys.executable,
            **variables,
        }
    )
    (directory / "variables.json").write_text(values)
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    command = [program, "-vvv", "-i", "host-1,", "-c", "local", str(playbook), "-e", f"@{directory / 'variables.json'}"]
    environment = {**os.environ, "HOME": str(directory), "COLUMNS": "400"}
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout


def test_the_control_node_shows_the_phases_until_ready(tmp_path: Path, vllm: Vllm, systemd: Systemd) -> None:
    vllm.health = 503

    def goes_on(count: int) -> None:
        if count == 4:
            systemd.log("capturing")
        if count == 8:
            vllm.health = 200

    vllm.on_health = goes_on
    status, output = play(tmp_path, port=vllm.port, budget=60)
    assert status == 0, output
    shown = [
        line.split(" (")[0] for line in output.splitlines() if line.startswith("host-1: ") and line.endswith(" s)")
    ]
    assert shown == ["host-1: loading weights 40 %", "host-1: capturing graphs 41 %"]


def test_a_used_up_budget_fails_with_the_phase_and_the_remedy(tmp_path: Path, systemd: Systemd) -> None:
    status, output = play(tmp_path, port=closed_port(), budget=0.5)
    assert status == 2, output
    assert "vLLM on host-1 was not ready after 0.5 s: it is at loading weights 40 %" in output
    assert "raise vllm_service_start_budget" in output
    assert "26/64" in output
