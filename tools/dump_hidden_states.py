#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a dump of hidden states with Hugging Face transformers: the reference that a deployed target is compared with.

    tools/dump_hidden_states.py TARGET --ids 2,30,58 --tokens tokens.json --out reference.safetensors

TARGET is a checkpoint that transformers loads (of Kimi-K2.5, the text model in it), tokens.json a list of token ids.
Runs where torch, transformers and the memory for the target are. The file is described in docs/hidden-states.md; with
`--streams near` (the default) it also has the two streams on each side of every tap, with `all` those of all layers.
What a training tool has kept can be written in the same format instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Without Ansible: its module_utils of ours need nothing of it.
ROOT = Path(__file__).resolve().parents[1]
for name in ("ansible", "ansible.module_utils"):
    sys.modules.setdefault(name, ModuleType(name))
sys.modules["ansible.module_utils"].__path__ = [str(ROOT / "module_utils")]

from ansible.module_utils.aerie.numeric_check import record_forms  # noqa: E402
from ansible.module_utils.aerie.tap_dump import PREFIXES, TAPS  # noqa: E402
from ansible.module_utils.aerie.tap_faults import STREAM  # noqa: E402

NEAR = 2
TEXT = "language_model."


def text_checkpoint(target: Path, scratch: Path) -> Path:
    """Return ``target``, or for Kimi-K2.5 a checkpoint of the text model in it, as the DeepSeek-V3 that it is."""
    from safetensors.torch import load_file, save_file

    config = json.loads((target / "config.json").read_text())
    if "text_config" not in config:
        return target
    text = {**config["text_config"], "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (scratch / "config.json").write_text(json.dumps(text))
    for number, shard in enumerate(sorted(target.glob("*.safetensors"))):
        tensors = {key.removeprefix(TEXT): value for key, value in load_file(shard).items() if key.startswith(TEXT)}
        save_file(tensors, scratch / f"model-{number:05}.safetensors", metadata={"format": "pt"})
    names = {key: path.name for path in sorted(scratch.glob("*.safetensors")) for key in _keys(path)}
    (scratch / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return scratch


def _keys(path: Path) -> Iterable[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as shard:
        return list(shard.keys())


def dump(model: Any, tokens: Sequence[int], tap_ids: Sequence[int], streams: str, dtype: str) -> dict[str, Any]:  # noqa: ANN401
    """Return the dump's tensors."""
    import torch

    forms = record_forms(model, tokens)
    last = max(forms[STREAM])
    near = {id_ + step for id_ in tap_ids for step in range(-NEAR, NEAR + 1)}
    kept = {"none": set(), "near": near, "all": set(forms[STREAM])}[streams] - set(tap_ids)
    tensors = {f"{TAPS}.{id_}": forms[STREAM][id_] for id_ in tap_ids}
    for form, prefix in PREFIXES.items():
        layers = kept if form == STREAM else set(tap_ids) if streams != "none" else set()
        tensors |= {f"{prefix}.{layer}": forms[form][layer] for layer in sorted(layers) if layer in forms[form]}
    if not set(tap_ids) <= set(range(last + 1)):
        raise SystemExit(f"the target has the tap ids 0 to {last}, and {list(tap_ids)} were asked for")
    tensors = {key: value.to(getattr(torch, dtype)).cpu().contiguous() for key, value in tensors.items()}
    whole = {"token_ids": list(tokens), "tap_ids": sorted(set(tap_ids))}
    return tensors | {key: torch.tensor(value, dtype=torch.int64) for key, value in whole.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--ids", type=lambda text: [int(part) for part in text.split(",")], required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="a JSON list of token ids; 32 to 256 are enough")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--streams", choices=["none", "near", "all"], default="near")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the file")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32", help="of the model")
    options = parser.parse_args(arguments)

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    tokens = json.loads(options.tokens.read_text())
    with tempfile.TemporaryDirectory(dir=options.out.parent) as scratch:
        source = text_checkpoint(options.target, Path(scratch))
        dtype = getattr(torch, options.compute)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="eager").eval()
    tensors = dump(model, tokens, options.ids, options.streams, options.dtype)
    metadata = {"format": "aerie-hidden-states", "made_by": "transformers", "model": str(options.target)}
    save_file(tensors, options.out, metadata=metadata)
    print(f"{options.out}: {len(tokens)} tokens, tap ids {sorted(set(options.ids))}, {len(tensors) - 2} tensors")


if __name__ == "__main__":
    main()
