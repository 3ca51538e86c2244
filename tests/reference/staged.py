#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serve with an environment's vLLM in one or more pipeline stages, ask for the reference's tokens, and stop it.

    staged.py ENVIRONMENT MODELS OUT --stages N --reference FILE --accepted all|none     answers and taps to OUT
    staged.py ENVIRONMENT MODELS OUT --stages N --dies-with TEXT                         it must not serve, and say why

MODELS holds `target` and `drafter`. The engine is Model Runner V2 on the CPU, which needs the directory
embedded/plugins/pipeline_stages on PYTHONPATH. OUT gets `log`, `answers.json` (what served.py prints: the counters)
and `taps/<step>.pt` (plugin tap_dump). Exits with 1, and says what differs, unless the tokens and the acceptance are
right, or the log has TEXT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

KEY = "sk-stages"
MODEL = "staged"
OPTIONS = {
    "host": "127.0.0.1",
    "api-key": KEY,
    "served-model-name": MODEL,
    "max-model-len": 512,
    "max-num-seqs": 4,
    "num-gpu-blocks-override": 64,
    "dtype": "float32",
}
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_MLA_DISABLE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command(options: argparse.Namespace, port: int) -> list[str]:
    speculation = {"method": "eagle3", "model": str(options.models / "drafter"), "num_speculative_tokens": 3}
    arguments = {
        **OPTIONS,
        "port": port,
        "pipeline-parallel-size": options.stages,
        "speculative-config": json.dumps(speculation),
        # vLLM's rotary kernel for CPUs is not exact.
        "compilation-config": json.dumps({"custom_ops": ["all", "-rotary_embedding"]}),
    }
    flags = ["trust-remote-code", "language-model-only", *([] if options.compiled else ["enforce-eager"])]
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    return [
        str(options.environment / "bin/vllm"),
        "serve",
        str(options.models / "target"),
        *words,
        *(f"--{flag}" for flag in flags),
    ]


def session(leader: int) -> list[int]:
    """Return the processes of the session that ``leader`` began: vLLM's workers too, however it ended."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(entry.name)) == leader:
                members.append(int(entry.name))
    return members


@contextlib.contextmanager
def running(options: argparse.Namespace, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run vLLM as a session of its own, and leave no process of it."""
    environment = {**os.environ, **ENVIRONMENT, "TAP_DUMP": str(options.out / "taps")}
    with (options.out / "log").open("wb") as log:
        server = subprocess.Popen(
            command(options, port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    try:
        yield server
    finally:
        for pid in session(server.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.wait()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def serves(server: subprocess.Popen[bytes], port: int, seconds: float) -> bool | None:
    """Return True once the server is healthy, False once it ended, None after ``seconds`` without either."""
    process = os.pidfd_open(server.pid)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if healthy(port):
            return True
        if select.select([process], [], [], 0.5)[0]:
            return False
    return None


def ask(options: argparse.Namespace, port: int) -> str:
    """Compare what is served with the reference; return the problems, none if it is right."""
    program = Path(__file__).with_name("served.py")
    arguments = [f"http://127.0.0.1:{port}", MODEL, str(options.reference), "--accepted", options.accepted]
    result = subprocess.run(
        [sys.executable, str(program), *arguments],
        env={**os.environ, "API_KEY": KEY},
        capture_output=True,
        text=True,
        check=False,
    )
    (options.out / "answers.json").write_text(result.stdout)
    return result.stderr if result.returncode else ""


def main() -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--accepted", choices=("all", "none"))
    parser.add_argument("--dies-with", metavar="TEXT")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--deadline", type=float, default=300, metavar="SECONDS")
    options = parser.parse_args()
    (options.out / "taps").mkdir(parents=True)

    started = time.monotonic()
    port = free_port()
    with running(options, port) as server:
        healthy_or_ended = serves(server, port, options.deadline)
        if healthy_or_ended is None:
            problem = f"neither served nor ended after {options.deadline:.0f} s"
        elif options.dies_with:
            problem = "it serves, and must not" if healthy_or_ended else ""
        else:
            problem = ask(options, port) if healthy_or_ended else f"vLLM ended with status {server.wait()}"
    log = (options.out / "log").read_text(errors="replace")
    if options.dies_with and not problem and options.dies_with not in log:
        problem = f"it did not say '{options.dies_with}'"
    print(f"{time.monotonic() - started:.0f} s")
    return f"{problem}\n--- the end of {options.out / 'log'}:\n{log[-3000:]}" if problem else ""


if __name__ == "__main__":
    sys.exit(main() or 0)
