# SPDX-License-Identifier: Apache-2.0
"""Whether the vLLM release, its model runner and the service's options can serve this kind of drafter.

Since when a release does what was read in the releases 0.15 to 0.33; older ones from the reports that are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ansible.module_utils.aerie.drafter import MLA_ARCHITECTURES, Drafter, eagle_config, is_for_training
from ansible.module_utils.aerie.drafter_fit import EAGLE3_OVER_STAGES, OPTIONS, Service, Target, Version
from ansible.module_utils.aerie.findings import ERROR, NOTE, WARNING, Fact, Finding

# The first vLLM release that serves each drafter architecture.
_ARCHITECTURES: dict[str, Version] = {
    "LlamaForCausalLMEagle3": (0,),
    "Eagle3LlamaForCausalLM": (0,),
    **{name: (0, 18) for name in MLA_ARCHITECTURES},
}
# vLLM takes these for the target's own multi-token prediction heads and replaces the architecture.
_MTP_MODEL_TYPES = ("deepseek_v3", "deepseek_v32")

_NORM_BEFORE_FC: Version = (0, 18)
_QUANTISED_LM_HEAD: Version = (0, 19)
_OWN_BACKEND_IN_V1: Version = (0, 21)
_NORMS: Version = (0, 22)
_NORMS_OF_SPECULATORS: Version = (0, 25)
_OWN_KV_CACHE_IN_V1: Version = (0, 26)
_OVERRIDES_IN_V2: Version = (0, 31)
# Up to here EAGLE-3 over stages exists, but the DeepSeek model does not opt in.
_NO_STAGES_AS_RELEASED: Version = (0, 34)
_SHORT_DRAFTER_SHORTENS_TARGET: Version = (0, 33)
# vllm#24505: the drafter's cache has the type that its attention is built for.
_FP8_CACHE_AND_OTHER_DRAFTER: Version = (0, 11)
# From here on a platform may register a KV cache of its own.
_REGISTERED_KV_CACHES: Version = (0, 33)

# The KV caches that vLLM 0.32 and 0.33 name, by their families.
_KV_CACHES = re.compile(r"auto|float16|bfloat16|(fp8|int8|int4|nvfp4|turboquant|ultraquant|octave)(_\w+)?")

# Rotary embeddings that vLLM 0.33 lengthens to the target's context; others keep the drafter's.
_LENGTHENED = ("default", "linear", "llama3", "ntk", "proportional")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_LLAMA_THETA = 10000.0


def check_architecture(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    fact = drafter.declares_architecture()
    kind = drafter.document.get("speculators_model_type")
    if drafter.is_speculators and (kind != "eagle3" or drafter.model_type not in (None, "llama")):
        yield Finding(
            "speculators_format",
            ERROR,
            (
                Fact("speculators_model_type", kind, drafter.config),
                Fact("model_type in transformer_layer_config", drafter.model_type, drafter.config),
            ),
            "of this format Aerie serves eagle3 with a llama layer, as vLLM does for this target",
            "choose an EAGLE-3 drafter with a llama layer, or one in Hugging Face's format",
        )
        return
    since = _ARCHITECTURES.get(drafter.architecture)
    if since is None:
        known = ", ".join(_ARCHITECTURES)
        looked_up = f"vLLM looks for {drafter.architecture}, which is none of {known}"
        yield Finding("architecture", ERROR, (fact,), looked_up, "choose a drafter of a known architecture")
    elif service.release < since:
        needed = ".".join(map(str, (*since, 0)))
        yield Finding(
            "architecture",
            ERROR,
            (fact,),
            f"vLLM {service.vllm_version} does not know it, {needed} is the first that does",
            f"deploy vLLM {needed} or newer, or choose a Llama drafter",
        )
    elif drafter.is_mla and drafter.model_type in _MTP_MODEL_TYPES:
        yield Finding(
            "model_type",
            ERROR,
            (fact, Fact("model_type", drafter.model_type, drafter.config)),
            "vLLM takes that model_type for the target's own prediction heads and loads another class",
            'set "model_type": "kimi_k2" in a copy of the drafter',
        )


def check_norms(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    """Check the norms of newer EAGLE-3 variants, which older releases leave out without a word."""
    nested = eagle_config(drafter.settings)
    since = _NORMS_OF_SPECULATORS if drafter.is_speculators else _NORMS
    before_fc = nested.get("norm_before_fc", drafter.settings.get("norm_before_fc"))
    for name, value, first, mla_has_it in (
        ("fc_norm", drafter.settings.get("fc_norm"), since, True),
        ("norm_output", drafter.settings.get("norm_output"), since, True),
        ("norm_before_fc", before_fc, _NORMS if "norm_before_fc" in nested else _NORM_BEFORE_FC, False),
    ):
        if not value:
            continue
        said = Fact(name, value, drafter.config)
        if drafter.is_mla and not mla_has_it:
            yield Finding(
                name,
                ERROR,
                (said, drafter.declares_architecture()),
                f"vLLM's class for this architecture has no {name}",
                "choose a Llama drafter, or one that was trained without it",
            )
        elif service.release < first:
            needed = ".".join(map(str, (*first, 0)))
            yield Finding(
                name,
                ERROR,
                (said, Fact("the first release that reads it", needed, f"vLLM {service.vllm_version}")),
                "without it the drafter runs on numbers that it was not trained on",
                f"deploy vLLM {needed} or newer, or choose a drafter without {name}",
            )
    for name, prefix, value in (
        ("fc_norm", "fc_norm.", drafter.settings.get("fc_norm")),
        ("norm_before_fc", "input_norm.", before_fc),
    ):
        held = sorted(tensor for tensor in drafter.checkpoint.tensors if tensor.startswith(prefix))
        if bool(value) != bool(held):
            yield Finding(
                f"{name}_tensors",
                ERROR,
                (
                    Fact(name, value, drafter.config),
                    drafter.stored("tensor", held[0], held[0])
                    if held
                    else Fact("no tensor", f"{prefix}*", str(drafter.root)),
                ),
                "vLLM goes by config.json, and has no place for the tensor" if held else "vLLM would use one of ones",
                "choose weights and config.json of one revision",
            )


def check_rope(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    """Check the rotary embedding. A Llama drafter may have its own; what was copied must be copied whole."""
    own, other = drafter.rope, target.rope
    facts = (Fact("rope", str(own), drafter.config), Fact("rope", str(other), target.config))
    if own.problem is not None:
        correct = "correct rope_scaling in a copy of the drafter, as the drafter was trained"
        yield Finding("rope_scaling", ERROR, facts, own.problem, correct)
        return
    if own.theta is None:
        if (other.theta or _LLAMA_THETA) != _LLAMA_THETA:
            yield Finding(
                "rope_theta",
                WARNING,
                facts,
                f"vLLM takes {_LLAMA_THETA:g} for want of rope_theta",
                "write the theta that the drafter was trained with as rope_theta into a copy of it",
            )
        return
    same_theta, same_scaling = own.theta == other.theta, own.scales_like(other)
    stretched = other.kind != "default"
    if (drafter.is_mla and not (same_theta and same_scaling)) or (stretched and same_theta != same_scaling):
        yield Finding(
            "rope",
            WARNING,
            facts,
            "latent attention is made with the target's rope"
            if drafter.is_mla
            else "one part is the target's and the other is not",
            "compare with the training run's configuration; the longer a text, the more a wrong one costs",
        )
    reach = own.reach
    if reach is not None and drafter.max_position_embeddings is not None and reach < drafter.max_position_embeddings:
        yield Finding(
            "rope_range",
            WARNING,
            (
                Fact("factor x original_max_position_embeddings =", int(reach), drafter.config),
                drafter.declares("max_position_embeddings"),
            ),
            f"positions beyond {int(reach)} are outside of what the scaling is made for",
            "choose config.json and weights of one revision",
        )


def check_max_position(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    if service.max_model_len is not None:
        needed, served = service.max_model_len, Fact("max_model_len", service.max_model_len, OPTIONS)
    else:
        needed = target.max_position_embeddings
        served = Fact("max_position_embeddings", needed, target.config)
    length, own = drafter.max_position_embeddings, service.draft_max_model_len
    if length is None:
        return
    limit, remedy = drafter.declares("max_position_embeddings"), "choose a drafter made for the longer context"
    in_v2 = service.runner == "v2"
    shortens = in_v2 and service.release >= _SHORT_DRAFTER_SHORTENS_TARGET and drafter.rope.kind not in _LENGTHENED
    if own is not None:
        said = Fact("max_model_len of speculative-config", own, OPTIONS)
        if own > needed or own > max(length, drafter.rope.reach or 0):
            yield Finding(
                "max_position",
                ERROR,
                (said, served if own > needed else limit),
                "vLLM does not start with a drafter's length that is more",
                "leave max_model_len out of speculative-config, or lower it",
            )
            return
        # Elsewhere V2 goes by the positions alone.
        if shortens or not in_v2:
            length, limit, remedy = own, said, "leave it out of speculative-config"
    if length >= needed:
        return
    if shortens:
        consequence = f"vLLM {service.vllm_version} would silently cut the target's context to {length} tokens"
    elif in_v2:
        consequence = f"beyond {length} tokens it drafts at positions that it was not trained on"
    else:
        consequence = f"nothing is drafted beyond {length} tokens"
    yield Finding(
        "max_position",
        ERROR if shortens else WARNING,
        (limit, served),
        consequence,
        f"set max_model_len to {length} or less, or {remedy}",
    )


def check_quantisation(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    """Check the drafter's own quantisation; the target's does not matter to it."""
    section = drafter.settings.get("quantization_config") or drafter.settings.get("compression_config")
    separate = drafter.root / "hf_quant_config.json"
    quantised = sorted(drafter.quantised_tensors())
    if section or separate.exists():
        method = section.get("quant_method") if isinstance(section, dict) else None
        said = Fact("quantization_config", method or "declared", drafter.config if section else str(separate))
        if not quantised:
            yield Finding(
                "quantization_unused",
                ERROR,
                (said, Fact("quantised tensors", "none", str(drafter.root))),
                "vLLM would expect quantised weights (this section may have been copied from the target)",
                "remove quantization_config from a copy of the drafter",
            )
    elif quantised:
        yield Finding(
            "quantization_undeclared",
            ERROR,
            (
                drafter.stored("tensor", quantised[0], quantised[0]),
                Fact("quantization_config", "not declared", drafter.config),
            ),
            "vLLM would look for weights that are not quantised",
            "choose weights and config.json of one revision",
        )
    for layer in ("lm_head", "embed_tokens"):
        parts = [name for name in quantised if name.startswith(f"{layer}.")]
        can = layer == "lm_head" and not drafter.is_mla and service.release >= _QUANTISED_LM_HEAD
        if parts and not can:
            yield Finding(
                "quantized_layer",
                ERROR,
                (drafter.stored("tensor", parts[0], parts[0]), drafter.declares_architecture()),
                f"vLLM {service.vllm_version} cannot load a quantised {layer} of this architecture",
                f"choose weights whose {layer} is not quantised"
                + (", or vLLM 0.19.0 or newer" if layer == "lm_head" and not drafter.is_mla else ""),
            )


def check_dtype(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    tensor = drafter.checkpoint.tensor("norm.weight")
    if tensor is None or target.dtype is None:
        return
    stored = _DTYPES.get(tensor.dtype, tensor.dtype)
    if stored != target.dtype:
        yield Finding(
            "dtype",
            NOTE,
            (drafter.stored("dtype of norm.weight", stored, "norm.weight"), Fact("dtype", target.dtype, target.config)),
            "vLLM serves a drafter in the target's dtype, unless the service's option dtype says otherwise",
            "nothing to do, if the drafter was trained to run in the target's dtype",
        )


def check_kv_cache(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    """Check the type of cache that the drafter is given, and an fp8 cache under a drafter that is not fp8."""
    own, option = service.draft_kv_cache_dtype, service.kv_cache_dtype or "auto"
    separate = service.release >= (_OVERRIDES_IN_V2 if service.runner == "v2" else _OWN_KV_CACHE_IN_V1)
    if own:
        yield from _check_own_kv_cache(own, separate, service)
    if separate:
        return
    if not option.startswith("fp8") or any(_is_fp8(drafter, name) for name in drafter.checkpoint.tensors):
        return
    breaks = service.release < _FP8_CACHE_AND_OTHER_DRAFTER
    yield Finding(
        "kv_cache_dtype",
        ERROR if breaks else WARNING,
        (Fact("kv-cache-dtype", option, OPTIONS), Fact("fp8 tensors", "none", str(drafter.root))),
        f"{service.names_runner()} gives the drafter the same cache"
        + (", and its attention fails on two dtypes (vllm#21177)" if breaks else ", without scales for its own values"),
        "leave the KV cache at auto, or deploy vLLM 0.31.0 or newer and set kv_cache_dtype in speculative-config",
    )


def _check_own_kv_cache(own: str, separate: bool, service: Service) -> Iterator[Finding]:
    """Check the kv_cache_dtype of speculative-config: whether it is one, and is read."""
    said = Fact("kv_cache_dtype of speculative-config", own, OPTIONS)
    if service.release < _OWN_KV_CACHE_IN_V1:
        yield Finding(
            "draft_kv_cache_dtype",
            ERROR,
            (said, Fact("the first release that has the option", "0.26.0", f"vLLM {service.vllm_version}")),
            "vLLM does not start with an option that it does not have",
            "leave it out of speculative-config, or deploy vLLM 0.26.0 or newer",
        )
    elif not _KV_CACHES.fullmatch(own):
        registered = service.release >= _REGISTERED_KV_CACHES
        yield Finding(
            "draft_kv_cache_dtype",
            WARNING if registered else ERROR,
            (said, Fact("types of KV cache", "auto, float16, bfloat16, fp8 ...", f"vLLM {service.vllm_version}")),
            "vLLM does not start with it" + (", unless a platform's plug-in registers it" if registered else ""),
            "correct it, or leave it out of speculative-config",
        )
    elif not separate:
        yield Finding(
            "draft_kv_cache_dtype",
            WARNING,
            (said, Fact("the first release that reads it", "0.31.0", service.names_runner())),
            "the drafter gets the service's KV cache",
            "leave it out of speculative-config, or deploy vLLM 0.31.0 or newer",
        )


def check_attention_backend(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    """Check a backend that was named: those for latent attention serve nothing else."""
    own = service.draft_attention_backend
    overridable = service.release >= (_OVERRIDES_IN_V2 if service.runner == "v2" else _OWN_BACKEND_IN_V1)
    if own and overridable:
        backend, option = own, "attention_backend in speculative-config"
    elif service.attention_backend and (service.runner == "v2" or not overridable):
        backend, option = service.attention_backend, "attention-backend"
    else:
        return
    if ("MLA" in backend.upper()) == drafter.is_mla:
        return
    kind = "latent attention" if drafter.is_mla else "attention with keys and values"
    yield Finding(
        "attention_backend",
        ERROR,
        (Fact(option, backend, OPTIONS), drafter.declares_architecture()),
        f"{service.names_runner()} takes that backend for the drafter, too, which has {kind}",
        "name a backend of its kind as attention_backend in speculative-config"
        if overridable
        else "leave attention-backend out, or deploy vLLM 0.31.0 or newer and name the drafter's in speculative-config",
    )


def check_pipeline(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    if service.pipeline_parallel_size == 1:
        return
    size = Fact("pipeline-parallel-size", service.pipeline_parallel_size, OPTIONS)
    limit = Fact("stages that EAGLE-3 works over", 1, service.names_runner())
    if service.release < EAGLE3_OVER_STAGES or service.runner == "v1":
        consequence = "the taps of earlier stages do not reach the drafter"
        remedy = "deploy vLLM 0.30.0 or newer with Model Runner V2 and the patch set eagle3-pp, or use one stage"
    elif not service.taps_proved and service.release < _NO_STAGES_AS_RELEASED:
        consequence = "this model family does not opt in to EAGLE-3 over pipeline stages"
        remedy = "deploy with the patch set eagle3-pp, or use one stage"
    else:
        return
    yield Finding("pipeline", ERROR, (size, limit), consequence, remedy)


def check_training_files(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    names = sorted(path.name for path in drafter.root.iterdir() if path.is_file() and is_for_training(path))
    if names:
        size = sum((drafter.root / name).stat().st_size for name in names)
        yield Finding(
            "training_files",
            NOTE,
            (Fact(f"{', '.join(names)} of together", f"{size} bytes", str(drafter.root)),),
            "only training reads them, they are not sent to hosts",
            "nothing to do",
        )


def _is_fp8(drafter: Drafter, name: str) -> bool:
    tensor = drafter.checkpoint.tensor(name)
    return tensor is not None and tensor.dtype.startswith("F8_")
