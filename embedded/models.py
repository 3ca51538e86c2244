#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write tiny Kimi-K2.5-shaped targets and EAGLE-3 drafters whose acceptance is known by construction.

    models.py OUT           writes OUT/{rot,random}/{target,drafter}

`rot`: the next token is a permutation of the last one, and every layer rotates the residual stream differently. With
the tap ids that the drafter is fitted to, every draft is accepted; with any other, none is. A chat answer is one fixed
sentence. What the model says depends on the last token only, so `rot` cannot show a damaged KV cache.

`random`: random weights with real attention and a real mixture of experts, for comparing tokens and hidden states
with a reference; its drafter is accepted about never. It answers in printable ASCII.

All weights are float32. Both targets have the DeepSeek-V3 text model, the vision tower and projector, the tokenizer,
the chat template and the processor files of Kimi-K2.5, in the layouts that vLLM and Hugging Face transformers load.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]
Tensors = dict[str, npt.NDArray[Any]]
Config = dict[str, Any]
Kind = Literal["rot", "random"]

# Of Kimi-K2.5's own numbers we keep what vLLM's attention kernels fix: the latent's rank and the rotary width.
HIDDEN, LAYERS, VOCAB, DRAFT_VOCAB = 128, 8, 1024, 512
HEADS, NOPE, ROPE, VALUE, Q_RANK, KV_RANK = 4, 32, 64, 32, 64, 512
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH, DENSE_LAYERS, DENSE_WIDTH = 4, 2, 64, 1, 256
VISION_HIDDEN, VISION_WIDTH, VISION_LAYERS, VISION_HEADS, PATCH, VISION_GRID = 64, 128, 2, 2, 14, 16
MAX_POSITIONS = 2048

# Not the default of vLLM (2, layers // 2, layers - 3): a runner that ignores the declared ids must show.
TAP_IDS = (2, 4, 6)
SEED = 0

TEXT = "language_model."
SHARDS = 2

# Matrix products and QR differ in their last bits between processors and BLAS builds, and rounding to float32 still
# shows some of that. Weights are rounded to this grid, far coarser than those bits and far finer than what the models
# need, so that the files are the same everywhere.
GRID = 2.0**-16


# ---------------------------------------------------------------------------------------------------------------------
# Vocabulary: bytes, fillers, the words of the answer, special tokens (last, as in Kimi-K2.5)

ANSWER = (
    "Hello from Aerie: this tiny Kimi-shaped model speaks one fixed sentence, while its EAGLE-3 drafter guesses every "
    "token ahead, and vLLM counts how many of those it then accepts."
)
SPECIAL = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "[UNK]",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = message.role if message.role in ('user', 'assistant') else 'system' -%}
<|im_{{ role }}|>{{ message.role }}<|im_middle|>
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content or [] -%}{{ part.text }}{%- endfor -%}
{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
# In the byte-level alphabet a newline and a space are shifted; the other printable characters are themselves.
NEWLINE, SPACE = "\u010a", "\u0120"
PRINTABLE = (NEWLINE, SPACE, *map(chr, range(33, 127)))


def vocabulary() -> dict[str, int]:
    """Token text in the byte-level alphabet -> id; a word is one token that no prompt is encoded to (no merges)."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ANSWER.replace(" ", f" {SPACE}").split(" ")
    fillers = [f"<filler_{i}>" for i in range(VOCAB - len(characters) - len(words) - len(SPECIAL))]
    return {text: i for i, text in enumerate([*characters, *fillers, *words, *SPECIAL])}


IDS = vocabulary()


def write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "model_max_length": MAX_POSITIONS,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Configurations


def token_ids() -> Config:
    """As in Kimi-K2.5, a chat turn's end is what ends generation."""
    return {"bos_token_id": IDS["[BOS]"], "eos_token_id": IDS["<|im_end|>"], "pad_token_id": IDS["[PAD]"]}


def common_config() -> Config:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **token_ids(),
    }


