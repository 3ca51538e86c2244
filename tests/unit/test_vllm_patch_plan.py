# SPDX-License-Identifier: Apache-2.0
"""The module vllm_patch_plan: which sets are for a release, what it can do with them, and when there is no plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_vllm
from modules import run_module

ROOT = Path(__file__).parents[2]
REGISTRY = b'_MODELS = {"ToyForCausalLM": ("toy", "CausalLM")}\n'
ELSEWHERE = [{"path": toy_vllm.MODEL, "class": "Absent"}]

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Plan:
    """Return the module's result for the toy wheel."""
    wheel = toy_vllm.wheel(tmp_path, {**toy_vllm.files(), "model_executor/models/registry.py": REGISTRY})

    def run(*patch_sets: dict[str, Any], **arguments: object) -> dict[str, Any]:
        given = {"wheel": str(wheel), "patch_sets": list(patch_sets), "layer_counts": [8], **arguments}
        return run_module("vllm_patch_plan", given, capsys)

    return run


def test_the_sets_that_are_for_other_code_are_named_and_do_no_harm(plan: Plan) -> None:
    result = plan(toy_vllm.patch_set(name="other", requires=ELSEWHERE), toy_vllm.patch_set())
    assert not result["failed"]
    assert {name: one["state"] for name, one in result["sets"].items()} == {"other": "not needed", "toy": "applies"}
    assert result["plan"]["set"] == "toy"


def test_what_a_deployment_can_ask_is_told_with_the_reason(plan: Plan) -> None:
    capabilities = {"pipeline_parallel": {"supported": False, "reason": "the runner cannot"}, "other": {}}
    assert plan(toy_vllm.patch_set(capabilities=capabilities))["capabilities"] == {
        "pipeline_parallel": {"supported": False, "reason": "the runner cannot"},
        "other": {"supported": True, "reason": ""},
    }


def test_a_release_that_no_set_is_for_fails(plan: Plan) -> None:
    result = plan(toy_vllm.patch_set(requires=ELSEWHERE))
    assert result["failed"]
    assert result["msg"].startswith(
        "no patch set is for the code of vLLM 0.33.0: toy is for code with class Absent in "
    )


def test_without_patch_sets_the_plan_is_empty(plan: Plan) -> None:
    result = plan()
    assert not result["failed"]
    assert (result["plan"]["set"], result["plan"]["files"]) == (None, [])
    assert (result["sets"], result["capabilities"], result["patch"], result["proof"]["run"]) == ({}, {}, "", 0)


def test_a_release_without_the_wanted_model_fails(plan: Plan) -> None:
    assert not plan(architectures=["ToyForCausalLM"])["failed"]
    result = plan(toy_vllm.patch_set(), architectures=["OtherForCausalLM"])
    assert result["failed"]
    assert result["msg"].startswith("vLLM 0.33.0 has no model OtherForCausalLM: ")


def test_a_list_of_layers_that_is_empty_fails_by_name(plan: Plan) -> None:
    result = plan(toy_vllm.patch_set(), layer_counts=[])
    assert result["failed"]
    assert result["msg"].startswith("vllm_patch_layer_counts is [], which proves nothing: ")


# Where a deploy plans: on one host for all, once the targets of all are known.
PLAYBOOK = """\
- hosts: all
  connection: local
  gather_facts: false
  vars_files: [{root}/playbooks/group_vars/all.yml]
  tasks:
    - ansible.builtin.include_role:
        name: vllm_patch
        tasks_from: plan
        apply: {{run_once: true, delegate_to: localhost}}
      run_once: true
    - ansible.builtin.debug:
        msg: "{{{{ vllm_patch_plans[vllm_patch_wheel].proof.summary }}}}"
      run_once: true
"""


def test_a_deploy_proves_for_the_layers_that_its_targets_have(tmp_path: Path, plan: Plan) -> None:
    sets = tmp_path / "patches" / "toy"
    sets.mkdir(parents=True)
    (sets / "set.yml.j2").write_text(json.dumps(toy_vllm.patch_set()))
    (tmp_path / "plan.yml").write_text(PLAYBOOK.format(root=ROOT))
    targets = [{"architecture": "ToyForCausalLM", "text": {"num_hidden_layers": layers}} for layers in (4, 5)]
    hosts = {f"host-{number}": {"target_model_result": target} for number, target in enumerate(targets)}
    variables = {
        "ansible_python_interpreter": sys.executable,
        "vllm_patch_layer_counts": [8],
        "vllm_patch_sets": ["toy"],
        "vllm_patch_templates_dir": str(tmp_path / "patches"),
        "vllm_patch_wheel": str(tmp_path / "vllm-0.33.0-py3-none-any.whl"),
    }
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts, "vars": variables}}))
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    command = [program, "-i", str(tmp_path / "hosts.json"), str(tmp_path / "plan.yml")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    wanted = plan(toy_vllm.patch_set(), layer_counts=[8, 4, 5])["proof"]
    assert wanted["summary"] in run.stdout
    assert wanted["run"] > plan(toy_vllm.patch_set())["proof"]["run"]
