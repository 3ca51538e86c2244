# SPDX-License-Identifier: Apache-2.0
"""What the probe compares: every option that can change a release is part of the request, or it says here why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ROLES = ("ml_env", "vllm_patch", "drafter", "target_model", "vllm_service", "hidden_states")

# The probe has them under names of its own.
OTHERWISE = {
    "ml_env_lock": "release_lock: the lock's content",
    "drafter_path": "release_drafter: the drafter's content",
    "vllm_patch_templates_dir": "release_patches: the templates' content",
    "vllm_service_template_dir": "part of Aerie's own code",
}
SETTINGS = "a setting of the host, which the probe compares with its files"
CHECKS = "changes what is checked, and nothing that is made"
FOLLOWS = "follows from what the request has, or from the host"
CONTROL = "where the control node or the host keeps something"
ADOPTED = "of environments that Aerie did not make"
BUDGET = "how long is waited"
# Why each of the others cannot change a release.
CANNOT = {
    "ml_env_index_url": "the lock has the digest of every wheel, wherever it comes from",
    "ml_env_path": FOLLOWS,
    "ml_env_python_archive": "ml_env_python_archive_sha256 is its content",
    "ml_env_source": "the lock has the digest of every wheel, wherever it comes from",
    "ml_env_torch_index": "the lock has the digest of every wheel, wherever it comes from",
    "ml_env_wheel_cache": CONTROL,
    "vllm_patch_adopted_deployment": ADOPTED,
    "vllm_patch_adopted_env": ADOPTED,
    "vllm_patch_adopted_health_url": ADOPTED,
    "vllm_patch_adopted_start_budget": ADOPTED,
    "vllm_patch_adopted_unit": ADOPTED,
    "vllm_patch_architectures": FOLLOWS,
    "vllm_patch_package_dir": FOLLOWS,
    "vllm_patch_plan": FOLLOWS,
    "vllm_patch_state": ADOPTED,
    "vllm_patch_store": CONTROL,
    "vllm_patch_target_layers": FOLLOWS,
    "vllm_patch_wheel": FOLLOWS,
    "drafter_attention_backend": FOLLOWS,
    "drafter_check_mode": CHECKS,
    "drafter_derived": CONTROL,
    "drafter_digest_cache": CONTROL,
    "drafter_draft_attention_backend": FOLLOWS,
    "drafter_draft_kv_cache_dtype": FOLLOWS,
    "drafter_draft_max_model_len": FOLLOWS,
    "drafter_kv_cache_dtype": FOLLOWS,
    "drafter_max_model_len": FOLLOWS,
    "drafter_pipeline_parallel_size": FOLLOWS,
    "drafter_store": CONTROL,
    "drafter_taps_proved": FOLLOWS,
    "drafter_target": FOLLOWS,
    "drafter_vllm_version": FOLLOWS,
    "target_model_gpu_memory_mb": CHECKS,
    "target_model_service_user": CHECKS,
    "vllm_service_allow_dangerous": CHECKS,
    "vllm_service_api_keys": SETTINGS,
    "vllm_service_check_options": CHECKS,
    "vllm_service_clients": SETTINGS,
    "vllm_service_has_account": FOLLOWS,
    "vllm_service_host": SETTINGS,
    "vllm_service_hub_token": SETTINGS,
    "vllm_service_port": SETTINGS,
    "vllm_service_release_inputs": FOLLOWS,
    "vllm_service_serves": FOLLOWS,
    "vllm_service_speculation": FOLLOWS,
    "vllm_service_start_budget": BUDGET,
    "vllm_service_stuck_after": BUDGET,
    "vllm_service_tls_authorities": "the gateway verifies with them",
    "vllm_service_tls_certificate": SETTINGS,
    "vllm_service_tls_key": SETTINGS,
    "vllm_service_wheel": FOLLOWS,
    "hidden_states_baseline": CHECKS,
    "hidden_states_budget": BUDGET,
    "hidden_states_note": CONTROL,
    "hidden_states_device": CHECKS,
    "hidden_states_every_id": CHECKS,
    "hidden_states_layers": FOLLOWS,
    "hidden_states_live": CHECKS,
    "hidden_states_numeric": CHECKS,
    "hidden_states_partition": FOLLOWS,
    "hidden_states_prompts": CHECKS,
    "hidden_states_python": FOLLOWS,
    "hidden_states_service": FOLLOWS,
    "hidden_states_stages": FOLLOWS,
    "hidden_states_tap_ids": FOLLOWS,
    "hidden_states_threads": CHECKS,
    "hidden_states_thresholds": CHECKS,
    "hidden_states_user": FOLLOWS,
}


def variables() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "playbooks/group_vars/all.yml").read_text())
    return found


def options(role: str) -> set[str]:
    """Return the options of all entry points of a role."""
    specs = yaml.safe_load((ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())["argument_specs"]
    return {name for spec in specs.values() for name in spec.get("options", {}) if name.startswith(f"{role}_")}


@pytest.mark.parametrize("role", ROLES)
def test_every_option_is_compared_or_cannot_change_a_release(role: str) -> None:
    compared = {*variables()["release_request"], *OTHERWISE}
    both = compared & CANNOT.keys()
    assert not both, f"compared, and said not to matter: {sorted(both)}"
    missing = options(role) - compared - CANNOT.keys()
    assert not missing, (
        f"{sorted(missing)}: put each into release_request (playbooks/group_vars/all.yml) if another value makes "
        "another release, or here, with the reason why it does not"
    )


def test_nothing_is_listed_that_is_no_option() -> None:
    known = set().union(*(options(role) for role in ROLES))
    assert {*OTHERWISE, *CANNOT} - known == set()
    # `-e speculation=off` is a word of the command line.
    assert set(variables()["release_request"]) - known == {"speculation"}


def test_the_request_has_the_values_themselves() -> None:
    request = variables()["release_request"]
    for name, value in request.items():
        assert name in value, f"{name} is compared by {value}"


def test_what_is_compared_by_its_content_is_given_to_the_probe() -> None:
    given = yaml.safe_load((ROOT / "roles/release/tasks/probe.yml").read_text())[0]["release_probe"]
    assert {"lock", "drafter", "code", "request"} <= given.keys()
    code = yaml.safe_load((ROOT / "roles/release/vars/main.yml").read_text())["_release_code"]
    directories = {entry.rpartition("/")[2] for entry in code if "role_path" in entry}
    # Every directory whose code plans a release.
    assert {"library", "module_utils", "roles", "templates"} <= directories
