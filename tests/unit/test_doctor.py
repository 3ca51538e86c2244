# SPDX-License-Identifier: Apache-2.0
"""`tools/doctor.py` as a user runs it: what it prints, its exit status, and how little it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.doctor import examine
from ansible.module_utils.aerie.drafter_fit import Service, Target
from model_files import KIMI, TensorFile, bf16, llama_drafter, target_facts, write_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target of which only config.json is here."""
    (tmp_path / "target").mkdir()
    write_json(tmp_path / "target" / "config.json", KIMI)
    return tmp_path / "target"


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "doctor.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_drafter_that_fits_is_said_to_fit(tmp_path: Path, target: Path) -> None:
    root = llama_drafter().write(tmp_path / "drafter")
    run = doctor(root, target, "0.33.0")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == [
        f"{root}: LlamaForCausalLMEagle3, for Model Runner V2 of vLLM 0.33.0",
        "tap ids [2, 30, 58], which mean",
        "-> [2, 30, 58] in the dialect of vllm  the default of vLLM and speculators for 61 layers",
        "   [3, 31, 59] in the dialect of sglang, specforge, torchspec",
        "vLLM will tap [2, 30, 58]",
        "",
        "The drafter fits.",
    ]


def test_errors_are_printed_with_remedies_and_end_with_status_1(tmp_path: Path, target: Path) -> None:
    drafter = llama_drafter()
    drafter.config["vocab_size"] = 163839
    drafter.tensors["t2d"] = TensorFile("BOOL", (163839,), drafter.tensors["t2d"].data[:163839])
    drafter.others = {"optimizer.pt": b""}
    run = doctor(drafter.write(tmp_path / "drafter"), target, "0.33.0")
    assert (run.returncode, run.stderr) == (1, "")
    lines = run.stdout.splitlines()
    assert lines[-1] == "1 error, 1 note"
    assert lines[-5].startswith("error: vocab_size 163839 in ") and lines[-5].endswith(" [vocab_size]")
    assert lines[-4] == "  remedy: choose a drafter made for this target"


def test_programs_get_json(tmp_path: Path, target: Path) -> None:
    drafter = llama_drafter()
    drafter.config |= {"rope_theta": 50000.0, "eagle_aux_hidden_state_layer_ids": [1, 29, 57]}
    drafter.config["eagle_config"] = {}
    run = doctor(drafter.write(tmp_path / "drafter"), target, "0.33.0", "--format", "json")
    result: dict[str, Any] = json.loads(run.stdout)
    assert (run.returncode, result["errors"]) == (1, 1)
    assert [finding["id"] for finding in result["findings"]] == ["tap_dialect", "rope"]
    assert set(result["findings"][0]) == {"id", "severity", "message", "remedy", "facts"}
    assert (result["drafter"]["dialect"], result["model_runner"]) == ("specforge", "v2")
    run = doctor(tmp_path / "drafter", target, "0.33.0", "--format", "json", "--dialect", "vllm")
    assert (run.returncode, json.loads(run.stdout)["errors"]) == (0, 0)


def test_the_services_options_are_told(tmp_path: Path, target: Path) -> None:
    drafter = llama_drafter()
    yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    drafter.config |= {"max_position_embeddings": 131072, "rope_scaling": yarn}
    root = drafter.write(tmp_path / "drafter")

    def found(*options: str) -> list[str]:
        run = doctor(root, target, "0.33.0", "--format", "json", *options)
        return [f"{one['id']} {one['severity']}" for one in json.loads(run.stdout)["findings"]]

    assert found() == ["max_position error"]
    assert found("--model-runner", "v1") == ["max_position warning"]
    assert found("--max-model-len", "128K") == []
    assert found("--max-model-len", "128k", "--draft-max-model-len", "4096") == ["max_position error"]
    assert found("--max-model-len", "128k", "--draft-kv-cache-dtype", "nonsense") == ["draft_kv_cache_dtype warning"]
    run = doctor(root, target, "0.33.0", "--max-model-len", "long")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("doctor: max_model_len is 'long', expected tokens such as")


def test_make_passes_more_options_on(tmp_path: Path) -> None:
    command = ["make", "-n", "doctor", "DRAFTER=d", "TARGET=t", "VLLM=0.33.0", "ARGS=--model-runner v1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    line = run.stdout.splitlines()[-1]
    assert line.endswith('tools/doctor.py "d" "t" "0.33.0" --format text --dialect auto --model-runner v1')


def test_a_number_that_is_none_is_named(tmp_path: Path, target: Path) -> None:
    root = llama_drafter().write(tmp_path / "drafter")
    path = root / "config.json"
    scaling = '"rope_scaling": {"type": "yarn", "factor": -Infinity, "original_max_position_embeddings": 4096}'
    path.write_text(path.read_text().replace('"rope_scaling": null', scaling))
    run = doctor(root, target, "0.33.0")
    assert (run.returncode, run.stderr) == (1, "")
    assert run.stdout.startswith(f"error: {path}: rope_scaling.factor is -inf, expected a finite number [unreadable]\n")
    config = target / "config.json"
    config.write_text(config.read_text().replace('"factor": 64.0', '"factor": NaN'))
    run = doctor(root, target, "0.33.0")
    assert (run.returncode, run.stdout) == (2, "")
    assert f"{config}: text_config.rope_scaling.factor is nan, expected a finite number" in run.stderr


def test_a_drafter_that_cannot_be_read_is_an_error(tmp_path: Path, target: Path) -> None:
    root = llama_drafter().write(tmp_path / "drafter")
    path = root / "model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 1)
    run = doctor(root, target, "0.33.0")
    assert run.returncode == 1
    assert run.stdout.startswith(f"error: {path}: at byte {path.stat().st_size}: truncated")
    run = doctor(path, target, "0.33.0", "--format", "json")
    assert (run.returncode, json.loads(run.stdout)["drafter"]) == (1, None)


@pytest.mark.parametrize("version", ["newest", ""])
def test_what_it_cannot_tell_ends_with_status_2(tmp_path: Path, target: Path, version: str) -> None:
    root = llama_drafter().write(tmp_path / "drafter")
    run = doctor(root, target, version)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"doctor: {version!r} is not a vLLM version such as 0.33.0\n"
    run = doctor(root, root, "0.33.0")
    assert (run.returncode, run.stdout) == (2, "")
    assert "architecture LlamaForCausalLMEagle3 is none of KimiK25ForConditionalGeneration" in run.stderr


def test_six_gigabytes_take_milliseconds(tmp_path: Path) -> None:
    drafter = llama_drafter()
    drafter.tensors |= {
        "embed_tokens.weight": bf16(163840, 7168),
        **{f"midlayer.mlp.{name}_proj.weight": bf16(18432, 7168) for name in ("gate", "up", "down")},
        "midlayer.mlp.more": bf16(163840, 7168),
    }
    root = drafter.write(tmp_path / "drafter")
    assert (root / "model.safetensors").stat().st_size > 6e9
    target, service = Target.from_facts(target_facts()), Service("0.33.0")
    began = time.perf_counter()
    examination = examine(root, target, service)
    seconds = time.perf_counter() - began
    assert examination.findings == []
    assert seconds < 0.5
