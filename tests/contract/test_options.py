# SPDX-License-Identifier: Apache-2.0
"""The options of every release are read from its own source, without running it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import releases
import wheels
import yaml
from ansible.module_utils.aerie.vllm_options import Options, options_of
from ansible.module_utils.aerie.wheel import Package, package_of_wheel

MEMBERS = (
    "engine/arg_utils.py",
    "entrypoints/openai/cli_args.py",
    "entrypoints/common/cli_args.py",
    "entrypoints/launchers/cli_args.py",
    "entrypoints/cli/serve.py",
    "config/speculative.py",
    "config/compilation.py",
)
ROOT = Path(__file__).resolve().parents[2]
RELEASES = {str(release): release for release in releases.load()}
# Names of options that import code which is not vLLM's, trust what clients send, or log what they say.
OPENING = re.compile(r"\b(plugin|trust|cls|class-overrides|log-(deltas|outputs|requests))\b")
# They close what they name, or count.
CLOSING = {"disable-log-requests", "max-lora-cls-labels"}

# Options that came, went and were renamed, as the releases' notes have it: (option, first release, first without it).
LIVES = [
    ("max-model-len", "0.11.0", ""),
    ("speculative-config", "0.11.0", ""),
    ("shutdown-timeout", "0.18.0", ""),
]


@pytest.fixture(scope="module")
def options() -> dict[str, Options]:
    wanted = {name: (release.distribution, release.version) for name, release in RELEASES.items()}
    with pytest.MonkeyPatch.context() as patch:
        # Apart from the partial wheels of other tests: one that lacks members is replaced.
        patch.setattr(wheels, "CACHE", wheels.CACHE / "serve-options")
        paths = wheels.partial_wheels(wanted.values(), ["vllm/__init__.py", *(f"vllm/{path}" for path in MEMBERS)])
    return {name: options_of(_of_members(paths[release])) for name, release in wanted.items()}


def _of_members(path: Path) -> Package:
    """Return the package of a partial wheel, as if it had these files only."""
    package = package_of_wheel(path)
    return replace(package, recorded={name: package.recorded[name] for name in MEMBERS if name in package.recorded})


@pytest.mark.parametrize("version", RELEASES)
def test_every_release_is_understood(options: dict[str, Options], version: str) -> None:
    read = options[version]
    assert len(read.names) > 150
    assert {"method", "model", "num_speculative_tokens"} <= read.keys["speculative-config"]
    assert "custom_ops" in read.keys["compilation-config"]
    # What inventory/sample and the demo say.
    assert read.problems({"trust-remote-code": True, "enforce-eager": True, "no-enable-prefix-caching": True}) == []
    assert read.problems({"max-modl-len": 1}) == [
        f"vLLM {read.version} has no option max-modl-len: the nearest that it has is max-model-len"
    ]


@pytest.mark.parametrize(("option", "first", "gone"), LIVES)
def test_an_option_is_there_from_its_first_release_to_its_last(
    options: dict[str, Options], option: str, first: str, gone: str
) -> None:
    order = [name for name, release in RELEASES.items() if release.distribution == "vllm"]
    have = [version for version in order if option in options[version].names]
    assert have == order[order.index(first) : order.index(gone) if gone else None]


@pytest.mark.parametrize("version", RELEASES)
def test_an_option_that_opens_the_service_is_refused_until_it_is_spelled_out(
    options: dict[str, Options], version: str
) -> None:
    role = yaml.safe_load((ROOT / "roles/vllm_service/vars/main.yml").read_text())
    dangerous = re.compile("|".join(role["_vllm_service_dangerous_options"]))
    opening = {name for name in options[version].names if OPENING.search(name)} - CLOSING
    assert {"trust-remote-code", "tool-parser-plugin", "worker-cls"} <= opening
    assert {name for name in opening if not dangerous.fullmatch(name)} == set()
