#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Writes a planned patch into an installed vLLM, or takes it back to the byte."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_patch
short_description: Patch an installed vLLM, all files or none, reversibly
description:
  - Writes the files that M(vllm_patch_plan) planned, after comparing every file with the sha256 that the RECORD of its
    distribution names. Restores exactly those bytes with O(state=absent).
  - A file that is neither pristine nor ours is refused with what became of it (an edit by hand before or after the
    patch, another patch, a patch in part, a file that an upgrade left behind), the remedy and a diff. Then nothing is
    written. Undoing a patch that someone edited since is refused in the same way.
  - Files are replaced by new inodes, so environments that share files by hard links keep theirs.
  - An interrupted run is finished by the next one; with check mode, RV(interrupted) tells without doing it.
author: Aerie
attributes:
  check_mode:
    description: Predicts what a run does, from the plan alone where the package is not installed yet.
    support: full
  diff_mode:
    description: Shows every changed file before and after.
    support: full
options:
  package_dir:
    description: The installed C(vllm) package, such as C(/opt/aerie/current/venv/lib/python3.12/site-packages/vllm).
    type: path
    required: true
  plan:
    description: The plan that M(vllm_patch_plan) returned.
    type: dict
  patch_sets:
    description: Rendered patch sets, to plan and prove on this host from the installed files. For environments that
      were not installed from a known wheel. Needs a Python that can parse this vLLM.
    type: list
    elements: dict
  layer_counts:
    description: With O(patch_sets), the numbers of layers to prove for.
    type: list
    elements: int
    default: [61]
  state:
    description: Whether the patch is there, or the pristine bytes.
    type: str
    choices: [present, absent]
    default: present
  store:
    description: Directory for the pristine bytes and the record of what was changed.
    type: path
    default: /opt/aerie
  unit:
    description:
      - The systemd unit that runs the package, where Aerie did not make it. If files change and it runs, it is stopped
        before and started after, and waited for. If it does not come back, the files are put back as they were, it is
        started again, and the module fails.
      - Empty stops nothing.
    type: str
    default: ""
  health_url:
    description: With O(unit), a URL that answers 200 once it serves. Without one it has to stay up for 5 seconds.
    type: str
    default: ""
  start_budget:
    description: With O(unit), seconds that a start may take.
    type: int
    default: 1800
  deployment:
    description: The id of the run over the fleet. With it a change is written into the ledger of O(store).
    type: str
    default: ""
  why:
    description: Why the files are changed, for the ledger.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Write the planned patch
  vllm_patch:
    package_dir: /opt/aerie/current/venv/lib/python3.12/site-packages/vllm
    plan: "{{ __vllm_patch_planned.plan }}"
    store: /opt/aerie

- name: Restore the bytes that the wheel installed
  vllm_patch:
    package_dir: /opt/aerie/current/venv/lib/python3.12/site-packages/vllm
    state: absent
    store: /opt/aerie

- name: Patch an environment made by hand, while its service is stopped
  vllm_patch:
    package_dir: /srv/ml-env/lib/python3.12/site-packages/vllm
    patch_sets: "{{ rendered }}"
    unit: my-vllm.service
    health_url: http://127.0.0.1:8000/health
    deployment: 20261129T100000Z
    why: deploy
"""

RETURN = r"""
vllm_version:
  description: The installed release (the planned one, where nothing is installed yet in check mode).
  type: str
  returned: always
  sample: 0.33.0
sets:
  description: For every patch set of the plan its C(state) after the run (native, not needed, applied, applies), the
    C(reason), and for each file its sha256 C(before) and C(after) this run.
  type: dict
  returned: always
interrupted:
  description: Whether an earlier run was interrupted, between two files or with O(unit) stopped, and this one brings it
    to its end.
  type: bool
  returned: when the package is installed
unit_state:
  description: What systemd calls the state of O(unit) after the run; empty without one.
  type: str
  returned: when the package is installed
  sample: active
