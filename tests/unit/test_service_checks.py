# SPDX-License-Identifier: Apache-2.0
"""What roles refuse before they touch a host, as a playbook on this machine shows it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KEY = {"ada": "0123456789abcdef"}
GOOD: dict[str, Any] = {
    "vllm_service_api_keys": KEY,
    "vllm_service_host": "10.0.0.1",
    "vllm_service_user": "nobody-has-this-name",
    "vllm_service_options": {},
    "vllm_service_environment": {},
    "target_model_path": "/srv/models/kimi",
}

# What an inventory says, and a part of the refusal; nothing where it is fine.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "good": ({}, ""),
    "a reserved option": ({"vllm_service_options": {"api_key": "x"}}, "vllm_service_options has api_key"),
    "an option with underscores": (
        {"vllm_service_options": {"tensor_parallel_size": 8}},
        "vllm_service_options has tensor_parallel_size, which Aerie does not know so; write tensor-parallel-size.",
    ),
    "a key of an option": ({"vllm_service_options": {"compilation-config.use_inductor": False}}, ""),
    "a dangerous variable of one host": (
        {"multi_node_environment": {"LD_PRELOAD": "/x.so"}},
        "LD_PRELOAD opens this service",
    ),
    "a target in /home": ({"target_model_path": "/home/ada/kimi"}, "does not see /home"),
    "a short key": ({"vllm_service_api_keys": {"ada": "short"}}, "at least 16 printable characters"),
    "no key on an address": ({"vllm_service_api_keys": {}}, "vllm_service_host is 10.0.0.1, which others reach"),
    "no key on all": ({"vllm_service_api_keys": {}, "vllm_service_host": "0.0.0.0"}, "which others reach"),
    "no key on loopback": ({"vllm_service_api_keys": {}, "vllm_service_host": "127.0.0.1"}, ""),
    "no key on loopback, IPv6": ({"vllm_service_api_keys": {}, "vllm_service_host": "::1"}, ""),
    "a certificate without its key": (
        {"vllm_service_tls_certificate": "PEM"},
        "vllm_service_tls_key is empty, and TLS needs it",
    ),
    "a key without its certificate": (
        {"vllm_service_tls_key": "PEM"},
        "vllm_service_tls_certificate is empty, and TLS needs it",
    ),
    "a certificate and a key": ({"vllm_service_tls_certificate": "PEM", "vllm_service_tls_key": "PEM"}, ""),
    "a hub token for nothing": ({"vllm_service_hub_token": "hf_0"}, "the service never asks the hub"),
    "a hub token that is none": (
        {"vllm_service_hub_token": "hf 0", "vllm_service_environment": {"HF_HUB_OFFLINE": 0}},
        "has spaces or other characters that no token has",
    ),
    "a hub token": ({"vllm_service_hub_token": "hf_0", "vllm_service_environment": {"HF_HUB_OFFLINE": 0}}, ""),
    "dangerous options": (
        {
            "vllm_service_options": {
                "trust_remote_code": True,
                "worker-cls": "a.B",
                "profiler-config.torch_profiler_dir": "/x",
            }
        },
        "profiler-config.torch-profiler-dir, trust-remote-code, worker-cls opens",
    ),
    "dangerous variables": (
        {"vllm_service_environment": {"VLLM_SERVER_DEV_MODE": 1, "HF_TOKEN": "x", "VLLM_TORCH_PROFILER_DIR": "/x"}},
        "HF_TOKEN, VLLM_SERVER_DEV_MODE, VLLM_TORCH_PROFILER_DIR opens",
    ),
    "dangerous, but spelled out": (
        {
            "vllm_service_options": {"trust-remote-code": True},
            "vllm_service_environment": {"VLLM_SERVER_DEV_MODE": 1},
            "vllm_service_allow_dangerous": ["VLLM_SERVER_DEV_MODE", "trust-remote-code"],
        },
        "",
    ),
    "switched off": (
        {
            "vllm_service_options": {"trust-remote-code": False, "max-model-len": 4096},
            "vllm_service_environment": {"VLLM_SERVER_DEV_MODE": 0, "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": 1},
        },
        "",
    ),
}

ACCOUNTS: dict[str, tuple[dict[str, Any], str]] = {
    "none yet": ({}, ""),
    "somebody's": ({"vllm_service_user": "daemon"}, "vllm_service_user is daemon, an account with the home"),
}

# The play is on the first.
HOSTS: dict[str, dict[str, Any]] = {"localhost": {}, "left-out": {}, "elsewhere": {"multi_node_port": 7000}}
SEVERAL: dict[str, Any] = {
    "multi_node_several": True,
    "multi_node_hosts": ["localhost"],
    "multi_node_addresses": ["10.0.0.1", "10.0.0.2"],
    "vllm_service_options": {},
}
REPLICAS: dict[str, tuple[dict[str, Any], str]] = {
    "defaults": ({}, ""),
    "a network card": ({"multi_node_environment": {"NCCL_IB_HCA": "mlx5_0"}}, ""),
    "several engines": (
        {"vllm_service_options": {"data-parallel-size": 2}},
        "vllm_service_options has data-parallel-size",
    ),
    "what Aerie sets": (
        {"multi_node_environment": {"VLLM_HOST_IP": "10.9.9.9"}},
        "multi_node_environment has VLLM_HOST_IP",
    ),
    "other stages here": (
        {"multi_node_environment": {"VLLM_PP_LAYER_PARTITION": "4,4"}},
        "multi_node_environment has VLLM_PP_LAYER_PARTITION",
    ),
    "addresses of IPv6": (
        {"multi_node_addresses": ["fd00::1", "fd00::2"]},
        "has fd00::1, fd00::2: Ray takes addresses",
    ),
    "no room for objects": (
        {"multi_node_object_store_mb": 10},
        "multi_node_object_store_mb has 10: Ray needs at least",
    ),
    "a part of it": (
        {"multi_node_hosts": ["localhost", "left-out"]},
        "localhost, left-out are one replica, and this run leaves out left-out: name all of them with --limit.",
    ),
    "ports that differ": (
        {"multi_node_hosts": ["left-out", "elsewhere"]},
        "left-out, elsewhere are one replica, and multi_node_port differs between them: give them the same.",
    ),
    "one address twice": ({"multi_node_addresses": ["10.0.0.1", "10.0.0.1"]}, "set multi_node_address of each"),
}

ROLLOUT: dict[str, tuple[dict[str, Any], str]] = {
    "defaults": ({}, ""),
    "of the command line": ({"release_keep": "2", "release_confirm_budget": "60", "release_batch": "2"}, ""),
    "a share": ({"release_batch": "100%"}, ""),
    "no release": ({"release_keep": 0}, "release_keep is 0: it must be a number from 1 on."),
    "no number": ({"release_keep": "three"}, "release_keep is three: it must be a number from 1 on."),
    "no budget": ({"release_confirm_budget": 0}, "release_confirm_budget is 0: it must be a number from 1 on."),
    "less than none": ({"release_confirm_budget": -1}, "release_confirm_budget is -1: it must be"),
    "a budget in words": ({"release_confirm_budget": "5m"}, "release_confirm_budget is 5m: it must be"),
    "a part of a second": ({"release_confirm_budget": 0.5}, "release_confirm_budget is 0.5: it must be"),
    "a batch in words": ({"release_batch": "half"}, "aerie_batch is half: it must be a number of replicas, or a share"),
    "no batch": ({"release_batch": 0}, "aerie_batch is 0: it must be a number of replicas, or a share"),
    "more than all": ({"release_batch": "101%"}, "aerie_batch is 101%: it must be a number of replicas, or a share"),
}

GATES: dict[str, tuple[dict[str, Any], str]] = {
    "defaults": ({}, ""),
    "a mode that there is not": ({"hidden_states_live": "on"}, "hidden_states_live is on: it must be enforce,"),
    "thresholds": ({"hidden_states_thresholds": {"fail_length": 1.2, "warn_length": 2}}, ""),
    "a baseline": (
        {"hidden_states_baseline": {"speculative_tokens": 3, "acceptance_length": 2.94, "per_position": [0.8, 0.6]}},
        "",
    ),
    "a part of a baseline": ({"hidden_states_baseline": {"acceptance_length": 2.94}}, ""),
    "prompts": ({"hidden_states_prompts": ["a", "b"]}, ""),
    "a threshold that there is not": (
        {"hidden_states_thresholds": {"fail_lenght": 1.2}},
        "thresholds has fail_lenght: 1.2; there are the numbers fail_length,",
    ),
    "a threshold that is no number": (
        {"hidden_states_thresholds": {"fail_length": "1,2"}},
        "thresholds has fail_length: '1,2'; there are the numbers",
    ),
    "thresholds that are a number": ({"hidden_states_thresholds": 1.2}, "hidden_states_thresholds is wrong: "),
    "a length with a comma": (
        {"hidden_states_baseline": {"speculative_tokens": 3, "acceptance_length": "2,94"}},
        "baseline has what is no number: could not convert string to float: '2,94'",
    ),
    "a length with a comma, of any depth": (
        {"hidden_states_baseline": {"acceptance_length": "2,94"}},
        "baseline has what is no number: could not convert string to float: '2,94'",
    ),
    "positions that are a number": (
        {"hidden_states_baseline": {"speculative_tokens": 3, "acceptance_length": 2.94, "per_position": 0.8}},
        "baseline has what is no number: ",
    ),
    "a depth in words": (
        {"hidden_states_baseline": {"speculative_tokens": "three", "acceptance_length": 2.94}},
        "speculative_tokens is 'three': it must be a number from 0 on",
    ),
    "a baseline that is a number": ({"hidden_states_baseline": 2.94}, "baseline is 2.94, and no result of the gate"),
    "prompts that are one": ({"hidden_states_prompts": "a"}, "prompts must be a list of texts"),
}

# The cases of each role, or of another part of it than its check, and what is fine for it.
ROLES: dict[str, tuple[dict[str, Any], dict[str, tuple[dict[str, Any], str]]]] = {
    "vllm_service": (GOOD, CASES),
    "vllm_service/account": (GOOD, ACCOUNTS),
    "multi_node": (SEVERAL, REPLICAS),
    "release": ({"release_batch": "25%"}, ROLLOUT),
    "hidden_states": ({}, GATES),
}
# Of a loop, those of its rounds.
MESSAGES = """{{ [ansible_failed_result] | union(ansible_failed_result.results | default([]))
                 | selectattr('msg', 'defined') | map(attribute='msg') }}"""
EVERY_CASE = [(role, name) for role, (_, cases) in ROLES.items() for name in cases]


@functools.cache
def refusals() -> dict[str, str]:
    """Return the message of each case, of one run of ansible-playbook."""
    tasks = [
        {
            "block": [
                {
                    "ansible.builtin.include_role": {
                        "name": role.partition("/")[0],
                        "tasks_from": role.partition("/")[2] or "check",
                    },
                    "vars": {**ROLES[role][0], **ROLES[role][1][name][0]},
                },
                {"ansible.builtin.set_fact": {"said": "{{ said | combine({name: ''}) }}"}},
            ],
            "rescue": [{"ansible.builtin.set_fact": {"said": "{{ said | combine({name: messages | join(' ')}) }}"}}],
            "vars": {"name": f"{role}: {name}", "messages": MESSAGES},
        }
        for role, name in EVERY_CASE
    ]
    with TemporaryDirectory() as directory:
        result = Path(directory) / "said.json"
        keep = {"ansible.builtin.copy": {"content": "{{ said | to_json }}", "dest": str(result), "mode": "0600"}}
        play = {
            "hosts": "localhost",
            "gather_facts": False,
            "vars": {"said": {}, "ansible_python_interpreter": sys.executable},
            "tasks": [*tasks, keep],
        }
        playbook = Path(directory) / "play.yml"
        playbook.write_text(yaml.safe_dump([play], sort_keys=False))
        inventory = Path(directory) / "hosts.yml"
        inventory.write_text(yaml.safe_dump({"all": {"hosts": HOSTS}}))
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        command = [program, "-i", str(inventory), "-c", "local", str(playbook)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.exists(), run.stdout + run.stderr
        said: dict[str, str] = json.loads(result.read_text())
    return said


@pytest.mark.parametrize(("role", "name"), EVERY_CASE)
def test_what_cannot_work_or_opens_the_service_is_refused(role: str, name: str) -> None:
    expected = ROLES[role][1][name][1]
    said = refusals()[f"{role}: {name}"]
    assert expected in said
    assert bool(said) == bool(expected), said
