#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: check an EAGLE-3 drafter against its target."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: drafter_check
short_description: Check that an EAGLE-3 drafter fits its target and the vLLM release that will serve it
description:
  - Reads both configurations and the headers of the drafter's weights, not the weights (but the small vocabulary maps
    C(d2t) and C(t2d)), and compares architecture, widths, vocabularies, tap ids and context length.
  - Fails when a finding is an error. Warnings are shown and do not fail.
  - Names the drafter's content by the SHA-256 of the files that a host needs. Changes nothing but O(digest_cache).
options:
  path:
    description: The directory of the drafter on this host, usually the control node.
    type: path
    required: true
  target:
    description: The RV(target) that M(target_check) returned.
    type: dict
    required: true
  vllm_version:
    description: The vLLM release that will serve it, such as V(0.33.0).
    type: str
    required: true
  model_runner:
    description:
      - Which of vLLM's model runners will serve it; they look for tap ids in different places.
      - With V(auto) the release's default for this model family, which is V2 from 0.29.0. Without Triton, as on
        CPU hosts, vLLM falls back to V1.
    type: str
    choices: [auto, v1, v2]
    default: auto
  max_model_len:
    description: The context length that the service is started with. By default the target's own.
    type: int
  taps_proved:
    description:
      - Whether the release carries a patch set whose proof covers every tap id from 0 to the number of layers.
      - Ids that the release as it is would lose are then no error.
    type: bool
    default: false
  digest_cache:
    description:
      - A file that remembers digests of weights whose size, mtime and inode did not change.
      - By default all files are read every time.
    type: path
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Check the drafter
  drafter_check:
    path: /srv/drafters/Kimi-K25-eagle3
    target: "{{ target_model_result }}"
    vllm_version: 0.33.0
  delegate_to: localhost
  register: drafter
"""

RETURN = r"""
drafter:
  description: What the drafter is.
  returned: success
  type: dict
  contains:
    path:
      description: The drafter's directory.
      type: str
    architecture:
      description: The class that vLLM looks up.
      type: str
      sample: LlamaForCausalLMEagle3
    mla:
      description: Whether its attention is latent attention.
      type: bool
    tap_ids:
      description: The tap ids that the model runner will use, ascending, as vLLM delivers them.
      type: list
      elements: int
      sample: [2, 30, 58]
    tap_ids_declared:
      description: The tap ids as its config.json declares them, or none.
      type: list
      elements: int
    model_runner:
      description: The model runner that was assumed.
      type: str
      sample: v2
    hidden_size:
      description: Its hidden size.
      type: int
    vocab_size:
      description: Its vocabulary.
      type: int
    draft_vocab_size:
      description: The part of the vocabulary that it can draft.
      type: int
    own_embedding:
      description: Whether it brings an embedding; it shares the target's otherwise.
      type: bool
    own_lm_head:
      description: Whether it brings an output head; it shares the target's otherwise.
      type: bool
    max_position_embeddings:
      description: Its context length, or none.
      type: int
    sha256:
      description: The digest of RV(drafter.files), which names its place in the store.
      type: str
    bytes:
      description: The size of RV(drafter.files).
      type: int
    files:
      description: The files that a host needs, each with name, path, size and sha256.
      type: list
      elements: dict
findings:
  description: What does not fit, worst first.
  returned: always
  type: list
  elements: dict
  contains:
    id:
      description: A short name of the misfit.
      type: str
      sample: fc_width
    severity:
      description: V(error), V(warning) or V(note).
      type: str
    message:
      description: Both values with their files, and what follows.
      type: str
    remedy:
      description: What to do.
      type: str
    facts:
      description: The values that disagree, each with what, value and file.
      type: list
      elements: dict
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ansible.module_utils.aerie.checkpoint import CheckpointError, cannot_read, summarise
from ansible.module_utils.aerie.digest_cache import cached_sha256
from ansible.module_utils.aerie.drafter import (
    ERROR,
    WARNING,
    Finding,
    Service,
    Target,
    check,
    content_digest,
    read_drafter,
    travelling_files,
    unreadable,
)
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "path": {"type": "path", "required": True},
    "target": {"type": "dict", "required": True},
    "vllm_version": {"type": "str", "required": True},
    "model_runner": {"type": "str", "choices": ["auto", "v1", "v2"], "default": "auto"},
    "max_model_len": {"type": "int"},
    "taps_proved": {"type": "bool", "default": False},
    "digest_cache": {"type": "path"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    options = module.params
    root = Path(options["path"])
    cache = Path(options["digest_cache"]) if options["digest_cache"] else None
    try:
        target = Target.from_facts(options["target"])
        service = Service(
            options["vllm_version"], options["model_runner"], options["max_model_len"], options["taps_proved"]
        )
    except ValueError as error:
        module.fail_json(msg=f"The drafter cannot be checked: {error}", findings=[])
    try:
        drafter = read_drafter(root)
        findings = check(drafter, target, service)
        fail_on_errors(module, findings)
        paths = travelling_files(drafter)
        files = manifest(paths, cached_sha256(paths, cache))
    except CheckpointError as error:
        fail_on_errors(module, unreadable(error))
    except OSError as error:
        fail_on_errors(module, unreadable(CheckpointError([cannot_read(Path(error.filename or root), error)])))
    for finding in findings:
        if finding.severity == WARNING:
            module.warn(f"{finding.message}; {finding.remedy}")
    module.exit_json(
        changed=False,
        drafter={
            "path": str(root),
            "architecture": drafter.architecture,
            "mla": drafter.is_mla,
            "tap_ids": sorted(drafter.tap_ids.used_by(service.runner, target.num_hidden_layers)),
            "tap_ids_declared": drafter.tap_ids.declared,
            "model_runner": service.runner,
            "hidden_size": drafter.hidden_size,
            "vocab_size": drafter.vocab_size,
            "draft_vocab_size": drafter.draft_vocab_size,
            "own_embedding": drafter.has_own_embedding,
            "own_lm_head": drafter.has_own_lm_head,
            "max_position_embeddings": drafter.max_position_embeddings,
            "sha256": content_digest(files),
            "bytes": sum(path.stat().st_size for path in paths),
            "files": files,
        },
        findings=[finding.as_dict() for finding in findings],
    )


def fail_on_errors(module: AnsibleModule, findings: Sequence[Finding]) -> None:
    """End the module when ``findings`` has errors, with what each says and its remedy."""
    errors = [finding for finding in findings if finding.severity == ERROR]
    if errors:
        sentences = [f"{finding.message}; {finding.remedy} [{finding.id}]" for finding in errors]
        module.fail_json(
            msg=f"The drafter does not fit: {summarise(sentences)}",
            findings=[finding.as_dict() for finding in findings],
        )


def manifest(paths: Sequence[Path], digests: Mapping[Path, str]) -> list[dict[str, object]]:
    """Return name, path, size and sha256 of each of ``paths``."""
    return [
        {"name": path.name, "path": str(path), "size": path.stat().st_size, "sha256": digests[path]} for path in paths
    ]


if __name__ == "__main__":
    main()
