#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Say whether an EAGLE-3 drafter fits its target and a vLLM release, before a GPU is touched.

Reads configurations and headers, not the weights. Of the target it needs config.json alone. Exit status 0 without
errors, 1 with errors, 2 when it cannot tell.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[1]
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

from ansible.module_utils.aerie.checkpoint import CheckpointError  # noqa: E402
from ansible.module_utils.aerie.dialects import CHOICES  # noqa: E402
from ansible.module_utils.aerie.doctor import Examination, describe, examine  # noqa: E402
from ansible.module_utils.aerie.drafter_fit import Service, Target, context_length  # noqa: E402
from ansible.module_utils.aerie.drafter_taps import used_tap_ids  # noqa: E402
from ansible.module_utils.aerie.findings import ERROR, NOTE, WARNING  # noqa: E402
from ansible.module_utils.aerie.target import describe_target  # noqa: E402


def main() -> int:
    options = _parser().parse_args()
    try:
        target = Target.from_facts(describe_target(options.target))
        service = Service(
            options.vllm,
            options.model_runner,
            context_length(options.max_model_len) if options.max_model_len else None,
            options.taps_proved,
            options.dialect,
            options.pipeline_parallel_size,
            options.attention_backend,
            options.kv_cache_dtype,
            options.draft_attention_backend,
            options.draft_kv_cache_dtype,
            options.draft_max_model_len,
        )
    except (CheckpointError, ValueError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    examination = examine(options.drafter, target, service)
    if options.format == "json":
        print(json.dumps(document(examination, target, service), indent=2))
    else:
        for line in report(examination, target, service):
            print(line)
    return 1 if examination.errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", type=Path, help="its directory, or its one file of weights beside config.json")
    parser.add_argument("target", type=Path, help="the target's directory; config.json is enough")
    parser.add_argument("vllm", help="the vLLM release that will serve it, such as 0.33.0")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--dialect", choices=CHOICES, default="auto", help="what the tap ids mean")
    parser.add_argument("--model-runner", choices=["auto", "v1", "v2"], default="auto")
    parser.add_argument("--max-model-len", help="the service's, such as 131072 or 128K; by default the target's")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--attention-backend", help="the service's")
    parser.add_argument("--kv-cache-dtype", help="the service's")
    parser.add_argument("--draft-attention-backend", help="that of speculative-config")
    parser.add_argument("--draft-kv-cache-dtype", help="that of speculative-config")
    parser.add_argument("--draft-max-model-len", type=int, help="that of speculative-config")
    parser.add_argument("--taps-proved", action="store_true", help="a patch set of Aerie's will be applied")
    return parser


def document(examination: Examination, target: Target, service: Service) -> dict[str, object]:
    """Return the whole result as JSON-able data; ``drafter`` is null when it cannot be read."""
    return {
        "vllm_version": service.vllm_version,
        "model_runner": service.runner,
        "drafter": describe(examination, target, service) if examination.drafter else None,
        "findings": [finding.as_dict() for finding in examination.findings],
        "errors": len(examination.errors),
    }


def report(examination: Examination, target: Target, service: Service) -> Iterator[str]:
    """Yield the result for people, as lines of text."""
    drafter = examination.drafter
    if drafter is not None:
        yield f"{drafter.root}: {drafter.architecture}, for {service.names_runner()}"
        if drafter.tap_ids.declared:
            yield f"tap ids {drafter.tap_ids.declared}, which mean"
            for reading in examination.resolution.readings:
                mark, names = "->" if reading.chosen else "  ", ", ".join(reading.dialects)
                why = f"  {'; '.join(reading.evidence)}" if reading.evidence else ""
                yield f"{mark} {reading.tap_ids} in the dialect of {names}{why}"
        if drafter.uses_taps:
            yield f"vLLM will tap {sorted(used_tap_ids(drafter.tap_ids, service, target.num_hidden_layers))}"
        yield ""
    for finding in examination.findings:
        yield f"{finding.severity}: {finding.message} [{finding.id}]"
        yield f"  remedy: {finding.remedy}"
    counts = [
        (sum(finding.severity == severity for finding in examination.findings), severity)
        for severity in (ERROR, WARNING, NOTE)
    ]
    found = [f"{count} {severity}{'s' if count > 1 else ''}" for count, severity in counts if count]
    yield ", ".join(found) if found else "The drafter fits."


if __name__ == "__main__":
    sys.exit(main())
