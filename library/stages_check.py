#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: can a model be cut into these pipeline stages, and which layers and taps does each have?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: stages_check
short_description: Cut a target into pipeline stages, or say why vLLM could not
description:
  - Computes the layers of each stage as vLLM does, and where each tap is captured, from numbers alone.
  - Fails with all that does not fit together, each with both values and the remedy.
  - Runs on the control node. Changes nothing.
options:
  hosts:
    description: The replica's hosts, its head first.
    type: list
    elements: str
    required: true
  tensor_parallel_size:
    description: GPUs that share a layer.
    type: int
    required: true
  pipeline_parallel_size:
    description: Stages, over all hosts.
    type: int
    required: true
  layers:
    description: The target's layers.
    type: int
    required: true
  heads:
    description: The target's attention heads.
    type: int
    required: true
  experts:
    description: The target's routed experts. 0 if it has none, or that is not known.
    type: int
    default: 0
  expert_parallel:
    description: Whether experts are spread over the GPUs instead of cut.
    type: bool
    default: false
  partition:
    description: The service's VLLM_PP_LAYER_PARTITION, if it has one.
    type: str
    default: ''
  tap_ids:
    description: The tap ids that the drafter takes; none without speculation.
    type: list
    elements: int
    default: []
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Cut Kimi-K2.5 over two hosts
  stages_check:
    hosts: [gpu-01, gpu-02]
    tensor_parallel_size: 8
    pipeline_parallel_size: 2
    layers: 61
    heads: 64
    tap_ids: [2, 30, 58]
  delegate_to: localhost
"""

RETURN = r"""
stages:
  description: A line for each stage.
  returned: success
  type: list
  elements: str
  sample: ["stage 0 on gpu-01: layers 0 to 30 (31), taps 2, 30"]
gpus:
  description: How many GPUs the service uses on each host.
  returned: success
  type: int
  sample: 8
problems:
  description: A sentence for each thing that does not fit.
  returned: when there are any
  type: list
  elements: str
  sample: ["pipeline-parallel-size is 3 and the target has 2 layers: each stage needs one"]
"""

from typing import Any

from ansible.module_utils.aerie.stages import Sizes, describe, problems, stages
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "hosts": {"type": "list", "elements": "str", "required": True},
    "tensor_parallel_size": {"type": "int", "required": True},
    "pipeline_parallel_size": {"type": "int", "required": True},
    "layers": {"type": "int", "required": True},
    "heads": {"type": "int", "required": True},
    "experts": {"type": "int", "default": 0},
    "expert_parallel": {"type": "bool", "default": False},
    "partition": {"type": "str", "default": ""},
    "tap_ids": {"type": "list", "elements": "int", "default": []},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    options = module.params
    sizes = Sizes(
        hosts=len(options["hosts"]),
        tensor=options["tensor_parallel_size"],
        pipeline=options["pipeline_parallel_size"],
        layers=options["layers"],
        heads=options["heads"],
        experts=options["experts"],
        expert_parallel=options["expert_parallel"],
        partition=options["partition"],
    )
    found = list(problems(sizes))
    if found:
        module.fail_json(msg=". ".join(found), problems=found)
    cut = stages(sizes.layers, sizes.pipeline, options["tap_ids"], sizes.partition)
    module.exit_json(changed=False, stages=describe(cut, options["hosts"]), gpus=sizes.gpus)


if __name__ == "__main__":
    main()
