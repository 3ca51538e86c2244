# SPDX-License-Identifier: Apache-2.0
"""How a model is cut into pipeline stages over a replica's hosts: which layers each has, and which taps it captures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StagesError(ValueError):
    """Stages that vLLM could not make; the text says why and what to do."""


@dataclass(frozen=True)
class Sizes:
    """What a replica is cut by, and what is cut.

    ``hosts``: how many it has. ``tensor`` GPUs share a layer, ``pipeline`` stages follow each other. ``layers`` and
    ``heads`` (of attention) are the target's, ``experts`` its routed ones (0: none, or not known). ``partition`` is
    vLLM's VLLM_PP_LAYER_PARTITION: the layers of each stage, with commas; empty for vLLM's own rule.
    """

    hosts: int
    tensor: int
    pipeline: int
    layers: int
    heads: int
    experts: int = 0
    expert_parallel: bool = False
    partition: str = ""

    @property
    def gpus(self) -> int:
        """Return how many GPUs the service uses on each host."""
        return self.tensor * self.pipeline // self.hosts


class Stage(NamedTuple):
    """One stage: its number from 0, its layers from ``first`` to before ``end``, and the tap ids that it captures."""

    number: int
    first: int
    end: int
    taps: tuple[int, ...]


def partition_of(layers: int, stages: int, partition: str = "") -> list[int]:
    """Return how many layers each stage has, as get_pp_indices of vLLM 0.8 to 0.33 (distributed/utils.py) cuts them.

    What is left over goes to the stages before the last one, which has the norm and the output besides, from the back.
    Raises StagesError where vLLM would not start.
    """
    if not partition:
        if stages > layers:
            raise StagesError(
                f"pipeline-parallel-size is {stages} and the target has {layers} layers: each stage needs one"
            )
        more = layers % stages
        return [layers // stages + (1 if stages - 1 - more <= stage < stages - 1 else 0) for stage in range(stages)]
    try:
        counts = [int(count) for count in partition.split(",")]
    except ValueError:
        raise StagesError(f"VLLM_PP_LAYER_PARTITION is {partition}: it must be numbers with commas") from None
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise StagesError(
            f"VLLM_PP_LAYER_PARTITION is {partition}: it must be {stages} numbers (pipeline-parallel-size), each at "
            f"least 1, that make {layers} layers together"
        )
    return counts


def stages(layers: int, count: int, tap_ids: Sequence[int], partition: str = "") -> list[Stage]:
    """Return the stages of a target; each tap belongs to the one that captures it with the patch set eagle3-pp.

    Tap k is the stream that enters layer k. On a boundary it is the end of the stage before, which captures it and
    sends it on; the embedding (0) is the first stage's.
    """
    result = []
    first = 0
    for number, size in enumerate(partition_of(layers, count, partition)):
        end = first + size
        taps = (tap for tap in sorted(set(tap_ids)) if first < tap <= end or tap == first == 0)
        result.append(Stage(number, first, end, tuple(taps)))
        first = end
    return result


def problems(sizes: Sizes) -> Iterator[str]:
    """Yield why a model cannot be cut in this way, one sentence each."""
    if sizes.pipeline % sizes.hosts:
        yield (
            f"pipeline-parallel-size is {sizes.pipeline} and the replica has {sizes.hosts} hosts: leave it out, "
            f"or give each host as many stages, such as {sizes.hosts}"
        )
    if sizes.heads % sizes.tensor:
        yield (
            f"tensor-parallel-size is {sizes.tensor} and does not divide the target's {sizes.heads} attention heads: "
            f"take {_below(sizes.tensor, sizes.heads)}"
        )
    if sizes.expert_parallel and 0 < sizes.experts < sizes.tensor:
        yield (
            f"enable-expert-parallel spreads {sizes.experts} experts over {sizes.tensor} GPUs: each needs one; lower "
            "tensor-parallel-size"
        )
    try:
        partition_of(sizes.layers, sizes.pipeline, sizes.partition)
    except StagesError as error:
        yield str(error)


def describe(cut: Sequence[Stage], hosts: Sequence[str]) -> list[str]:
    """Return a line for each stage: where it is, its layers and its taps."""
    return [
        f"stage {stage.number} on {_where(stage.number * len(hosts) // len(cut), hosts)}: layers {stage.first} to "
        f"{stage.end - 1} ({stage.end - stage.first}), {_taps(stage, len(cut))}"
        for stage in cut
    ]


def _where(place: int, hosts: Sequence[str]) -> str:
    # vLLM puts the driver's host first; the others come in the order of Ray's random ids.
    return hosts[place] if place == 0 or len(hosts) == 2 else f"one of {', '.join(hosts[1:])}"


def _taps(stage: Stage, count: int) -> str:
    if not stage.taps:
        return "no taps"
    words = [
        str(tap) + (" (on the boundary)" if tap == stage.end and stage.number < count - 1 else "") for tap in stage.taps
    ]
    return f"tap{'s' if len(words) > 1 else ''} {', '.join(words)}"


def _below(size: int, heads: int) -> int:
    return next(candidate for candidate in range(size, 0, -1) if heads % candidate == 0)
