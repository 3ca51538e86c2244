# SPDX-License-Identifier: Apache-2.0
"""Patch sets: what one does to a release, decided from the release's own code.

A patch set is a mapping (rendered from ``templates/patches/<name>/set.yml.j2``):

``name``, ``description``
``versions``   the releases that it is written and tested for, such as ``>=0.30,<0.34``
``native``     facts about the code (see ``_holds``); where all hold, the release needs no patch
``requires``   facts without which the set cannot work
``files``      list of ``path`` (in the package) and ``edits`` (see ``edits``)
``proof``      what the symbolic check runs (see ``prove``)

``plan_set`` answers ``native``, ``applies`` or ``refused``; ``make_plan`` turns that into the plan that a host writes.
"""

from __future__ import annotations

import ast
import base64
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible.module_utils.aerie.edits import apply_edits
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.prove import Proof, default_cases, prove
from ansible.module_utils.aerie.source import Refusal, attribute, classes, functions, has_base, unified_diff
from ansible.module_utils.aerie.wheel import Package

NATIVE, APPLIES, APPLIED, REFUSED = "native", "applies", "applied", "refused"
PatchSet = Mapping[str, Any]
_KEYS = {"name", "description", "versions", "native", "requires", "files", "proof"}
_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class FilePlan:
    """One file of the package, before and after."""

    path: str
    pristine: bytes
    patched: bytes

    def diff(self) -> str:
        """Return the change as a unified diff."""
        return unified_diff(f"vllm/{self.path}", self.pristine, self.patched)


@dataclass
class SetPlan:
    """What a patch set does to one release: ``state``, why, and the planned files with their proof."""

    name: str
    state: str
    reason: str
    files: list[FilePlan] = field(default_factory=list)
    proof: Proof = field(default_factory=Proof)
    warnings: list[str] = field(default_factory=list)


def plan_set(package: Package, patch_set: PatchSet, layer_counts: Sequence[int]) -> SetPlan:
    """Decide from the pristine ``package`` what ``patch_set`` does to it; prove it for models of these layer counts."""
    name = _checked(patch_set)["name"]
    release = f"vLLM {package.version}"
    try:
        if all(_holds(package, fact) for fact in patch_set["native"]):
            return SetPlan(name, NATIVE, f"{release} has it: {_describe(patch_set['native'][0])}")
        warnings = _version_warnings(package.version, patch_set)
        for fact in patch_set["requires"]:
            if not _holds(package, fact):
                raise Refusal(f"it needs {_describe(fact)}, which is not there")
        files = [_plan_file(package, name, entry) for entry in patch_set["files"]]
    except Refusal as refusal:
        return SetPlan(name, REFUSED, f"{name} is refused for {release}: {refusal}")
    planned = {file.path: file.patched for file in files}
    proof = _prove(package, planned, patch_set["proof"], layer_counts)
    if proof.failures:
        return SetPlan(name, REFUSED, f"{name} is refused for {release}: {proof.summary}", files, proof, warnings)
    return SetPlan(name, APPLIES, f"{release} needs it; {proof.summary}", files, proof, warnings)


def make_plan(package: Package, plans: Sequence[SetPlan]) -> dict[str, Any]:
    """Return what a host needs to patch: JSON-able; the bytes are base64. At most one set may apply to a release."""
    applying = [plan for plan in plans if plan.state == APPLIES]
    if len(applying) > 1:
        names = " and ".join(plan.name for plan in applying)
        raise Refusal(
            f"{names} both apply to vLLM {package.version}, and a release gets at most one patch set: keep one"
        )
    files = applying[0].files if applying else []
    return {
        "vllm_version": package.version,
        "distribution": package.distribution,
        "set": applying[0].name if applying else None,
        "sets": {plan.name: {"state": plan.state, "reason": plan.reason} for plan in plans},
        "files": [
            {
                "path": file.path,
                "pristine_sha256": sha256_bytes(file.pristine),
                "patched_sha256": sha256_bytes(file.patched),
                "pristine": base64.b64encode(file.pristine).decode(),
                "content": base64.b64encode(file.patched).decode(),
            }
            for file in files
        ],
    }


def _checked(patch_set: PatchSet) -> PatchSet:
    if set(patch_set) != _KEYS or not patch_set["files"] or not patch_set["native"]:
        name = patch_set.get("name", "without a name")
        raise Refusal(f"patch set {name} must have exactly the keys {sorted(_KEYS)}, with files and native filled")
    return patch_set


def _plan_file(package: Package, set_name: str, entry: Mapping[str, Any]) -> FilePlan:
    pristine = package.read(entry["path"])
    return FilePlan(entry["path"], pristine, apply_edits(entry["path"], pristine, set_name, entry["edits"]))


def _prove(
    package: Package, planned: Mapping[str, bytes], proof: Mapping[str, Any], layer_counts: Sequence[int]
) -> Proof:
    def read(path: str) -> bytes:
        return planned[path] if path in planned else package.read(path)

    cases = [
        case
        for layers in layer_counts
        for case in default_cases(layers, proof["pipeline_sizes"], wrapped="wrapper" in proof)
    ]
    return prove(read, proof, cases)


def _holds(package: Package, fact: Mapping[str, str]) -> bool:
    """Tell whether the package's code has what ``fact`` names.

    That is, in the file ``path``, a ``function`` of the module, or a ``class`` with a ``base``, ``method`` or
    ``attribute``.
    """
    if fact["path"] not in package.recorded:
        return False
    try:
        tree = ast.parse(package.read(fact["path"]))
    except (SyntaxError, ValueError) as error:
        raise Refusal(f"{fact['path']} cannot be parsed by this Python: {error}") from error
    if "function" in fact:
        return bool(functions(tree, fact["function"]))
    return any(
        ("base" not in fact or has_base(owner, fact["base"]))
        and ("method" not in fact or bool(functions(owner, fact["method"])))
        and ("attribute" not in fact or attribute(owner, fact["attribute"]) is not None)
        for owner in classes(tree, fact["class"])
    )


def _describe(fact: Mapping[str, str]) -> str:
    kinds = ("function", "class", "base", "method", "attribute")
    return f"{' '.join(f'{kind} {fact[kind]}' for kind in kinds if kind in fact)} in {fact['path']}"


def _version_warnings(version: str, patch_set: PatchSet) -> list[str]:
    """Refuse a release older than the set's range; warn about a newer one, whose code then decides."""
    if _in_range(version, patch_set["versions"]):
        return []
    lower = [part for part in patch_set["versions"].split(",") if part.strip().startswith((">", "="))]
    if not _in_range(version, ",".join(lower)):
        raise Refusal(f"it is for {patch_set['versions']}")
    return [f"{patch_set['name']} is tested for {patch_set['versions']}, not for vLLM {version}: its code decides"]


def _in_range(version: str, specification: str) -> bool:
    for part in filter(None, specification.split(",")):
        match = re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*([0-9.]+)\s*", part)
        if not match:
            raise Refusal(f"{specification!r} is no version range such as >=0.30,<0.34")
        if not _COMPARISONS[match.group(1)](_release(version), _release(match.group(2))):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, without trailing zeros: 0.33.0rc1 -> (0, 33)."""
    match: re.Match[str] | None = re.match(r"\d+(\.\d+)*", version)
    if not match:
        raise Refusal(f"{version!r} is no version number")
    numbers = [int(number) for number in match.group().split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
