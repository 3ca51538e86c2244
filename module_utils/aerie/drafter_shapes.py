# SPDX-License-Identifier: Apache-2.0
"""Whether the drafter's tensors have the shapes that its configuration, its target and vLLM's classes imply.

What vLLM does with a field was read in its releases 0.15 to 0.33: llama_eagle3.py and deepseek_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.aerie.drafter import FIRST_LAYER, TAP_IDS, Drafter, default_tap_ids
from ansible.module_utils.aerie.drafter_fit import Service, Target, Version
from ansible.module_utils.aerie.findings import ERROR, Fact, Finding

# From here on the classes take their number of taps from the configuration.
_COUNTS_TAPS: Version = (0, 22)


def check_hidden_size(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    if drafter.width().value != target.hidden_size:
        yield Finding(
            "hidden_size",
            ERROR,
            (drafter.width(), Fact("hidden_size", target.hidden_size, target.config)),
            "the drafter was trained on another target's hidden states",
            "choose a drafter made for this target",
        )


def check_fc(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    fc = drafter.checkpoint.tensor("fc.weight")
    if fc is None or not drafter.uses_taps:
        return
    if len(fc.shape) != 2 or fc.shape[0] != drafter.hidden_size:
        yield Finding(
            "fc_output",
            ERROR,
            (drafter.stored("fc.weight shape", list(fc.shape), "fc.weight"), drafter.declares("hidden_size")),
            "fc must have one row per hidden unit of the drafter",
            "choose weights and config.json of one revision",
        )
        return
    # Whether the runner taps the declared ids, and whether the width is this target's, are other checks' questions.
    ids = drafter.tap_ids.declared or default_tap_ids(target.num_hidden_layers)
    width = drafter.width()
    expected = len(ids) * (drafter.target_hidden_size or drafter.hidden_size)
    if fc.shape[1] != expected:
        file = target.config if width.value == target.hidden_size else width.file
        yield Finding(
            "fc_width",
            ERROR,
            (
                drafter.stored("fc.weight columns", fc.shape[1], "fc.weight"),
                Fact(f"{len(ids)} taps x hidden_size {width.value} =", expected, file),
            ),
            f"fc takes the taps {ids} of {drafter.config} side by side, and their widths do not add up",
            f"correct {TAP_IDS} in a copy of the drafter, or choose a drafter made for this target",
        )
        return
    counted = _taps_that_vllm_counts(drafter, service)
    if counted.value != len(ids):
        yield Finding(
            "tap_count",
            ERROR,
            (Fact(f"{len(ids)} tap ids", ids, drafter.config), counted),
            f"vLLM {service.vllm_version} builds fc for {counted.value} taps and gets {len(ids)}",
            f'set "num_aux_hidden_states": {len(ids)} in a copy of the drafter',
        )


def _taps_that_vllm_counts(drafter: Drafter, service: Service) -> Fact:
    """Return how many taps the drafter's class is built for: it does not look where the runner looks."""
    if service.release < _COUNTS_TAPS:
        return Fact("fixed number of taps", 3, f"vLLM {service.vllm_version}")
    if drafter.num_aux_hidden_states is not None:
        return drafter.declares("num_aux_hidden_states")
    if drafter.tap_ids.nested:
        return Fact(f"number of eagle_config.{TAP_IDS}", len(drafter.tap_ids.nested), drafter.config)
    return Fact("number of taps, for want of num_aux_hidden_states,", 3, drafter.config)


