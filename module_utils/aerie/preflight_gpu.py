# SPDX-License-Identifier: Apache-2.0
"""What a host's GPUs and their driver must have for a CUDA build: each check is facts to findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ansible.module_utils.aerie.findings import Finding
from ansible.module_utils.aerie.nvidia_smi import Gpu, GpuReport
from ansible.module_utils.aerie.preflight_findings import note, problem
from ansible.module_utils.aerie.xid import Xid

# The first driver branch of each CUDA major release.
_DRIVER_FOR_CUDA = {11: 450, 12: 525, 13: 580}
# The first CUDA release whose compilers know a GPU of this capability, from NVIDIA's release notes.
_CUDA_FOR_CAPABILITY = {8: (11, 0), 9: (11, 8), 10: (12, 8), 12: (12, 8)}
# The oldest capability that builds for a CUDA major release run on.
_OLDEST_CAPABILITY = {11: (3, 5), 12: (5, 0), 13: (7, 5)}
_BFLOAT16 = (8, 0)
# The major compute capabilities that vLLM's kernels for dense latent attention run on, as each backend's
# supports_compute_capability has it in vLLM 0.18 to 0.33. TRITON_MLA runs on all.
_LATENT_BACKENDS = {
    "CUTLASS_MLA": (10,),
    "FLASHINFER_MLA": (10,),
    "FLASHMLA": (9, 10),
    "FLASH_ATTN_MLA": (9,),
    "TOKENSPEED_MLA": (10,),
}
# What a GPU keeps for itself or a display; more without a process is a context that never went away.
_LEFTOVER_MB = 2048
_ROOM_FOR_CACHE_MB = 4096


@dataclass(frozen=True)
class GpuNeeds:
    """What the service needs of a host's GPUs.

    ``cuda``: the release that the build is for. ``count``: GPUs on this host, for ``stages`` pipeline stages; none of
    both where the options leave this host of a replica without a stage, which is refused elsewhere.
    ``visible``: indices or UUIDs that the service is given, none for all. ``weights``: bytes of this host's part of the
    checkpoint, 0 if not known. ``utilization``: the share of a GPU's memory that vLLM may use. ``latent``:
    the model's attention is latent (MLA). ``backend``: the attention backend that is asked for, or empty. ``dtype``:
    vLLM's option.
    ``custom_all_reduce``: whether vLLM's own all-reduce is left on.
    """

    cuda: tuple[int, int]
    count: int
    visible: tuple[str, ...] = ()
    weights: int = 0
    utilization: float = 0.9
    latent: bool = False
    backend: str = ""
    dtype: str = "auto"
    custom_all_reduce: bool = True
    stages: int = 1


@dataclass(frozen=True)
class GpuFacts:
    """What was found: the report, the process ids of our own service, whether NVLink joins GPUs, and Xid errors."""

    report: GpuReport
    own: frozenset[int] = frozenset()
    nvlink: bool | None = None
    xids: tuple[Xid, ...] = ()


def selected(report: GpuReport, needs: GpuNeeds) -> tuple[Gpu, ...]:
    """Return the GPUs that the service uses: the first whole ones of those that it is given."""
    gpus = report.gpus
    if needs.visible:
        gpus = tuple(gpu for gpu in gpus if any(_names(name, gpu) for name in needs.visible))
    whole = tuple(gpu for gpu in gpus if not gpu.mig)
    # CUDA gives a process one MIG slice, whatever there is.
    return (whole or gpus[:1])[: needs.count]


def _names(name: str, gpu: Gpu) -> bool:
    return name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))


def check_driver(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    driver, (major, minor) = facts.report.driver, needs.cuda
    needed = _DRIVER_FOR_CUDA.get(major, max(_DRIVER_FOR_CUDA.values()))
    match = re.match(r"([0-9]{1,9})", driver)
    if not match or int(match.group(1)) < needed:
        message = f"the driver is {driver or 'unknown'} and a CUDA {major} build needs {needed} or newer"
        yield problem("gpu-driver", message, "update it")
    elif (0, 0) < facts.report.cuda < needs.cuda:
        runs = "{}.{}".format(*facts.report.cuda)
        message = f"the driver {driver} is for CUDA {runs} and the build is for {major}.{minor}"
        yield note("gpu-driver-minor", message, "update the driver if a kernel that is compiled at run time fails")


def check_count(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    usable = selected(facts.report, needs)
    if len(usable) >= needs.count:
        return
    divided = sum(gpu.mig for gpu in facts.report.gpus)
    slices = f" ({divided} are in MIG mode: `nvidia-smi -mig 0` makes them whole)" if divided else ""
    given = f" of those in CUDA_VISIBLE_DEVICES ({','.join(needs.visible)})" if needs.visible else ""
    message = f"{len(usable)} GPUs{given} are usable and tensor-parallel-size is {needs.count // max(needs.stages, 1)}"
    if needs.stages > 1:
        message += f", in {needs.stages} pipeline stages on this host"
    yield problem("gpu-count", message, f"lower it, or see nvidia-smi{slices}")


def check_lost(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    for gpu in facts.report.gpus:
        if gpu.lost:
            yield problem("gpu-lost", f"GPU {gpu.index} ({gpu.bus}) does not answer its driver", "reboot the host")


def check_capability(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    for gpu in _one_of_each(selected(facts.report, needs)):
        if gpu.capability is None:
            continue
        own = f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        first = _CUDA_FOR_CAPABILITY.get(gpu.capability[0], (0, 0))
        if gpu.capability < _OLDEST_CAPABILITY.get(needs.cuda[0], (0, 0)):
            message = f"{own}, which CUDA {needs.cuda[0]} builds no longer run on"
            yield problem("gpu-too-old", message, "take a lock for an older CUDA, or other GPUs")
        elif needs.cuda < first:
            message = f"{own}, which needs CUDA {first[0]}.{first[1]}; the build is for {needs.cuda[0]}.{needs.cuda[1]}"
            yield problem("gpu-too-new", message, "take a lock for a newer CUDA (ml_env_lock)")
        if gpu.capability < _BFLOAT16 and needs.dtype in ("auto", "bfloat16"):
            yield problem("gpu-bfloat16", f"{own}, without bfloat16", "set dtype: half in vllm_service_options")


def check_attention(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    """Yield what keeps the attention backend that is asked for from serving a model with latent attention."""
    if not needs.latent:
        return
    for gpu in _one_of_each(selected(facts.report, needs)):
        if gpu.capability is None:
            continue
        allowed = ["TRITON_MLA", *(name for name, on in _LATENT_BACKENDS.items() if gpu.capability[0] in on)]
        own = f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
        if needs.backend in _LATENT_BACKENDS and needs.backend not in allowed:
            message = f"the attention backend {needs.backend} does not run on {own}"
            yield problem("gpu-attention", message, f"for the model's latent attention take {' or '.join(allowed)}")
        elif not needs.backend and allowed == ["TRITON_MLA"]:
            message = f"only TRITON_MLA serves the model's latent attention on {own}"
            remedy = "set attention-config: {backend_per_kind: {mla_attention: TRITON_MLA}} so that no other is tried"
            yield note("gpu-attention-only", message, remedy)


def check_weights(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    gpus = selected(facts.report, needs)
    usable_mb = [int(gpu.memory * needs.utilization) for gpu in gpus]
    if not needs.weights or not gpus or not all(usable_mb) or len(gpus) < needs.count:
        return
    each_mb = (needs.weights >> 20) // len(gpus)
    smallest = min(usable_mb)
    takes = f"the weights take {each_mb} MiB of each of {len(gpus)} GPUs"
    if each_mb >= smallest:
        message = f"{takes}, and vLLM may use {smallest} MiB (gpu-memory-utilization {needs.utilization:g})"
        yield problem("gpu-memory", message, "use more GPUs (tensor-parallel-size), or smaller weights")
    elif smallest - each_mb < _ROOM_FOR_CACHE_MB:
        message = f"{takes}, which leaves {smallest - each_mb} MiB for activations and the KV cache"
        yield note("gpu-memory-tight", message, "lower max-model-len, or use more GPUs")


def check_busy(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    """Yield the processes of others that compute on our GPUs, and memory that a process left behind."""
    for gpu in selected(facts.report, needs):
        others = [process for process in gpu.processes if process.pid not in facts.own and "C" in process.kind]
        for process in others:
            message = f"GPU {gpu.index} is in use by {process.name} (process {process.pid}, {process.memory} MiB)"
            yield problem("gpu-busy", message, "stop it, or give the service other GPUs (CUDA_VISIBLE_DEVICES)")
        if gpu.used > _LEFTOVER_MB and not gpu.processes and not gpu.mig and not facts.own:
            message = f"GPU {gpu.index} has {gpu.used} MiB in use by no process that can be seen"
            yield problem("gpu-leftover", message, "find it (fuser -v /dev/nvidia*), or reset the GPU")


def check_errors(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    """Yield ECC errors, and Xid errors in the kernel log of this boot."""
    for gpu in selected(facts.report, needs):
        where = f"GPU {gpu.index} ({gpu.bus})"
        if gpu.uncorrectable:
            message = f"{where} had {gpu.uncorrectable} ECC errors that were not corrected"
            yield problem("gpu-ecc", message, "reset it (nvidia-smi --gpu-reset); replace it if they come back")
        if gpu.remapping == "failed":
            yield problem("gpu-remap-failed", f"{where} could not replace broken memory", "replace it")
        elif gpu.remapping:
            yield problem("gpu-remap", f"{where} waits for a reset to replace broken memory", "reset it, or reboot")
    for xid in facts.xids:
        message = f"the kernel log has Xid {xid.number} of the GPU at {xid.bus} ({xid.count} times since boot)"
        if xid.meaning:
            remedy = "reboot; replace the GPU if it comes back"
            yield problem("gpu-xid", f"{message}: {xid.meaning}", remedy)
        else:
            yield note("gpu-xid-note", message, "NVIDIA's catalogue of Xid errors says what it means")


def check_links(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    """Yield what slows GPUs down that work together: missing NVLink, a fabric that is not up, PCIe lanes."""
    gpus = selected(facts.report, needs)
    for gpu in gpus:
        if gpu.fabric and gpu.fabric != "Completed" and needs.count > 1:
            message = f"GPU {gpu.index} is not registered with its NVSwitches ({gpu.fabric})"
            yield problem("gpu-fabric", message, "start nvidia-fabricmanager, of the driver's own release")
    if facts.nvlink is False and needs.count > 1 and needs.custom_all_reduce:
        remedy = "set disable-custom-all-reduce: true in vllm_service_options; tensor parallelism costs more here"
        yield note("gpu-nvlink", "no NVLink joins the GPUs: they talk over PCIe", remedy)
    narrow = [gpu for gpu in gpus if 0 < gpu.lanes[0] < gpu.lanes[1]]
    if narrow:
        which = ", ".join(f"GPU {gpu.index} x{gpu.lanes[0]} of x{gpu.lanes[1]}" for gpu in narrow)
        yield note("gpu-pcie", f"PCIe runs with fewer lanes than the GPU has: {which}", "reseat it, or see the slot")


def _one_of_each(gpus: tuple[Gpu, ...]) -> list[Gpu]:
    """Return the first GPU of every model, since what holds for one holds for its like."""
    return list({gpu.name: gpu for gpu in reversed(gpus)}.values())[::-1]


CHECKS = (
    check_driver,
    check_count,
    check_lost,
    check_capability,
    check_attention,
    check_weights,
    check_busy,
    check_errors,
    check_links,
)


def check_gpus(facts: GpuFacts, needs: GpuNeeds) -> Iterator[Finding]:
    """Yield what keeps a CUDA build from running well on the GPUs of this host."""
    for check in CHECKS:
        yield from check(facts, needs)
