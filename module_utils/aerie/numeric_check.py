# SPDX-License-Identifier: Apache-2.0
"""Compare the taps of an installed vLLM's own model classes with Hugging Face transformers, tap by tap.

    python -m ansible.module_utils.aerie.numeric_check [--layers 61] [--ids 2,30,58] [--stages 2] [--device N] ...

A program (the module hidden_state_check starts it), run by a release's own venv/bin/python. A random model of
DeepSeek-V3's shape, tiny in width but with the real number of layers, is loaded by vLLM (as DeepseekV3ForCausalLM, and
inside KimiK25ForConditionalGeneration) and by transformers, in float32. Both run one prompt; tap k of vLLM must be the
stream that enters layer k in transformers. No engine, no checkpoint and no port is needed, and nothing is written but a
temporary directory.

With --stages N the layers are cut as vLLM cuts them, each stage is a process of its own, and what one hands to the next
goes through torch.distributed's gloo: taps of earlier stages must arrive at the last one, whole and in order.

It uses the CPU, at the lowest priority and with few threads, and no GPU unless --device names one. A CUDA build cannot
run its models on the CPU: without a device the verdict is `not_run`.

Prints one line of JSON: `gate` (numeric), `verdict` (passed, failed, not_run), `fault` (its name), `message`, `taps`
(for each `model`, `run` and `id`: `max_abs_error`, `cosine`, and `best`, what of transformers the tap matches best),
`vllm_version`, `device`, `seconds`. Exit status: 0 passed or not run, 1 failed.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

from ansible.module_utils.aerie.tap_faults import (
    FORMS,
    MATCHES,
    NORMALISED,
    RESIDUAL,
    STREAM,
    UPDATE,
    Held,
    name_fault,
)

# Largest difference from the reference, relative to the largest element of what is compared. Float32 gives 1e-6.
TOLERANCE = 1e-4
SEED = 20261129
PROMPT = tuple(range(40, 57))

# Widths that vLLM's attention kernels for CPUs take; the latent's rank is free where latent attention is off.
HIDDEN, VOCABULARY, HEADS, NOPE, ROPE, VALUE, RANK = 64, 128, 2, 32, 32, 32, 48
DENSE_WIDTH, EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH, DENSE_LAYERS = 96, 4, 2, 32, 1
# How much a layer adds to a stream of unit variance.
LAYER_GAIN = 0.5
WRAPPER_PREFIX = "language_model."
# The fault of a release whose model cannot carry taps from stage to stage.
NO_STAGES = "no pipeline stages"
MISSHAPEN, LOST, DOUBLED = "misshapen output", "taps lost", "taps doubled"
MODELS = {"deepseek": "DeepseekV3ForCausalLM", "kimi": "KimiK25ForConditionalGeneration"}
# What the imports and both models need, with room for the program beside a service that has its memory already.
MEMORY_MB = 2048
# What each further stage needs besides what it shares with the first.
STAGE_MB = 512
# Where an exception says that the code under test is wrong, and not that it cannot be run here.
MODEL_FILES = f"{os.sep}vllm{os.sep}model_executor{os.sep}models{os.sep}"
# What says something of the host or the build, though the model's code is on the way there.
_OF_THE_HOST = {"MemoryError", "OutOfMemoryError", "NotImplementedError", "AcceleratorError"}
# Where torch calls a layer.
_LAYER_CALL = f"{os.sep}torch{os.sep}nn{os.sep}modules{os.sep}module.py"


class NotRunError(Exception):
    """Why the comparison cannot be made on this host."""


class FaultError(Exception):
    """What is wrong with the installed classes: a name, and a sentence."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Run(NamedTuple):
    """One declaration of taps: a name for it, and the ids."""

    name: str
    ids: tuple[int, ...]


