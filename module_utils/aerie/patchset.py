# SPDX-License-Identifier: Apache-2.0
"""Patch sets: what each does to a release, decided from the release's own code.

A patch set is a mapping (rendered from ``templates/patches/<name>/set.yml.j2``):

``name``, ``description``
``versions``      the releases that it is written and tested for, such as ``>=0.30,<0.34``
``native``        facts (see ``code_facts``); where all hold, upstream has made the change and the set is not needed
``requires``      facts that say which code the set is for; elsewhere it is not needed
``files``         list of ``path`` (in the package) and ``edits`` (see ``edits``); a file or an edit with ``when``
                  (facts, about this file unless they name another) is left out where they do not hold
``proof``         what the symbolic check runs (see ``prove``); a role with ``optional`` is left out where its file is
                  not there, and ``sequence_parallel`` is a fact
``capabilities``  name -> ``reason`` why it is missing, and either ``supported: false`` or ``when`` (facts)

``plan_set`` answers for one set, ``plan_sets`` for all of them together with the plan that a host writes.
"""

from __future__ import annotations

import base64
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ansible.module_utils.aerie.code_facts import Code, Fact, describe
from ansible.module_utils.aerie.edits import apply_edits
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.prove import Proof, Reader, default_cases, prove
from ansible.module_utils.aerie.source import Refusal, unified_diff
from ansible.module_utils.aerie.wheel import Package

NATIVE, APPLIES, APPLIED, REFUSED, NOT_NEEDED = "native", "applies", "applied", "refused", "not needed"
# The capability that is about more than one pipeline stage.
OVER_STAGES = "pipeline_parallel"
PatchSet = Mapping[str, Any]
_KEYS = {"name", "description", "versions", "native", "requires", "files", "proof", "capabilities"}
_OPTIONAL_ROLES = ("wrapper", "allow_list", "loader")
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


@dataclass(frozen=True)
class Capability:
    """Something that a deployment may want from a release, and why the release does not have it."""

    supported: bool
    reason: str = ""


@dataclass
class SetPlan:
    """What a patch set does to one release: ``state``, why, and the planned files with their proof.

    For a release that has it (``native``) the proof is that of the release's own code, which then may fail over several
    pipeline stages.
    """

    name: str
    state: str
    reason: str
    files: list[FilePlan] = field(default_factory=list)
    proof: Proof = field(default_factory=Proof)
    warnings: list[str] = field(default_factory=list)
    capabilities: dict[str, Capability] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Selection:
    """What all patch sets together do to one release: the plan for its hosts, and what they can ask of it then."""

    plans: list[SetPlan]
    plan: dict[str, Any]
    capabilities: dict[str, Capability]
    warnings: list[str]


def plan_sets(
    package: Package, patch_sets: Sequence[PatchSet], layer_counts: Sequence[int], architectures: Sequence[str] = ()
) -> Selection:
    """Plan all of ``patch_sets`` for the pristine ``package``; refuse when EAGLE-3 cannot be had on it.

    That is when a set is refused, when two apply, when none is for this code, or when the release has no model for one
    of ``architectures``. Without patch sets the plan is empty.
    """
    if patch_sets and (not layer_counts or min(layer_counts) < 1):
        raise Refusal(
            f"vllm_patch_layer_counts is {list(layer_counts)}, which proves nothing: name the numbers of layers of the "
            "target models, such as [61]"
        )
    code = Code(package)
    release = f"vLLM {package.version}"
    for architecture in architectures:
        if code.model(architecture) is None:
            raise Refusal(
                f"{release} has no model {architecture}: its registry does not name it; install a release that has it"
            )
    plans = [_plan_set(code, patch_set, layer_counts) for patch_set in patch_sets]
    refused = [plan.reason for plan in plans if plan.state == REFUSED]
    if refused:
        raise Refusal("; ".join(refused))
    useful = [plan for plan in plans if plan.state in (APPLIES, NATIVE)]
    if plans and not useful:
        raise Refusal(
            f"no patch set is for the code of {release}: {'; '.join(plan.reason for plan in plans)}; "
            "install a release that docs/patch-sets.md lists"
        )
    plan = make_plan(package, plans)
    applying = [one for one in plans if one.state == APPLIES]
    warnings = [warning for one in applying or useful for warning in one.warnings]
    covered = {path for one in useful for path in one.models}
    warnings += [
        f"no patch set proves anything for {architecture} of {release}"
        for architecture in architectures
        if plans and code.model(architecture) not in covered
    ]
    return Selection(plans, plan, _joined(useful), warnings)


def _joined(plans: Sequence[SetPlan]) -> dict[str, Capability]:
    """Return the capabilities of a release: what any of ``plans`` supports, or why the last one does not.

    The sets come oldest release first, and the last one knows most of this one.
    """
    joined: dict[str, Capability] = {}
    for plan in plans:
        for name, capability in plan.capabilities.items():
            if name not in joined or not joined[name].supported:
                joined[name] = capability
    return joined


def plan_set(package: Package, patch_set: PatchSet, layer_counts: Sequence[int]) -> SetPlan:
    """Decide from the pristine ``package`` what ``patch_set`` does to it; prove it for models of these layer counts."""
    return _plan_set(Code(package), patch_set, layer_counts)


