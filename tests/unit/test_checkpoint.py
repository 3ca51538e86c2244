# SPDX-License-Identifier: Apache-2.0
"""A model directory is read as a whole, and everything that is wrong with it is said at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible.module_utils.aerie.checkpoint import INDEX_NAME, CheckpointError, read_checkpoint, read_single, summarise
from ansible.module_utils.aerie.digest_cache import cached_sha256
from ansible.module_utils.aerie.files import sha256_file
from model_files import bf16, write_json, write_safetensors, write_sharded

ONE, TWO, THREE = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    shards = {ONE: {"a": bf16(4), "b": bf16(2)}, TWO: {"c": bf16(8)}, THREE: {"d": bf16(16)}}
    write_sharded(tmp_path, shards)
    return tmp_path


def problems_of(root: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(root)
    return caught.value.problems


def test_an_indexed_checkpoint_knows_each_tensors_file(sharded: Path) -> None:
    checkpoint = read_checkpoint(sharded)
    assert dict(checkpoint.tensors) == {"a": ONE, "b": ONE, "c": TWO, "d": THREE}
    assert checkpoint.file_of("c") == sharded / TWO
    tensor = checkpoint.tensor("d")
    assert tensor is not None and tensor.shape == (16,)
    assert checkpoint.tensor("e") is None
    assert checkpoint.size == sum((sharded / name).stat().st_size for name in (ONE, TWO, THREE))


def test_files_that_the_index_does_not_name_are_not_the_models(sharded: Path) -> None:
    write_safetensors(sharded / "consolidated.safetensors", {"a": bf16(4)})
    assert set(read_checkpoint(sharded).shards) == {ONE, TWO, THREE}


def test_without_an_index_every_file_counts_but_the_ignored(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": bf16(4)})
    write_safetensors(tmp_path / "optimizer.safetensors", {"a": bf16(4)})
    assert set(read_checkpoint(tmp_path, ignored=["optimizer.safetensors"]).shards) == {"model.safetensors"}
    (problem,) = problems_of(tmp_path)
    assert problem.startswith(f"{tmp_path / 'optimizer.safetensors'}: a is also in {tmp_path / 'model.safetensors'}")


def test_all_missing_and_truncated_shards_are_named(sharded: Path) -> None:
    (sharded / ONE).unlink()
    with (sharded / THREE).open("r+b") as stream:
        stream.truncate((sharded / THREE).stat().st_size - 5)
    missing, truncated = problems_of(sharded)
    assert missing.startswith(f"{sharded / ONE}: missing, but {sharded / INDEX_NAME} places 2 tensors in it")
    size = (sharded / THREE).stat().st_size
    assert truncated.startswith(f"{sharded / THREE}: at byte {size}: truncated: {size} bytes, but its header implies")


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded: Path) -> None:
    write_json(sharded / INDEX_NAME, {"weight_map": {"a": ONE, "b": TWO, "c": TWO, "d": THREE}})
    (problem,) = problems_of(sharded)
    assert f"places b in {TWO}, but it is in {ONE}" in problem


def test_tensors_that_no_shard_has_are_counted(sharded: Path) -> None:
    write_json(sharded / INDEX_NAME, {"weight_map": {"a": ONE, "x": THREE, "y": THREE, "d": THREE, "c": TWO}})
    (problem,) = problems_of(sharded)
    assert f"places x (and 1 more) in {THREE}, but it is in none of the shards" in problem


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "", "model.bin", 7])
def test_an_index_that_leads_out_of_the_directory_is_refused(sharded: Path, name: object) -> None:
    write_json(sharded / INDEX_NAME, {"weight_map": {"a": name}})
    (problem,) = problems_of(sharded)
    assert problem.startswith(f"{sharded / INDEX_NAME}: a is placed in {name!r}")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "{" * 100_000])
def test_an_index_that_is_none_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX_NAME).write_text(text, encoding="utf-8")
    (problem,) = problems_of(sharded)
    assert problem.startswith(f"{sharded / INDEX_NAME}: ")


def test_a_series_without_an_index_must_be_complete(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    assert set(read_checkpoint(sharded).shards) == {ONE, TWO, THREE}
    (sharded / TWO).unlink()
    (problem,) = problems_of(sharded)
    assert problem.startswith(f"{sharded / TWO}: missing, though other parts of the series are there")


def test_one_file_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "best.safetensors", {"a": bf16(4)})
    write_safetensors(tmp_path / "last.safetensors", {"a": bf16(4)})
    checkpoint = read_single(tmp_path / "last.safetensors")
    assert (dict(checkpoint.tensors), checkpoint.indexed) == ({"a": "last.safetensors"}, False)
    (tmp_path / "last.safetensors").write_bytes(b"\0" * 7)
    with pytest.raises(CheckpointError, match=r"last\.safetensors: at byte 7"):
        read_single(tmp_path / "last.safetensors")


def test_one_of_several_parts_is_no_checkpoint(sharded: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_single(sharded / TWO)
    assert caught.value.problems == (
        f"{sharded / TWO}: one of several files that make a model; name the directory {sharded}",
    )


def test_weights_in_another_format_are_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    (problem,) = problems_of(tmp_path)
    assert problem.startswith(f"{tmp_path}: no {INDEX_NAME} and no *.safetensors file")
    assert "pytorch_model.bin is not read here: convert the weights to safetensors" in problem


def test_many_problems_make_a_readable_message() -> None:
    assert summarise([str(number) for number in range(9)]) == "0; 1; 2; 3; 4; and 4 more"
    assert summarise(["one"]) == "one"


def test_digests_are_remembered_until_a_file_changes(tmp_path: Path) -> None:
    model, cache = tmp_path / "model.safetensors", tmp_path / "cache" / "digests.json"
    model.write_bytes(b"first")
    before = cached_sha256([model], cache)
    assert before == {model: sha256_file(model)}
    # The same size and time, so what comes back was remembered.
    status = model.stat()
    with model.open("r+b") as stream:
        stream.write(b"other")
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached_sha256([model], cache) == before
    os.utime(model)
    assert cached_sha256([model], cache) == {model: sha256_file(model)} != before


def test_a_damaged_digest_cache_is_replaced(tmp_path: Path) -> None:
    model, cache = tmp_path / "model.safetensors", tmp_path / "digests.json"
    model.write_bytes(b"weights")
    for text in ("", "[]", '{"x": 3}', "{"):
        cache.write_text(text, encoding="utf-8")
        assert cached_sha256([model], cache) == {model: sha256_file(model)}
        assert str(model) in cache.read_text(encoding="utf-8")
