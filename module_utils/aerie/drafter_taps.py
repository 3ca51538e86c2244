# SPDX-License-Identifier: Apache-2.0
"""Whether the streams that vLLM will tap are those that the drafter was trained on.

Where the model runners look for tap ids was read in vLLM 0.11 to 0.33.
"""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.aerie.dialects import Resolution, resolve
from ansible.module_utils.aerie.drafter import TAP_IDS, Drafter, TapIds, default_tap_ids
from ansible.module_utils.aerie.drafter_fit import Service, Target, Version
from ansible.module_utils.aerie.findings import ERROR, NOTE, Fact, Finding

# Older releases take the default, whatever the drafter declares.
_READS_IDS: Version = (0, 11, 1)
_V1_READS_NESTED_IDS: Version = (0, 22)
_LAST_BOUNDARY_CAPTURED: Version = (0, 25)
_V2_READS_LAYER_IDS: Version = (0, 27)
_V2_CAN_DO_WITHOUT_TAPS: Version = (0, 33)


def used_tap_ids(taps: TapIds, service: Service, num_layers: int) -> list[int]:
    """Return the ids that vLLM taps in a target of ``num_layers`` layers, in the order in which they are declared."""
    return _read(taps, service) or default_tap_ids(num_layers)


def check_aux_hidden_states(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    """Check a drafter that is said to do without taps."""
    if drafter.uses_taps:
        return
    said = Fact("eagle_config.use_aux_hidden_state", False, drafter.config)
    fc = drafter.checkpoint.tensor("fc.weight")
    if fc is not None:
        yield Finding(
            "aux_hidden_states_off",
            ERROR,
            (said, drafter.stored("fc.weight shape", list(fc.shape), "fc.weight")),
            "vLLM would leave out fc, and give the drafter the last hidden state instead of the taps it was trained on",
            'set "use_aux_hidden_state": true in a copy of the drafter',
        )
    elif drafter.is_mla or (service.runner == "v2" and service.release < _V2_CAN_DO_WITHOUT_TAPS):
        reader = drafter.architecture if drafter.is_mla else service.names_runner()
        yield Finding(
            "aux_hidden_states_off",
            ERROR,
            (said, Fact("use of taps", "always", reader)),
            f"{reader} does not read it and takes fc for granted",
            "choose a drafter that takes taps" + ("" if drafter.is_mla else ", or vLLM 0.33.0 or newer"),
        )


def check_tap_ids(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    if not drafter.uses_taps:
        return
    taps, layers = drafter.tap_ids, target.num_hidden_layers
    n_layers = Fact("num_hidden_layers", layers, target.config)
    if taps.declared is None:
        yield Finding(
            "tap_ids_undeclared",
            NOTE,
            (Fact(TAP_IDS, "not declared", drafter.config), n_layers),
            f"vLLM taps its default {default_tap_ids(layers)}",
            f"write the ids that the drafter was trained on as {TAP_IDS} into a copy of it",
        )
        return
    if taps.contradict:
        yield Finding(
            "tap_ids_conflict",
            ERROR,
            tuple(Fact(place, ids, drafter.config) for place, ids in taps.places.items()),
            "the drafter was trained on one of them",
            "keep the ids of the training run, wherever ids stand, in a copy of the drafter",
        )
        return
    bad = list(_check_values(drafter, taps.declared, n_layers))
    yield from bad
    if bad:
        return
    resolution = resolve(drafter, layers, service.tap_dialect)
    if resolution.tap_ids is None:
        yield _even(drafter, taps.declared, resolution)
        return
    past = [item for item in resolution.tap_ids if item > layers]
    if past:
        yield Finding(
            "tap_ids_range",
            ERROR,
            (Fact("tap ids", taps.declared, drafter.config), n_layers),
            f"in the dialect {resolution.dialect} they are vLLM's {resolution.tap_ids}, and {past[0]} is outside 0 to "
            f"{layers}",
            "correct drafter_tap_dialect (make doctor: DIALECT), or choose a drafter made for this target",
        )
        return
    yield from _check_use(drafter, resolution, n_layers, service)
    yield from _check_lost(resolution.tap_ids, Fact("tap ids", taps.declared, drafter.config), n_layers, service)


def _read(taps: TapIds, service: Service) -> list[int] | None:
    """Return the ids that the runner finds in the drafter's configuration."""
    if service.release < _READS_IDS:
        return None
    return taps.top_level or _read_below_eagle_config(taps, service)


def _read_below_eagle_config(taps: TapIds, service: Service) -> list[int] | None:
    """Return what the runner finds in eagle_config: V2 looks there for another name than V1."""
    if service.runner == "v1":
        return taps.nested if service.release >= _V1_READS_NESTED_IDS else None
    return taps.layer_ids if service.release >= _V2_READS_LAYER_IDS else None


def _check_values(drafter: Drafter, declared: list[int], n_layers: Fact) -> Iterator[Finding]:
    layers = n_layers.value
    assert isinstance(layers, int)
    ids = Fact("tap ids", declared, drafter.config)
    outside = [item for item in declared if not 0 <= item <= layers]
    if outside:
        yield Finding(
            "tap_ids_range",
            ERROR,
            (ids, n_layers),
            f"{outside[0]} is outside 0 to {layers}, so no such hidden state exists",
            "choose a drafter made for this target, or correct the ids in a copy of it",
        )
    elif len(set(declared)) != len(declared):
        yield Finding(
            "tap_ids_duplicate",
            ERROR,
            (ids, Fact("distinct ids", sorted(set(declared)), drafter.config)),
            "vLLM delivers each tap once",
            "correct the ids in a copy of the drafter",
        )
    elif declared != sorted(declared):
        yield Finding(
            "tap_ids_order",
            ERROR,
            (ids, Fact("ids in ascending order", sorted(declared), drafter.config)),
            "vLLM delivers taps in ascending order whatever order is declared",
            "sort the ids, and fc.weight's columns if training concatenated them as declared, in a copy of the drafter",
        )


def _even(drafter: Drafter, declared: list[int], resolution: Resolution) -> Finding:
    """Refuse to guess what the ids mean."""
    inputs, outputs = resolution.readings
    reasons = [f"for the first speaks {'; '.join(inputs.evidence)}", f"for the second {'; '.join(outputs.evidence)}"]
    return Finding(
        "tap_dialect",
        ERROR,
        (Fact("tap ids", declared, drafter.config),),
        f"as inputs of layers ({', '.join(inputs.dialects)}) they are vLLM's {inputs.tap_ids}, as outputs of layers "
        f"({', '.join(outputs.dialects)}) vLLM's {outputs.tap_ids}, and "
        + (", ".join(reasons) if inputs.evidence else "nothing tells which"),
        "set drafter_tap_dialect (make doctor: DIALECT) to the tool that trained the drafter",
    )


def _check_use(drafter: Drafter, resolution: Resolution, n_layers: Fact, service: Service) -> Iterator[Finding]:
    """Check that what vLLM taps is what the ids mean."""
    taps, layers = drafter.tap_ids, n_layers.value
    assert isinstance(layers, int) and resolution.tap_ids is not None
    declared, used = taps.declared, used_tap_ids(taps, service, layers)
    same = sorted(used) == sorted(resolution.tap_ids)
    meant = f"in the dialect {resolution.dialect} they are vLLM's {resolution.tap_ids}"
    if service.release < _READS_IDS:
        if not same:
            yield Finding(
                "tap_ids_unread",
                ERROR,
                (Fact("tap ids", declared, drafter.config), n_layers),
                f"vLLM {service.vllm_version} reads no tap ids and taps its default {used}"
                + ("" if resolution.tap_ids == declared else f" ({meant})"),
                "deploy vLLM 0.11.1 or newer, or choose a drafter that was trained on the default",
            )
    elif taps.top_level is None and declared != _read_below_eagle_config(taps, service):
        yield Finding(
            "tap_ids_nested",
            NOTE if same else ERROR,
            (Fact("tap ids in eagle_config", declared, drafter.config), n_layers),
            f"{service.names_runner()} does not read them there and taps {used}"
            + (", which are the same" if same else "")
            + ("" if resolution.tap_ids == declared else f" ({meant})"),
            f"deploy with Aerie, which derives a config.json with {resolution.tap_ids} in both places, or write them "
            f"at the top level as well ({TAP_IDS}) in a copy of the drafter",
        )
    elif not same:
        (evidence,) = (reading.evidence for reading in resolution.readings if reading.chosen)
        yield Finding(
            "tap_dialect",
            ERROR,
            (Fact("tap ids", declared, drafter.config),),
            meant + (f" ({'; '.join(evidence)})" if evidence else "") + f", and vLLM taps {used}",
            f"deploy with Aerie, which derives a config.json with {resolution.tap_ids} in both places, or write them "
            "there in a copy of the drafter",
        )


def _check_lost(tap_ids: list[int], ids: Fact, n_layers: Fact, service: Service) -> Iterator[Finding]:
    """Check for ids that the release as it is does not deliver."""
    if service.taps_proved:
        return
    lost = [0] if 0 in tap_ids else []
    if n_layers.value in tap_ids and service.release < _LAST_BOUNDARY_CAPTURED:
        assert isinstance(n_layers.value, int)
        lost.append(n_layers.value)
    for item in lost:
        yield Finding(
            "tap_id_lost",
            ERROR,
            (ids, n_layers),
            f"vLLM {service.vllm_version} as released does not deliver tap {item} of this model family",
            "deploy with a patch set that delivers it" + (", or vLLM 0.25.0 or newer" if item else ""),
        )
