# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin for tests: write the taps that the drafter receives to files, one for each step of the engine.

With TAP_DUMP=DIRECTORY, DIRECTORY/<step>.pt holds `requests` (their ids), `input_ids` and `positions` (T), `hidden`
(T, H) and `taps`, a list of (T, H) tensors, for the T tokens of that step. Dummy runs, as for profiling, leave none.
"""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


@functools.cache  # vLLM may call it twice in a process
def register() -> None:
    """Wrap the proposal of Model Runner V2's EAGLE drafters."""
    if "TAP_DUMP" not in os.environ:
        return
    import torch
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    propose = TargetDependentARSpeculator.propose
    directory = Path(os.environ["TAP_DUMP"])
    step = itertools.count()

    @functools.wraps(propose)
    def dumping(
        self: DraftModelSpeculator,
        input_batch: InputBatch,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor],
        *rest: object,
        dummy_run: bool = False,
        **more: object,
    ) -> torch.Tensor:
        if not dummy_run:
            count = input_batch.num_tokens
            # A view would be written with all that it is a view of, hence the clones.
            record = {
                "requests": list(input_batch.req_ids),
                "input_ids": input_batch.input_ids[:count].clone(),
                "positions": input_batch.positions[:count].clone(),
                "hidden": last_hidden_states[:count].clone(),
                "taps": [tap[:count].clone() for tap in aux_hidden_states],
            }
            torch.save(record, directory / f"{next(step):04}.pt")
        tensors = (attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states)
        return propose(self, input_batch, *tensors, *rest, dummy_run=dummy_run, **more)

    TargetDependentARSpeculator.propose = dumping