def text_config() -> Config:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **common_config(),
        "num_hidden_layers": LAYERS,
        "intermediate_size": DENSE_WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "first_k_dense_replace": DENSE_LAYERS,
        "moe_layer_freq": 1,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    }


def vision_config() -> Config:
    """Under the names of the model's own remote code (`vt_...`) and those of transformers; loaders read either."""
    shape = {
        "num_attention_heads": VISION_HEADS,
        "num_hidden_layers": VISION_LAYERS,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_WIDTH,
    }
    grid = {"pos_emb_height": VISION_GRID, "pos_emb_width": VISION_GRID, "pos_emb_time": 4}
    return {
        "model_type": "kimi_k25_vision",
        "patch_size": PATCH,
        "pos_emb_type": "divided_fixed",
        **grid,
        **{f"init_{name}": value for name, value in grid.items()},
        **shape,
        **{f"vt_{name}": value for name, value in shape.items()},
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": VISION_HIDDEN,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": HIDDEN,
        "video_attn_type": "spatial_temporal",
    }


def target_config() -> Config:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text_config(),
        "vision_config": vision_config(),
        "media_placeholder_token_id": IDS["<|media_pad|>"],
        "image_token_id": IDS["<|media_pad|>"],
        "video_token_id": IDS["<|media_end|>"],
        "vision_start_token_id": IDS["<|media_begin|>"],
        "vision_end_token_id": IDS["<|media_end|>"],
        "projection_hidden_size": VISION_HIDDEN,
        "ignore_index": -100,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **token_ids(),
    }


def drafter_config(declared_ids: Sequence[int]) -> Config:
    """The tap ids stand in both places: vLLM's Model Runner V1 reads the nested ones, V2 only those at the top."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **common_config(),
        "draft_vocab_size": DRAFT_VOCAB,
        "num_hidden_layers": 1,
        "intermediate_size": DENSE_WIDTH,
        # The key-value heads of the target without MLA: both models then fit one layout of cache blocks.
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": NOPE + ROPE,
        "mlp_bias": False,
        "eagle_aux_hidden_state_layer_ids": list(declared_ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(declared_ids), "use_aux_hidden_state": True},
    }


PREPROCESSOR_CONFIG: Config = {
    "auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"},
    "image_processor_type": "KimiK25VisionProcessor",
    "media_proc_cfg": {
        "in_patch_limit": 256,
        "patch_size": PATCH,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": VISION_GRID,
        "in_patch_limit_each_frame": 64,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
    },
}
# Stands in for the image processor that comes with the model on the hub. vLLM up to 0.19 loads it at start; serving
# text never calls preprocess.
REMOTE_CODE = '''\
"""Stand-in for Kimi-K2.5's image processor: it can be loaded, and it refuses images."""

from transformers.image_processing_utils import BaseImageProcessor


