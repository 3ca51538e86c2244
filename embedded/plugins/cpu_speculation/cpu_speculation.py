# SPDX-License-Identifier: Apache-2.0
"""Test only: speculative decoding on the CPU build of vLLM 0.17.1, whose runner refuses it.

    PYTHONPATH=embedded/plugins/cpu_speculation vllm serve ... --worker-cls cpu_speculation.Worker

Three Triton kernels get equivalents in PyTorch, for greedy requests only, and the CPU's runner loads models as the
GPU's does. Models, drafters and configuration are vLLM's own, and so is the question whether a model has the interface
of EAGLE-3: what `make proof-interface` shows is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from vllm.triton_utils import triton
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode import eagle
from vllm.v1.worker import cpu_model_runner, cpu_worker, gpu_model_runner

# In a row of sampled tokens: none here.
NO_TOKEN = -1


class Kernel:
    """A function that is launched as Triton's kernels are: ``kernel[grid](...)``. It does the whole grid at once."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run


def accept_greedily(
    output: torch.Tensor,
    ends: torch.Tensor,
    drafted: torch.Tensor,
    wanted: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_drafts: int,
) -> None:
    """Write each request's tokens: its drafts up to the first wrong one, then the target's own token.

    output: (requests, max_drafts + 1). Drafts of all requests stand one after the other in ``drafted`` and ``wanted``
    (the target's choices); ``ends`` says where each request's end. ``is_greedy`` is None when all requests are greedy.
    """
    if is_greedy is not None:
        raise NotImplementedError("cpu_speculation serves greedy requests only")
    start = 0
    for row, end in enumerate(ends.tolist()):
        drafts, targets = drafted[start:end].tolist(), [*wanted[start:end].tolist(), int(bonus[row])]
        accepted = next((place for place, draft in enumerate(drafts) if draft != targets[place]), len(drafts))
        output[row, : accepted + 1] = torch.tensor(targets[: accepted + 1])
        start = end


def last_tokens(
    sampled: torch.Tensor,
    discarded: torch.Tensor,
    backup: torch.Tensor,
    last: torch.Tensor,
    counts: torch.Tensor,
    vocabulary: int,
    width: int,
    requests: int,
    stride: int,
    **tuning: int,
) -> None:
    """Write each request's last sampled token (or its ``backup``) and how many it has; sampled: (requests, width)."""
    valid = (sampled != NO_TOKEN) & (sampled < vocabulary) & ~discarded[:requests, None]
    places = torch.where(valid, torch.arange(width), -1).amax(dim=1)
    tokens = sampled.gather(1, places.clamp(min=0)[:, None]).squeeze(1)
    last.copy_(torch.where(places >= 0, tokens, backup[:requests]))
    counts.copy_(valid.sum(dim=1))


def rows_to_draft_from(
    ends: torch.Tensor,
    counts: torch.Tensor,
    query_starts: torch.Tensor,
    rows: torch.Tensor,
    rejected: torch.Tensor,
    requests: int,
) -> None:
    """Write how many drafts of each request were rejected, and the row of its last accepted token in the batch."""
    drafted = ends[:requests].diff(prepend=ends.new_zeros(1))
    rejected.copy_(torch.where(drafted > 0, drafted + 1 - counts[:requests], 0))
    rows.copy_(query_starts[1 : requests + 1] - 1 - rejected)


class Runner(cpu_model_runner.CPUModelRunner):
    """The CPU's model runner, with speculation."""

    # With the drafter, and with the question whether the model has the interface of EAGLE-3.
    load_model = gpu_model_runner.GPUModelRunner.load_model

    def __init__(self, vllm_config: Any, device: torch.device) -> None:  # noqa: ANN401
        # All that CPUModelRunner's constructor does, but for its refusal.
        with cpu_model_runner._torch_cuda_wrapper():
            gpu_model_runner.GPUModelRunner.__init__(self, vllm_config, device)
        self.use_cuda_graph = False
        self.cascade_attn_enabled = False
        self._postprocess_tensors()

    def _copy_draft_token_ids_to_cpu(self, scheduler_output: object, zeros_only: bool = False) -> None:
        """Copy without CUDA's streams."""
        self._draft_token_req_ids = self.input_batch.req_ids.copy()
        if torch.is_tensor(self._draft_token_ids):
            drafts = self._draft_token_ids
            self.draft_token_ids_cpu[: len(drafts)] = 0 if zeros_only else drafts


rejection_sampler.rejection_greedy_sample_kernel = Kernel(accept_greedily)
eagle.eagle_prepare_next_token_padded_kernel = Kernel(last_tokens)
eagle.eagle_prepare_inputs_padded_kernel = Kernel(rows_to_draft_from)
if not hasattr(triton, "next_power_of_2"):
    # What stands in for Triton on a machine without a GPU lacks it.
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
# There is no device whose memory could be measured.
gpu_model_runner.DeviceMemoryProfiler = lambda: nullcontext(SimpleNamespace(consumed_memory=0))

cpu_worker.CPUModelRunner = Runner
Worker = cpu_worker.CPUWorker
