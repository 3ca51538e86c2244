# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM: `vllm serve`'s command line, endpoints, log lines and counters, without a model.

It starts in a tenth of a second, its tokens are a function of the prompt, and it has faults to order. A fault is an
environment variable STAND_IN_<NAME> (a part of the release, through vllm_service_environment), or an entry of the JSON
object in /run/stand-in/faults.json, which wins and may change at any time; values are JSON, or else words:

    start_s      seconds that loading takes
    die          how loading ends: traceback (exit status 1) or clean (0)
    health       never (loaded, but nothing is served), or the status of /health
    tokens       none (no answer ever), wrong, or error (status 500)
    token_s      seconds for each token
    acceptance   how often a draft token is accepted, from 0 to 1
    counters     missing: /metrics has none of speculation
    stop_s       seconds from SIGTERM to the end
    leave        shm (a segment that stays), or orphan (a process of another session that holds the port)

counters and leave are read at the start, the others whenever they matter: what holds the stand-in lets go of it as soon
as it is taken back.

Runs on a host's Python, with the standard library alone.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
FAULTS = Path(os.environ.get("STAND_IN_FAULTS", "/run/stand-in/faults.json"))
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_DEFAULT_TOKENS = 16
# Between two looks at a fault that holds.
_LOOK_S = 0.05
# Lives on when its parent is gone, with the socket that it inherited.
_ORPHAN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(86400)"


# -------------------------------------------------------------------------------------------------------- what is asked


def tokens(prompt: str, count: int, *, salt: str = "") -> list[str]:
    """Return the ``count`` tokens that follow ``prompt``: always the same, on every host and in every release."""
    digest = hashlib.sha256(f"{salt}{prompt}".encode()).digest()
    return [f" {_WORDS[digest[position % len(digest)] % len(_WORDS)]}{position}" for position in range(count)]


def fault(name: str) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return the fault ``name`` as it stands now, or None."""
    try:
        ordered = json.loads(FAULTS.read_text())
    except (OSError, ValueError):
        ordered = {}
    if name in ordered:
        return ordered[name]
    text = os.environ.get(f"STAND_IN_{name.upper()}")
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def _hold(seconds: Callable[[], float]) -> None:
    """Return after ``seconds``, which may change meanwhile."""
    began = time.monotonic()
    while (left := began + seconds() - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_S))


def read_config(path: Path) -> dict[str, Any]:
    """Read `vllm serve --config` as Aerie writes it: one `name: <JSON>` a line."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: json.loads(value) for name, _, value in (line.partition(": ") for line in lines)}


def say(text: str) -> None:
    print(text, flush=True)


def log(text: str, where: str, process: str = "APIServer") -> None:
    """Write a line in vLLM's shape."""
    say(f"({process} pid={os.getpid()}) INFO {time.strftime('%m-%d %H:%M:%S')} [{where}] {text}")


# --------------------------------------------------------------------------------------------------------------- engine


