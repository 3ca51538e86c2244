# SPDX-License-Identifier: Apache-2.0
"""The rotary position embedding that a model's configuration declares, in either of the two ways of writing it down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# What vLLM 0.15 to 0.33 can build, and what each kind needs to be told.
_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "mrope": (),
    "longrope": (),
    "proportional": (),
    "ntk": ("factor",),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# DeepSeek's yarn is the same with two more settings.
_SAME_AS = {"deepseek_yarn": "yarn", "deepseek_llama_scaling": "yarn"}
# Settings of the scaling that say where it lies rather than what it is.
_NAMES = {"type", "rope_type", "rope_theta"}


@dataclass(frozen=True)
class Rope:
    """A declared rotary embedding: ``theta`` is its base, ``scaling`` the settings of a scaling of kind ``kind``."""

    theta: float | None
    kind: str
    scaling: Mapping[str, object]

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Rope:
        """Read ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` as transformers 5 writes both."""
        fields = rope_fields(config)
        scaling = fields["rope_scaling"]
        settings = scaling if isinstance(scaling, dict) else {}
        kind = str(settings.get("rope_type") or settings.get("type") or "default")
        theta = fields["rope_theta"]
        return cls(
            float(theta) if isinstance(theta, (int, float)) else None,
            _SAME_AS.get(kind, kind),
            {name: value for name, value in settings.items() if name not in _NAMES and value is not None},
        )

    @property
    def reach(self) -> float | None:
        """How many positions a stretched range has, or None where nothing is stretched."""
        factor, original = self.scaling.get("factor"), self.scaling.get("original_max_position_embeddings")
        if self.kind == "default" or not isinstance(factor, (int, float)) or not isinstance(original, (int, float)):
            return None
        return factor * original

    @property
    def problem(self) -> str | None:
        """What keeps vLLM from building it, or from meaning anything, or None."""
        if self.kind not in _NEEDS:
            return f"vLLM knows no scaling of type {self.kind}"
        missing = [name for name in _NEEDS[self.kind] if not isinstance(self.scaling.get(name), (int, float))]
        if missing:
            return f"scaling of type {self.kind} needs {' and '.join(missing)}"
        too_far = self.reach is not None and not math.isfinite(self.reach)
        return "factor x original_max_position_embeddings is no finite number" if too_far else None

    def scales_like(self, other: Rope) -> bool:
        """Tell whether both stretch positions alike; settings that only one of them states are taken as equal."""
        shared = self.scaling.keys() & other.scaling.keys()
        return self.kind == other.kind and all(self.scaling[name] == other.scaling[name] for name in shared)

    def __str__(self) -> str:
        settings = [f"{name} {value}" for name, value in sorted(self.scaling.items())]
        return ", ".join([f"theta {self.theta:g}" if self.theta else "no theta", self.kind, *settings])


def rope_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Return ``rope_theta`` and ``rope_scaling`` of ``config``, None where it does not say, however it is written."""
    parameters = config.get("rope_parameters")
    both = dict(parameters) if isinstance(parameters, dict) else {}
    theta = config.get("rope_theta", both.pop("rope_theta", None))
    return {"rope_theta": theta, "rope_scaling": config.get("rope_scaling") or both or None}
