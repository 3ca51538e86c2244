# SPDX-License-Identifier: Apache-2.0
"""What the role refuses before it touches a host, as a playbook on this machine shows it."""

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
    "a target in /home": ({"target_model_path": "/home/ada/kimi"}, "does not see /home"),
    "a short key": ({"vllm_service_api_keys": {"ada": "short"}}, "at least 16 printable characters"),
    "somebody's account": ({"vllm_service_user": "daemon"}, "an account with the home"),
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


@functools.cache
def refusals() -> dict[str, str]:
    """Return the message of each case, of one run of ansible-playbook."""
    tasks = [
        {
            "block": [
                {
                    "ansible.builtin.include_role": {"name": "vllm_service", "tasks_from": "check"},
                    "vars": {**GOOD, **variables},
                },
                {"ansible.builtin.set_fact": {"said": "{{ said | combine({name: ''}) }}"}},
            ],
            "rescue": [
                {"ansible.builtin.set_fact": {"said": "{{ said | combine({name: ansible_failed_result.msg}) }}"}}
            ],
            "vars": {"name": name},
        }
        for name, (variables, _) in CASES.items()
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
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        command = [program, "-i", "localhost,", "-c", "local", str(playbook)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.exists(), run.stdout + run.stderr
        said: dict[str, str] = json.loads(result.read_text())
    return said


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_work_or_opens_the_service_is_refused(name: str) -> None:
    expected = CASES[name][1]
    said = refusals()[name]
    assert expected in said
    assert bool(said) == bool(expected), said