class Engine:
    """What a vLLM would have loaded: names, the depth of speculation, and the counters."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.model = str(options["model"])
        names = options.get("served-model-name", self.model)
        self.names: list[str] = [names] if isinstance(names, str) else list(names)
        speculation = json.loads(options.get("speculative-config", "{}"))
        self.drafter = str(speculation.get("model", ""))
        self.depth = int(speculation.get("num_speculative_tokens", 0)) if fault("counters") != "missing" else 0
        self.running = 0
        self._started = round(time.time(), 2)
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self._counts = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
        self._positions = [0] * self.depth
        self._totals = {"prompt_tokens": 0, "generation_tokens": 0, "request_success": 0}

    def load(self) -> None:
        """Say what vLLM says while it loads, take the time that was ordered, and fail if that was ordered."""
        worker = "Worker"
        log(
            f"Initializing a V1 LLM engine (v{VERSION}) with config: model='{self.model}'",
            "core.py:133",
            process="EngineCore",
        )
        config = json.loads((Path(self.model) / "config.json").read_text())
        log(f"Resolved architecture: {config['architectures'][0]}", "model.py:733")
        log(f"Starting to load model {self.model}...", "cpu_model_runner.py:68", process=worker)
        for step in range(11):
            say(f"Loading safetensors checkpoint shards: {step * 10:3d}% Completed | {step}/10 [00:00<00:00, 9.00it/s]")
            _hold(lambda: float(fault("start_s") or 0) / 11)
        if self.drafter:
            self._load_drafter(worker)
        how = fault("die")
        if how == "clean":
            sys.exit(0)
        if how:
            raise RuntimeError(f"the stand-in was told to die: {how}")
        log("init engine (profile, create kv cache, warmup model) took 0.12 s", "core.py:402", process="EngineCore")

    def _load_drafter(self, worker: str) -> None:
        config = json.loads((Path(self.drafter) / "config.json").read_text())
        log("Loading drafter model...", "cpu_model_runner.py:75", process=worker)
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        if ids:
            said = f"Using auxiliary layers from speculative config: {tuple(sorted(ids))}"
            log(said, "gpu_model_runner.py:5243", process=worker)

    def generate(self, prompt: str, count: int) -> Iterator[str]:
        """Yield the tokens after ``prompt``, and count them as one request when they are out."""
        with self._lock:
            self.running += 1
        try:
            while fault("tokens") == "none" and not self.stopping.wait(_LOOK_S):
                pass
            for token in tokens(prompt, count, salt="wrong" if fault("tokens") == "wrong" else ""):
                self.stopping.wait(float(fault("token_s") or 0))
                yield token
            self._book(prompt, count)
        finally:
            with self._lock:
                self.running -= 1

    def _book(self, prompt: str, count: int) -> None:
        """Count a request: the first token comes from the prompt, each draft then gives what it got right and one."""
        named = fault("acceptance")
        rate = 1.0 if named is None else float(named)
        with self._lock:
            self._totals["prompt_tokens"] += len(prompt.split())
            self._totals["generation_tokens"] += count
            self._totals["request_success"] += 1
            left = count - 1
            while self.depth and left > 0:
                accepted = 0
                while accepted < self.depth and self._random.random() < rate:
                    self._positions[accepted] += 1
                    accepted += 1
                self._counts["drafts"] += 1
                self._counts["draft_tokens"] += self.depth
                self._counts["accepted_tokens"] += accepted
                left -= accepted + 1

    def metrics(self) -> str:
        """Return the counters as vLLM's /metrics has them; those of speculation only where there is any."""
        labels = f'engine="0",model_name="{self.names[0]}"'
        with self._lock:
            gauges = {"vllm:num_requests_running": self.running, "vllm:num_requests_waiting": 0}
            counters: dict[str, float] = {f"vllm:{name}_total": value for name, value in self._totals.items()}
            speculation = {f"vllm:spec_decode_num_{name}_total": value for name, value in self._counts.items()}
            positions = list(self._positions)
        lines = ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {self._started}"]
        for kind, samples in (("gauge", gauges), ("counter", {**counters, **(speculation if self.depth else {})})):
            for name, value in samples.items():
                lines += [f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)}"]
        if self.depth:
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f"# TYPE {name} counter")
            lines += [f'{name}{{{labels},position="{place}"}} {float(value)}' for place, value in enumerate(positions)]
        return "".join(f"{line}\n" for line in lines)


# ----------------------------------------------------------------------------------------------------------------- HTTP


class Middleware:
    """ASGI middleware around nothing: says what it would answer instead of the application."""

    def __init__(self, names: Sequence[str]) -> None:
        self._app: Any = self._application
        self._passed = threading.local()
        for name in names:
            module, _, attribute = name.rpartition(".")
            self._app = getattr(importlib.import_module(module), attribute)(self._app)

    async def _application(self, _scope: object, _receive: object, _send: object) -> None:
        self._passed.value = True

    def refusal(self, path: str, headers: Message) -> tuple[int, bytes] | None:
        """Return status and body of the refusal of a request, or None if it may pass."""
        messages: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._passed.value = False
        # Nothing in it waits for anything, so one step is all of it.
        with contextlib.suppress(StopIteration):
            self._app({"type": "http", "path": path, "headers": raw}, None, send).send(None)
        if self._passed.value:
            return None
        return int(messages[0]["status"]), b"".join(message.get("body", b"") for message in messages[1:])