notes:
  description: What became of an earlier patch, where the files are not what its record says, and warnings of the
    planning with O(patch_sets). Shown as warnings too.
  type: list
  elements: str
  returned: when the package is installed
  sample: ["vLLM 0.32.0, which was patched with eagle3-pp, was replaced by vllm 0.33.0: the patch went with it"]
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.adopted import Adopted, UserUnit
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patcher import Move, Patcher, Plan, plan_files
from ansible.module_utils.aerie.patchset import APPLIED, APPLIES, plan_sets
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import Package, package_of_directory
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "package_dir": {"type": "path", "required": True},
    "plan": {"type": "dict"},
    "patch_sets": {"type": "list", "elements": "dict"},
    "layer_counts": {"type": "list", "elements": "int", "default": [61]},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "store": {"type": "path", "default": "/opt/aerie"},
    "unit": {"type": "str", "default": ""},
    "health_url": {"type": "str", "default": ""},
    "start_budget": {"type": "int", "default": 1800},
    "deployment": {"type": "str", "default": ""},
    "why": {"type": "str", "default": ""},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec=ARGUMENT_SPEC,
        mutually_exclusive=[("plan", "patch_sets")],
        required_if=[("state", "present", ("plan", "patch_sets"), True)],
        supports_check_mode=True,
    )
    try:
        result = _run(module)
    except Refusal as refusal:
        module.fail_json(msg=str(refusal))
    except OSError as error:
        module.fail_json(msg=f"cannot read {error.filename}: {error.strerror}; mend that and run again")
    for note in result.get("notes", []):
        module.warn(note)
    module.exit_json(**result)


def _run(module: AnsibleModule) -> dict[str, Any]:
    parameters = module.params
    package_dir, plan, present = Path(parameters["package_dir"]), parameters["plan"], parameters["state"] == "present"
    if not package_dir.is_dir():
        if not module.check_mode:
            raise Refusal(f"{package_dir} is no directory: install vLLM there first, or correct package_dir")
        return _predicted(plan if present else None, package_dir)
    package = package_of_directory(package_dir)
    patcher = Patcher(package_dir, Path(parameters["store"]))
    warnings: list[str] = []
    if parameters["patch_sets"]:
        plan, warnings = _planned_here(patcher, package, parameters["patch_sets"], parameters["layer_counts"])
    work = patcher.present(package, plan) if present else patcher.absent(package, plan)
    unit = _unit(parameters)
    owed = unit is not None and unit.is_owed()
    if not module.check_mode:
        entry = {name: parameters[name] for name in ("deployment", "why")} if parameters["deployment"] else {}
        # Noting a fact about files that are as wanted stops nothing.
        Adopted(patcher, package, unit if work.changed or owed else None, entry).change(work)
    patched_now = present and (not module.check_mode or not work.moves)
    return {
        "changed": work.changed or owed,
        "vllm_version": package.version,
        "sets": _sets(plan, work.moves, APPLIED if patched_now else APPLIES),
        "interrupted": work.interrupted or owed,
        "unit_state": unit.state() if unit else "",
        "notes": [*warnings, *work.notes],
        "diff": _diff(work.moves, package_dir),
    }


def _unit(parameters: dict[str, Any]) -> UserUnit | None:
    name = parameters["unit"]
    if not name:
        return None
    note = Path(parameters["store"]) / f"stopped-{name}"
    unit = UserUnit(name, parameters["health_url"], parameters["start_budget"], note)
    unit.refuse_unusable()
    return unit


def _planned_here(
    patcher: Patcher, package: Package, patch_sets: list[Any], layer_counts: list[int]
) -> tuple[Plan, list[str]]:
    """Plan from the installed files, as they were before any patch of ours; return the plan and its warnings."""
    pristine = Package(
        package.distribution, package.version, package.recorded, lambda path: patcher.pristine(package, path)
    )
    selection = plan_sets(pristine, patch_sets, layer_counts)
    return selection.plan, selection.warnings


def _predicted(plan: Plan | None, package_dir: Path) -> dict[str, Any]:
    """Say what a run will do once vLLM is installed: the host has nothing to look at yet."""
    files = sorted(plan_files(plan), key=lambda file: file.path) if plan else []
    moves = [Move(file.path, file.pristine, file.patched) for file in files]
    return {
        "changed": bool(moves),
        "vllm_version": plan["vllm_version"] if plan else "",
        "sets": _sets(plan, moves, APPLIES),
        "diff": _diff(moves, package_dir),
    }


def _sets(plan: Plan | None, moves: Sequence[Move], state: str) -> dict[str, Any]:
    if plan is None:
        return {}
    now = {move.path: move for move in moves}
    files = {
        file["path"]: {
            "before": sha256_bytes(now[file["path"]].before) if file["path"] in now else file["patched_sha256"],
            "after": sha256_bytes(now[file["path"]].after) if file["path"] in now else file["patched_sha256"],
        }
        for file in plan["files"]
    }
    return {
        name: {**known, "state": state, "files": files} if name == plan["set"] else {**known, "files": {}}
        for name, known in plan["sets"].items()
    }


def _diff(moves: Sequence[Move], package_dir: Path) -> list[dict[str, str]]:
    return [
        {
            "before_header": str(package_dir / move.path),
            "after_header": str(package_dir / move.path),
            "before": move.before.decode("utf-8", "backslashreplace"),
            "after": move.after.decode("utf-8", "backslashreplace"),
        }
        for move in moves
    ]


if __name__ == "__main__":
    main()
