# SPDX-License-Identifier: Apache-2.0
"""What the contract test expects of every release (releases.yml), and the support table in the documentation.

``python tests/contract/releases.py`` writes that table; a test asserts that it is up to date.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DATA = Path(__file__).with_name("releases.yml")
DOCUMENT = Path(__file__).parents[2] / "docs" / "patch-sets.md"
SETS = ("eagle3-interface", "eagle3-taps", "eagle3-pp")
DEEPSEEK, KIMI = "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"
_BEGIN, _END = "<!-- support table: begin -->\n", "<!-- support table: end -->\n"


class Release(NamedTuple):
    """One release: the state of every set, the models it has, what it can do with Aerie, and the exact bytes."""

    version: str
    states: Mapping[str, str]
    models: Sequence[str]
    capabilities: Mapping[str, bool]
    files: Mapping[str, Mapping[str, str]]
    distribution: str = "vllm"

    @property
    def applying(self) -> str:
        """Return the name of the set that applies."""
        (name,) = [name for name, state in self.states.items() if state == "applies"]
        return name

    def __str__(self) -> str:
        return self.version if self.distribution == "vllm" else f"{self.distribution}-{self.version}"


def load() -> list[Release]:
    """Return the releases, oldest first."""
    content: list[dict[str, Any]] = yaml.safe_load(DATA.read_text())
    return [Release(**entry) for entry in content]


def support_table(releases: Sequence[Release]) -> str:
    """Return the support table: neighbouring releases that are alike share a row."""
    lines = [
        "| vLLM | DeepSeek-V3 | Kimi-K2.5 | Several pipeline stages | Tap ids in the drafter's config.json |",
        "|---|---|---|---|---|",
    ]
    for row, alike in groupby((one for one in releases if one.distribution == "vllm"), key=lambda one: list(_row(one))):
        versions = [release.version for release in alike]
        span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        lines.append(f"| {' | '.join([span, *row])} |")
    return "\n".join(lines) + "\n"


def _row(release: Release) -> Iterator[str]:
    for model in (DEEPSEEK, KIMI):
        yield f"`{release.applying}`" if model in release.models else "refused: the model is not there"
    yield "yes" if release.capabilities["pipeline_parallel"] else "refused"
    if not release.capabilities["declared_tap_ids"]:
        yield "ignored: 2, N // 2, N - 3"
    else:
        yield (
            "top level; Model Runner V1: `eagle_config` too"
            if release.capabilities["nested_tap_ids_v1"]
            else "top level only"
        )


def with_table(document: str, table: str) -> str:
    """Return ``document`` with the text between the two marks replaced by ``table``."""
    before, _, rest = document.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{table}{_END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), support_table(load())))
