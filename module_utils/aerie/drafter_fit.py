# SPDX-License-Identifier: Apache-2.0
"""The two things that a drafter must fit: its target, and how it will be served."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ansible.module_utils.aerie.rope import Rope

Version = tuple[int, ...]

# Where the service's options stand, for messages.
OPTIONS = "the service's options"

RUNNER_V2_BY_DEFAULT: Version = (0, 29)
EAGLE3_OVER_STAGES: Version = (0, 30)

# How vLLM reads --max-model-len.
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_COUNT = re.compile(r"(\d+)([KMGT]?)|(\d+\.\d+|\d+)([kmgt])")


@dataclass(frozen=True)
class Target:
    """The facts of target_check that a drafter must fit."""

    config: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rope: Rope
    dtype: str | None

    @classmethod
    def from_facts(cls, facts: Mapping[str, object]) -> Target:
        """Read the ``target`` that target_check returned. Raises ValueError naming what is missing from it."""
        found = facts.get("text")
        text = found if isinstance(found, dict) else {}
        numbers = {}
        for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
            value = text.get(name)
            if type(value) is not int:
                raise ValueError(f"text.{name} is {value!r}, expected an integer")
            numbers[name] = value
        dtype = text.get("dtype")
        return cls(
            config=str(facts.get("config", facts.get("path"))),
            rope=Rope.read(text),
            dtype=dtype if isinstance(dtype, str) else None,
            **numbers,
        )


@dataclass(frozen=True)
class Service:
    """How the drafter will be served.

    ``taps_proved``: a patch set whose proof covers every tap id and pipeline size is part of the release.
    ``tap_dialect``: what the drafter's tap ids mean; one of dialects.CHOICES.
    ``max_model_len``, ``attention_backend`` and ``kv_cache_dtype`` are the service's, the ones that begin with
    ``draft_`` those of its speculative-config; None where the service leaves the choice to vLLM.
    """

    vllm_version: str
    model_runner: str = "auto"
    max_model_len: int | None = None
    taps_proved: bool = False
    tap_dialect: str = "auto"
    pipeline_parallel_size: int = 1
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    draft_attention_backend: str | None = None
    draft_kv_cache_dtype: str | None = None
    draft_max_model_len: int | None = None
    release: Version = field(init=False)

    def __post_init__(self) -> None:
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.vllm_version)
        if match is None:
            raise ValueError(f"{self.vllm_version!r} is not a vLLM version such as 0.33.0")
        object.__setattr__(self, "release", tuple(int(part or 0) for part in match.groups()))

    @property
    def runner(self) -> str:
        """The model runner that will read the tap ids: v1 or v2.

        Where V2 came before EAGLE-3 over pipeline stages, vLLM itself falls back to V1 for more than one stage.
        """
        if self.model_runner != "auto":
            return self.model_runner
        if self.release < RUNNER_V2_BY_DEFAULT:
            return "v1"
        return "v1" if self.pipeline_parallel_size > 1 and self.release < EAGLE3_OVER_STAGES else "v2"

    def names_runner(self) -> str:
        """Name runner and release for a message."""
        return f"Model Runner {self.runner.upper()} of vLLM {self.vllm_version}"


def context_length(text: str) -> int | None:
    """Return the tokens that vLLM makes of the option max-model-len; None for ``auto``, where the target's count.

    As vLLM has it, 128K is 128 x 1024 and 128k is 128 x 1000. Raises ValueError for what is no number of tokens.
    """
    text = text.strip()
    if text == "-1" or text.lower() == "auto":
        return None
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"max_model_len is {text!r}, expected tokens such as 131072, 128K, 128k or auto")
    whole, binary, number, decimal = match.groups()
    return int(whole) * _BINARY.get(binary, 1) if whole else int(float(number) * _DECIMAL[decimal])