class Place(NamedTuple):
    """Which pipeline stage a process is, and of how many. The last one has the reference and compares."""

    stage: int
    stages: int

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def receive(self) -> dict[str, Any] | None:
        """Return the tensors of the stage before this one by their names; None in front of the first stage.

        Raises FaultError and NotRunError where that stage did.
        """
        if self.stage == 0:
            return None
        from torch.distributed import recv_object_list

        received: list[Any] = [None]
        recv_object_list(received, src=self.stage - 1, group=_stages_group())
        if isinstance(received[0], dict):
            return received[0]
        name, message = received[0]
        raise FaultError(name, message) if name else NotRunError(message)

    def send(self, what: dict[str, Any] | tuple[str, str]) -> None:
        """Hand tensors to the next stage, or why there are none: the name of a fault or nothing, and a sentence."""
        from torch.distributed import send_object_list

        send_object_list([what], dst=self.stage + 1, group=_stages_group())


def _stages_group() -> Any:  # noqa: ANN401 - torch.distributed.ProcessGroup
    from vllm.distributed import get_pp_group

    return get_pp_group().cpu_group


def quiet_environment(scratch: Path, threads: int, device: str, partition: str) -> None:
    """Set what vLLM, torch and transformers read when they are imported. No network, no telemetry, no other GPU."""
    caches = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "TMPDIR")
    os.environ.update(dict.fromkeys(caches, str(scratch)))
    os.environ.update(
        CUDA_VISIBLE_DEVICES=device,
        OMP_NUM_THREADS=str(threads),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_MLA_DISABLE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
        DO_NOT_TRACK="1",
        TOKENIZERS_PARALLELISM="false",
    )
    if partition:
        os.environ["VLLM_PP_LAYER_PARTITION"] = partition


# ---------------------------------------------------------------------------------------------------------------------
# A tiny model


def text_config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "intermediate_size": DENSE_WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": RANK,
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
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }


def kimi_config(layers: int) -> dict[str, Any]:
    """The text model inside Kimi-K2.5's wrapper; the vision tower is never run, and tiny."""
    shape = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    grid = {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 4}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**text_config(layers), "model_type": "kimi_k2"},
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "patch_size": 14,
            "pos_emb_type": "divided_fixed",
            **grid,
            **{f"init_{name}": value for name, value in grid.items()},
            **shape,
            **{f"vt_{name}": value for name, value in shape.items()},
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmerger",
            "mm_hidden_size": 32,
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
            "text_hidden_size": HIDDEN,
            "video_attn_type": "spatial_temporal",
        },
        "media_placeholder_token_id": 3,
        "image_token_id": 3,
        "pad_token_id": 2,
        "ignore_index": -100,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }


def tensor_shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a DeepSeek-V3 checkpoint, by the names that checkpoints have."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HEADS * (NOPE + ROPE), HIDDEN)
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", (RANK + ROPE, HIDDEN)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", (RANK,)
        yield f"{prefix}.self_attn.kv_b_proj.weight", (HEADS * (NOPE + VALUE), RANK)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * VALUE)
        if layer < DENSE_LAYERS:
            yield from _mlp_shapes(f"{prefix}.mlp", DENSE_WIDTH)
            continue
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (EXPERTS,)
        yield from _mlp_shapes(f"{prefix}.mlp.shared_experts", EXPERT_WIDTH)
        for expert in range(EXPERTS):
            yield from _mlp_shapes(f"{prefix}.mlp.experts.{expert}", EXPERT_WIDTH)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def _mlp_shapes(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, HIDDEN)
    yield f"{prefix}.up_proj.weight", (width, HIDDEN)
    yield f"{prefix}.down_proj.weight", (HIDDEN, width)


