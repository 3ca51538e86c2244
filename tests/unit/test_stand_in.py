# SPDX-License-Identifier: Apache-2.0
"""The stand-in engine is taken for vLLM by Aerie's own gates, and its faults are what they are called."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import vllm_log
from ansible.module_utils.aerie.acceptance import live_gate
from ansible.module_utils.aerie.speculation import parse_speculation

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "stand_in"
sys.path.insert(0, str(STAND_IN))
vllm_stand_in = importlib.import_module("vllm_stand_in")
stand_in_wheel = importlib.import_module("stand_in_wheel")

KEY = "sk-0123456789abcdef"
DEPTH = 3
MODEL = "kimi"
_PATIENCE_S = 20


class StandIn:
    """A stand-in that runs, with its log in a file."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.faults = directory / "faults.json"
        self._log = directory / "log"
        (directory / "keys").write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()}  # test\n")
        command = [
            sys.executable,
            str(STAND_IN / "vllm_stand_in.py"),
            "serve",
            "--config",
            str(directory / "serve.yaml"),
        ]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--middleware", "aerie_api_keys.RequireApiKey"]
        ordered = {f"STAND_IN_{name}": value for name, value in environment.items()}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT / "roles/vllm_service/files"),
                    "AERIE_API_KEYS_FILE": str(directory / "keys"),
                    "STAND_IN_FAULTS": str(self.faults),
                    **ordered,
                },
            )

    def log(self) -> list[str]:
        return self._log.read_text().splitlines()

    def await_log(self, text: str) -> None:
        await_that(lambda: any(text in line for line in self.log()))

    def ask(
        self, path: str, body: dict[str, Any] | None = None, key: str = KEY, timeout_s: float = _PATIENCE_S
    ) -> tuple[int, str]:
        """Return status and body of an answer; raises OSError or HTTPException if there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, {"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def text(self, prompt: str, count: int) -> str:
        status, answer = self.ask("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": count})
        assert status == 200
        return str(json.loads(answer)["choices"][0]["text"])

    def order(self, **faults: object) -> None:
        self.faults.write_text(json.dumps(faults))


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Callable[..., StandIn]]:
    """Return a function that starts a stand-in with faults of its release."""
    started = []
    for name, config in (
        ("target", {"architectures": ["KimiK25ForConditionalGeneration"]}),
        ("drafter", {"eagle_aux_hidden_state_layer_ids": [4, 2, 6]}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    speculation = {"method": "eagle3", "model": str(tmp_path / "drafter"), "num_speculative_tokens": DEPTH}

    def start(speculative: bool = True, **environment: str) -> StandIn:
        options = {"model": str(tmp_path / "target"), "served-model-name": MODEL, "trust-remote-code": True}
        if speculative:
            options["speculative-config"] = json.dumps(speculation)
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in options.items()]
        (tmp_path / "serve.yaml").write_text("# Options.\n" + "".join(lines))
        started.append(StandIn(tmp_path, environment))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        Path(f"/dev/shm/psm_stand_in_{one.process.pid}").unlink(missing_ok=True)


@pytest.fixture
def running(stand_in: Callable[..., StandIn]) -> Callable[..., StandIn]:
    """Return a function that starts a stand-in and returns it when it serves."""

    def start(**options: Any) -> StandIn:  # noqa: ANN401
        one = stand_in(**options)
        one.await_log("Application startup complete")
        return one

    return start


def end(one: StandIn) -> int:
    one.process.terminate()
    return one.process.wait(_PATIENCE_S)


# --- Taken for vLLM


def test_its_log_reads_like_vllms(running: Callable[..., StandIn]) -> None:
    log = running().log()
    assert vllm_log.read_phase(log).name == vllm_log.SERVING
    assert vllm_log.tap_ids(log) == [2, 4, 6]


def test_progress_of_loading_is_in_the_log(stand_in: Callable[..., StandIn]) -> None:
    one = stand_in(START_S="11")
    one.await_log("10% Completed")
    phase = vllm_log.read_phase(one.log())
    assert phase.name == vllm_log.LOADING
    assert phase.percent is not None and 10 <= phase.percent < 100
    one.order(start_s=0)
    one.await_log("Application startup complete")
    assert end(one) == 0


def test_tokens_depend_on_the_prompt_alone(running: Callable[..., StandIn]) -> None:
    one = running()
    assert one.text("Hello", 5) == one.text("Hello", 5) == "".join(vllm_stand_in.tokens("Hello", 5))
    assert one.text("Hello", 5) != one.text("Goodbye", 5)


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_stream_has_the_tokens_of_the_answer(running: Callable[..., StandIn], chat: bool) -> None:
    one = running()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
    request = {"model": MODEL, "max_tokens": 7, **asked}

    def content(choice: dict[str, Any], part: str) -> str:
        return str(choice[part]["content"] if chat else choice["text"])

    whole = json.loads(one.ask(path, request)[1])
    _, answer = one.ask(path, {**request, "stream": True, "stream_options": {"include_usage": True}})
    *events, last = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    chunks = [json.loads(event) for event in events]
    assert last == "[DONE]"
    assert chunks[-1]["usage"] == whole["usage"]
    streamed = [content(chunk["choices"][0], "delta") for chunk in chunks[:-1]]
    assert len(streamed) == 7
    assert "".join(streamed) == content(whole["choices"][0], "message")


def test_requests_need_a_key(running: Callable[..., StandIn]) -> None:
    one = running()
    assert one.ask("/v1/models", key="sk-of-somebody-else")[0] == 401
    assert one.ask("/v1/completions", {"prompt": "Hello"}, key="sk-of-somebody-else")[0] == 401
    assert one.ask("/health", key="sk-of-somebody-else")[0] == 200
    assert json.loads(one.ask("/v1/models")[1])["data"][0]["id"] == MODEL


def test_another_model_is_not_served(running: Callable[..., StandIn]) -> None:
    status, answer = running().ask("/v1/completions", {"model": "other", "prompt": "Hello"})
    assert (status, json.loads(answer)["error"]["type"]) == (404, "NotFoundError")


def test_counters_are_those_of_the_gates_request(running: Callable[..., StandIn]) -> None:
    one = running()
    one.text("Hello", 32)
    counted = parse_speculation(one.ask("/metrics")[1])
    assert counted is not None
    assert (counted.drafts, counted.draft_tokens, counted.accepted_tokens) == (8, 24, 24)
    assert counted.accepted_per_position == (8, 8, 8)


def judge(one: StandIn, depth: int) -> str:
    config = {"url": one.url, "model": MODEL, "speculative_tokens": depth, "thresholds": {"fail_length": 2.0}}
    return str(live_gate(config, KEY)["verdict"])


@pytest.mark.parametrize(("acceptance", "verdict"), [("1", "passed"), ("0.9", "passed"), ("0", "failed")])
def test_the_live_gate_judges_its_acceptance(running: Callable[..., StandIn], acceptance: str, verdict: str) -> None:
    assert judge(running(ACCEPTANCE=acceptance), DEPTH) == verdict


def test_without_speculation_there_are_no_counters(running: Callable[..., StandIn]) -> None:
    one = running(speculative=False)
    assert "spec_decode" not in one.ask("/metrics")[1]
    assert judge(one, 0) == "not_applicable"


# --- Faults


@pytest.mark.parametrize(("how", "status"), [("traceback", 1), ("clean", 0)])
def test_it_dies_while_it_loads(stand_in: Callable[..., StandIn], how: str, status: int) -> None:
    one = stand_in(DIE=how)
    assert one.process.wait(_PATIENCE_S) == status
    cause = vllm_log.root_cause(one.log())
    assert (cause.line if cause else None) == (f"RuntimeError: the stand-in was told to die: {how}" if status else None)


def test_it_never_becomes_healthy(stand_in: Callable[..., StandIn]) -> None:
    one = stand_in(HEALTH="never")
    one.await_log("init engine")
    with pytest.raises(ConnectionRefusedError):
        one.ask("/health")
    one.order(health=200)
    one.await_log("Application startup complete")
    assert end(one) == 0


def test_a_fault_comes_and_goes_while_it_runs(running: Callable[..., StandIn]) -> None:
    one = running(HEALTH="503")
    assert one.ask("/health")[0] == 503
    one.order(health=200)
    assert one.ask("/health")[0] == 200
    one.order(tokens="wrong")
    assert one.text("Hello", 5) != "".join(vllm_stand_in.tokens("Hello", 5))
    one.order(tokens="error")
    assert one.ask("/v1/completions", {"prompt": "Hello"})[0] == 500
    one.order()
    assert one.text("Hello", 5) == "".join(vllm_stand_in.tokens("Hello", 5))


def test_healthy_without_tokens(running: Callable[..., StandIn]) -> None:
    one = running(TOKENS="none")
    with pytest.raises(TimeoutError):
        one.ask("/v1/completions", {"prompt": "Hello"}, timeout_s=0.3)
    assert one.ask("/health")[0] == 200
    one.order(tokens="right")
    assert one.text("Hello", 5) == "".join(vllm_stand_in.tokens("Hello", 5))


def test_counters_are_missing(running: Callable[..., StandIn]) -> None:
    assert parse_speculation(running(COUNTERS="missing").ask("/metrics")[1]) is None


def test_a_slow_stream_is_cut_by_its_end(running: Callable[..., StandIn]) -> None:
    one = running(TOKEN_S="0.05")
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=_PATIENCE_S)
    request = json.dumps({"prompt": "Hello", "max_tokens": 1000, "stream": True})
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", request, {"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        assert end(one) == 0
        with pytest.raises(http.client.IncompleteRead):
            answer.read()


def test_it_takes_its_time_to_stop(running: Callable[..., StandIn]) -> None:
    one = running(STOP_S="60")
    one.process.terminate()
    one.await_log("Shutting down")
    with pytest.raises(OSError):
        one.ask("/health")
    one.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(0.2)
    one.order(stop_s=0)
    assert one.process.wait(_PATIENCE_S) == 0


@pytest.mark.parametrize("stays", [False, True], ids=["by itself", "with the fault"])
def test_its_shared_memory_goes(running: Callable[..., StandIn], stays: bool) -> None:
    one = running(**({"LEAVE": "shm"} if stays else {}))
    segment = Path(f"/dev/shm/psm_stand_in_{one.process.pid}")
    assert segment.exists()
    assert end(one) == 0
    assert segment.exists() == stays


def test_an_orphan_holds_the_port(running: Callable[..., StandIn]) -> None:
    one = running(LEAVE="orphan")
    (orphan,) = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text().split()
    try:
        # It has its own program only a moment after it was started.
        await_that(lambda: b"86400" in Path(f"/proc/{orphan}/cmdline").read_bytes())
        assert end(one) == 0
        assert os.getsid(int(orphan)) == int(orphan)
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", one.port))
    finally:
        os.kill(int(orphan), signal.SIGKILL)


# --- The wheel


def test_the_same_files_give_the_same_wheel(tmp_path: Path) -> None:
    data = stand_in_wheel.wheel_bytes({"a.py": b"a = 1\n"})
    assert data == stand_in_wheel.wheel_bytes({"a.py": b"a = 1\n"})
    assert data != stand_in_wheel.wheel_bytes({"a.py": b"a = 2\n"})
    (tmp_path / "wheel").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "wheel") as wheel:
        assert wheel.read("vllm/a.py") == b"a = 1\n"
        assert wheel.read("vllm_stand_in.py") == (STAND_IN / "vllm_stand_in.py").read_bytes()


def test_the_wheel_of_ray_has_the_program_that_runs_it() -> None:
    with zipfile.ZipFile(io.BytesIO(stand_in_wheel.ray_wheel_bytes())) as wheel:
        assert wheel.read("ray_stand_in.py") == (STAND_IN / "ray_stand_in.py").read_bytes()
        assert b"ray = ray_stand_in:main" in wheel.read(f"ray-{stand_in_wheel.RAY_VERSION}.dist-info/entry_points.txt")


# --- Ray


def aerie_node() -> Any:  # noqa: ANN401
    """Return the program that runs Ray, as a module."""
    spec = importlib.util.spec_from_file_location("aerie_node", ROOT / "roles/multi_node/files/aerie_node.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Start the stand-in for Ray on an address, as the program of a replica's host starts Ray."""
    program = aerie_node()
    started: list[subprocess.Popen[bytes]] = []

    def start(address: str) -> subprocess.Popen[bytes]:
        node = program.Node(tmp_path, ("127.79.0.1", "127.79.0.2"), address, 31200, 1, 100, 60.0)
        command = [sys.executable, str(STAND_IN / "ray_stand_in.py"), *program.ray_command(node)[1:]]
        started.append(subprocess.Popen(command, env={"STAND_IN_FAULTS": str(tmp_path / "faults.json")}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
        return True
    return False


def test_ray_listens_on_the_head_and_on_others_once_the_head_does(
    ray: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    other = ray("127.79.0.2")
    ray("127.79.0.1")
    places = [("127.79.0.1", 31200), ("127.79.0.1", 31202), ("127.79.0.2", 31202)]
    await_that(lambda: all(listens(*place) for place in places))
    # Nobody gets in where a queue is full of connections that were not accepted.
    for _ in range(300):
        assert listens("127.79.0.1", 31200)
    assert not listens("127.79.0.2", 31200)
    other.terminate()
    assert other.wait(_PATIENCE_S) == -signal.SIGTERM


def test_ray_dies_where_it_was_told_to(ray: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    (tmp_path / "faults.json").write_text('{"ray": "dies"}')
    assert ray("127.79.0.1").wait(_PATIENCE_S) == 1
