#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: check a target model where it lies."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: target_check
short_description: Check that a target model is whole, known and readable
description:
  - Reads the model's configuration and the headers of its weights, not the weights, so that a model of 600 GB takes
    about a second.
  - Fails, with everything that is wrong at once, when the configuration is missing or of an unknown architecture, when
    a shard that the index names is missing or has another size than its header implies, when a tensor is not in the
    shard where the index places it, when tokenizer files or remote code that C(auto_map) names are missing, or when
    O(service_user) could not read it.
  - Changes nothing.
options:
  path:
    description: The directory of the model on this host.
    type: path
    required: true
  service_user:
    description:
      - The account that will read the model. Its permissions are taken from file modes; access control lists are not
        considered.
      - One that does not exist yet has the permissions that everybody has.
      - By default permissions are not checked beyond those of the account that runs this module.
    type: str
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Check the target model
  target_check:
    path: /models/Kimi-K2.5
    service_user: vllm
  register: kimi
"""

RETURN = r"""
target:
  description: What the model is.
  returned: success
  type: dict
  contains:
    path:
      description: The model's directory.
      type: str
    config:
      description: Its config.json.
      type: str
    architecture:
      description: The class that vLLM loads.
      type: str
      sample: KimiK25ForConditionalGeneration
    model_type:
      description: The model_type of the whole model.
      type: str
      sample: kimi_k25
    text:
      description:
        - The text model's model_type, hidden_size, num_hidden_layers, vocab_size, max_position_embeddings and
          num_attention_heads.
        - Also its kv_lora_rank, rope_theta, rope_scaling, tie_word_embeddings and dtype, none where it does not say.
      type: dict
      sample: {model_type: kimi_k2, hidden_size: 7168, num_hidden_layers: 61, vocab_size: 163840}
    quantization:
      description: The method that the weights are quantised with, or none.
      type: str
      sample: compressed-tensors
    identity:
      description:
        - A SHA-256 over configuration, tokenizer, remote code, index, and every shard's name, size and header.
        - Two copies of a model have the same one wherever they lie.
      type: str
    shards:
      description: How many files the weights are in.
      type: int
      sample: 64
    bytes:
      description: The size of the weights.
      type: int
      sample: 595000000000
problems:
  description: Everything that is wrong, one sentence each; the message has the first few.
  returned: failure
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.aerie.checkpoint import CheckpointError, cannot_read
from ansible.module_utils.aerie.target import Reader, inspect_target
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "path": {"type": "path", "required": True},
    "service_user": {"type": "str"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    root = Path(module.params["path"])
    user = module.params["service_user"]
    try:
        target = inspect_target(root, Reader.named(user) if user else None)
    except CheckpointError as error:
        module.fail_json(msg=f"The target model cannot be served: {error}", problems=list(error.problems))
    except OSError as error:
        problem = cannot_read(Path(error.filename or root), error)
        module.fail_json(msg=f"The target model cannot be served: {problem}", problems=[problem])
    module.exit_json(changed=False, target=target)


if __name__ == "__main__":
    main()