def random_weights(layers: int) -> dict[str, Any]:
    """Return name -> float32 tensor. Norms are not ones, so that a stream before a norm and after it differ."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, shape in tensor_shapes(layers):
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1.0 + 0.3 * values
        elif name.endswith("bias"):
            values = 0.1 * values
        elif "embed_tokens" not in name:
            values = values / shape[-1] ** 0.5
            values = LAYER_GAIN * values if name.endswith(("o_proj.weight", "down_proj.weight")) else values
        weights[name] = values
    return weights


def write_model(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------------------------------
# The reference


class Reference(NamedTuple):
    """What transformers computes: ``forms[form][k]``, (tokens, hidden), at the entrance of layer k."""

    forms: dict[str, dict[int, Any]]
    final: Any


def reference(directory: Path, layers: int) -> Reference:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    except (ImportError, ValueError, KeyError, TypeError) as error:
        raise NotRunError(f"this transformers cannot load the reference model ({_line(error)})") from error
    lacking = [str(key) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[kind]]
    if lacking:
        raise NotRunError(f"this transformers loads the reference model differently: {', '.join(sorted(lacking)[:3])}")
    forms = record_forms(model.eval(), PROMPT)
    return Reference(forms, forms[NORMALISED][layers])


def record_forms(model: Any, tokens: Sequence[int]) -> dict[str, dict[int, Any]]:  # noqa: ANN401 - of transformers
    """Run ``tokens`` through a causal LM; return ``[form][layer]``, (tokens, hidden), as in ``tap_faults``."""
    import torch

    forms: dict[str, dict[int, Any]] = {form: {} for form in FORMS}

    def keep(form: str, layer: int) -> Any:  # noqa: ANN401 - one of torch's kinds of hooks
        # The first argument of a module for a hook before it, the result for one after it.
        def hook(_module: object, inputs: Any, output: Any = None) -> None:  # noqa: ANN401
            value = inputs[0] if output is None else output[0] if isinstance(output, tuple) else output
            # The experts' output has another shape in some releases.
            forms[form][layer] = value.detach().reshape(len(tokens), -1).clone()

        return hook

    inner = model.model
    last = len(inner.layers)
    for index, layer in enumerate(inner.layers):
        layer.register_forward_pre_hook(keep(STREAM, index))
        layer.input_layernorm.register_forward_hook(keep(NORMALISED, index))
        layer.post_attention_layernorm.register_forward_pre_hook(keep(RESIDUAL, index + 1))
        layer.mlp.register_forward_hook(keep(UPDATE, index + 1))
    inner.norm.register_forward_pre_hook(keep(STREAM, last))
    inner.norm.register_forward_hook(keep(NORMALISED, last))
    with torch.inference_mode():
        model(torch.tensor([list(tokens)]), use_cache=False)
    return forms


# ---------------------------------------------------------------------------------------------------------------------
# vLLM


def platform_of(device: str) -> str:
    """Return the torch device that the installed build can run its models on. Raises NotRunError."""
    from vllm.platforms import current_platform

    if device:
        if not current_platform.is_cuda_alike():
            raise NotRunError(f"this vLLM is no CUDA build, so it has no use for device {device}: leave --device out")
        return "cuda:0"
    if not current_platform.is_cpu():
        raise NotRunError(
            "this vLLM is built for GPUs and cannot run its models on the CPU: name a device with 2 GB of free memory, "
            "or let the switch run the check between the stop and the start"
        )
    return "cpu"


def engine_config(directory: Path, on_gpu: bool, stages: int) -> Any:  # noqa: ANN401 - vllm.config.VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    options: dict[str, Any] = {
        "model": str(directory),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        # vLLM's rotary kernel for CPUs is not exact.
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    }
    known = inspect.signature(EngineArgs).parameters
    if "language_model_only" in known:
        options["language_model_only"] = True
    elif json.loads((directory / "config.json").read_text())["model_type"] == "kimi_k25":
        options["limit_mm_per_prompt"] = {"vision_chunk": 0}
    if on_gpu and "attention_backend" in known:
        # One that takes float32.
        options["attention_backend"] = "TRITON_ATTN"
    config = EngineArgs(**options).create_engine_config()
    # Not an option: vLLM would ask for as many GPUs.
    config.parallel_config.pipeline_parallel_size = stages
    return config


def join(config: Any, scratch: Path, place: Place) -> None:  # noqa: ANN401
    """Be one stage of the pipeline, and the only member of its tensor group. Without a network, but for gloo's own."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    if place.stages > 1:
        # torch.distributed's own: NCCL refuses two stages on one GPU, and vLLM's shared memory for CPUs four taps.
        plain = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
        type(current_platform).get_device_communicator_cls = classmethod(lambda _: plain)
    backend = "gloo"
    with set_current_vllm_config(config):
        init_distributed_environment(place.stages, place.stage, f"file://{scratch}/rendezvous", 0, backend)
        initialize_model_parallel(1, place.stages)