def check_tensors(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    attention = ("kv_a_proj_with_mqa.",) if drafter.is_mla else ("k_proj.", "qkv_proj.")
    needed = (
        *([("fc.",)] if drafter.uses_taps else []),
        ("norm.weight",),
        tuple(f"{layer}self_attn.{projection}" for layer in FIRST_LAYER for projection in attention),
    )
    for prefixes in needed:
        if not any(name.startswith(prefixes) for name in drafter.checkpoint.tensors):
            yield Finding(
                "tensor_missing",
                ERROR,
                (
                    drafter.declares_architecture(),
                    Fact("no tensor", " or ".join(f"{prefix}*" for prefix in prefixes), str(drafter.root)),
                ),
                "the weights are not those of an EAGLE-3 drafter of this architecture",
                "choose weights and config.json of one revision",
            )
    experts = [name for name in drafter.checkpoint.tensors if ".mlp.experts." in name]
    if experts:
        yield Finding(
            "mixture_of_experts",
            ERROR,
            (
                drafter.declares_architecture(),
                drafter.stored("tensor", min(experts), min(experts)),
            ),
            "vLLM's EAGLE-3 drafters have a dense MLP and cannot load experts",
            "choose a drafter with a dense MLP",
        )


def check_attention_input(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    projections = ("kv_a_proj_with_mqa", "q_a_proj") if drafter.is_mla else ("q_proj", "k_proj", "v_proj")
    for name in [f"{layer}self_attn.{projection}.weight" for layer in FIRST_LAYER for projection in projections]:
        tensor = drafter.checkpoint.tensor(name)
        if tensor is not None and len(tensor.shape) == 2 and tensor.shape[1] != 2 * drafter.hidden_size:
            yield Finding(
                "attention_width",
                ERROR,
                (
                    drafter.stored(f"{name} columns", tensor.shape[1], name),
                    Fact("2 x hidden_size =", 2 * drafter.hidden_size, drafter.config),
                ),
                "an EAGLE-3 drafter's first layer takes the embedding and the hidden state side by side",
                "choose an EAGLE-3 drafter (EAGLE-1 and MTP weights have other shapes)",
            )
            return


def check_vocabulary(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    if drafter.vocab_size != target.vocab_size:
        yield Finding(
            "vocab_size",
            ERROR,
            (drafter.declares("vocab_size"), Fact("vocab_size", target.vocab_size, target.config)),
            "drafter and target do not share a tokenizer",
            "choose a drafter made for this target",
        )
    if drafter.draft_vocab_size > drafter.vocab_size:
        yield Finding(
            "draft_vocab_size",
            ERROR,
            (drafter.declares("draft_vocab_size"), drafter.declares("vocab_size")),
            "a draft vocabulary is a part of the vocabulary",
            "choose weights and config.json of one revision",
        )


def check_embedding(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    tensor = drafter.checkpoint.tensor("embed_tokens.weight")
    if tensor is None:
        if drafter.hidden_size != target.hidden_size and drafter.target_hidden_size is not None:
            yield Finding(
                "embedding_missing",
                ERROR,
                (drafter.declares("hidden_size"), Fact("hidden_size", target.hidden_size, target.config)),
                f"{drafter.root} has no embed_tokens.weight, and the target's embedding is of another width",
                "choose weights that bring their own embedding",
            )
    elif tensor.shape != (drafter.vocab_size, drafter.hidden_size):
        yield Finding(
            "embedding_shape",
            ERROR,
            (
                drafter.stored("embed_tokens.weight shape", list(tensor.shape), "embed_tokens.weight"),
                Fact("vocab_size and hidden_size", [drafter.vocab_size, drafter.hidden_size], drafter.config),
            ),
            "an embedding has a row per token and a column per hidden unit",
            "choose weights and config.json of one revision",
        )


def check_lm_head(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    tensor = drafter.checkpoint.tensor("lm_head.weight")
    if not drafter.has_own_lm_head and drafter.draft_vocab_size != target.vocab_size:
        yield Finding(
            "lm_head_missing",
            ERROR,
            (drafter.declares("draft_vocab_size"), Fact("vocab_size", target.vocab_size, target.config)),
            f"{drafter.root} has no lm_head.weight, and the target's head has other rows",
            "choose weights that bring their own lm_head (some drafters gained one in a later revision)",
        )
    elif tensor is not None and tensor.shape[:1] != (drafter.draft_vocab_size,):
        yield Finding(
            "lm_head_rows",
            ERROR,
            (
                drafter.stored("lm_head.weight shape", list(tensor.shape), "lm_head.weight"),
                drafter.declares("draft_vocab_size"),
            ),
            "the head must have a row per token of the draft vocabulary",
            "correct draft_vocab_size in a copy of the drafter, or choose weights and config.json of one revision",
        )
    elif tensor is not None and tensor.shape[1:] != (drafter.hidden_size,):
        yield Finding(
            "lm_head_width",
            ERROR,
            (
                drafter.stored("lm_head.weight shape", list(tensor.shape), "lm_head.weight"),
                drafter.declares("hidden_size"),
            ),
            "the head must have a column per hidden unit of the drafter",
            "choose weights and config.json of one revision",
        )
