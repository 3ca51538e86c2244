# SPDX-License-Identifier: Apache-2.0
"""What a drafter's tap ids mean: training tools count layers in two ways, one apart.

vLLM and speculators: id k is the stream entering layer k. SGLang, SpecForge and TorchSpec: id k is the output of layer
k, which is vLLM's k + 1. Nothing in the weights tells the two apart, and a drafter that gets the neighbouring layers
runs and is useless; so the meaning is taken from the user, or from evidence, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ansible.module_utils.aerie.drafter import Drafter, default_tap_ids, eagle_config

AUTO, VLLM = "auto", "vllm"
# How far each dialect's ids are from vLLM's.
SHIFTS = {VLLM: 0, "sglang": 1, "specforge": 1, "torchspec": 1}
CHOICES = (AUTO, *SHIFTS)

# Whose name, in a key or a text of the configuration or the weights' metadata, says who wrote it.
_PRODUCERS = {"speculators": VLLM, "specforge": "specforge", "torchspec": "torchspec", "sglang": "sglang"}
# Fields of eagle_config that TorchSpec's configurations have.
_TORCHSPEC_FIELDS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm")


@dataclass(frozen=True)
class Evidence:
    """Something about a drafter that speaks for a dialect."""

    dialect: str
    why: str


@dataclass(frozen=True)
class Reading:
    """The declared ids read in ``dialects``: as vLLM's ids, and what speaks for it."""

    dialects: tuple[str, ...]
    tap_ids: list[int]
    evidence: tuple[str, ...]
    chosen: bool

    def as_dict(self) -> dict[str, object]:
        """Return the reading as JSON-able data."""
        return {
            "dialects": list(self.dialects),
            "tap_ids": self.tap_ids,
            "evidence": list(self.evidence),
            "chosen": self.chosen,
        }


@dataclass(frozen=True)
class Resolution:
    """What the ids mean: the dialect and vLLM's ids, both None if that is not to be told; and both readings.

    A drafter that declares no ids has no readings.
    """

    dialect: str | None
    tap_ids: list[int] | None
    readings: tuple[Reading, ...]


def resolve(drafter: Drafter, num_layers: int, wanted: str = AUTO) -> Resolution:
    """Return what the ids of ``drafter`` mean, for a target of ``num_layers`` layers.

    ``wanted`` is one of CHOICES; with AUTO the evidence decides, and where it is even nothing does.
    """
    declared = drafter.tap_ids.declared
    if declared is None:
        return Resolution(None, None, ())
    evidence = list(_evidence(drafter, declared, num_layers))
    dialect = _weigh(evidence) if wanted == AUTO else wanted
    readings = tuple(
        Reading(
            dialects=tuple(name for name, own in SHIFTS.items() if own == shift),
            tap_ids=[item + shift for item in declared],
            evidence=tuple(item.why for item in evidence if SHIFTS[item.dialect] == shift),
            chosen=dialect is not None and SHIFTS[dialect] == shift,
        )
        for shift in sorted(set(SHIFTS.values()))
    )
    ids = None if dialect is None else [item + SHIFTS[dialect] for item in declared]
    return Resolution(dialect, ids, readings)


def _weigh(evidence: list[Evidence]) -> str | None:
    """Return the dialect that most of the evidence speaks for, or None where it is even or there is none."""
    votes = {shift: [item for item in evidence if SHIFTS[item.dialect] == shift] for shift in set(SHIFTS.values())}
    best, other = sorted(votes.values(), key=len, reverse=True)
    return best[0].dialect if len(best) > len(other) else None


def _evidence(drafter: Drafter, declared: list[int], num_layers: int) -> Iterator[Evidence]:
    ids = sorted(declared)
    inputs = default_tap_ids(num_layers)
    if ids == inputs:
        yield Evidence(VLLM, f"the default of vLLM and speculators for {num_layers} layers")
    elif ids == [item - 1 for item in inputs]:
        yield Evidence("specforge", f"the default of SpecForge and TorchSpec for {num_layers} layers")
    if ids[-1] == num_layers:
        yield Evidence(VLLM, f"a target of {num_layers} layers has no layer {num_layers}, whose output it could be")
    yield from _producers(drafter)


def _producers(drafter: Drafter) -> Iterator[Evidence]:
    """Yield, once for each tool, where the drafter names who made it."""
    if drafter.is_speculators:
        yield Evidence(VLLM, f"speculators_config in {drafter.config}")
    places: list[tuple[Mapping[str, object], str]] = [
        (drafter.document, drafter.config),
        (eagle_config(drafter.settings), f"eagle_config of {drafter.config}"),
    ]
    places += [(header.metadata, f"the metadata of {header.path}") for header in drafter.checkpoint.shards.values()]
    seen = {"speculators"} if drafter.is_speculators else set()
    for fields, place in places:
        for key, value in fields.items():
            text = f"{key} {value}".lower() if isinstance(value, str) else key.lower()
            for tool, dialect in _PRODUCERS.items():
                if tool in text and tool not in seen:
                    seen.add(tool)
                    yield Evidence(dialect, f"{key} names {tool} in {place}")
    named = [name for name in _TORCHSPEC_FIELDS if name in eagle_config(drafter.settings)]
    if named and "torchspec" not in seen:
        yield Evidence("torchspec", f"{named[0]}, a field of TorchSpec's, in eagle_config of {drafter.config}")
