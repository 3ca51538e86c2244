#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the hidden states that a release's own vLLM gives for a reference's tokens, as a dump of the same format.

    venv/bin/python dump_deployed.py --config serve.yaml --reference REFERENCE --out FILE [--streams none|near|all]

Loads the target as the release serves it (its options, parallelism and quantisation), without a server and without
speculation, runs the tokens of the reference in one step, and records what the model's EAGLE-3 interface gives for the
reference's tap ids. It needs the GPUs: the service must not run meanwhile. The format is that of
tools/dump_hidden_states.py; `--streams near` (the default) adds the streams beside each tap.

vLLM's speculation method `extract_hidden_states` is not used: in 0.32.0 it needs CUDA and refuses models with latent
attention, which DeepSeek-V3 and Kimi-K2.5 are. The taps come from the same interface.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEAR = 2


class Recorder:
    """What vLLM's workers have besides their own methods; the target's model keeps the taps of its last step."""

    def aerie_record(self, ids: Sequence[int]) -> None:
        """Have the model capture ``ids``, and hand the runner what it would get without them."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        model.set_aux_hidden_state_layers(tuple(ids))
        self._aerie_taps: list[Any] = []

        def keep(_module: object, _inputs: object, output: Any) -> Any:  # noqa: ANN401 - a hook of torch
            if not isinstance(output, tuple):
                return output
            final, taps = output
            self._aerie_taps = [tap.detach() for tap in taps]
            return final

        model.register_forward_hook(keep)

    def aerie_write(self, path: str, token_ids: Sequence[int], tap_ids: Sequence[int], ids: Sequence[int]) -> int:
        """Write the dump, on the first worker; return how many taps there were."""
        import torch
        from safetensors.torch import save_file

        taps = self._aerie_taps
        if self.rank == 0 and len(taps) == len(ids):  # type: ignore[attr-defined]
            tensors = {
                f"{'hidden_states' if id_ in tap_ids else 'streams'}.{id_}": tap[: len(token_ids)].cpu().contiguous()
                for id_, tap in zip(ids, taps)
            }
            tensors["token_ids"] = torch.tensor(token_ids, dtype=torch.int64)
            tensors["tap_ids"] = torch.tensor(tap_ids, dtype=torch.int64)
            save_file(tensors, path, metadata={"format": "aerie-hidden-states", "made_by": "vLLM"})
        return len(taps)


def wanted_ids(tap_ids: Sequence[int], layers: int, streams: str) -> list[int]:
    """Return the ids to capture. Ids 0 and ``layers``, which some releases lose, only where they are taps."""
    others: set[int] = set()
    if streams == "all":
        others = set(range(1, layers))
    elif streams == "near":
        others = {id_ + step for id_ in tap_ids for step in range(-NEAR, NEAR + 1)} & set(range(1, layers))
    return sorted(others | set(tap_ids))


def engine_arguments(config: Path, tokens: int) -> Any:  # noqa: ANN401 - vllm.engine.arg_utils.EngineArgs
    """Return what `vllm serve --config` makes of the release's options, without speculation and without graphs."""
    from vllm.engine.arg_utils import EngineArgs

    serve = importlib.import_module("vllm.entrypoints.cli.serve")
    parser = serve.FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(subparsers)
    arguments = EngineArgs.from_cli_args(parser.parse_args(["serve", "--config", str(config)]))
    arguments.speculative_config = None
    arguments.enforce_eager = True
    arguments.enable_prefix_caching = False
    # All tokens in one step.
    arguments.max_num_batched_tokens = max(tokens, arguments.max_num_batched_tokens or 0, 2048)
    arguments.worker_extension_cls = f"{Path(__file__).stem}.{Recorder.__name__}"
    return arguments


def record(options: argparse.Namespace) -> str:
    from safetensors import safe_open
    from vllm import LLM, SamplingParams

    with safe_open(options.reference, framework="pt") as reference:
        token_ids = reference.get_tensor("token_ids").tolist()
        tap_ids = sorted(set(reference.get_tensor("tap_ids").tolist()))
    llm = LLM.from_engine_args(engine_arguments(options.config, len(token_ids)))
    text = llm.llm_engine.model_config.hf_text_config
    ids = wanted_ids(tap_ids, text.num_hidden_layers, options.streams)
    llm.collective_rpc("aerie_record", args=(ids,))
    llm.generate([{"prompt_token_ids": token_ids}], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    counts = llm.collective_rpc("aerie_write", args=(str(options.out), token_ids, tap_ids, ids))
    if counts[0] != len(ids):
        raise SystemExit(f"{counts[0]} taps were delivered for the ids {ids}: the model's EAGLE-3 interface loses some")
    return f"{options.out}: {len(token_ids)} tokens, tap ids {tap_ids}, {len(ids) - len(tap_ids)} other streams"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the release's serve.yaml")
    parser.add_argument("--reference", type=Path, required=True, help="a dump, for its token ids and tap ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--streams", choices=["none", "near", "all"], default="near")
    print(json.dumps({"dump": record(parser.parse_args(arguments))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
