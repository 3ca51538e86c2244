#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: does a vLLM release take the options that its service is to have?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_options_check
short_description: Refuse options that a vLLM release does not take, before anything is touched
description:
  - Reads the options of C(vllm serve) from the source in the release's wheel, without running it, and compares.
  - Fails with every option, and every key of an option that is a mapping, that the release does not have, each with the
    nearest that it has. Options are renamed and removed between releases; a service with one that is gone does not
    start.
  - Runs on the control node. Changes nothing.
options:
  wheel:
    description: The wheel of the release.
    type: path
    required: true
  options:
    description: The options by name, as they are given to the service.
    type: dict
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Check the options
  vllm_options_check:
    wheel: /var/cache/aerie/wheels/vllm-0.33.0-cp38-abi3-manylinux_2_31_x86_64.whl
    options: {max-model-len: 131072, speculative-config: {attention_backend: FLASH_ATTN}}
"""

RETURN = r"""
vllm_version:
  description: The release.
  returned: success
  type: str
  sample: 0.33.0
known:
  description: How many options it has.
  returned: success
  type: int
  sample: 331
problems:
  description: A sentence for each option that it does not take.
  returned: success
  type: list
  elements: str
  sample: ["vLLM 0.33.0 has no option max-modl-len: the nearest that it has is max-model-len"]
"""