class Server(ThreadingHTTPServer):
    """vLLM's HTTP server."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], engine: Engine, middleware: Middleware) -> None:
        super().__init__(address, Handler)
        self.engine = engine
        self.middleware = middleware

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no event."""


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *_: object) -> None:
        """Requests are not logged: there are thousands."""

    def setup(self) -> None:
        super().setup()
        # Headers and chunks are separate writes, which must not wait for each other.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._admitted(path):
            return
        engine = self.server.engine
        if path == "/health":
            status = fault("health")
            self._answer(status if isinstance(status, int) else 200, b"")
        elif path == "/metrics":
            self._answer(200, engine.metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/version":
            self._json(200, {"version": VERSION})
        elif path == "/v1/models":
            models = [
                {"id": name, "object": "model", "owned_by": "vllm", "root": engine.model} for name in engine.names
            ]
            self._json(200, {"object": "list", "data": models})
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if not self._admitted(path):
            return
        if path not in ("/v1/completions", "/v1/chat/completions"):
            self._json(404, {"detail": "Not Found"})
            return
        try:
            request = json.loads(data)
            chat = path.endswith("/chat/completions")
            prompts = [_conversation(request["messages"])] if chat else _prompts(request["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            self._error(400, "BadRequestError", f"the request cannot be read: {error!r}")
            return
        if request.get("model", self.server.engine.names[0]) not in self.server.engine.names:
            self._error(404, "NotFoundError", f"The model `{request['model']}` does not exist.")
        elif fault("tokens") == "error":
            self._error(500, "InternalServerError", "EngineCore encountered an issue.")
        elif request.get("stream"):
            self._stream(request, prompts[0], chat=chat)
        else:
            self._complete(request, prompts, chat=chat)

    def _admitted(self, path: str) -> bool:
        if self.server.engine.stopping.is_set():
            self.close_connection = True
            return False
        refusal = self.server.middleware.refusal(path, self.headers)
        if refusal:
            self._answer(*refusal)
        return refusal is None

    def _complete(self, request: Mapping[str, Any], prompts: Sequence[str], *, chat: bool) -> None:
        count = _count(request)
        texts = ["".join(self.server.engine.generate(prompt, count)) for prompt in prompts]
        if self.server.engine.stopping.is_set():
            self.close_connection = True
            return
        choices = [
            {"index": index, "finish_reason": "length", **_content(text, chat, "message")}
            for index, text in enumerate(texts)
        ]
        kind = "chat.completion" if chat else "text_completion"
        self._json(200, {**_envelope(request, kind), "choices": choices, "usage": _usage(prompts, count)})

    def _stream(self, request: Mapping[str, Any], prompt: str, *, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        envelope = _envelope(request, "chat.completion.chunk" if chat else "text_completion")
        count = _count(request)
        for position, token in enumerate(self.server.engine.generate(prompt, count), start=1):
            reason = "length" if position == count else None
            choice = {"index": 0, "finish_reason": reason, **_content(token, chat, "delta")}
            self._event(json.dumps({**envelope, "choices": [choice]}))
        if self.server.engine.stopping.is_set():
            self.close_connection = True
            return
        if (request.get("stream_options") or {}).get("include_usage"):
            self._event(json.dumps({**envelope, "choices": [], "usage": _usage([prompt], count)}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _error(self, status: int, kind: str, message: str) -> None:
        self._json(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    def _json(self, status: int, value: object) -> None:
        self._answer(status, json.dumps(value).encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _prompts(prompt: str | list[Any]) -> list[str]:
    """Return the prompts of a request: a text, several texts, token ids, or several lists of them."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or isinstance(prompt[0], int):
        return [" ".join(map(str, prompt))]
    return [one if isinstance(one, str) else " ".join(map(str, one)) for one in prompt]


def _conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _count(request: Mapping[str, Any]) -> int:
    return int(request.get("max_completion_tokens") or request.get("max_tokens") or _DEFAULT_TOKENS)


def _content(text: str, chat: bool, part: str) -> dict[str, Any]:
    return {part: {"role": "assistant", "content": text}} if chat else {"text": text}


def _envelope(request: Mapping[str, Any], kind: str) -> dict[str, Any]:
    # The process that answered, for who wants to know which release it runs.
    fingerprint = f"{socket.gethostname()} {os.getpid()} {Path(sys.prefix).parent.name}"
    return {
        "id": f"cmpl-{random.getrandbits(64):016x}",
        "object": kind,
        "created": int(time.time()),
        "model": request.get("model"),
        "system_fingerprint": fingerprint,
    }


def _usage(prompts: Sequence[str], count: int) -> dict[str, int]:
    before, after = sum(len(prompt.split()) for prompt in prompts), count * len(prompts)
    return {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}


# -------------------------------------------------------------------------------------------------------------- service


class Stop(Exception):
    """systemd, or somebody at a terminal, wants this process to end."""


def _stop(*_: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise Stop


def serve(engine: Engine, address: tuple[str, int], middleware: Middleware) -> None:
    """Load, listen, and run until a signal comes; then end as vLLM does, and cut off what is under way."""
    left = fault("leave")
    segment = Path(f"/dev/shm/psm_stand_in_{os.getpid()}")
    segment.write_bytes(bytes(mmap.PAGESIZE))
    try:
        engine.load()
        while fault("health") == "never":
            time.sleep(_LOOK_S)
        with Server(address, engine, middleware) as server:
            if left == "orphan":
                subprocess.Popen([sys.executable, "-c", _ORPHAN], pass_fds=[server.fileno()], start_new_session=True)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            log(f"Starting vLLM server on http://{address[0]}:{address[1]}", "entry.py:140")
            say(f"INFO:     Started server process [{os.getpid()}]")
            say("INFO:     Application startup complete.")
            engine.stopping.wait()
    except Stop:
        say("INFO:     Shutting down")
        engine.stopping.set()
        _hold(lambda: float(fault("stop_s") or 0))
    finally:
        if left != "shm":
            segment.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("serve")
    command.add_argument("--config", type=Path, required=True)
    command.add_argument("--host", default="127.0.0.1")
    command.add_argument("--port", type=int, default=8000)
    command.add_argument("--middleware", action="append", default=[])
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    # As libraries of a real environment do, a mapping tells which environment a process runs.
    with Path(__file__).open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ):
        log(f"version {VERSION}", "api_utils.py:347")
        serve(Engine(read_config(options.config)), (options.host, options.port), Middleware(options.middleware))


if __name__ == "__main__":
    main()
