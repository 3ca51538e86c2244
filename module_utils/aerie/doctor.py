# SPDX-License-Identifier: Apache-2.0
"""The whole examination of a drafter: every check, what its tap ids mean, and the derived drafter where one is needed.

Reads configurations and headers, and of the weights only the small vocabulary maps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ansible.module_utils.aerie.checkpoint import CheckpointError, cannot_read
from ansible.module_utils.aerie.dialects import VLLM, Resolution, resolve
from ansible.module_utils.aerie.drafter import (
    CONFIG,
    TAP_IDS,
    Drafter,
    as_vllm_reads,
    drafter_of,
    eagle_config,
    read_drafter,
)
from ansible.module_utils.aerie.drafter_fit import Service, Target
from ansible.module_utils.aerie.drafter_maps import check_vocabulary_maps
from ansible.module_utils.aerie.drafter_serving import (
    check_architecture,
    check_attention_backend,
    check_dtype,
    check_kv_cache,
    check_max_position,
    check_norms,
    check_pipeline,
    check_quantisation,
    check_rope,
    check_training_files,
)
from ansible.module_utils.aerie.drafter_shapes import (
    check_attention_input,
    check_embedding,
    check_fc,
    check_hidden_size,
    check_lm_head,
    check_tensors,
    check_vocabulary,
)
from ansible.module_utils.aerie.drafter_taps import check_aux_hidden_states, check_tap_ids, used_tap_ids
from ansible.module_utils.aerie.files import sha256_bytes, sha256_file, write_atomically
from ansible.module_utils.aerie.findings import ERROR, NOTE, Fact, Finding, worst_first

CHECKS: tuple[Callable[[Drafter, Target, Service], Iterator[Finding]], ...] = (
    check_architecture,
    check_hidden_size,
    check_fc,
    check_tensors,
    check_attention_input,
    check_vocabulary,
    check_embedding,
    check_lm_head,
    check_vocabulary_maps,
    check_norms,
    check_aux_hidden_states,
    check_tap_ids,
    check_rope,
    check_max_position,
    check_quantisation,
    check_dtype,
    check_kv_cache,
    check_attention_backend,
    check_pipeline,
    check_training_files,
)
_NO_IDS = Resolution(None, None, ())
# In a derived config.json: what it was derived from.
_ORIGIN = "aerie_derived"


@dataclass(frozen=True)
class Examination:
    """What was found: ``drafter`` is None if it cannot be read, and the derived one if ``source`` is the user's."""

    findings: list[Finding]
    drafter: Drafter | None = None
    source: Drafter | None = None
    resolution: Resolution = _NO_IDS

    @property
    def errors(self) -> list[Finding]:
        """The findings that keep it from being served."""
        return [finding for finding in self.findings if finding.severity == ERROR]


def examine(path: Path, target: Target, service: Service, derived: Path | None = None) -> Examination:
    """Examine the drafter at ``path`` (a directory, or its one file of weights).

    With ``derived``, a drafter whose tap ids vLLM would misread gets a config.json of its own below that directory,
    and what is checked is the drafter with it. Without, such ids are errors.
    """
    try:
        drafter = read_drafter(path)
        resolution = resolve(drafter, target.num_hidden_layers, service.tap_dialect)
        if derived is not None and needs_derivation(drafter, resolution):
            made = derive(drafter, resolution, derived)
            findings = [
                *check(made, target, replace(service, tap_dialect=VLLM)),
                _derivation(drafter, made, resolution),
            ]
            return Examination(worst_first(findings), made, drafter, resolution)
        return Examination(check(drafter, target, service), drafter, None, resolution)
    except CheckpointError as error:
        return Examination(unreadable(error))
    except OSError as error:
        return Examination(unreadable(CheckpointError([cannot_read(Path(error.filename or path), error)])))


def check(drafter: Drafter, target: Target, service: Service) -> list[Finding]:
    """Return everything about ``drafter`` that does not fit ``target`` or ``service``, worst first."""
    return worst_first([finding for part in CHECKS for finding in part(drafter, target, service)])


def unreadable(error: CheckpointError) -> list[Finding]:
    """Return what kept a drafter from being read as findings."""
    remedy = "fetch the drafter again, or correct drafter_path"
    return [Finding("unreadable", ERROR, (), problem, remedy) for problem in error.problems]


def needs_derivation(drafter: Drafter, resolution: Resolution) -> bool:
    """Tell whether some runner would tap other layers than the ids mean, though what they mean is known.

    Ids that contradict each other, or are out of order, are not known: those are errors in any case.
    """
    taps = drafter.tap_ids
    if resolution.tap_ids is None or not drafter.uses_taps or taps.contradict:
        return False
    return resolution.tap_ids != taps.top_level


def derive(drafter: Drafter, resolution: Resolution, folder: Path) -> Drafter:
    """Return ``drafter`` with a config.json that has vLLM's ids in both places that runners read, and no others.

    It lies in ``folder``/<its SHA-256>/, says what it was derived from, and everything else in it is as it was.
    """
    ids = {TAP_IDS: resolution.tap_ids}
    document = dict(drafter.document) | ids
    holder = "transformer_layer_config" if drafter.is_speculators else None
    inner = dict(_section(document, holder)) if holder else document
    nested = dict(eagle_config(drafter.settings))
    # The same ids by another name, which stay as they were written otherwise.
    inner["eagle_config"] = nested | ids | ({"layer_ids": resolution.tap_ids} if nested.get("layer_ids") else {})
    if holder:
        document[holder] = inner
    document[_ORIGIN] = {
        "config_sha256": sha256_file(Path(drafter.config)),
        "tap_ids": drafter.tap_ids.declared,
        "tap_dialect": resolution.dialect,
    }
    data = json.dumps(document, indent=2).encode("utf-8") + b"\n"
    path = folder / sha256_bytes(data) / CONFIG
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return drafter_of(drafter.root, path, document, as_vllm_reads(path, document), drafter.checkpoint)


def describe(examination: Examination, target: Target, service: Service) -> dict[str, object]:
    """Return what the readable drafter of ``examination`` is, as JSON-able data."""
    drafter, source = examination.drafter, examination.source
    assert drafter is not None
    return {
        "path": str(drafter.root),
        "architecture": drafter.architecture,
        "mla": drafter.is_mla,
        "tap_ids": sorted(used_tap_ids(drafter.tap_ids, service, target.num_hidden_layers))
        if drafter.uses_taps
        else [],
        "tap_ids_declared": (source or drafter).tap_ids.declared,
        "dialect": examination.resolution.dialect,
        "readings": [reading.as_dict() for reading in examination.resolution.readings],
        "derived": source is not None,
        "model_runner": service.runner,
        "hidden_size": drafter.hidden_size,
        "vocab_size": drafter.vocab_size,
        "draft_vocab_size": drafter.draft_vocab_size,
        "own_embedding": drafter.has_own_embedding,
        "own_lm_head": drafter.has_own_lm_head,
        "max_position_embeddings": drafter.max_position_embeddings,
    }


def _section(document: dict[str, object], name: str) -> dict[str, object]:
    section = document[name]
    assert isinstance(section, dict)
    return section


def _derivation(drafter: Drafter, made: Drafter, resolution: Resolution) -> Finding:
    return Finding(
        "tap_ids_derived",
        NOTE,
        (
            Fact("tap ids", drafter.tap_ids.declared, drafter.config),
            Fact("tap ids", resolution.tap_ids, made.config),
        ),
        f"read in the dialect {resolution.dialect}, and written where every model runner looks",
        "nothing to do",
    )
