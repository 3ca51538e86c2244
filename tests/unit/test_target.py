# SPDX-License-Identifier: Apache-2.0
"""A target model is described when it is whole, and every fault of it is named with the file and the remedy."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.checkpoint import CheckpointError
from ansible.module_utils.aerie.target import Reader, describe_target, inspect_target
from model_files import KIMI, KIMI_TEXT, TensorFile, bf16, write_json, write_kimi, write_safetensors, write_sharded

SECOND_SHARD = "model-00002-of-00002.safetensors"
STRANGER = Reader("vllm", 64001, frozenset({64001}))


@pytest.fixture
def kimi() -> Iterator[Path]:
    # pytest keeps tmp_path private, and a model that a service reads lies where others may go.
    before = os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="aerie-") as name:
        Path(name).chmod(0o755)
        yield write_kimi(Path(name) / "kimi")
    os.umask(before)


def problems_of(root: Path, reader: Reader | None = None) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        inspect_target(root, reader)
    return caught.value.problems


def edit_config(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    change(config)
    write_json(root / "config.json", config)


def test_kimi_is_described_by_its_text_model(kimi: Path) -> None:
    facts = inspect_target(kimi, STRANGER)
    names = ("hidden_size", "num_hidden_layers", "n_routed_experts", "vocab_size", "kv_lora_rank")
    sizes = {name: KIMI_TEXT[name] for name in names}
    text = facts.pop("text")
    assert isinstance(text, dict)
    assert sizes.items() <= text.items()
    assert (text["model_type"], text["dtype"]) == ("kimi_k2", "bfloat16")
    assert len(str(facts.pop("identity"))) == 64
    assert facts == {
        "path": str(kimi),
        "config": str(kimi / "config.json"),
        "architecture": "KimiK25ForConditionalGeneration",
        "model_type": "kimi_k25",
        "quantization": "compressed-tensors",
        "shards": 2,
        "bytes": sum(path.stat().st_size for path in kimi.glob("*.safetensors")),
    }


def test_the_configuration_alone_says_the_same(kimi: Path) -> None:
    whole = inspect_target(kimi)
    for path in kimi.iterdir():
        if path.name != "config.json":
            path.unlink()
    described = describe_target(kimi)
    assert described.items() <= whole.items()
    assert whole.keys() - described.keys() == {"identity", "shards", "bytes"}


def test_a_rope_is_read_as_either_transformers_writes_it(kimi: Path) -> None:
    before = inspect_target(kimi)["text"]
    text = {name: value for name, value in KIMI_TEXT.items() if not name.startswith("rope")}
    rope = {"rope_theta": 50000.0, "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    write_json(kimi / "config.json", {**KIMI, "text_config": {**text, "rope_parameters": rope}})
    after = inspect_target(kimi)["text"]
    assert isinstance(before, dict) and isinstance(after, dict)
    assert after["rope_theta"] == before["rope_theta"] == 50000.0
    assert after["rope_scaling"] == {
        "rope_type": "yarn",
        **{name: value for name, value in before["rope_scaling"].items() if name != "type"},
    }


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        ("DeepseekV3ForCausalLM", "kimi_k2"),
        ("DeepseekV2ForCausalLM", "deepseek_v2"),
    ],
)
def test_a_text_only_model_is_its_own_text_model(kimi: Path, architecture: str, model_type: str) -> None:
    config = {**KIMI_TEXT, "architectures": [architecture], "model_type": model_type}
    write_json(kimi / "config.json", config)
    facts = inspect_target(kimi)
    text = facts["text"]
    assert isinstance(text, dict)
    assert (facts["architecture"], facts["model_type"], text["model_type"]) == (architecture, model_type, model_type)


def test_the_identity_is_the_same_wherever_the_model_lies(kimi: Path) -> None:
    copy = write_kimi(kimi.parent / "copy")
    (kimi / "README.md").write_text("downloaded on a Sunday\n", encoding="utf-8")
    assert inspect_target(copy)["identity"] == inspect_target(kimi)["identity"]


@pytest.mark.parametrize("name", ["config.json", "tiktoken.model", "tokenization_kimi.py", "generation_config.json"])
def test_the_identity_changes_with_every_file_that_the_service_reads(kimi: Path, name: str) -> None:
    before = inspect_target(kimi)["identity"]
    with (kimi / name).open("a", encoding="utf-8") as stream:
        stream.write(" " if (kimi / name).stat().st_size else "{}")
    assert inspect_target(kimi)["identity"] != before


def test_the_identity_changes_with_a_shards_header(kimi: Path) -> None:
    before = inspect_target(kimi)["identity"]
    write_safetensors(kimi / SECOND_SHARD, {"language_model.lm_head.weight": bf16(7168, 163840)})
    assert inspect_target(kimi)["identity"] != before


def test_a_missing_path_is_named_with_the_variable_to_correct(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path / "absent")
    assert problem.startswith(f"{tmp_path / 'absent'}: no such directory on this host")
    assert "target_model_path" in problem
    (tmp_path / "file").touch()
    (problem,) = problems_of(tmp_path / "file")
    assert problem.startswith(f"{tmp_path / 'file'}: not a directory")


def test_everything_that_is_wrong_is_said_at_once(kimi: Path) -> None:
    (kimi / "config.json").unlink()
    (kimi / "tiktoken.model").unlink()
    (kimi / "tokenization_kimi.py").unlink()
    (kimi / SECOND_SHARD).unlink()
    config, tokenizer, code, shard = problems_of(kimi)
    assert config == f"{kimi / 'config.json'}: missing"
    assert tokenizer.startswith(f"{kimi}: none of tokenizer.json, tiktoken.model, tokenizer.model, vocab.json is there")
    assert code.startswith(
        f"{kimi / 'tokenization_kimi.py'}: missing, but auto_map in {kimi / 'tokenizer_config.json'}"
    )
    assert shard.startswith(f"{kimi / SECOND_SHARD}: missing, but {kimi / 'model.safetensors.index.json'} places 1")


def test_a_shard_of_another_size_than_its_header_implies_is_named(kimi: Path) -> None:
    path = kimi / SECOND_SHARD
    whole = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(whole - 1)
    (problem,) = problems_of(kimi)
    assert problem.startswith(
        f"{path}: at byte {whole - 1}: truncated: {whole - 1} bytes, but its header implies {whole}"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM is none of KimiK25For"),
        ({"architectures": None}, "architecture None is none of KimiK25For"),
        ({"text_config": {**KIMI_TEXT, "model_type": "llama"}}, "model_type llama is none of kimi_k2, deepseek_v3"),
        ({"text_config": {**KIMI_TEXT, "hidden_size": "7168"}}, "hidden_size is '7168', expected a positive integer"),
        ({"text_config": {**KIMI_TEXT, "num_hidden_layers": 0}}, "num_hidden_layers is 0, expected a positive integer"),
    ],
)
def test_a_configuration_that_is_not_understood_is_named(kimi: Path, change: dict[str, Any], problem: str) -> None:
    write_json(kimi / "config.json", {**KIMI, **change})
    (found,) = problems_of(kimi)
    assert found.startswith(f"{kimi / 'config.json'}: ")
    assert problem in found


def test_code_of_another_repository_is_not_expected_here(kimi: Path) -> None:
    (kimi / "configuration_kimi_k25.py").unlink()
    edit_config(kimi, lambda config: config["auto_map"].update(AutoConfig="moonshot/code--configuration.KimiK25Config"))
    assert inspect_target(kimi)["shards"] == 2


def test_a_private_file_is_named_with_the_account_and_the_remedy(kimi: Path) -> None:
    (kimi / SECOND_SHARD).chmod(0o640)
    (problem,) = problems_of(kimi, STRANGER)
    assert problem.startswith(f"{kimi / SECOND_SHARD}: user vllm may not read it (-rw-r----- ")
    assert problem.endswith(f"chmod o+r {kimi / SECOND_SHARD}")
    group = Reader("vllm", 64001, frozenset({(kimi / SECOND_SHARD).stat().st_gid}))
    assert inspect_target(kimi, group)["shards"] == 2
    assert inspect_target(kimi)["shards"] == 2


def test_a_closed_directory_on_the_way_is_named(kimi: Path) -> None:
    kimi.parent.chmod(0o700)
    (problem,) = problems_of(kimi, STRANGER)
    assert problem.startswith(f"{kimi.parent}: user vllm may not enter it (drwx------ ")
    assert problem.endswith(f"chmod o+x {kimi.parent}")


def test_the_way_that_a_link_leads_counts_too(kimi: Path) -> None:
    blobs = kimi.parent / "blobs"
    blobs.mkdir(mode=0o755)
    (kimi / SECOND_SHARD).rename(blobs / "0a1b2c")
    (kimi / SECOND_SHARD).symlink_to(blobs / "0a1b2c")
    assert inspect_target(kimi, STRANGER)["shards"] == 2
    blobs.chmod(0o700)
    (problem,) = problems_of(kimi, STRANGER)
    assert problem.startswith(f"{blobs}: user vllm may not enter it")


def test_an_account_that_does_not_exist_yet_has_what_everybody_has(kimi: Path) -> None:
    newcomer = Reader.named("aerie-no-such-user")
    assert inspect_target(kimi, newcomer)["shards"] == 2
    (kimi / "config.json").chmod(0o640)
    (problem,) = problems_of(kimi, newcomer)
    assert problem.startswith(f"{kimi / 'config.json'}: user aerie-no-such-user (still to be made")


def test_root_may_read_everything(kimi: Path) -> None:
    (kimi / "config.json").chmod(0o600)
    assert inspect_target(kimi, Reader.named("root"))["shards"] == 2


def test_a_model_of_many_shards_takes_about_a_second(kimi: Path) -> None:
    shards: dict[str, dict[str, TensorFile]] = {
        f"model-{number:05}-of-00064.safetensors": {
            f"language_model.model.layers.{number}.mlp.experts.{expert}.{part}": TensorFile("I32", (2048, 896))
            for expert in range(128)
            for part in ("gate_proj.weight_packed", "up_proj.weight_packed", "down_proj.weight_packed")
        }
        for number in range(1, 65)
    }
    write_sharded(kimi, shards)
    began = time.perf_counter()
    facts = inspect_target(kimi, STRANGER)
    assert time.perf_counter() - began < 5
    assert (facts["shards"], facts["bytes"]) == (64, sum((kimi / name).stat().st_size for name in shards))
