# SPDX-License-Identifier: Apache-2.0
"""One drafter per misfit: exactly the planted fault is found, with both values, both files, and a remedy.

The drafters have the shapes of public ones for Kimi-K2.5: hidden size 7168, vocabulary 163840, draft vocabulary 32000.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.checkpoint import CheckpointError
from ansible.module_utils.aerie.doctor import check
from ansible.module_utils.aerie.drafter import TapIds, content_digest, read_drafter, travelling_files
from ansible.module_utils.aerie.drafter_fit import Service, Target, context_length
from ansible.module_utils.aerie.drafter_taps import used_tap_ids
from ansible.module_utils.aerie.findings import Finding
from model_files import (
    DRAFT_VOCAB,
    HIDDEN,
    KIMI_ROPE_SCALING,
    VOCAB,
    DrafterFiles,
    TensorFile,
    bf16,
    int64,
    llama_drafter,
    mla_drafter,
    speculators_drafter,
    spread,
    target_facts,
    vocabulary_maps,
    write_json,
    write_safetensors,
    write_sharded,
)

TARGET = "/models/kimi/config.json"
IDS = "eagle_aux_hidden_state_layer_ids"
Change = Callable[[DrafterFiles], object]


def serving(version: str, **options: Any) -> Service:  # noqa: ANN401
    """Return a service that was told what tap ids mean; test_dialects.py has those that were not."""
    return Service(version, **{"tap_dialect": "vllm", **options})


NEWEST = serving("0.33.0")


def findings_of(root: Path, service: Service = NEWEST, **text: object) -> list[Finding]:
    findings = check(read_drafter(root), Target.from_facts(target_facts(**text)), service)
    assert json.loads(json.dumps([finding.as_dict() for finding in findings])) == [one.as_dict() for one in findings]
    return findings


def put(**tensors: TensorFile) -> Change:
    """Add or replace tensors, ``__`` standing for the dot in a name."""
    return lambda drafter: drafter.tensors.update({name.replace("__", "."): file for name, file in tensors.items()})


def say(**config: object) -> Change:
    return lambda drafter: drafter.config.update(config)


def without(name: str) -> Change:
    return lambda drafter: drafter.tensors.pop(name)


def all_of(*changes: Change) -> Change:
    def change(drafter: DrafterFiles) -> None:
        for part in changes:
            part(drafter)

    return change


def set_taps(drafter: DrafterFiles, ids: list[int]) -> None:
    """Declare ``ids`` in both places, with an fc that fits their number."""
    drafter.config[IDS] = ids
    drafter.config["eagle_config"] = {IDS: ids}
    drafter.tensors["fc.weight"] = bf16(HIDDEN, len(ids) * HIDDEN)


def only_nested(drafter: DrafterFiles, ids: list[int]) -> None:
    set_taps(drafter, ids)
    del drafter.config[IDS]


def full_vocabulary(drafter: DrafterFiles) -> None:
    drafter.config["draft_vocab_size"] = VOCAB
    drafter.tensors["lm_head.weight"] = bf16(VOCAB, HIDDEN)
    del drafter.tensors["d2t"], drafter.tensors["t2d"]


def first_tokens(drafter: DrafterFiles) -> None:
    drafter.tensors |= vocabulary_maps(list(range(DRAFT_VOCAB)))


def set_map(drafter: DrafterFiles, change: Callable[[list[int]], object]) -> None:
    """Change the target ids that d2t leads to, and leave t2d out."""
    ids = spread()
    change(ids)
    drafter.tensors["d2t"] = int64(token - draft for draft, token in enumerate(ids))
    del drafter.tensors["t2d"]


def narrow(drafter: DrafterFiles) -> None:
    """Make the drafter half as wide as its target, with an embedding of its own."""
    half = HIDDEN // 2
    drafter.config |= {"hidden_size": half, "target_hidden_size": HIDDEN}
    drafter.tensors |= {
        "fc.weight": bf16(half, 3 * HIDDEN),
        "lm_head.weight": bf16(DRAFT_VOCAB, half),
        "embed_tokens.weight": bf16(VOCAB, half),
        **{f"midlayer.self_attn.{name}_proj.weight": bf16(4096, 2 * half) for name in "qkv"},
    }


HEALTHY: dict[str, Change] = {
    "with shared embedding": lambda drafter: None,
    "with its own embedding": put(embed_tokens__weight=bf16(VOCAB, HIDDEN)),
    "with the whole vocabulary": full_vocabulary,
    "with the whole vocabulary and the target's head": all_of(full_vocabulary, without("lm_head.weight")),
    "with the first tokens as draft vocabulary": first_tokens,
    "without t2d": without("t2d"),
    "with four taps": lambda d: set_taps(d, [2, 20, 40, 58]),
    "with taps at both ends of what vLLM delivers": lambda d: set_taps(d, [1, 30, 61]),
    "with ids at the top level only": lambda d: d.config.pop("eagle_config"),
    "with layers instead of midlayer": lambda d: d.tensors.update(
        {name.replace("midlayer.", "layers.0."): d.tensors.pop(name) for name in list(d.tensors) if "midlayer" in name}
    ),
}


@pytest.mark.parametrize("make", [llama_drafter, mla_drafter])
@pytest.mark.parametrize("change", HEALTHY.values(), ids=HEALTHY.keys())
def test_a_healthy_drafter_has_no_findings(tmp_path: Path, make: Callable[[], DrafterFiles], change: Change) -> None:
    drafter = make()
    change(drafter)
    assert findings_of(drafter.write(tmp_path / "drafter")) == []


def test_a_healthy_narrow_drafter_has_no_findings(tmp_path: Path) -> None:
    drafter = llama_drafter()
    narrow(drafter)
    assert findings_of(drafter.write(tmp_path / "drafter")) == []


def test_a_healthy_sharded_drafter_has_no_findings(tmp_path: Path) -> None:
    drafter = llama_drafter()
    names = sorted(drafter.tensors)
    half = len(names) // 2
    write_sharded(
        tmp_path,
        {
            "model-00001-of-00002.safetensors": {name: drafter.tensors[name] for name in names[:half]},
            "model-00002-of-00002.safetensors": {name: drafter.tensors[name] for name in names[half:]},
        },
    )
    write_json(tmp_path / "config.json", drafter.config)
    assert findings_of(tmp_path) == []


WEIGHTS, CONFIG = "{root}/model.safetensors", "{root}/config.json"

# A fault's id, how to plant it in a healthy Llama drafter, and what its message must name.
MISFITS: dict[str, tuple[str, Change, list[str]]] = {
    "an unknown architecture": (
        "architecture",
        say(architectures=["MedusaModel"]),
        ["architecture MedusaModel", CONFIG, "Eagle3MedusaModel, which is none of LlamaForCausalLMEagle3"],
    ),
    "another target's hidden size": (
        "hidden_size",
        all_of(say(target_hidden_size=4096), put(fc__weight=bf16(HIDDEN, 3 * 4096))),
        ["target_hidden_size 4096", CONFIG, "hidden_size 7168", TARGET],
    ),
    "fc for two taps": (
        "fc_width",
        put(fc__weight=bf16(HIDDEN, 2 * HIDDEN)),
        ["fc.weight columns 14336", WEIGHTS, "3 taps x hidden_size 7168 = 21504", TARGET],
    ),
    "fc of another output width": (
        "fc_output",
        put(fc__weight=bf16(4096, 3 * HIDDEN)),
        ["fc.weight shape [4096, 21504]", WEIGHTS, "hidden_size 7168", CONFIG],
    ),
    "a number of taps that is not the ids'": (
        "tap_count",
        say(num_aux_hidden_states=4),
        ["3 tap ids [2, 30, 58]", "num_aux_hidden_states 4", CONFIG],
    ),
    "four taps at the top level only": (
        "tap_count",
        all_of(lambda d: set_taps(d, [2, 20, 40, 58]), lambda d: d.config.pop("eagle_config")),
        ["4 tap ids [2, 20, 40, 58]", "number of taps, for want of num_aux_hidden_states, 3", CONFIG],
    ),
    "no fc": (
        "tensor_missing",
        without("fc.weight"),
        ["LlamaForCausalLMEagle3", CONFIG, "fc.*", "{root}"],
    ),
    "MLA weights": (
        "tensor_missing",
        lambda d: d.tensors.update(
            {"midlayer.self_attn.kv_a_proj_with_mqa.weight": d.tensors.pop("midlayer.self_attn.k_proj.weight")}
        ),
        ["LlamaForCausalLMEagle3", CONFIG, "midlayer.self_attn.k_proj.*", "{root}"],
    ),
    "experts": (
        "mixture_of_experts",
        put(midlayer__mlp__experts__0__up_proj__weight=bf16(2048, HIDDEN)),
        ["LlamaForCausalLMEagle3", CONFIG, "midlayer.mlp.experts.0.up_proj.weight", WEIGHTS],
    ),
    "EAGLE-1 attention": (
        "attention_width",
        put(midlayer__self_attn__q_proj__weight=bf16(8192, HIDDEN)),
        ["q_proj.weight columns 7168", WEIGHTS, "2 x hidden_size = 14336", CONFIG],
    ),
    "another vocabulary": (
        "vocab_size",
        all_of(say(vocab_size=129280), put(**vocabulary_maps(spread(vocab=129280), 129280))),
        ["vocab_size 129280", CONFIG, "vocab_size 163840", TARGET],
    ),
    "a draft vocabulary larger than the vocabulary": (
        "draft_vocab_size",
        all_of(say(draft_vocab_size=163841), put(lm_head__weight=bf16(163841, HIDDEN))),
        ["draft_vocab_size 163841", "vocab_size 163840", CONFIG],
    ),
    "an embedding of another size": (
        "embedding_shape",
        put(embed_tokens__weight=bf16(129280, HIDDEN)),
        ["embed_tokens.weight shape [129280, 7168]", WEIGHTS, "[163840, 7168]", CONFIG],
    ),
    "no embedding for its own width": (
        "embedding_missing",
        all_of(narrow, without("embed_tokens.weight")),
        ["hidden_size 3584", CONFIG, "hidden_size 7168", TARGET],
    ),
    "a head for the whole vocabulary": (
        "lm_head_rows",
        put(lm_head__weight=bf16(VOCAB, HIDDEN)),
        ["lm_head.weight shape [163840, 7168]", WEIGHTS, "draft_vocab_size 32000", CONFIG],
    ),
    "a head of another width": (
        "lm_head_width",
        put(lm_head__weight=bf16(DRAFT_VOCAB, 4096)),
        ["lm_head.weight shape [32000, 4096]", WEIGHTS, "hidden_size 7168", CONFIG],
    ),
    "no head": (
        "lm_head_missing",
        without("lm_head.weight"),
        ["draft_vocab_size 32000", CONFIG, "vocab_size 163840", TARGET],
    ),
    "no d2t": (
        "d2t_missing",
        without("d2t"),
        ["draft_vocab_size 32000", "vocab_size 163840", CONFIG],
    ),
    "a d2t for the whole vocabulary": (
        "d2t_unexpected",
        all_of(full_vocabulary, put(d2t=TensorFile("I64", (VOCAB,)))),
        ["d2t shape [163840]", WEIGHTS, "draft_vocab_size 163840", CONFIG],
    ),
    "a d2t of another length": (
        "d2t_length",
        put(d2t=TensorFile("I64", (31999,))),
        ["d2t shape [31999]", WEIGHTS, "draft_vocab_size 32000", CONFIG],
    ),
    "a d2t that is no integer": (
        "vocabulary_map",
        put(d2t=bf16(DRAFT_VOCAB)),
        [WEIGHTS, "d2t is BF16, expected integers"],
    ),
    "a d2t that leads past the vocabulary": (
        "d2t_range",
        lambda d: set_map(d, lambda ids: ids.__setitem__(7, VOCAB)),
        ["d2t[7] + 7 = 163840", WEIGHTS, "vocab_size 163840", CONFIG],
    ),
    "a d2t that leads below zero": (
        "d2t_range",
        lambda d: set_map(d, lambda ids: ids.__setitem__(0, -1)),
        ["d2t[0] + 0 = -1", WEIGHTS, "vocab_size 163840", CONFIG],
    ),
    "a d2t that leads to one token twice": (
        "d2t_duplicate",
        lambda d: set_map(d, lambda ids: ids.__setitem__(31999, ids[3])),
        ["d2t[3] + 3 = 15", "d2t[31999] + 31999 = 15", WEIGHTS],
    ),
    "a d2t that holds target ids": (
        "d2t_absolute",
        put(d2t=int64(spread())),
        ["d2t[31999] + 31999 = 191994", "159995", WEIGHTS],
    ),
    "a d2t that holds target ids, without t2d": (
        "d2t_absolute",
        all_of(put(d2t=int64(spread())), without("t2d")),
        ["d2t[31999] + 31999 = 191994", "159995", WEIGHTS],
    ),
    "a t2d of another length": (
        "t2d_length",
        put(t2d=TensorFile("BOOL", (129280,))),
        ["t2d shape [129280]", WEIGHTS, "vocab_size 163840", CONFIG],
    ),
    "a t2d that marks too few": (
        "t2d_count",
        put(t2d=TensorFile("BOOL", (VOCAB,), bytes([1] * 31999))),
        ["number of tokens marked by t2d 31999", WEIGHTS, "draft_vocab_size 32000", CONFIG],
    ),
    "a t2d that marks others": (
        "t2d_mismatch",
        put(t2d=vocabulary_maps([1, *spread()[1:]])["t2d"]),
        ["t2d[0] False", "number of d2t entries for token 0: 1", WEIGHTS],
    ),
    "ids that differ between the two places": (
        "tap_ids_conflict",
        say(eagle_config={IDS: [1, 29, 57]}),
        [f"{IDS} [2, 30, 58]", f"eagle_config.{IDS} [1, 29, 57]", CONFIG],
    ),
    "ids that differ within eagle_config": (
        "tap_ids_conflict",
        all_of(lambda d: only_nested(d, [2, 30, 58]), lambda d: d.config["eagle_config"].update(layer_ids=[1, 29, 57])),
        [f"eagle_config.{IDS} [2, 30, 58]", "eagle_config.layer_ids [1, 29, 57]", CONFIG],
    ),
    "nested ids that the runner ignores": (
        "tap_ids_nested",
        lambda d: only_nested(d, [1, 29, 57]),
        ["[1, 29, 57]", CONFIG, "num_hidden_layers 61", TARGET, "Model Runner V2 of vLLM 0.33.0", "taps [2, 30, 58]"],
    ),
    "an id past the last layer": (
        "tap_ids_range",
        lambda d: set_taps(d, [2, 30, 62]),
        ["[2, 30, 62]", CONFIG, "num_hidden_layers 61", TARGET],
    ),
    "a negative id": (
        "tap_ids_range",
        lambda d: set_taps(d, [-1, 30, 58]),
        ["[-1, 30, 58]", CONFIG, "num_hidden_layers 61", TARGET],
    ),
    "an id twice": (
        "tap_ids_duplicate",
        lambda d: set_taps(d, [2, 30, 30]),
        ["[2, 30, 30]", "[2, 30]", CONFIG],
    ),
    "ids out of order": (
        "tap_ids_order",
        lambda d: set_taps(d, [58, 2, 30]),
        ["[58, 2, 30]", "[2, 30, 58]", CONFIG],
    ),
    "the embedding as a tap": (
        "tap_id_lost",
        lambda d: set_taps(d, [0, 30, 58]),
        ["[0, 30, 58]", CONFIG, "num_hidden_layers 61", TARGET, "does not deliver tap 0"],
    ),
    "a context that would cut the target's": (
        "max_position",
        all_of(
            say(max_position_embeddings=4096),
            say(rope_scaling={"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096}),
        ),
        ["max_position_embeddings 4096", CONFIG, "max_position_embeddings 262144", TARGET, "cut the target's context"],
    ),
    "taps that are said to be off": (
        "aux_hidden_states_off",
        say(eagle_config={IDS: [2, 30, 58], "use_aux_hidden_state": False}),
        ["eagle_config.use_aux_hidden_state False", CONFIG, "fc.weight shape [7168, 21504]", WEIGHTS],
    ),
    "norms per tap without their tensors": (
        "fc_norm_tensors",
        say(fc_norm=True),
        ["fc_norm True", CONFIG, "no tensor fc_norm.*", "{root}"],
    ),
    "norms per tap that are not declared": (
        "fc_norm_tensors",
        put(**{f"fc_norm__{tap}__weight": bf16(HIDDEN) for tap in range(3)}),
        ["fc_norm None", CONFIG, "tensor fc_norm.0.weight", WEIGHTS],
    ),
    "a norm before fc without its tensor": (
        "norm_before_fc_tensors",
        say(norm_before_fc=True),
        ["norm_before_fc True", CONFIG, "no tensor input_norm.*", "{root}"],
    ),
    "a scaling that vLLM does not know": (
        "rope_scaling",
        say(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        ["theta 1e+06, spiral, factor 2.0", CONFIG, "theta 50000, yarn", TARGET, "no scaling of type spiral"],
    ),
    "a scaling without its factor": (
        "rope_scaling",
        say(rope_scaling={"type": "yarn", "original_max_position_embeddings": 4096}),
        ["theta 1e+06, yarn", CONFIG, TARGET, "scaling of type yarn needs factor"],
    ),
    "a scaling beyond all numbers": (
        "rope_scaling",
        say(rope_scaling={"type": "yarn", "factor": 1e300, "original_max_position_embeddings": 1e300}),
        ["factor 1e+300", CONFIG, TARGET, "factor x original_max_position_embeddings is no finite number"],
    ),
    "the target's quantisation on weights that have none": (
        "quantization_unused",
        say(quantization_config={"quant_method": "compressed-tensors"}),
        ["quantization_config compressed-tensors", CONFIG, "quantised tensors none", "{root}"],
    ),
    "a quantisation of another tool on weights that have none": (
        "quantization_unused",
        lambda d: d.others.update({"hf_quant_config.json": b"{}"}),
        ["quantization_config declared", "{root}/hf_quant_config.json", "quantised tensors none"],
    ),
    "quantised weights that are not declared": (
        "quantization_undeclared",
        put(midlayer__mlp__down_proj__weight_scale=bf16(1)),
        ["tensor midlayer.mlp.down_proj.weight_scale", WEIGHTS, "quantization_config not declared", CONFIG],
    ),
    "a quantised embedding": (
        "quantized_layer",
        all_of(
            say(quantization_config={"quant_method": "fp8"}),
            put(embed_tokens__weight=TensorFile("F8_E4M3", (VOCAB, HIDDEN)), embed_tokens__weight_scale=bf16(1)),
        ),
        ["tensor embed_tokens.weight", WEIGHTS, "LlamaForCausalLMEagle3", CONFIG, "a quantised embed_tokens"],
    ),
}


@pytest.mark.parametrize(("name", "change", "named"), MISFITS.values(), ids=MISFITS.keys())
def test_exactly_the_planted_fault_is_found(tmp_path: Path, name: str, change: Change, named: list[str]) -> None:
    drafter = llama_drafter()
    change(drafter)
    root = drafter.write(tmp_path / "drafter")
    (finding,) = findings_of(root)
    assert (finding.id, finding.severity) == (name, "error")
    assert [part for part in (part.format(root=root) for part in named) if part not in finding.message] == []
    assert finding.remedy


FP8 = put(midlayer__mlp__down_proj__weight=TensorFile("F8_E4M3", (HIDDEN, 18432)))
INT4: Change = all_of(
    say(quantization_config={"quant_method": "quark"}),
    put(midlayer__mlp__down_proj__weight_packed=TensorFile("I32", (HIDDEN, 2304))),
    without("midlayer.mlp.down_proj.weight"),
)
QUANTISED_HEAD: Change = all_of(
    INT4, put(lm_head__weight_packed=TensorFile("I32", (DRAFT_VOCAB, 896))), without("lm_head.weight")
)
NORMS: Change = all_of(say(fc_norm=True), put(**{f"fc_norm__{tap}__weight": bf16(HIDDEN) for tap in range(3)}))
NORM_BEFORE_FC: Change = all_of(say(norm_before_fc=True), put(input_norm__weight=bf16(3 * HIDDEN)))
NO_TAPS: Change = all_of(say(eagle_config={"use_aux_hidden_state": False}), without("fc.weight"))
KIMI_ROPE = {"rope_theta": 50000.0, "rope_scaling": KIMI_ROPE_SCALING}


def nothing(drafter: DrafterFiles) -> None:
    """Leave the drafter as it is."""


# What matters only to some releases, runners, options and kinds of drafter: the drafter, how it is served, and the
# findings' ids and severities.
SERVED: dict[str, tuple[Callable[[], DrafterFiles], Change, Service, list[str]]] = {
    "norms per tap": (llama_drafter, NORMS, serving("0.22.0"), []),
    "norms per tap, MLA": (mla_drafter, NORMS, serving("0.22.0"), []),
    "norms per tap, too early": (mla_drafter, NORMS, serving("0.21.0"), ["fc_norm error"]),
    "normed output": (mla_drafter, say(norm_output=True), serving("0.22.0"), []),
    "normed output, too early": (mla_drafter, say(norm_output=True), serving("0.21.0"), ["norm_output error"]),
    "normed output of speculators": (speculators_drafter, say(norm_output=True), serving("0.25.0"), []),
    "normed output of speculators, too early": (
        speculators_drafter,
        say(norm_output=True),
        serving("0.24.0"),
        ["norm_output error"],
    ),
    "norm before fc": (llama_drafter, NORM_BEFORE_FC, serving("0.18.0"), []),
    "norm before fc, too early": (llama_drafter, NORM_BEFORE_FC, serving("0.17.1"), ["norm_before_fc error"]),
    "norm before fc, MLA": (mla_drafter, NORM_BEFORE_FC, NEWEST, ["norm_before_fc error"]),
    "no taps": (llama_drafter, NO_TAPS, NEWEST, []),
    "no taps, MLA": (mla_drafter, NO_TAPS, NEWEST, ["aux_hidden_states_off error"]),
    "no taps, before V2 could": (llama_drafter, NO_TAPS, serving("0.32.0"), ["aux_hidden_states_off error"]),
    "no taps, V1": (llama_drafter, NO_TAPS, serving("0.32.0", model_runner="v1"), []),
    "speculators": (speculators_drafter, nothing, NEWEST, []),
    "speculators' P-EAGLE": (
        speculators_drafter,
        say(speculators_model_type="peagle"),
        NEWEST,
        ["speculators_format error"],
    ),
    "speculators with a layer of another kind": (
        speculators_drafter,
        lambda d: d.config["transformer_layer_config"].update(model_type="qwen3"),
        NEWEST,
        ["speculators_format error"],
    ),
    "the target's rope": (llama_drafter, say(**KIMI_ROPE), NEWEST, []),
    "the target's rope as transformers 5 writes it": (
        mla_drafter,
        all_of(
            lambda d: (d.config.pop("rope_theta"), d.config.pop("rope_scaling")),
            say(rope_parameters={"rope_theta": 50000.0, "rope_type": "yarn", **KIMI_ROPE_SCALING}),
        ),
        NEWEST,
        [],
    ),
    "the target's theta without its scaling": (
        llama_drafter,
        say(rope_theta=50000.0),
        NEWEST,
        ["rope warning"],
    ),
    "the target's scaling without its theta": (
        llama_drafter,
        say(rope_scaling=KIMI_ROPE_SCALING),
        NEWEST,
        ["rope warning"],
    ),
    "another rope, MLA": (mla_drafter, say(rope_theta=10000.0), NEWEST, ["rope warning"]),
    "another stretch, MLA": (
        mla_drafter,
        say(rope_scaling={**KIMI_ROPE_SCALING, "factor": 128.0}),
        NEWEST,
        ["rope warning"],
    ),
    "no theta": (llama_drafter, lambda d: d.config.pop("rope_theta"), NEWEST, ["rope_theta warning"]),
    "a scaling that ends before the context": (
        llama_drafter,
        say(rope_scaling={"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}),
        NEWEST,
        ["rope_range warning"],
    ),
    "half precision": (
        llama_drafter,
        put(norm__weight=TensorFile("F16", (HIDDEN,))),
        NEWEST,
        ["dtype note"],
    ),
    "quantised": (llama_drafter, INT4, NEWEST, []),
    "a quantised head": (llama_drafter, QUANTISED_HEAD, serving("0.19.0"), []),
    "a quantised head, too early": (llama_drafter, QUANTISED_HEAD, serving("0.18.1"), ["quantized_layer error"]),
    "a quantised head, MLA": (mla_drafter, QUANTISED_HEAD, NEWEST, ["quantized_layer error"]),
    "an fp8 cache": (llama_drafter, nothing, serving("0.33.0", kv_cache_dtype="fp8"), []),
    "an fp8 cache for an fp8 drafter": (
        llama_drafter,
        all_of(FP8, say(quantization_config={"quant_method": "fp8"})),
        serving("0.10.2", kv_cache_dtype="fp8"),
        [],
    ),
    "an fp8 cache, V1": (llama_drafter, nothing, serving("0.26.0", kv_cache_dtype="fp8_e4m3"), []),
    "an fp8 cache that cannot be set apart": (
        llama_drafter,
        nothing,
        serving("0.25.1", kv_cache_dtype="fp8_e4m3"),
        ["kv_cache_dtype warning"],
    ),
    "an fp8 cache that V2 cannot set apart": (
        llama_drafter,
        nothing,
        serving("0.30.0", kv_cache_dtype="fp8"),
        ["kv_cache_dtype warning"],
    ),
    "an fp8 cache on an old release": (
        llama_drafter,
        nothing,
        serving("0.10.2", kv_cache_dtype="fp8"),
        ["kv_cache_dtype error"],
    ),
    "a KV cache of its own": (
        llama_drafter,
        nothing,
        serving("0.31.0", kv_cache_dtype="fp8", draft_kv_cache_dtype="bfloat16"),
        [],
    ),
    "a KV cache of its own, V1": (
        llama_drafter,
        nothing,
        serving("0.26.0", kv_cache_dtype="fp8", draft_kv_cache_dtype="auto"),
        [],
    ),
    "a KV cache of its own that V2 does not read": (
        llama_drafter,
        nothing,
        serving("0.30.0", kv_cache_dtype="fp8", draft_kv_cache_dtype="auto"),
        ["draft_kv_cache_dtype warning", "kv_cache_dtype warning"],
    ),
    "a KV cache of its own, before there was the option": (
        llama_drafter,
        nothing,
        serving("0.25.1", draft_kv_cache_dtype="auto"),
        ["draft_kv_cache_dtype error"],
    ),
    "a KV cache that there is not": (
        llama_drafter,
        nothing,
        serving("0.32.0", draft_kv_cache_dtype="nonsense"),
        ["draft_kv_cache_dtype error"],
    ),
    "a KV cache that only a plug-in has": (
        llama_drafter,
        nothing,
        serving("0.33.0", draft_kv_cache_dtype="nonsense"),
        ["draft_kv_cache_dtype warning"],
    ),
    "an MLA backend, MLA": (mla_drafter, nothing, serving("0.33.0", attention_backend="TRITON_MLA"), []),
    "an MLA backend": (
        llama_drafter,
        nothing,
        serving("0.33.0", attention_backend="TRITON_MLA"),
        ["attention_backend error"],
    ),
    "an MLA backend, V1": (llama_drafter, nothing, serving("0.28.0", attention_backend="FLASHMLA"), []),
    "an MLA backend, before V1 chose apart": (
        llama_drafter,
        nothing,
        serving("0.20.2", attention_backend="FLASHMLA"),
        ["attention_backend error"],
    ),
    "a backend of its own": (
        llama_drafter,
        nothing,
        serving("0.33.0", attention_backend="TRITON_MLA", draft_attention_backend="TRITON_ATTN"),
        [],
    ),
    "a backend of its own that V2 does not read": (
        llama_drafter,
        nothing,
        serving("0.30.0", attention_backend="TRITON_MLA", draft_attention_backend="TRITON_ATTN"),
        ["attention_backend error"],
    ),
    "a backend of its own that is none for it": (
        mla_drafter,
        nothing,
        serving("0.33.0", draft_attention_backend="FLASH_ATTN"),
        ["attention_backend error"],
    ),
    "two stages": (mla_drafter, nothing, serving("0.33.0", pipeline_parallel_size=2), ["pipeline error"]),
    "two stages, patched": (mla_drafter, nothing, serving("0.33.0", pipeline_parallel_size=2, taps_proved=True), []),
    "two stages, before there were any": (
        mla_drafter,
        nothing,
        serving("0.29.0", pipeline_parallel_size=2, taps_proved=True),
        ["pipeline error"],
    ),
    "two stages, V1": (
        mla_drafter,
        nothing,
        serving("0.33.0", pipeline_parallel_size=2, taps_proved=True, model_runner="v1"),
        ["pipeline error"],
    ),
}


@pytest.mark.parametrize(("make", "change", "service", "found"), SERVED.values(), ids=SERVED.keys())
def test_exactly_what_this_service_minds_is_found(
    tmp_path: Path, make: Callable[[], DrafterFiles], change: Change, service: Service, found: list[str]
) -> None:
    drafter = make()
    change(drafter)
    findings = findings_of(drafter.write(tmp_path / "drafter"), service)
    assert [f"{finding.id} {finding.severity}" for finding in findings] == found
    # Both sides of what disagrees, with the file or the option that states each.
    assert all(len(finding.facts) == 2 and finding.consequence and finding.remedy for finding in findings)


def test_more_stages_than_v2_can_do_fall_back_to_v1(tmp_path: Path) -> None:
    assert serving("0.29.0", pipeline_parallel_size=2).runner == "v1"
    assert serving("0.29.0").runner == serving("0.30.0", pipeline_parallel_size=2).runner == "v2"


@pytest.mark.parametrize("change", [first_tokens, put(d2t=int64([0] * DRAFT_VOCAB))])
def test_a_zero_d2t_is_the_first_tokens_and_nothing_else(tmp_path: Path, change: Change) -> None:
    drafter = llama_drafter()
    change(drafter)
    found = [finding.id for finding in findings_of(drafter.write(tmp_path / "drafter"))]
    assert found == ([] if change is first_tokens else ["t2d_mismatch"])


def test_an_mla_drafter_needs_the_release_that_knows_it(tmp_path: Path) -> None:
    root = mla_drafter().write(tmp_path / "drafter")
    assert findings_of(root, serving("0.18.0")) == []
    (finding,) = findings_of(root, serving("0.17.1"))
    assert (finding.id, finding.severity) == ("architecture", "error")
    assert "vLLM 0.17.1 does not know it, 0.18.0 is the first that does" in finding.message


def test_an_mla_drafter_must_not_pass_for_the_targets_own_heads(tmp_path: Path) -> None:
    drafter = mla_drafter()
    drafter.config["model_type"] = "deepseek_v3"
    (finding,) = findings_of(drafter.write(tmp_path / "drafter"))
    assert (finding.id, finding.severity) == ("model_type", "error")
    assert "model_type deepseek_v3" in finding.message


def test_mla_drafters_had_three_taps_before_0_22(tmp_path: Path) -> None:
    drafter = mla_drafter()
    set_taps(drafter, [2, 20, 40, 58])
    root = drafter.write(tmp_path / "drafter")
    assert findings_of(root, serving("0.22.0")) == []
    (finding,) = findings_of(root, serving("0.21.0"))
    assert finding.id == "tap_count"
    assert "4 tap ids [2, 20, 40, 58]" in finding.message
    assert "fixed number of taps 3 in vLLM 0.21.0" in finding.message


@pytest.mark.parametrize(
    ("service", "severities"),
    [
        (serving("0.33.0"), ["error"]),
        (serving("0.29.0"), ["error"]),
        (serving("0.28.0"), []),
        (serving("0.22.0"), []),
        (serving("0.21.0"), ["error"]),
        (serving("0.15.1"), ["error"]),
        (serving("0.28.0", model_runner="v2"), ["error"]),
        (serving("0.33.0+cpu", model_runner="v1"), []),
    ],
)
def test_nested_ids_are_read_by_runner_v1_from_0_22_only(
    tmp_path: Path, service: Service, severities: list[str]
) -> None:
    drafter = llama_drafter()
    only_nested(drafter, [1, 29, 57])
    findings = findings_of(drafter.write(tmp_path / "drafter"), service)
    assert [finding.severity for finding in findings] == severities
    assert {finding.id for finding in findings} <= {"tap_ids_nested"}


@pytest.mark.parametrize(
    "release",
    yaml.safe_load((Path(__file__).parents[1] / "contract/releases.yml").read_text()),
    ids=lambda release: release["version"],
)
def test_the_ids_that_count_are_those_that_the_released_wheel_reads(release: dict[str, Any]) -> None:
    service, declared, default = Service(release["version"], "v1"), [5, 20, 40], [2, 30, 58]
    can = release["capabilities"]
    top_level, nested = TapIds(declared, None, None), TapIds(None, declared, None)
    assert used_tap_ids(top_level, service, 61) == (declared if can["declared_tap_ids"] else default)
    assert used_tap_ids(nested, service, 61) == (declared if can["nested_tap_ids_v1"] else default)


@pytest.mark.parametrize("place", [set_taps, only_nested])
def test_a_release_that_reads_no_ids_serves_the_default_alone(
    tmp_path: Path, place: Callable[[DrafterFiles, list[int]], None]
) -> None:
    drafter = llama_drafter()
    place(drafter, [5, 20, 40])
    root = drafter.write(tmp_path / "drafter")
    (finding,) = findings_of(root, serving("0.11.0"))
    assert (finding.id, finding.severity) == ("tap_ids_unread", "error")
    assert "tap ids [5, 20, 40]" in finding.message
    assert "vLLM 0.11.0 reads no tap ids and taps its default [2, 30, 58]" in finding.message
    place(drafter, [2, 30, 58])
    assert findings_of(drafter.write(root), serving("0.11.0")) == []


def test_nested_ids_that_are_the_default_are_worth_a_note(tmp_path: Path) -> None:
    drafter = llama_drafter()
    only_nested(drafter, [2, 30, 58])
    (finding,) = findings_of(drafter.write(tmp_path / "drafter"))
    assert (finding.id, finding.severity) == ("tap_ids_nested", "note")
    assert "taps [2, 30, 58], which are the same" in finding.message


def test_runner_v2_reads_layer_ids_and_runner_v1_does_not(tmp_path: Path) -> None:
    drafter = llama_drafter()
    del drafter.config[IDS]
    drafter.config["eagle_config"] = {"layer_ids": [1, 29, 57]}
    root = drafter.write(tmp_path / "drafter")
    assert findings_of(root, serving("0.33.0")) == []
    (finding,) = findings_of(root, serving("0.33.0", model_runner="v1"))
    assert (finding.id, finding.severity) == ("tap_ids_nested", "error")


def test_undeclared_ids_are_worth_a_note_that_names_the_default(tmp_path: Path) -> None:
    drafter = llama_drafter()
    del drafter.config[IDS], drafter.config["eagle_config"]
    (finding,) = findings_of(drafter.write(tmp_path / "drafter"))
    assert (finding.id, finding.severity) == ("tap_ids_undeclared", "note")
    assert "num_hidden_layers 61 in /models/kimi/config.json: vLLM taps its default [2, 30, 58]" in finding.message


def test_the_last_boundary_is_delivered_since_0_25(tmp_path: Path) -> None:
    drafter = llama_drafter()
    set_taps(drafter, [2, 30, 61])
    root = drafter.write(tmp_path / "drafter")
    assert findings_of(root, serving("0.25.0")) == []
    (finding,) = findings_of(root, serving("0.24.0"))
    assert (finding.id, finding.severity) == ("tap_id_lost", "error")
    assert "does not deliver tap 61" in finding.message


def test_a_patch_set_that_proves_all_taps_delivers_the_ends(tmp_path: Path) -> None:
    drafter = llama_drafter()
    set_taps(drafter, [0, 30, 61])
    assert findings_of(drafter.write(tmp_path / "drafter"), serving("0.24.0", taps_proved=True)) == []


@pytest.mark.parametrize(
    ("service", "severities"),
    [
        (serving("0.33.0", max_model_len=4096), []),
        (serving("0.33.0", max_model_len=4097), ["error"]),
        (serving("0.33.0", model_runner="v1", max_model_len=4097), ["warning"]),
        (serving("0.32.0"), ["warning"]),
    ],
)
def test_a_short_drafter_matters_by_release_and_served_length(
    tmp_path: Path, service: Service, severities: list[str]
) -> None:
    drafter = mla_drafter()
    drafter.config["max_position_embeddings"] = 4096
    findings = findings_of(drafter.write(tmp_path / "drafter"), service)
    assert [(finding.id, finding.severity) for finding in findings] == [("max_position", level) for level in severities]


@pytest.mark.parametrize(
    ("own", "service", "found"),
    [
        # Only what cuts the target, and V1, go by it.
        (8192, serving("0.33.0", max_model_len=16384), "error: .* cut the target's context to 8192 tokens"),
        (8192, serving("0.33.0", max_model_len=8192), ""),
        (8192, serving("0.33.0", model_runner="v1"), "warning: .* nothing is drafted beyond 8192 tokens"),
        (8192, serving("0.32.0", max_model_len=16384), ""),
        (16385, serving("0.33.0", max_model_len=16384), "error: .* does not start with a drafter's length"),
        (262145, serving("0.32.0"), "error: .* does not start with a drafter's length"),
    ],
)
def test_the_length_that_speculative_config_gives_a_drafter_counts(
    tmp_path: Path, own: int, service: Service, found: str
) -> None:
    root = mla_drafter().write(tmp_path / "drafter")
    findings = findings_of(root, replace(service, draft_max_model_len=own))
    assert [finding.id for finding in findings] == (["max_position"] if found else [])
    for finding in findings:
        assert re.match(found, f"{finding.severity}: {finding.message}")
        assert f"max_model_len of speculative-config {own} in the service's options" in finding.message


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("131072", 131072),
        (" 131072 ", 131072),
        ("128K", 131072),
        ("128k", 128000),
        ("25.6k", 25600),
        ("1M", 1 << 20),
        ("1m", 10**6),
        ("1G", 1 << 30),
        ("auto", None),
        ("AUTO", None),
        ("-1", None),
    ],
)
def test_a_context_length_is_read_as_vllm_reads_it(text: str, tokens: int | None) -> None:
    assert context_length(text) == tokens


@pytest.mark.parametrize("text", ["128 K", "25.6K", "1.5", "K", "-2", "128KB", "0x100"])
def test_what_is_no_context_length_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"max_model_len is {text!r}, expected tokens such as 131072")):
        context_length(text)


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999", "1" + "0" * 400])
def test_a_number_that_is_none_is_named(tmp_path: Path, number: str) -> None:
    root = llama_drafter().write(tmp_path / "drafter")
    path = root / "config.json"
    text = path.read_text().replace("1000000.0", number)
    path.write_text(text.replace('"rope_scaling": null', f'"rope_scaling": {{"factors": [1.0, {number}]}}'))
    with pytest.raises(CheckpointError) as caught:
        read_drafter(root)
    shown = "an integer of 1329 bits" if number.startswith("10") else str(float(number))
    assert sorted(caught.value.problems) == [
        f"{path}: rope_scaling.factors[1] is {shown}, expected a finite number",
        f"{path}: rope_theta is {shown}, expected a finite number",
    ]


def test_what_only_training_reads_stays_behind(tmp_path: Path) -> None:
    drafter = llama_drafter()
    drafter.others = {
        "training_state.pt": bytes(100),
        "optimizer.pt": bytes(23),
        "trainer_state.json": b"{}",
        "tokenizer.json": b"{}",
        "README.md": b"# card",
        "pytorch_model.bin": bytes(9),
        ".cache.json": b"{}",
    }
    root = drafter.write(tmp_path / "drafter")
    (root / "checkpoint-1000").mkdir()
    write_safetensors(root / "optimizer.safetensors", {"fc.weight": bf16(2)})
    (finding,) = findings_of(root)
    assert (finding.id, finding.severity) == ("training_files", "note")
    assert "optimizer.pt, optimizer.safetensors, trainer_state.json, training_state.pt" in finding.message
    names = [path.name for path in travelling_files(read_drafter(root))]
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def test_several_faults_are_all_found_and_the_worst_come_first(tmp_path: Path) -> None:
    drafter = llama_drafter()
    drafter.config["max_position_embeddings"] = 4096
    drafter.config["vocab_size"] = 163839
    drafter.tensors["t2d"] = TensorFile("BOOL", (163839,), drafter.tensors["t2d"].data[:163839])
    drafter.others = {"optimizer.pt": b""}
    findings = findings_of(drafter.write(tmp_path / "drafter"), serving("0.32.0"))
    assert [finding.id for finding in findings] == ["vocab_size", "max_position", "training_files"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": None}, "hidden_size is None, expected a positive integer"),
        ({"vocab_size": True}, "vocab_size is True, expected a positive integer"),
        ({"draft_vocab_size": -1}, "draft_vocab_size is -1, expected a positive integer or nothing"),
        ({"architectures": []}, "architectures is [], expected a list with the drafter's class"),
        ({IDS: "2,30,58"}, f"{IDS} is '2,30,58', expected a list of layer ids"),
        ({"eagle_config": {IDS: [2, "30"]}}, f"{IDS} is [2, '30'], expected a list of layer ids"),
    ],
)
def test_a_malformed_field_is_named(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    drafter = llama_drafter()
    drafter.config |= change
    root = drafter.write(tmp_path / "drafter")
    with pytest.raises(CheckpointError) as caught:
        read_drafter(root)
    assert caught.value.problems == (f"{root / 'config.json'}: {problem}",)


def test_vllm_lengthens_a_plain_rope_and_drafts_on(tmp_path: Path) -> None:
    drafter = llama_drafter()
    drafter.config["max_position_embeddings"] = 4096
    (finding,) = findings_of(drafter.write(tmp_path / "drafter"))
    assert (finding.id, finding.severity) == ("max_position", "warning")
    assert "beyond 4096 tokens it drafts at positions that it was not trained on" in finding.message


def test_a_drafter_is_named_by_its_one_file_of_weights(tmp_path: Path) -> None:
    root = llama_drafter().write(tmp_path)
    (root / "model.safetensors").rename(root / "epoch-3.safetensors")
    write_safetensors(root / "epoch-2.safetensors", {"fc.weight": bf16(2)})
    drafter = read_drafter(root / "epoch-3.safetensors")
    assert check(drafter, Target.from_facts(target_facts()), NEWEST) == []
    assert [path.name for path in travelling_files(drafter)] == ["config.json", "epoch-3.safetensors"]


def test_a_path_that_is_no_drafter_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory on the control node; correct drafter_path"):
        read_drafter(tmp_path / "absent")
    with pytest.raises(CheckpointError) as caught:
        read_drafter(tmp_path)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        f"{tmp_path / 'config.json'}",
        f"{tmp_path}",
    ]


@pytest.mark.parametrize("version", ["", "latest", "33"])
def test_a_version_that_is_none_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match="is not a vLLM version such as"):
        Service(version)


def test_target_facts_that_lack_a_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"text\.hidden_size is None, expected an integer"):
        Target.from_facts(target_facts(hidden_size=None))
    with pytest.raises(ValueError, match=r"text\.hidden_size is None, expected an integer"):
        Target.from_facts({})


def test_the_content_digest_depends_on_names_and_bytes_only() -> None:
    one = {"name": "a", "sha256": "0" * 64, "size": 1, "path": "/x/a"}
    two = {"name": "b", "sha256": "1" * 64, "size": 2, "path": "/x/b"}
    digest = content_digest([one, two])
    assert content_digest([{**two, "path": "/y/b"}, one]) == digest
    assert (
        len(
            {
                digest,
                content_digest([one]),
                *(content_digest([one, {**two, **c}]) for c in ({"name": "c"}, {"size": 3})),
            }
        )
        == 4
    )
