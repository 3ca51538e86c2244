# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin for tests: write the taps that the drafter receives to files, one for each step of the engine.

With TAP_DUMP=DIRECTORY, DIRECTORY/<step>.pt holds `input_ids` and `positions` (T), `hidden` (T, H) and `taps`, a list
of (T, H) tensors, for the T tokens of that step. Steps without a request, such as those for profiling, leave none.
"""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Wrap the proposal of Model Runner V2's EAGLE drafters; vLLM calls this in each of its processes, maybe twice."""
    if "TAP_DUMP" not in os.environ:
        return
    import torch
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    propose = TargetDependentARSpeculator.propose
    if hasattr(propose, "__wrapped__"):
        return
    directory = Path(os.environ["TAP_DUMP"])
    step = itertools.count()

    @functools.wraps(propose)
    def dumping(
        self: Any, input_batch: Any, attn_metadata: Any, slot_mappings: Any, hidden: Any, taps: Any, *rest: Any, **more: Any
    ) -> Any:
        count = input_batch.num_tokens
        record = {
            "input_ids": input_batch.input_ids[:count],
            "positions": input_batch.positions[:count],
            "hidden": hidden[:count],
            "taps": [tap[:count] for tap in taps],
        }
        # A view would be written with all that it is a view of.
        clones = {name: [t.clone() for t in value] if isinstance(value, list) else value.clone() for name, value in record.items()}
        torch.save(clones, directory / f"{next(step):04}.pt")
        return propose(self, input_batch, attn_metadata, slot_mappings, hidden, taps, *rest, **more)

    TargetDependentARSpeculator.propose = dumping
