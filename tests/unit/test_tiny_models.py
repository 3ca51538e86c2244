# SPDX-License-Identifier: Apache-2.0
"""embedded/models.py from outside: the files it writes are read as any loader reads them, and run in numpy."""

from __future__ import annotations

import itertools
import json
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from tokenizers import Tokenizer

PROGRAM = Path(__file__).parents[2] / "embedded" / "models.py"
KINDS = ("rot", "random")
TAPS = [2, 4, 6]

Array = npt.NDArray[np.float64]
Weights = dict[str, Array]


def make(*arguments: object, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False, umask=umask
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    assert isinstance(content, dict)
    return content


def headers(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> (dtype, shape) of every tensor in a directory, from the safetensors headers alone."""
    found: dict[str, tuple[str, list[int]]] = {}
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__")
        assert path.stat().st_size == 8 + size + max(entry["data_offsets"][1] for entry in header.values())
        found |= {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    return found


def load(directory: Path) -> Weights:
    weights: Weights = {}
    for path in directory.glob("*.safetensors"):
        for name, tensor in safetensors.numpy.load_file(path).items():
            weights[name.removeprefix("language_model.")] = tensor.astype(np.float64)
    return weights


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    # A strict umask must not keep the service's user from reading what root has written.
    result = make(out, umask=0o077)
    assert result.returncode == 0, result.stderr
    return out


class TestFiles:
    def test_same_bytes_every_time_and_one_line_per_model(self, tiny: Path, tmp_path: Path) -> None:
        lines = make(tmp_path).stdout.splitlines()
        assert [line.split(":")[0] for line in lines] == [str(tmp_path / kind) for kind in KINDS]
        assert contents(tmp_path) == contents(tiny)

    def test_one_kind_alone_is_the_same(self, tiny: Path, tmp_path: Path) -> None:
        make(tmp_path, "--kind", "random")
        assert contents(tmp_path) == {name: data for name, data in contents(tiny).items() if name.startswith("random/")}

    def test_seed_changes_the_weights(self, tiny: Path, tmp_path: Path) -> None:
        make(tmp_path, "--seed", 1)
        for kind in KINDS:
            for part in ("target", "drafter"):
                before, after = contents(tiny / kind / part), contents(tmp_path / kind / part)
                assert before.keys() == after.keys()
                assert {name for name in before if before[name] != after[name]} == {
                    name for name in before if name.endswith(".safetensors")
                }

    def test_second_run_writes_nothing(self, tmp_path: Path) -> None:
        def identities() -> dict[Path, tuple[int, int]]:
            return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}

        make(tmp_path)
        before = identities()
        result = make(tmp_path)
        assert all(line.endswith("up to date") for line in result.stdout.splitlines())
        assert identities() == before

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda target: (target / "model-00002-of-00002.safetensors").unlink(),
            lambda target: (target / "config.json").write_text("{}"),
            lambda target: (target / "model-00003-of-00002.safetensors").write_bytes(b"stray"),
        ],
        ids=["gone", "altered", "stray"],
    )
    def test_damage_is_repaired(self, tiny: Path, tmp_path: Path, spoil: Callable[[Path], object]) -> None:
        shutil.copytree(tiny / "rot", tmp_path / "rot")
        assert make(tmp_path, "--kind", "rot").stdout.rstrip().endswith("up to date")
        spoil(tmp_path / "rot" / "target")
        assert make(tmp_path, "--kind", "rot").stdout.rstrip().endswith("written")
        assert contents(tmp_path / "rot") == contents(tiny / "rot")

    def test_leftover_of_an_interrupted_run_is_no_obstacle(self, tiny: Path, tmp_path: Path) -> None:
        (tmp_path / ".rot.new" / "target").mkdir(parents=True)
        make(tmp_path, "--kind", "rot")
        assert contents(tmp_path / "rot") == contents(tiny / "rot")
        assert [path.name for path in tmp_path.iterdir()] == ["rot"]

    def test_readable_by_every_user(self, tiny: Path) -> None:
        for kind in KINDS:
            for path in [tiny / kind, *(tiny / kind).rglob("*")]:
                assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path

    def test_a_few_megabytes(self, tiny: Path) -> None:
        for kind in KINDS:
            assert sum(map(len, contents(tiny / kind).values())) < 20e6

    def test_refuses_a_tap_that_the_target_lacks(self, tmp_path: Path) -> None:
        result = make(tmp_path, "--fitted-ids", "2,4,9")
        assert result.returncode == 2
        assert "fitted tap id 9 is not one of the target's 0 to 8" in result.stderr
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
class TestCheckpoints:
    def test_index_names_every_tensor_and_its_shard(self, tiny: Path, kind: str) -> None:
        target = tiny / kind / "target"
        index = read_json(target / "model.safetensors.index.json")
        shards = {path.name: safetensors.numpy.load_file(path) for path in target.glob("*.safetensors")}
        assert len(shards) > 1
        assert index["weight_map"] == {name: shard for shard, tensors in shards.items() for name in tensors}
        total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
        assert index["metadata"]["total_size"] == total

    def test_text_tensors_have_the_configured_shapes(self, tiny: Path, kind: str) -> None:
        config = read_json(tiny / kind / "target" / "config.json")
        assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
        text = config["text_config"]
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]

        def mlp(prefix: str, width: int) -> dict[str, list[int]]:
            return {
                f"{prefix}.gate_proj.weight": [width, hidden],
                f"{prefix}.up_proj.weight": [width, hidden],
                f"{prefix}.down_proj.weight": [hidden, width],
            }

        expected = {
            "model.embed_tokens.weight": [text["vocab_size"], hidden],
            "model.norm.weight": [hidden],
            "lm_head.weight": [text["vocab_size"], hidden],
        }
        for index in range(text["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            expected |= {
                f"{layer}.input_layernorm.weight": [hidden],
                f"{layer}.post_attention_layernorm.weight": [hidden],
                f"{layer}.self_attn.q_a_proj.weight": [text["q_lora_rank"], hidden],
                f"{layer}.self_attn.q_a_layernorm.weight": [text["q_lora_rank"]],
                f"{layer}.self_attn.q_b_proj.weight": [heads * (nope + rope), text["q_lora_rank"]],
                f"{layer}.self_attn.kv_a_proj_with_mqa.weight": [text["kv_lora_rank"] + rope, hidden],
                f"{layer}.self_attn.kv_a_layernorm.weight": [text["kv_lora_rank"]],
                f"{layer}.self_attn.kv_b_proj.weight": [heads * (nope + value), text["kv_lora_rank"]],
                f"{layer}.self_attn.o_proj.weight": [hidden, heads * value],
            }
            if index < text["first_k_dense_replace"]:
                expected |= mlp(f"{layer}.mlp", text["intermediate_size"])
                continue
            expected[f"{layer}.mlp.gate.weight"] = [text["n_routed_experts"], hidden]
            expected[f"{layer}.mlp.gate.e_score_correction_bias"] = [text["n_routed_experts"]]
            for expert in (*(f"experts.{i}" for i in range(text["n_routed_experts"])), "shared_experts"):
                expected |= mlp(f"{layer}.mlp.{expert}", text["moe_intermediate_size"])

        found = headers(tiny / kind / "target")
        assert {dtype for dtype, _ in found.values()} == {"F32"}
        text_found = {name: shape for name, (_, shape) in found.items() if name.startswith("language_model.")}
        assert text_found == {f"language_model.{name}": shape for name, shape in expected.items()}
        others = {name.split(".")[0] for name in found.keys() - text_found.keys()}
        assert others == {"vision_tower", "mm_projector"}

    def test_drafter_fits_the_target(self, tiny: Path, kind: str) -> None:
        text = read_json(tiny / kind / "target" / "config.json")["text_config"]
        config = read_json(tiny / kind / "drafter" / "config.json")
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["hidden_size"] == text["hidden_size"]
        assert config["vocab_size"] == text["vocab_size"]
        assert config["draft_vocab_size"] < config["vocab_size"]
        assert config["eagle_aux_hidden_state_layer_ids"] == TAPS
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == TAPS
        hidden, drafted = config["hidden_size"], config["draft_vocab_size"]
        attention = config["num_attention_heads"] * config["head_dim"]
        inner = config["intermediate_size"]
        assert headers(tiny / kind / "drafter") == {
            "fc.weight": ("F32", [hidden, len(TAPS) * hidden]),
            "norm.weight": ("F32", [hidden]),
            "lm_head.weight": ("F32", [drafted, hidden]),
            "midlayer.hidden_norm.weight": ("F32", [hidden]),
            "midlayer.input_layernorm.weight": ("F32", [hidden]),
            "midlayer.post_attention_layernorm.weight": ("F32", [hidden]),
            "midlayer.self_attn.q_proj.weight": ("F32", [attention, 2 * hidden]),
            "midlayer.self_attn.k_proj.weight": ("F32", [attention, 2 * hidden]),
            "midlayer.self_attn.v_proj.weight": ("F32", [attention, 2 * hidden]),
            "midlayer.self_attn.o_proj.weight": ("F32", [hidden, attention]),
            "midlayer.mlp.gate_proj.weight": ("F32", [inner, hidden]),
            "midlayer.mlp.up_proj.weight": ("F32", [inner, hidden]),
            "midlayer.mlp.down_proj.weight": ("F32", [hidden, inner]),
            "d2t": ("I64", [drafted]),
            "t2d": ("BOOL", [config["vocab_size"]]),
        }

    def test_draft_vocabulary_maps_say_the_same(self, tiny: Path, kind: str) -> None:
        tensors = safetensors.numpy.load_file(tiny / kind / "drafter" / "model.safetensors")
        drafted = np.arange(len(tensors["d2t"])) + tensors["d2t"]
        assert np.array_equal(drafted, np.flatnonzero(tensors["t2d"]))
        assert len(np.unique(tensors["d2t"])) > 2, "a mapping that no error in it would show"

    def test_special_tokens_are_those_of_the_configs(self, tiny: Path, kind: str) -> None:
        target = tiny / kind / "target"
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        config = read_json(target / "config.json")
        assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"]
        assert config["media_placeholder_token_id"] == tokenizer.token_to_id("<|media_pad|>")
        expected = {
            "bos_token_id": tokenizer.token_to_id("[BOS]"),
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "pad_token_id": tokenizer.token_to_id("[PAD]"),
        }
        drafter = read_json(tiny / kind / "drafter" / "config.json")
        generation = read_json(target / "generation_config.json")
        for holder in (config, config["text_config"], generation, drafter):
            assert {name: holder[name] for name in expected} == expected

    @pytest.mark.parametrize("text", ["plain", "caf\u00e9 \u2192 \U0001f600", "\x00\x7f\n\t", "<|im_end"])
    def test_any_text_survives_the_tokenizer(self, tiny: Path, kind: str, text: str) -> None:
        tokenizer = Tokenizer.from_file(str(tiny / kind / "target" / "tokenizer.json"))
        ids = tokenizer.encode(text).ids
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text

    def test_chat_template(self, tiny: Path, kind: str) -> None:
        source = (tiny / kind / "target" / "chat_template.jinja").read_text()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": " are you?"}]},
            {"role": "assistant", "content": None},
            {"role": "tool", "content": "4"},
        ]
        prompt = environment.from_string(source).render(messages=messages, add_generation_prompt=True)
        assert prompt == (
            "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
            "<|im_user|>user<|im_middle|>Who are you?<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|><|im_end|>"
            "<|im_system|>tool<|im_middle|>4<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>"
        )
        tokenizer = Tokenizer.from_file(str(tiny / kind / "target" / "tokenizer.json"))
        assert tokenizer.encode(prompt).ids[-1] == tokenizer.token_to_id("<|im_middle|>")


# What follows runs the files of `rot` in numpy: DeepSeek-V3's latent attention and the EAGLE-3 layer, written from the
# models' definitions, not from the way in which the weights were made.


def rms_norm(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight)


def rotary(x: Array, theta: float) -> Array:
    """Turn (tokens, heads, width) by position. Pairs are (i, i + width / 2)."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )


def attend(query: Array, key: Array, value: Array) -> Array:
    """Causal attention over (tokens, heads, width) -> (tokens, heads * value width)."""
    count = len(query)
    scores = np.einsum("qhd,khd->hqk", query, key, optimize=True) / np.sqrt(query.shape[-1])
    scores[:, np.triu(np.ones((count, count), dtype=bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", shares, value, optimize=True).reshape(count, -1))


def latent_attention(weights: Weights, prefix: str, config: dict[str, Any], x: Array) -> Array:
    def project(name: str, y: Array) -> Array:
        return np.asarray(y @ weights[f"{prefix}.{name}.weight"].T)

    count, heads = len(x), config["num_attention_heads"]
    nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    query_latent = rms_norm(project("q_a_proj", x), weights[f"{prefix}.q_a_layernorm.weight"])
    query = project("q_b_proj", query_latent).reshape(count, heads, nope + rope)
    latent = project("kv_a_proj_with_mqa", x)
    shared_key = rotary(latent[:, None, rank:], config["rope_theta"])
    key_value_latent = rms_norm(latent[:, :rank], weights[f"{prefix}.kv_a_layernorm.weight"])
    key_value = project("kv_b_proj", key_value_latent).reshape(count, heads, -1)
    query[..., nope:] = rotary(query[..., nope:], config["rope_theta"])
    key = np.concatenate([key_value[..., :nope], np.broadcast_to(shared_key, (count, heads, rope))], axis=-1)
    return project("o_proj", attend(query, key, key_value[..., nope:]))


class Target:
    def __init__(self, directory: Path) -> None:
        self.config = read_json(directory / "config.json")["text_config"]
        self.weights = load(directory)
        self.embeddings = self.weights["model.embed_tokens.weight"]

    def streams(self, tokens: Sequence[int]) -> list[Array]:
        """The residual streams entering each layer and, last, that leaving the last one: each (tokens, hidden).

        MLPs are left out: test_experts_add_nothing.
        """
        x = self.embeddings[list(tokens)]
        streams = [x]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            normed = rms_norm(x, self.weights[f"{layer}.input_layernorm.weight"])
            x = x + latent_attention(self.weights, f"{layer}.self_attn", self.config, normed)
            streams.append(x)
        return streams

    def logits(self, last_stream: Array) -> Array:
        return np.asarray(rms_norm(last_stream, self.weights["model.norm.weight"]) @ self.weights["lm_head.weight"].T)


class Drafter:
    def __init__(self, directory: Path, embeddings: Array) -> None:
        self.config = read_json(directory / "config.json")
        self.weights = load(directory)
        self.embeddings = embeddings

    def combine(self, taps: Sequence[Array]) -> Array:
        return np.asarray(np.concatenate(taps, axis=-1) @ self.weights["fc.weight"].T)

    def step(self, tokens: Sequence[int], x: Array) -> tuple[int, Array]:
        """One pass over embedded tokens and streams (tokens, hidden): the draft after the last, and its stream."""
        embedded = rms_norm(self.embeddings[list(tokens)], self.weights["midlayer.input_layernorm.weight"])
        both = np.concatenate([embedded, rms_norm(x, self.weights["midlayer.hidden_norm.weight"])], axis=-1)
        query, key, value = (
            (both @ self.weights[f"midlayer.self_attn.{name}_proj.weight"].T).reshape(
                len(both), self.config["num_attention_heads"], -1
            )
            for name in "qkv"
        )
        theta = self.config["rope_theta"]
        attended = attend(rotary(query, theta), rotary(key, theta), value)
        x = x + attended @ self.weights["midlayer.self_attn.o_proj.weight"].T
        last = rms_norm(x[-1], self.weights["norm.weight"])
        draft = int((self.weights["lm_head.weight"] @ last).argmax())
        return draft + int(self.weights["d2t"][draft]), x[-1:]

    def draft(self, tokens: Sequence[int], next_token: int, taps: Sequence[Array], count: int = 3) -> list[int]:
        """The drafts after next_token, which the target has chosen after tokens."""
        draft, x = self.step([*tokens[1:], next_token], self.combine(taps))
        drafts = [draft]
        while len(drafts) < count:
            draft, x = self.step([draft], x)
            drafts.append(draft)
        return drafts


@pytest.fixture(scope="session")
def rot_target(tiny: Path) -> Target:
    return Target(tiny / "rot" / "target")


@pytest.fixture(scope="session")
def rot_drafter(tiny: Path, rot_target: Target) -> Drafter:
    return Drafter(tiny / "rot" / "drafter", rot_target.embeddings)


@pytest.fixture(scope="session")
def everything(rot_target: Target) -> list[Array]:
    """The streams of one sequence that holds every token once."""
    return rot_target.streams(range(len(rot_target.embeddings)))


@pytest.fixture(scope="session")
def logits(rot_target: Target, everything: list[Array]) -> Array:
    """Row t: the logits after token t."""
    return rot_target.logits(everything[-1])


@pytest.fixture(scope="session")
def successor(logits: Array) -> list[int]:
    return [int(token) for token in logits.argmax(axis=-1)]


def continuation(successor: Sequence[int], token: int, count: int) -> list[int]:
    return list(
        itertools.islice(itertools.accumulate(itertools.repeat(token), lambda t, _: successor[t]), 1, count + 1)
    )


PROMPTS = ["hello world", "abcabcabc", "The capital of France is", "caf\u00e9", "\u2192"]
WRONG_TAPS = [
    *([*TAPS[:place], TAPS[place] + shift, *TAPS[place + 1 :]] for place in range(3) for shift in (-1, 1)),
    *([tap + shift for tap in TAPS] for shift in (-1, 1)),
    *(list(order) for order in itertools.permutations(TAPS) if list(order) != TAPS),
    [2, 4, 5],
]


class TestRotatingModel:
    def test_experts_add_nothing(self, rot_target: Target, rot_drafter: Drafter) -> None:
        for weights in (rot_target.weights, rot_drafter.weights):
            last = [weights[name] for name in weights if name.endswith("down_proj.weight")]
            assert last
            assert not any(weight.any() for weight in last)

    def test_stream_is_a_rotation_of_the_embedding(self, rot_target: Target, everything: list[Array]) -> None:
        for before, after in itertools.pairwise(everything):
            rotation, *_ = np.linalg.lstsq(before, after, rcond=None)
            assert np.allclose(rotation.T @ rotation, np.eye(len(rotation)), atol=1e-3)
            assert np.allclose(before @ rotation, after, atol=1e-2)
            off_diagonal = rotation[1:, 1:] - np.eye(len(rotation) - 1)
            assert np.linalg.norm(off_diagonal) > 10, "a layer that leaves the stream as it is hides a wrong tap"

    def test_next_token_is_a_permutation(self, successor: list[int]) -> None:
        assert sorted(successor) == list(range(len(successor)))

    def test_logits_are_far_apart(self, logits: Array) -> None:
        ranked = np.sort(logits, axis=-1)
        assert (ranked[:, -1] - ranked[:, -2]).min() > 10

    def test_text_is_continued_within_the_draft_vocabulary(self, successor: list[int], rot_drafter: Drafter) -> None:
        reachable = {token for start in range(256) for token in continuation(successor, start, 200)}
        assert reachable <= set(np.flatnonzero(rot_drafter.weights["t2d"]).tolist())

    def test_chat_answer_is_printable_and_ends(self, tiny: Path, successor: list[int]) -> None:
        tokenizer = Tokenizer.from_file(str(tiny / "rot" / "target" / "tokenizer.json"))
        end = read_json(tiny / "rot" / "target" / "generation_config.json")["eos_token_id"]
        (start,) = tokenizer.encode("<|im_middle|>").ids
        answer = continuation(successor, start, 200)
        answer = answer[: answer.index(end)]
        text = tokenizer.decode(answer)
        assert text.startswith("Hello from Aerie")
        assert text.endswith(".")
        assert text.isprintable()
        assert len(answer) < 32

    def test_taps_give_the_embedding_back(
        self, rot_target: Target, rot_drafter: Drafter, everything: list[Array]
    ) -> None:
        combined = rot_drafter.combine([everything[tap] for tap in TAPS])
        assert np.allclose(combined, rot_target.embeddings, atol=0.05)

    @pytest.mark.parametrize("taps", WRONG_TAPS, ids=str)
    def test_wrong_taps_drown_it(
        self, rot_target: Target, rot_drafter: Drafter, everything: list[Array], taps: list[int]
    ) -> None:
        combined = rot_drafter.combine([everything[tap] for tap in taps])
        error = np.linalg.norm(combined - rot_target.embeddings, axis=-1)
        assert error.min() > 2 * np.linalg.norm(rot_target.embeddings, axis=-1).max()

    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_drafts(
        self, tiny: Path, rot_target: Target, rot_drafter: Drafter, successor: list[int], prompt: str
    ) -> None:
        tokens = Tokenizer.from_file(str(tiny / "rot" / "target" / "tokenizer.json")).encode(prompt).ids
        streams = rot_target.streams(tokens)
        next_token, *following = continuation(successor, tokens[-1], 4)
        assert rot_drafter.draft(tokens, next_token, [streams[tap] for tap in TAPS]) == following
        for taps in WRONG_TAPS:
            draft, *_ = rot_drafter.draft(tokens, next_token, [streams[tap] for tap in taps])
            assert draft != following[0], taps

    def test_declared_ids_change_only_what_is_declared(self, tiny: Path, tmp_path: Path) -> None:
        make(tmp_path, "--kind", "rot", "--declared-ids", "1,3,5")
        before, after = contents(tiny / "rot"), contents(tmp_path / "rot")
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {"drafter/config.json", "recipe.json"}
        config = read_json(tmp_path / "rot" / "drafter" / "config.json")
        assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]

    def test_fitted_ids_change_only_the_drafters_weights(self, tiny: Path, rot_target: Target, tmp_path: Path) -> None:
        make(tmp_path, "--kind", "rot", "--fitted-ids", "0,8,3")
        before, after = contents(tiny / "rot"), contents(tmp_path / "rot")
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {"drafter/model.safetensors", "recipe.json"}
        streams = rot_target.streams(range(64))
        combined = Drafter(tmp_path / "rot" / "drafter", rot_target.embeddings).combine(
            [streams[tap] for tap in (0, 8, 3)]
        )
        assert np.allclose(combined, rot_target.embeddings[:64], atol=0.05)


class TestRandomModel:
    def test_experts_and_attention_are_real(self, tiny: Path) -> None:
        weights = load(tiny / "random" / "target")
        outputs = [weights[name] for name in weights if name.endswith(("down_proj.weight", "o_proj.weight"))]
        assert min(np.linalg.norm(weight) for weight in outputs) > 1

    def test_only_printable_tokens_can_win(self, tiny: Path) -> None:
        weights = load(tiny / "random" / "target")
        tokenizer = Tokenizer.from_file(str(tiny / "random" / "target" / "tokenizer.json"))
        possible = np.flatnonzero(weights["lm_head.weight"].any(axis=-1)).tolist()
        assert sorted(tokenizer.decode([token]) for token in possible) == ["\n", *map(chr, range(32, 127))]