def load(config: Any, weights: Mapping[str, Any], prefix: str, device: str) -> Any:  # noqa: ANN401
    """Build the model of ``config`` as vLLM's loader does, and give it ``weights``."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with set_current_vllm_config(config), torch.device(device):
            model = initialize_model(vllm_config=config)
        # A generator, as loaders give: some releases go over it once only.
        model.load_weights((f"{prefix}{name}", tensor) for name, tensor in weights.items())
        with set_current_vllm_config(config):
            process_weights_after_loading(model, config.model_config, torch.device(device))
    finally:
        torch.set_default_dtype(default)
    return model.eval()


def attention(config: Any, device: str) -> dict[str, Any]:  # noqa: ANN401
    """Give every attention layer a KV cache, and return what the forward context needs for one request."""
    import torch
    from vllm.forward_context import set_forward_context

    layers = config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in layers.items() if hasattr(layer, "get_kv_cache_spec")}
    first = next(iter(layers.values()))
    spec, backend = first.get_kv_cache_spec(config), first.get_attn_backend()
    config.cache_config.block_size = spec.block_size
    blocks = 2
    shape = (blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    if hasattr(backend, "get_kv_cache_shape"):
        shape = backend.get_kv_cache_shape(blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
    # Older releases have one cache for each virtual engine.
    listed = isinstance(getattr(first, "kv_cache", None), list)
    for layer in layers.values():
        cache = torch.zeros(shape, dtype=spec.dtype, device=device)
        layer.kv_cache = [cache] if listed else cache
    common = one_request(spec.block_size, device)
    metadata = backend.get_builder_cls()(spec, list(layers), config, torch.device(device)).build(0, common)
    context: dict[str, Any] = {"attn_metadata": dict.fromkeys(layers, metadata)}
    if "slot_mapping" in inspect.signature(set_forward_context).parameters:
        context["slot_mapping"] = dict.fromkeys(layers, common.slot_mapping)
    return context


def one_request(block_size: int, device: str) -> Any:  # noqa: ANN401
    """Return the metadata for the first step of one request, whose keys and values go to block 1."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    tokens = len(PROMPT)
    starts, length = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    values: dict[str, Any] = {
        "query_start_loc": starts.to(device),
        "query_start_loc_cpu": starts,
        "seq_lens": length.to(device),
        "num_reqs": 1,
        "num_actual_tokens": tokens,
        "max_query_len": tokens,
        "max_seq_len": tokens,
        "block_table_tensor": torch.tensor([[1]], dtype=torch.int32, device=device),
        "slot_mapping": torch.arange(block_size, block_size + tokens, device=device),
        "causal": True,
        "_seq_lens_cpu": length,
        "_num_computed_tokens_cpu": torch.tensor([0], dtype=torch.int32),
    }
    known = inspect.signature(CommonAttentionMetadata).parameters
    return CommonAttentionMetadata(**{name: value for name, value in values.items() if name in known})


