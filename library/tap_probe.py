#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: prepare the dialect probe of a drafter."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: tap_probe
short_description: Make drafters with tap ids shifted by one, to measure which of them are accepted
description:
  - Makes two directories with links to the drafter's weights and a C(config.json) of their own, in which the tap ids
    are those that are served, less one and plus one.
  - The drafter itself is not touched. The same ids have the same directory, so running it again changes nothing.
options:
  path:
    description: The drafter's directory on this host, usually the control node, or its one file of weights.
    type: path
    required: true
  tap_ids:
    description: The tap ids that are served, in vLLM's dialect.
    type: list
    elements: int
    required: true
  num_layers:
    description: The target's number of layers.
    type: int
    required: true
  proved:
    description: Whether the ids 0 and O(num_layers) are delivered for certain. They are not tried otherwise.
    type: bool
    default: false
  folder:
    description: Where the directories are made. They belong to this module.
    type: path
    required: true
attributes:
  check_mode:
    support: full
    description: The directories are made in check mode, too; they are a cache.
  diff_mode:
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Make drafters with shifted tap ids
  tap_probe:
    path: /srv/drafters/Kimi-K25-eagle3
    tap_ids: [2, 30, 58]
    num_layers: 61
    folder: /var/cache/aerie/derived
  delegate_to: localhost
"""

RETURN = r"""
variants:
  description: The ids to try, those that are served first.
  returned: success
  type: list
  elements: dict
  contains:
    shift:
      description: By how much they were shifted.
      type: int
    tap_ids:
      description: The ids, in vLLM's dialect.
      type: list
      elements: int
      sample: [1, 29, 57]
    path:
      description: The drafter that declares them; empty for those that are served.
      type: str
    left_out:
      description: Why they are not tried; empty if they are.
      type: str
declared:
  description: The ids that the drafter's own configuration declares, or none.
  returned: success
  type: list
  elements: int
"""

from pathlib import Path

from ansible.module_utils.aerie.checkpoint import CheckpointError
from ansible.module_utils.aerie.drafter import read_drafter
from ansible.module_utils.aerie.tap_probe import variants
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "path": {"type": "path", "required": True},
    "tap_ids": {"type": "list", "elements": "int", "required": True},
    "num_layers": {"type": "int", "required": True},
    "proved": {"type": "bool", "default": False},
    "folder": {"type": "path", "required": True},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    options = module.params
    try:
        drafter = read_drafter(Path(options["path"]))
        found = variants(drafter, options["tap_ids"], options["num_layers"], options["proved"], Path(options["folder"]))
    except (CheckpointError, OSError) as error:
        module.fail_json(msg=f"The drafter's tap ids cannot be shifted: {error}")
    module.exit_json(
        changed=False,
        variants=[variant._asdict() for variant in found],
        declared=drafter.tap_ids.declared,
    )


if __name__ == "__main__":
    main()
