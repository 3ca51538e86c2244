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
    C(d2t) and C(t2d)), and compares architecture, widths, vocabularies, tap ids, positions, norms and quantisation.
  - Finds out what the tap ids mean (O(tap_dialect)), and writes a C(config.json) with vLLM's ids into O(derived) if the
    drafter's own would be misread.
  - Fails when a finding is an error, unless O(mode) is V(advisory). Warnings are shown and do not fail.
  - Names the drafter's content by the SHA-256 of the files that a host needs. Changes nothing but O(digest_cache) and
    O(derived), which belong to this module.
options:
  path:
    description:
      - The directory of the drafter on this host, usually the control node.
      - Or its one file of weights, with C(config.json) beside it.
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
  mode:
    description:
      - Whether findings that are errors fail the task (V(enforce)) or are warnings (V(advisory)).
      - A drafter that cannot be read fails in any case, since there is nothing to send.
    type: str
    choices: [enforce, advisory]
    default: enforce
  model_runner:
    description:
      - Which of vLLM's model runners will serve it; they look for tap ids in different places.
      - With V(auto) the release's default for this model family, which is V2 from 0.29.0. Without Triton, as on
        CPU hosts, vLLM falls back to V1.
    type: str
    choices: [auto, v1, v2]
    default: auto
  tap_dialect:
    description:
      - What the drafter's tap ids mean. V(vllm) (and speculators) - the stream entering that layer. V(sglang),
        V(specforge) and V(torchspec) - the output of that layer.
      - With V(auto) evidence decides - who made the drafter, and the tools' default ids. Where it is even, the module
        fails rather than guess.
    type: str
    choices: [auto, vllm, sglang, specforge, torchspec]
    default: auto
  derived:
    description:
      - A directory for derived configurations, each in a directory named by its SHA-256.
      - Without it tap ids that vLLM would misread are an error.
    type: path
  pipeline_parallel_size:
    description: How many pipeline stages the service has.
    type: int
    default: 1
  attention_backend:
    description: The service's option C(attention-backend), if it is set.
    type: str
  kv_cache_dtype:
    description: The service's option C(kv-cache-dtype), if it is set.
    type: str
  draft_attention_backend:
    description: The C(attention_backend) of the service's speculative-config, if it is set.
    type: str
  draft_kv_cache_dtype:
    description: The C(kv_cache_dtype) of the service's speculative-config, if it is set.
    type: str
  draft_max_model_len:
    description: The C(max_model_len) of the service's speculative-config, if it is set.
    type: int
  max_model_len:
    description:
      - The service's option C(max-model-len) as vLLM takes it, such as V(131072), V(128K), V(128k) or V(auto).
      - By default the target's own context length.
    type: str
  taps_proved:
    description:
      - Whether the release carries a patch set whose proof covers every tap id from 0 to the number of layers, and
        several pipeline stages where the release can carry taps over them.
      - What the release as it is would lose is then no error.
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
      description: The tap ids as its own config.json declares them, or none.
      type: list
      elements: int
    dialect:
      description: The dialect that they were read in; none for a drafter that declares no ids.
      type: str
      sample: vllm
    readings:
      description: The declared ids in both readings, each with dialects, vLLM's tap_ids, evidence, and whether chosen.
      type: list
      elements: dict
    derived:
      description: Whether a config.json was derived. RV(drafter.files) then has it instead of the drafter's own.
      type: bool
    source_sha256:
      description: The digest of the drafter's own files, which is RV(drafter.sha256) unless a config.json was derived.
      type: str
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
errors:
  description: How many of RV(findings) are errors, which is none unless O(mode) is V(advisory).
  returned: success
  type: int
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
from ansible.module_utils.aerie.dialects import CHOICES
from ansible.module_utils.aerie.digest_cache import cached_sha256
from ansible.module_utils.aerie.doctor import describe, examine, unreadable
from ansible.module_utils.aerie.drafter import Drafter, content_digest, travelling_files
from ansible.module_utils.aerie.drafter_fit import Service, Target, context_length
from ansible.module_utils.aerie.findings import ERROR, NOTE, Finding
from ansible.module_utils.basic import AnsibleModule

SERVICE_OPTIONS = {
    "model_runner": {"type": "str", "choices": ["auto", "v1", "v2"], "default": "auto"},
    "taps_proved": {"type": "bool", "default": False},
    "tap_dialect": {"type": "str", "choices": list(CHOICES), "default": "auto"},
    "pipeline_parallel_size": {"type": "int", "default": 1},
    "attention_backend": {"type": "str"},
    "kv_cache_dtype": {"type": "str"},
    "draft_attention_backend": {"type": "str"},
    "draft_kv_cache_dtype": {"type": "str"},
    "draft_max_model_len": {"type": "int"},
}
ARGUMENT_SPEC = {
    "path": {"type": "path", "required": True},
    "target": {"type": "dict", "required": True},
    "vllm_version": {"type": "str", "required": True},
    "mode": {"type": "str", "choices": ["enforce", "advisory"], "default": "enforce"},
    **SERVICE_OPTIONS,
    "max_model_len": {"type": "str"},
    "derived": {"type": "path"},
    "digest_cache": {"type": "path"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    options = module.params
    path = Path(options["path"])
    derived, cache = (Path(options[name]) if options[name] else None for name in ("derived", "digest_cache"))
    try:
        target = Target.from_facts(options["target"])
        given = {name: options[name] for name in SERVICE_OPTIONS}
        length = context_length(options["max_model_len"]) if options["max_model_len"] else None
        service = Service(options["vllm_version"], max_model_len=length, **given)
    except ValueError as error:
        module.fail_json(msg=f"The drafter cannot be checked: {error}", findings=[])
    examination = examine(path, target, service, derived)
    drafter = examination.drafter
    if drafter is None or options["mode"] == "enforce":
        fail_on_errors(module, examination.findings)
    assert drafter is not None
    try:
        files = manifest(drafter, cache)
        source = content_digest(manifest(examination.source or drafter, cache))
    except OSError as error:
        fail_on_errors(module, unreadable(CheckpointError([cannot_read(Path(error.filename or path), error)])))
    for finding in examination.findings:
        if finding.severity != NOTE:
            module.warn(f"{finding.message}; {finding.remedy}")
    module.exit_json(
        changed=False,
        drafter={
            **describe(examination, target, service),
            "sha256": content_digest(files),
            "source_sha256": source,
            "bytes": sum(Path(str(file["path"])).stat().st_size for file in files),
            "files": files,
        },
        findings=[finding.as_dict() for finding in examination.findings],
        errors=len(examination.errors),
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


def manifest(drafter: Drafter, cache: Path | None) -> list[dict[str, object]]:
    """Return name, path, size and sha256 of each file that a host needs."""
    paths = travelling_files(drafter)
    digests: Mapping[Path, str] = cached_sha256(paths, cache)
    return [
        {"name": path.name, "path": str(path), "size": path.stat().st_size, "sha256": digests[path]} for path in paths
    ]


if __name__ == "__main__":
    main()