class Model:
    """vLLM's model, or one stage of it, with attention that works, ready to be run on the prompt."""

    def __init__(self, config: Any, model: Any, device: str, place: Place) -> None:  # noqa: ANN401
        self.config, self.model, self.device, self.place = config, model, device, place
        self.context = attention(config, device)
        self.has_taps = False

    def declare(self, ids: Sequence[int]) -> None:
        """Declare the taps as the runner does. Raises FaultError."""
        declare_taps(self.model, ids, self.place.stages)
        self.has_taps = True

    def run(self) -> tuple[Any, list[Any]]:
        """Return the final hidden state and the taps, each (tokens, hidden) on the CPU; nothing on earlier stages.

        Raises FaultError where the model does, or returns something else.
        """
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        tokens = torch.tensor(PROMPT, device=self.device)
        positions = torch.arange(len(PROMPT), device=self.device)
        received = self._received()
        with (
            torch.inference_mode(),
            set_current_vllm_config(self.config),
            set_forward_context(vllm_config=self.config, num_tokens=len(PROMPT), **self.context),
        ):
            output = called(self.model, self.has_taps, tokens, positions, received)
        if not self.place.is_last:
            if not hasattr(output, "tensors"):
                what = f"{_kind(output)}, and no tensors for the next stage"
                raise FaultError(MISSHAPEN, f"stage {self.place.stage} returns {what}")
            self.place.send({**self._relayed(received), **{name: one.cpu() for name, one in output.tensors.items()}})
            return None, []
        final, taps = taken_apart(output)
        return final.float().cpu(), [tap.float().cpu() for tap in taps]

    def _received(self) -> Any:  # noqa: ANN401 - vllm.sequence.IntermediateTensors
        tensors = self.place.receive()
        if tensors is None:
            return None
        from vllm.sequence import IntermediateTensors

        return IntermediateTensors({name: tensor.to(self.device) for name, tensor in tensors.items()})

    def _relayed(self, received: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return what a stage in the middle passes on, as Model Runner V2 does: the taps of those before it."""
        if received is None:
            return {}
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import aux_hidden_state_relay_keys

        keys = aux_hidden_state_relay_keys(self.model)
        lost = [name for name in keys if name not in received.tensors]
        if lost:
            raise FaultError(LOST, f"stage {self.place.stage} has to hand on {', '.join(lost)} and did not get it")
        return {name: received[name].cpu() for name in keys}


def declare_taps(model: Any, ids: Sequence[int], stages: int) -> None:  # noqa: ANN401
    """Declare the taps as the runner does, through the top-level model. Raises FaultError."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(model):
        name = type(model).__name__
        raise FaultError("no interface", f"{name} does not declare SupportsEagle3: the runner refuses it")
    if stages > 1:
        _refuse_without_stages(model)
    model.set_aux_hidden_state_layers(tuple(ids))


def _refuse_without_stages(model: Any) -> None:  # noqa: ANN401
    """Ask what Model Runner V2 asks. Raises FaultError."""
    try:
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import verify_supports_aux_hidden_states_over_pp
    except ImportError as error:
        raise FaultError(NO_STAGES, "this vLLM has no EAGLE-3 over pipeline stages: use one stage") from error
    try:
        verify_supports_aux_hidden_states_over_pp(model, "eagle3")
    except ValueError as error:
        raise FaultError(NO_STAGES, str(error)) from error


def called(model: Callable[..., Any], has_taps: bool, *arguments: Any) -> Any:  # noqa: ANN401
    """Call the model. Raises FaultError where its own code is what fails.

    That is where the last frame is a model's, or one that it called with arguments of its own: the name of a tensor
    that no stage sent fails in another file. What fails below one of its layers may be a kernel that this host lacks,
    but not when the same layers ran without taps.
    """
    try:
        return model(*arguments)
    except (FaultError, NotRunError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [index for index, frame in enumerate(frames) if MODEL_FILES in frame.filename]
        of_the_host = any(kind.__name__ in _OF_THE_HOST for kind in type(error).__mro__)
        if not own or of_the_host:
            raise
        below_a_layer = any(frame.filename.endswith(_LAYER_CALL) for frame in frames[own[-1] :])
        if below_a_layer and not has_taps:
            raise
        raise FaultError("raises", _raised_at(error, frames[own[-1]])) from error


def _raised_at(error: BaseException, frame: traceback.FrameSummary) -> str:
    at = f"{frame.filename.rpartition(MODEL_FILES)[2]}:{frame.lineno}"
    return f"the model's code raises {_line(error)} ({at})"


def taken_apart(output: Any) -> tuple[Any, list[Any]]:  # noqa: ANN401
    """Return the final hidden state and the taps in what the last stage's model returned. Raises FaultError.

    Each has a row for each token, as wide as the model: what is none cannot be compared, and would not serve a drafter.
    """
    final, taps = output if isinstance(output, tuple) and len(output) == 2 else (output, [])
    if not isinstance(taps, (list, tuple)):
        raise FaultError(MISSHAPEN, f"{_kind(taps)} is returned where the taps are expected")
    wanted = (len(PROMPT), HIDDEN)
    named = {"the model's own output": final, **{f"tap number {n}": tap for n, tap in enumerate(taps, start=1)}}
    for what, value in named.items():
        if tuple(getattr(value, "shape", ())) != wanted:
            raise FaultError(MISSHAPEN, f"{what} is {_kind(value)}, expected a tensor of shape {wanted}")
    return final, list(taps)


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"


# ---------------------------------------------------------------------------------------------------------------------
# Comparison


class Comparison(NamedTuple):
    """One tap against one thing of the reference."""

    max_abs_error: float
    cosine: float
    scale: float

    @property
    def matches(self) -> bool:
        return self.max_abs_error <= TOLERANCE


def compare(tap: Any, wanted: Any) -> Comparison:  # noqa: ANN401 - tensors
    """The error is relative to the largest element of ``wanted``; ``scale`` is what fits ``wanted`` to ``tap`` best."""
    norm, dot = float((wanted * wanted).sum()), float((tap * wanted).sum())
    length = float((tap * tap).sum())
    cosine = dot / (norm * length) ** 0.5 if norm * length > 0 else 0.0
    error = float(abs(tap - wanted).max()) / max(float(abs(wanted).max()), 1e-30)
    # A NaN matches nothing.
    return Comparison(error if error == error else float("inf"), cosine if cosine == cosine else 0.0, dot / norm)


def held(id_: int, tap: Any, truth: Reference) -> tuple[Held, dict[str, Any]]:  # noqa: ANN401
    """Return what ``tap`` holds, and the record of its comparison with every stream of the reference."""
    own = compare(tap, truth.forms[STREAM][id_])
    candidates = [
        (form, layer, compare(tap, values)) for form in FORMS for layer, values in sorted(truth.forms[form].items())
    ]
    # The reference's embedding is its stream 0, and its own stream comes first among equals.
    form, layer, best = min(candidates, key=lambda one: (one[2].max_abs_error, one[:2] != (STREAM, id_)))
    scale = 1.0
    if not best.matches:
        form, layer, best = max(candidates, key=lambda one: abs(one[2].cosine))
        scaled = compare(tap, best.scale * truth.forms[form][layer])
        scale, known = best.scale, scaled.matches
    else:
        known = True
    record = {
        "id": id_,
        "max_abs_error": own.max_abs_error,
        "cosine": own.cosine,
        "best": {"form": form, "layer": layer, "max_abs_error": best.max_abs_error, "cosine": best.cosine},
    }
    return Held(id_, form if known else "", layer, scale), record


def check_run(
    name: str,
    run: Run,
    model: Model,
    truth: Reference,
    plain: Any,  # noqa: ANN401
) -> tuple[list[Held], list[dict[str, Any]]]:
    """Declare the taps of ``run`` and return what they hold, with the records. Raises FaultError."""
    model.declare(run.ids)
    final, taps = model.run()
    wanted = sorted(set(run.ids))
    if not compare(final, plain).matches:
        ids = _short(run.ids)
        raise FaultError("model changed", f"{name}: capturing the taps {ids} changes what the model itself computes")
    pairs = [held(id_, tap, truth) for id_, tap in zip(wanted, taps)]
    if len(taps) != len(wanted):
        detail = "; ".join(str(one) for one, _ in pairs if not one.is_right) or "the others are right"
        count = f"{len(taps)} taps are delivered for the {len(wanted)} ids {_short(wanted)}"
        raise FaultError(LOST if len(taps) < len(wanted) else DOUBLED, f"{name}: {count}: {detail}")
    records = [{"model": name, "run": run.name, **record} for _, record in pairs]
    return [one for one, _ in pairs], records


def check_model(name: str, model: Model, runs: Sequence[Run], truth: Reference) -> Iterator[tuple[list[Held], Any]]:
    plain, _ = model.run()
    difference = compare(plain, truth.final)
    if not difference.matches:
        raise FaultError(
            "model differs",
            f"{name} without taps differs from transformers by {difference.max_abs_error:.2g} (relative), so its taps "
            "show nothing: the model's own code or a kernel is wrong",
        )
    for run in runs:
        yield check_run(name, run, model, truth, plain)


# ---------------------------------------------------------------------------------------------------------------------


def examine(options: argparse.Namespace, scratch: Path, result: dict[str, Any]) -> None:
    """Fill ``result`` in place, so that what was found before an interruption is kept."""
    device = _imports(options, result)
    runs = _runs(options)
    weights = random_weights(options.layers)
    text, wrapped = scratch / "text", scratch / "wrapped"
    write_model(text, text_config(options.layers), weights)
    write_model(wrapped, kimi_config(options.layers), {f"{WRAPPER_PREFIX}{name}": weights[name] for name in weights})

    def models(place: Place) -> Iterator[tuple[str, Model]]:
        for number, kind in enumerate(options.models.split(",")):
            config = engine_config(wrapped if kind == "kimi" else text, bool(options.device), place.stages)
            if number == 0:
                join(config, scratch, place)
            prefix = WRAPPER_PREFIX if kind == "kimi" else ""
            yield MODELS[kind], Model(config, load(config, weights, prefix, device), device, place)

    every: list[Held] = []
    with earlier_stages(options.stages, lambda place: be_stage(place, models(place), runs)):
        truth = reference(text, options.layers)
        for name, model in models(Place(options.stages - 1, options.stages)):
            for taps, records in check_model(name, model, runs, truth):
                every += taps
                result["taps"] += records
                fault = name_fault(taps)
                if fault.name != MATCHES:
                    raise FaultError(fault.name, f"{name}: {fault.name}: {fault.detail}")
    worst = max(record["max_abs_error"] for record in result["taps"])
    cut = f" in {options.stages} stages" if options.stages > 1 else ""
    result.update(
        verdict="passed",
        fault=MATCHES,
        message=(
            f"{len(every)} taps of {', '.join(MODELS[kind] for kind in options.models.split(','))} in vLLM "
            f"{result['vllm_version']} hold the streams that their ids name, within {worst:.1e} of transformers "
            f"({options.layers} layers{cut}, float32, {result['device']})"
        ),
    )


@contextlib.contextmanager
def earlier_stages(stages: int, run: Callable[[Place], None]) -> Iterator[None]:
    """Have a process for each stage but the last, which is this process. None outlives the block."""
    pids: list[int] = []
    try:
        for stage in range(stages - 1):
            if (pid := os.fork()) == 0:
                try:
                    run(Place(stage, stages))
                finally:
                    os._exit(0)
            pids.append(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def be_stage(place: Place, models: Iterator[tuple[str, Model]], runs: Sequence[Run]) -> None:
    """Do the part of an earlier stage in what ``check_model`` does; what goes wrong is for the last stage to tell."""
    try:
        for _, model in models:
            model.run()
            for run in runs:
                model.declare(run.ids)
                model.run()
    except Exception as error:
        traceback.print_exc()
        place.send(meaning_of(error))


def _imports(options: argparse.Namespace, result: dict[str, Any]) -> str:
    available, needed = available_mb(Path("/proc/meminfo").read_text()), MEMORY_MB + STAGE_MB * (options.stages - 1)
    if available < needed:
        raise NotRunError(f"it needs {needed} MB of memory, and {available} MB are available")
    try:
        import torch
        import transformers
        import vllm
    except (ImportError, OSError) as error:
        raise NotRunError(f"the environment cannot be imported here ({_line(error)})") from error
    result.update(vllm_version=vllm.__version__, transformers_version=transformers.__version__)
    torch.set_num_threads(options.threads)
    device = platform_of(options.device)
    result["device"] = f"GPU {options.device}" if options.device else "CPU"
    if device == "cpu" and hasattr(torch, "accelerator"):
        # As vLLM's worker for CPUs does: torch refuses to empty the cache of an accelerator that is not there.
        torch.accelerator.empty_cache = lambda: None
    return device


def available_mb(meminfo: str) -> int:
    """Return the memory that is available, in MB, from the text of /proc/meminfo."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) >> 10


def _runs(options: argparse.Namespace) -> list[Run]:
    layers = options.layers
    ids = options.ids or (2, layers // 2, layers - 3)
    outside = [id_ for id_ in ids if not 0 <= id_ <= layers]
    if outside:
        raise NotRunError(f"tap id {outside[0]} is none of a model with {layers} layers, which has 0 to {layers}")
    return [Run("declared", tuple(ids)), *([Run("every", tuple(range(layers + 1)))] if options.every_id else [])]


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _short(ids: Sequence[int]) -> str:
    return f"{ids[0]} to {ids[-1]}" if len(ids) > 6 else ", ".join(map(str, ids))


def meaning_of(error: BaseException) -> tuple[str, str]:
    """Return what an exception means: a fault's name where the code under test raised it, else nothing; and why."""
    if isinstance(error, FaultError):
        return error.name, str(error)
    if isinstance(error, NotRunError):
        return "", str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if frames and MODEL_FILES in frames[-1].filename:
        return "raises", _raised_at(error, frames[-1])
    return "", f"it ended early with {_line(error)}"


def verdict_of(error: BaseException, result: dict[str, Any]) -> None:
    """Put into ``result`` what an exception means."""
    fault, why = meaning_of(error)
    if fault:
        result.update(verdict="failed", fault=fault, message=why)
    else:
        result.update(verdict="not_run", message=f"The numeric check was not run: {why}.")


def out_of_time(_signal: int, _frame: FrameType | None) -> None:
    raise NotRunError("its time was over before it had finished")


@contextlib.contextmanager
def only_our_output() -> Iterator[TextIO]:
    """Give the stream for our one line; whatever else is printed, also by libraries of C, goes to the error output."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        yield stream
    finally:
        stream.flush()


def id_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=61, help="number of layers (default: Kimi-K2.5's 61)")
    parser.add_argument("--ids", type=id_list, help="tap ids (default: vLLM's, such as 2,30,58)")
    parser.add_argument("--every-id", action="store_true", help="also check each id from 0 to the number of layers")
    parser.add_argument("--models", default="deepseek,kimi", help="which of deepseek,kimi (default: both)")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages (default: 1)")
    parser.add_argument("--partition", default="", help="layers of each stage, with commas (default: vLLM's rule)")
    parser.add_argument("--device", default="", help="a GPU, by its number or UUID (default: none)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the CPU (default: 1)")
    parser.add_argument("--budget-s", type=int, default=0, help="seconds after which it gives up")
    options = parser.parse_args(arguments)
    unknown = set(options.models.split(",")) - set(MODELS)
    if unknown:
        parser.error(f"--models: {', '.join(sorted(unknown))} is none of {', '.join(MODELS)}")
    if options.layers < 4:
        parser.error("--layers: at least 4")
    if not 1 <= options.stages <= options.layers:
        parser.error("--stages: from 1 to the number of layers")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    started = time.monotonic()
    result: dict[str, Any] = {"gate": "numeric", "verdict": "not_run", "fault": "", "message": "", "taps": []}
    result.update(layers=options.layers, stages=options.stages, vllm_version="", device="")
    # Releases are read-only once made: no bytecode beside their files, whoever runs this.
    sys.dont_write_bytecode = not sys.pycache_prefix
    with only_our_output() as output, tempfile.TemporaryDirectory(prefix="aerie-numeric-") as scratch:
        with contextlib.suppress(OSError):
            os.nice(19)
        quiet_environment(Path(scratch), options.threads, options.device, options.partition)
        signal.signal(signal.SIGALRM, out_of_time)
        signal.alarm(options.budget_s)
        try:
            examine(options, Path(scratch), result)
        except Exception as error:
            traceback.print_exc()
            verdict_of(error, result)
        signal.alarm(0)
        result["seconds"] = round(time.monotonic() - started, 1)
        print(json.dumps(result), file=output)
    return 1 if result["verdict"] == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