class KimiK25VisionProcessor(BaseImageProcessor):
    def __init__(self, media_proc_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg or {}
        self.num_frames_per_chunk = self.media_proc_cfg.get("temporal_merge_kernel_size", 4)

    def media_tokens_calculator(self, media):
        return 4

    def preprocess(self, medias, return_tensors=None, **kwargs):
        raise NotImplementedError("this tiny model serves text only")
'''


# ---------------------------------------------------------------------------------------------------------------------
# Random weights


def as_weight(values: Array) -> npt.NDArray[np.float32]:
    return (np.round(values / GRID) * GRID).astype(np.float32)


def matrix(rng: np.random.Generator, *shape: int) -> Array:
    """A random linear map (out, in...) that keeps the size of what it maps."""
    return rng.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))


def norm(rng: np.random.Generator, width: int) -> Array:
    return 1.0 + 0.05 * rng.standard_normal(width)


def bias(rng: np.random.Generator, width: int) -> Array:
    return 0.05 * rng.standard_normal(width)


def mlp(rng: np.random.Generator, prefix: str, width: int) -> Iterator[tuple[str, Array]]:
    yield f"{prefix}.gate_proj.weight", matrix(rng, width, HIDDEN)
    yield f"{prefix}.up_proj.weight", matrix(rng, width, HIDDEN)
    yield f"{prefix}.down_proj.weight", matrix(rng, HIDDEN, width)


def random_layer(rng: np.random.Generator, index: int) -> Iterator[tuple[str, Array]]:
    layer = f"{TEXT}model.layers.{index}"
    yield f"{layer}.input_layernorm.weight", norm(rng, HIDDEN)
    yield f"{layer}.post_attention_layernorm.weight", norm(rng, HIDDEN)
    attention = f"{layer}.self_attn"
    yield f"{attention}.q_a_proj.weight", matrix(rng, Q_RANK, HIDDEN)
    yield f"{attention}.q_a_layernorm.weight", norm(rng, Q_RANK)
    yield f"{attention}.q_b_proj.weight", matrix(rng, HEADS * (NOPE + ROPE), Q_RANK)
    yield f"{attention}.kv_a_proj_with_mqa.weight", matrix(rng, KV_RANK + ROPE, HIDDEN)
    yield f"{attention}.kv_a_layernorm.weight", norm(rng, KV_RANK)
    yield f"{attention}.kv_b_proj.weight", matrix(rng, HEADS * (NOPE + VALUE), KV_RANK)
    yield f"{attention}.o_proj.weight", matrix(rng, HIDDEN, HEADS * VALUE)
    if index < DENSE_LAYERS:
        yield from mlp(rng, f"{layer}.mlp", DENSE_WIDTH)
        return
    yield f"{layer}.mlp.gate.weight", matrix(rng, EXPERTS, HIDDEN)
    yield f"{layer}.mlp.gate.e_score_correction_bias", bias(rng, EXPERTS)
    for expert in range(EXPERTS):
        yield from mlp(rng, f"{layer}.mlp.experts.{expert}", EXPERT_WIDTH)
    yield from mlp(rng, f"{layer}.mlp.shared_experts", EXPERT_WIDTH)


def random_text_model(rng: np.random.Generator) -> dict[str, Array]:
    """Only printable characters have an output row: other tokens have logit 0, which is never the largest."""
    lm_head = np.zeros((VOCAB, HIDDEN))
    lm_head[[IDS[character] for character in PRINTABLE]] = rng.standard_normal((len(PRINTABLE), HIDDEN))
    weights = {
        f"{TEXT}model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)),
        f"{TEXT}model.norm.weight": norm(rng, HIDDEN),
        f"{TEXT}lm_head.weight": lm_head,
    }
    for index in range(LAYERS):
        weights.update(random_layer(rng, index))
    return weights


def vision_model(rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """Vision tower and projector: never run by the tests, but a loader has to find every tensor of it."""

    def linear(name: str, rows: int, *columns: int) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", matrix(rng, rows, *columns)
        yield f"{name}.bias", bias(rng, rows)

    def layer_norm(name: str) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", norm(rng, VISION_HIDDEN)
        yield f"{name}.bias", bias(rng, VISION_HIDDEN)

    yield from linear("vision_tower.patch_embed.proj", VISION_HIDDEN, 3, PATCH, PATCH)
    yield "vision_tower.patch_embed.pos_emb.weight", matrix(rng, VISION_GRID, VISION_GRID, VISION_HIDDEN)
    for index in range(VISION_LAYERS):
        block = f"vision_tower.encoder.blocks.{index}"
        yield from layer_norm(f"{block}.norm0")
        yield from layer_norm(f"{block}.norm1")
        yield from linear(f"{block}.wqkv", 3 * VISION_HIDDEN, VISION_HIDDEN)
        yield from linear(f"{block}.wo", VISION_HIDDEN, VISION_HIDDEN)
        yield from linear(f"{block}.mlp.fc0", VISION_WIDTH, VISION_HIDDEN)
        yield from linear(f"{block}.mlp.fc1", VISION_HIDDEN, VISION_WIDTH)
    yield from layer_norm("vision_tower.encoder.final_layernorm")
    merged = 4 * VISION_HIDDEN
    yield from layer_norm("mm_projector.pre_norm")
    yield from linear("mm_projector.proj.0", merged, merged)
    yield from linear("mm_projector.proj.2", HIDDEN, merged)


DRAFTER_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")


def random_drafter(rng: np.random.Generator, taps: int) -> dict[str, Array]:
    heads = HEADS * (NOPE + ROPE)
    return {
        **{f"midlayer.{name}.weight": norm(rng, HIDDEN) for name in DRAFTER_NORMS},
        **{f"midlayer.self_attn.{name}_proj.weight": matrix(rng, heads, 2 * HIDDEN) for name in "qkv"},
        "midlayer.self_attn.o_proj.weight": matrix(rng, HIDDEN, heads),
        **dict(mlp(rng, "midlayer.mlp", DENSE_WIDTH)),
        "norm.weight": norm(rng, HIDDEN),
        "fc.weight": matrix(rng, HIDDEN, taps * HIDDEN),
        "lm_head.weight": rng.standard_normal((DRAFT_VOCAB, HIDDEN)),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The rotating model
#
# Coordinate 0 of the residual stream is 1 in every layer and the stream's root mean square is 1, so RMS norms with
# weight 1 change nothing. Queries and keys are made from coordinate 0 only: the same constant at every position, so
# the rotary embedding alone decides the scores, which peak at distance 0 (by 56 before the softmax). Attention thus
# reads its own position only, and adds a matrix of our choice times its input to the stream.
#
# Target: layer i adds (R_i - 1) x, which makes the stream entering layer k  S[k] @ E[t],  S[k] = R_{k-1} ... R_0.
# The output rows are turned by S[layers], so the largest logit is that of the successor of t.
#
# Drafter: the embeddings of a cycle's tokens are turned into each other by one rotation P,  E[successor(t)] = P @ E[t].
# fc turns each tap back to E[t] and adds them up with large weights A_j that sum to 1: one wrong tap drowns E[t].
# Attention makes x' = GAIN P x + (1 - GAIN) e of the stream x and the embedding e of the token after t; that is
# E[successor(t)] if x is E[t] and e is P x, and has a negative share of it otherwise. Its successor is the draft, and
# x' is the next step's x.

SCORE = 16.0
GAIN = 2.0
TAP_WEIGHT = 4.0
LOGIT_SCALE = 0.2
CYCLE = HIDDEN - 1


@dataclass(frozen=True)
class Rotating:
    """successor: (VOCAB,) the next token of each; embeddings: (VOCAB, HIDDEN), row t is E[t]; rotation: P.

    streams: S[0] ... S[LAYERS]; drafted: (DRAFT_VOCAB,) the ascending ids of the draft vocabulary.
    """

    successor: Tokens
    embeddings: Array
    rotation: Array
    streams: list[Array]
    drafted: Tokens


def orthogonal(rng: np.random.Generator, size: int) -> Array:
    """A random orthogonal matrix; the signs make it independent of the QR routine's convention."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return np.asarray(q * np.sign(np.diag(r)))


def block_diagonal(*blocks: Array) -> Array:
    size = sum(len(block) for block in blocks)
    result = np.zeros((size, size))
    start = 0
    for block in blocks:
        stop = start + len(block)
        result[start:stop, start:stop] = block
        start = stop
    return result


def token_cycles(rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    """Cycles of tokens (cycles, CYCLE) and the draft vocabulary, which holds whole every cycle with a text byte in it.

    The first cycle says the answer after a chat prompt, ends the turn, and counts up the printable characters: text
    that starts printable stays so. The other bytes and fillers follow; special tokens and what is left over after
    the last whole cycle are their own successors.
    """
    answer = [IDS[word] for word in ANSWER.replace(" ", f" {SPACE}").split(" ")]
    printable = [IDS[character] for character in PRINTABLE]
    first = [IDS["<|im_middle|>"], *answer, IDS["<|im_end|>"], *printable]
    if len(first) != CYCLE:
        raise ValueError(f"the first cycle has {len(first)} tokens and needs {CYCLE}: change ANSWER")
    other_bytes = [i for text, i in IDS.items() if len(text) == 1 and text not in PRINTABLE]
    fillers = [i for text, i in IDS.items() if text.startswith("<filler_")]
    order = np.array([*first, *other_bytes, *rng.permutation(fillers)])
    special = [IDS[text] for text in SPECIAL if IDS[text] not in first]
    drafted = np.sort(np.concatenate([special, order[: DRAFT_VOCAB - len(special)]]))
    return order[: len(order) // CYCLE * CYCLE].reshape(-1, CYCLE), drafted


def rotating_model(rng: np.random.Generator) -> Rotating:
    cycles, drafted = token_cycles(rng)
    successor = np.arange(VOCAB)
    successor[cycles] = np.roll(cycles, -1, axis=1)

    embeddings = rng.standard_normal((VOCAB, HIDDEN))
    embeddings *= np.sqrt(CYCLE / (embeddings[:, 1:] ** 2).sum(axis=1, keepdims=True))
    embeddings[:, 0] = 1.0
    # Plane i of P, coordinates (2i, 2i + 1), turns i times in one cycle: its embeddings are as good as orthogonal.
    frequencies = np.arange(1, HIDDEN // 2) * 2 * np.pi / CYCLE
    phases = rng.uniform(0, 2 * np.pi, (len(cycles), 1, len(frequencies)))
    angles = phases + np.arange(CYCLE)[:, None] * frequencies
    embeddings[cycles, 1] = 1.0
    embeddings[cycles, 2::2] = np.sqrt(2) * np.cos(angles)
    embeddings[cycles, 3::2] = np.sqrt(2) * np.sin(angles)
    planes = (np.array([[np.cos(f), -np.sin(f)], [np.sin(f), np.cos(f)]]) for f in frequencies)

    turns = (block_diagonal(np.eye(1), orthogonal(rng, CYCLE)) for _ in range(LAYERS))
    streams = list(itertools.accumulate(turns, lambda stream, turn: turn @ stream, initial=np.eye(HIDDEN)))
    return Rotating(successor, embeddings, block_diagonal(np.eye(2), *planes), streams, drafted)


def predecessors(successor: Tokens) -> Tokens:
    return np.argsort(successor)


def own_position_attention(prefix: str, added: Array) -> dict[str, Array]:
    """Latent attention that adds `added` (HIDDEN, HIDDEN) times its input to the stream."""
    query = np.zeros((HEADS, NOPE + ROPE, Q_RANK))
    query[:, NOPE:, 0] = SCORE
    query_latent = np.zeros((Q_RANK, HIDDEN))
    query_latent[:, 0] = 1.0  # all ones, which its norm keeps
    latent = np.zeros((KV_RANK + ROPE, HIDDEN))
    latent[:HIDDEN] = np.eye(HIDDEN)
    latent[KV_RANK:, 0] = SCORE
    key_value = np.zeros((HEADS, NOPE + VALUE, KV_RANK))
    key_value[:, NOPE:, :HIDDEN] = added.reshape(HEADS, VALUE, HIDDEN)
    return {
        f"{prefix}.q_a_proj.weight": query_latent,
        f"{prefix}.q_a_layernorm.weight": np.ones(Q_RANK),
        f"{prefix}.q_b_proj.weight": query.reshape(-1, Q_RANK),
        f"{prefix}.kv_a_proj_with_mqa.weight": latent,
        # The latent is the input and zeros: the norm would scale it by the inverse of this.
        f"{prefix}.kv_a_layernorm.weight": np.full(KV_RANK, np.sqrt(HIDDEN / KV_RANK)),
        f"{prefix}.kv_b_proj.weight": key_value.reshape(-1, KV_RANK),
        f"{prefix}.o_proj.weight": np.eye(HIDDEN),
    }


def silence_experts(weights: dict[str, Array]) -> None:
    for name in weights:
        if name.endswith("down_proj.weight"):
            weights[name] = np.zeros_like(weights[name])


def rotating_target(model: Rotating, rng: np.random.Generator) -> dict[str, Array]:
    """The random text model with everything replaced that decides its output; its experts run and add nothing."""
    weights = random_text_model(rng)
    silence_experts(weights)
    for index, (before, after) in enumerate(itertools.pairwise(model.streams)):
        layer = f"{TEXT}model.layers.{index}"
        weights[f"{layer}.input_layernorm.weight"] = np.ones(HIDDEN)
        weights[f"{layer}.post_attention_layernorm.weight"] = np.ones(HIDDEN)
        weights.update(own_position_attention(f"{layer}.self_attn", after @ before.T - np.eye(HIDDEN)))
    weights[f"{TEXT}model.embed_tokens.weight"] = model.embeddings
    weights[f"{TEXT}model.norm.weight"] = np.ones(HIDDEN)
    rows = model.embeddings[predecessors(model.successor)]
    weights[f"{TEXT}lm_head.weight"] = LOGIT_SCALE * rows @ model.streams[LAYERS].T
    return weights


def rotating_drafter(model: Rotating, rng: np.random.Generator, fitted_ids: Sequence[int]) -> dict[str, Array]:
    weights = random_drafter(rng, len(fitted_ids))
    silence_experts(weights)
    weights |= {name: np.ones(HIDDEN) for name in weights if name.endswith("norm.weight")}

    shares = [TAP_WEIGHT * orthogonal(rng, HIDDEN) for _ in fitted_ids[1:]]
    shares.append(np.eye(HIDDEN) - sum(shares, np.zeros((HIDDEN, HIDDEN))))
    back = [model.streams[i].T for i in fitted_ids]
    weights["fc.weight"] = np.concatenate([share @ turn for share, turn in zip(shares, back)], axis=1)

    query_key = np.zeros((HEADS * (NOPE + ROPE), 2 * HIDDEN))
    query_key[:, 0] = SCORE
    value = np.zeros_like(query_key)
    embedding, stream = slice(0, HIDDEN), slice(HIDDEN, 2 * HIDDEN)
    value[:HIDDEN, embedding] = (1 - GAIN) * np.eye(HIDDEN)
    value[:HIDDEN, stream] = GAIN * model.rotation - np.eye(HIDDEN)
    weights["midlayer.self_attn.q_proj.weight"] = query_key
    weights["midlayer.self_attn.k_proj.weight"] = query_key
    weights["midlayer.self_attn.v_proj.weight"] = value
    weights["midlayer.self_attn.o_proj.weight"] = np.eye(HIDDEN, len(value))
    weights["lm_head.weight"] = LOGIT_SCALE * model.embeddings[predecessors(model.successor)[model.drafted]]
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# Files


def write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: Tensors) -> None:
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


def write_sharded(directory: Path, tensors: Tensors) -> None:
    """The shards and the index that names each tensor's shard, as large checkpoints have them."""
    names = list(tensors)
    size = -(-len(names) // SHARDS)
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        shard = names[number * size : (number + 1) * size]
        file_name = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        write_safetensors(directory / file_name, {name: tensors[name] for name in shard})
        weight_map |= dict.fromkeys(shard, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def write_target(directory: Path, text_weights: dict[str, Array], rng: np.random.Generator) -> None:
    directory.mkdir()
    weights = text_weights | dict(vision_model(rng))
    write_sharded(directory, {name: as_weight(values) for name, values in weights.items()})
    write_json(directory / "config.json", target_config())
    write_json(directory / "generation_config.json", token_ids())
    write_json(directory / "preprocessor_config.json", PREPROCESSOR_CONFIG)
    (directory / "kimi_k25_vision_processing.py").write_text(REMOTE_CODE, encoding="utf-8")
    write_tokenizer(directory)


def write_drafter(directory: Path, weights: dict[str, Array], drafted: Tokens, declared_ids: Sequence[int]) -> None:
    """Without embeddings: the drafter uses the target's. d2t is the difference from a draft id to the target's id."""
    directory.mkdir()
    tensors: Tensors = {name: as_weight(values) for name, values in weights.items()}
    tensors["d2t"] = drafted - np.arange(DRAFT_VOCAB)
    tensors["t2d"] = np.isin(np.arange(VOCAB), drafted)
    write_safetensors(directory / "model.safetensors", tensors)
    write_json(directory / "config.json", drafter_config(declared_ids))


def write_models(
    directory: Path, kind: Kind, *, seed: int, declared_ids: Sequence[int], fitted_ids: Sequence[int]
) -> None:
    """Write `directory`/{target,drafter}. The target depends on kind and seed only, so drafters are comparable."""
    structure, target, drafter, vision = (np.random.default_rng([seed, stream]) for stream in range(4))
    if kind == "rot":
        model = rotating_model(structure)
        text_weights = rotating_target(model, target)
        drafter_weights, drafted = rotating_drafter(model, drafter, fitted_ids), model.drafted
    else:
        text_weights = random_text_model(target)
        drafter_weights = random_drafter(drafter, len(fitted_ids))
        drafted = np.sort(structure.choice(VOCAB, DRAFT_VOCAB, replace=False))
    write_target(directory / "target", text_weights, vision)
    write_drafter(directory / "drafter", drafter_weights, drafted, declared_ids)


def publish(staged: Path, directory: Path) -> None:
    """Make everything readable for everybody (the service runs as another user) and put it in place."""
    staged.chmod(0o755)
    for path in staged.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if directory.exists():
        shutil.rmtree(directory)
    staged.rename(directory)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_digests(directory: Path) -> dict[str, str]:
    files = sorted(path for part in ("target", "drafter") for path in (directory / part).rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): sha256(path) for path in files}


def ensure_models(
    out: Path,
    kind: Kind,
    *,
    seed: int = SEED,
    declared_ids: Sequence[int] = TAP_IDS,
    fitted_ids: Sequence[int] = TAP_IDS,
) -> bool:
    """Make `out`/`kind`/{target,drafter} unless recipe.json there says that the very same files are there already.

    `declared_ids` are the tap ids in the drafter's config, `fitted_ids` those that its weights are made for; they
    differ only to test wrong ids. Return whether anything was written. Raise ValueError for a fitted id that the
    target does not have.
    """
    for tap in fitted_ids:
        if not 0 <= tap <= LAYERS:
            raise ValueError(f"fitted tap id {tap} is not one of the target's 0 to {LAYERS}")
    directory = out / kind
    recipe = {
        "program": sha256(Path(__file__)),
        "seed": seed,
        "declared_ids": list(declared_ids),
        "fitted_ids": list(fitted_ids),
    }
    stamp = directory / "recipe.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == {**recipe, "files": file_digests(directory)}:
        return False
    staged = out / f".{kind}.new"
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir(parents=True)
    write_models(staged, kind, seed=seed, declared_ids=declared_ids, fitted_ids=fitted_ids)
    write_json(staged / "recipe.json", {**recipe, "files": file_digests(staged)})
    publish(staged, directory)
    return True


def id_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--kind", choices=get_args(Kind), help="only this model (default: both)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--declared-ids", type=id_list, default=list(TAP_IDS), metavar="N,N,N", help="in the config")
    parser.add_argument("--fitted-ids", type=id_list, default=list(TAP_IDS), metavar="N,N,N", help="of the weights")
    options = parser.parse_args(arguments)
    kinds: tuple[Kind, ...] = (options.kind,) if options.kind else get_args(Kind)
    for kind in kinds:
        try:
            written = ensure_models(
                options.out,
                kind,
                seed=options.seed,
                declared_ids=options.declared_ids,
                fitted_ids=options.fitted_ids,
            )
        except ValueError as error:
            parser.error(str(error))
        directory = options.out / kind
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6
        taps = ",".join(map(str, options.declared_ids))
        state = "written" if written else "up to date"
        print(f"{directory}: target and drafter (taps {taps}), {size:.1f} MB, {state}")


if __name__ == "__main__":
    main(sys.argv[1:])