def _plan_set(code: Code, patch_set: PatchSet, layer_counts: Sequence[int]) -> SetPlan:
    name = _checked(patch_set)["name"]
    release = f"vLLM {code.package.version}"
    try:
        has_it = bool(patch_set["native"]) and all(map(code.holds, patch_set["native"]))
        missing = [fact for fact in patch_set["requires"] if not code.holds(fact)]
        if missing and not has_it:
            return SetPlan(name, NOT_NEEDED, f"{name} is for code with {describe(missing[0])}, unlike {release}")
        proof = resolve_proof(code, patch_set["proof"])
        capabilities = {key: _capability(code, entry) for key, entry in patch_set["capabilities"].items()}
        models = [proof[role]["path"] for role in ("causal_lm", "wrapper") if role in proof]
        stock = prove_set(code.read, proof, layer_counts, inner_taps=has_it, stop_early=not has_it)
        if has_it or not stock.failures:
            found = describe(patch_set["native"][0]) if has_it else ""
            return _native(SetPlan(name, NATIVE, "", [], stock, [], capabilities, models), release, found)
        warnings = _version_warnings(code.package.version, patch_set)
        files = _plan_files(code, patch_set)
    except Refusal as refusal:
        return SetPlan(name, REFUSED, f"{name} is refused for {release}: {refusal}")
    planned = {file.path: file.patched for file in files}

    def read(path: str) -> bytes:
        return planned[path] if path in planned else code.read(path)

    result = prove_set(read, proof, layer_counts)
    if result.failures:
        return SetPlan(name, REFUSED, f"{name} is refused for {release}: {result.summary}", files, result, warnings)
    reason = f"{release} needs it; {result.summary}"
    return SetPlan(name, APPLIES, reason, files, result, warnings, capabilities, models)


def _native(plan: SetPlan, release: str, found: str) -> SetPlan:
    """Return the ``plan`` of a set that ``release`` has itself, with the reason and with what its own code fails at.

    ``found`` is what says so, "" for nothing but the proof. What fails only over several pipeline stages costs no more
    than those.
    """
    proof, name = plan.proof, plan.name
    evidence = f"{found}; {proof.summary}" if found else proof.summary
    if not proof.failures:
        return replace(plan, reason=f"{release} has it: {evidence}")
    fails = f"its own code fails the symbolic check: {proof.summary}"
    if not proof.fails_only_over_stages:
        reason = (
            f"{name} is refused for {release}, which says that it has it ({found}): {fails}; install a release that "
            f"docs/patch-sets.md lists, or leave {name} out of vllm_patch_sets and do without its proof"
        )
        return replace(plan, state=REFUSED, reason=reason, capabilities={})
    return replace(
        plan,
        reason=f"{release} has it for one pipeline stage: {evidence}",
        warnings=[f"{release} has {name} for one pipeline stage only: over several {fails}"],
        capabilities={**plan.capabilities, OVER_STAGES: Capability(False, fails)},
    )


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
    if set(patch_set) != _KEYS or not patch_set["files"] or not patch_set["requires"]:
        name = patch_set.get("name", "without a name")
        raise Refusal(f"patch set {name} must have exactly the keys {sorted(_KEYS)}, with files and requires filled")
    return patch_set


def _plan_files(code: Code, patch_set: PatchSet) -> list[FilePlan]:
    """Return every file of the set as it was and as it will be; refuse when one edit cannot be made."""
    files = []
    for entry in patch_set["files"]:
        path = entry["path"]
        if not _applies_here(code, path, entry):
            continue
        edits = [edit for edit in entry["edits"] if _applies_here(code, path, edit)]
        pristine = code.read(path)
        files.append(FilePlan(path, pristine, apply_edits(path, pristine, patch_set["name"], edits)))
    return files


def _applies_here(code: Code, path: str, entry: Mapping[str, Any]) -> bool:
    return all(code.holds({"path": path, **fact}) for fact in entry.get("when", []))


def resolve_proof(code: Code, proof: Mapping[str, Any]) -> dict[str, Any]:
    """Return the proof as this release needs it: without the roles that it has no code for."""
    roles = {
        key: value
        for key, value in proof.items()
        if key not in _OPTIONAL_ROLES or not value.get("optional") or code.has(value["path"])
    }
    fact: Fact | None = proof.get("sequence_parallel")
    return {**roles, "sequence_parallel": bool(fact and code.holds(fact))}


def _capability(code: Code, entry: Mapping[str, Any]) -> Capability:
    supported = entry.get("supported", True) and all(map(code.holds, entry.get("when", [])))
    return Capability(supported, "" if supported else entry["reason"])


def prove_set(
    read: Reader,
    proof: Mapping[str, Any],
    layer_counts: Sequence[int],
    *,
    inner_taps: bool = False,
    stop_early: bool = False,
) -> Proof:
    """Run the default cases; with ``inner_taps`` only those without the ids 0 and the number of layers.

    Upstream's own support may leave those two out; where it does, another set mends it.
    """
    cases = [
        case
        for layers in layer_counts
        for case in default_cases(
            layers,
            proof["pipeline_sizes"],
            wrapped="wrapper" in proof,
            sequence_parallel=proof["sequence_parallel"],
        )
        if not inner_taps or all(0 < tap < layers for tap in case.ids)
    ]
    return prove(read, proof, cases, stop_early=stop_early)


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
