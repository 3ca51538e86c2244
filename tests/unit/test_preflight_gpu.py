# SPDX-License-Identifier: Apache-2.0
"""Every check of the GPUs: what it says, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.aerie.nvidia_smi import Gpu, GpuReport, Process, parse_nvidia_smi
from ansible.module_utils.aerie.preflight_gpu import GpuFacts, GpuNeeds, check_gpus, selected
from ansible.module_utils.aerie.xid import Xid
from preflight_findings_text import messages

ANSWERS = Path(__file__).parent / "nvidia_smi"
GIB = 1 << 30


def facts(name: str, **more: object) -> GpuFacts:
    report = parse_nvidia_smi((ANSWERS / name).read_text())
    assert report is not None
    return replace(GpuFacts(report), **more)  # type: ignore[arg-type]


def of(gpus: list[Gpu], driver: str = "580.95", cuda: tuple[int, int] = (13, 0), **more: object) -> GpuFacts:
    numbered = tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))
    return replace(GpuFacts(GpuReport(driver, cuda, numbered)), **more)  # type: ignore[arg-type]


def check(found: GpuFacts, count: int = 1, cuda: tuple[int, int] = (13, 0), **needs: object) -> list[str]:
    return messages(check_gpus(found, GpuNeeds(cuda, count, **needs)))  # type: ignore[arg-type]


H200 = Gpu("NVIDIA H200", 143771, capability=(9, 0))
B200 = Gpu("NVIDIA B200", 183359, capability=(10, 0))
RTX = Gpu("NVIDIA RTX PRO 6000", 97887, capability=(12, 0))


def test_gpus_that_have_everything_have_no_findings() -> None:
    assert check(facts("h200.xml", own=frozenset({4000, 4001, 4002, 4003})), 4) == []
    assert check(facts("b200.xml"), 2) == []
    assert check(of([RTX] * 8), 8) == []


# ----------------------------------------------------------------------------------------------------- driver and count


@pytest.mark.parametrize(
    ("driver", "cuda", "needed"),
    [
        ("550.54.15", (13, 0), 580),
        ("579.99", (13, 0), 580),
        ("515.65.01", (12, 8), 525),
        ("", (13, 0), 580),
        ("570.86", (12, 8), 0),
        ("580", (99, 0), 0),
    ],
)
def test_a_driver_that_is_too_old_is_named_with_what_is_needed(driver: str, cuda: tuple[int, int], needed: int) -> None:
    wanted = f"the driver is {driver or 'unknown'} and a CUDA {cuda[0]} build needs {needed} or newer: update it"
    assert check(of([H200], driver, (0, 0)), cuda=cuda) == ([wanted] if needed else [])


def test_a_driver_for_an_older_minor_release_is_noted() -> None:
    assert check(of([H200], "550.54.15", (12, 4)), cuda=(12, 8)) == [
        "note: the driver 550.54.15 is for CUDA 12.4 and the build is for 12.8: "
        "update the driver if a kernel that is compiled at run time fails"
    ]


def test_too_few_gpus_are_counted() -> None:
    own = frozenset({4000, 4001, 4002, 4003})
    assert check(facts("h200.xml", own=own), 8) == [
        "4 GPUs are usable and tensor-parallel-size is 8: lower it, or see nvidia-smi"
    ]
    assert check(facts("h200.xml", own=own), 8, stages=2) == [
        "4 GPUs are usable and tensor-parallel-size is 4, in 2 pipeline stages on this host: "
        "lower it, or see nvidia-smi"
    ]
    # A host that the options leave without a stage takes none; whoever counts some all the same gets an answer.
    assert check(facts("h200.xml", own=own), 0, stages=0, weights=GIB) == []
    assert check(facts("h200.xml", own=own), 8, stages=0) == check(facts("h200.xml", own=own), 8)
    assert check(facts("no_gpu.xml")) == [
        "0 GPUs are usable and tensor-parallel-size is 1: lower it, or see nvidia-smi"
    ]


def test_slices_of_a_gpu_are_no_gpus_to_share_a_model() -> None:
    assert check(facts("mig.xml"), 2) == [
        "1 GPUs are usable and tensor-parallel-size is 2: lower it, or see nvidia-smi "
        "(1 are in MIG mode: `nvidia-smi -mig 0` makes them whole)"
    ]
    assert check(facts("all_mig.xml"), 2)[0].startswith("1 GPUs are usable and tensor-parallel-size is 2")
    # A process gets one slice, which is enough for a small model.
    assert check(facts("all_mig.xml")) == []


def test_the_service_uses_the_gpus_that_it_is_given() -> None:
    report = of([replace(H200, uuid=f"GPU-{n}") for n in "abcd"]).report
    for visible in (("2", "3"), ("GPU-c", "GPU-d"), ("GPU-c", "3")):
        assert [gpu.uuid for gpu in selected(report, GpuNeeds((13, 0), 2, visible))] == ["GPU-c", "GPU-d"]
    assert check(GpuFacts(report), 2, visible=("2", "7")) == [
        "1 GPUs of those in CUDA_VISIBLE_DEVICES (2,7) are usable and tensor-parallel-size is 2: "
        "lower it, or see nvidia-smi"
    ]


def test_a_lost_gpu_is_named() -> None:
    assert "GPU 0 (00000000:19:00.0) does not answer its driver: reboot the host" in check(facts("lost.xml"))


# --------------------------------------------------------------------------------------------- capability and attention


@pytest.mark.parametrize(
    ("gpu", "cuda", "needed"),
    [(B200, (12, 4), "12.8"), (RTX, (12, 4), "12.8"), (H200, (11, 7), "11.8"), (B200, (12, 8), ""), (RTX, (13, 0), "")],
)
def test_a_gpu_that_is_newer_than_the_build(gpu: Gpu, cuda: tuple[int, int], needed: str) -> None:
    major, minor = gpu.capability or (0, 0)
    expected = (
        f"{gpu.name} has compute capability {major}.{minor}, which needs CUDA {needed}; the build is for "
        f"{cuda[0]}.{cuda[1]}: take a lock for a newer CUDA (ml_env_lock)"
    )
    assert check(of([gpu] * 2), 2, cuda) == ([expected] if needed else [])


def test_a_gpu_that_is_older_than_the_build() -> None:
    volta = Gpu("Tesla V100", 32510, capability=(7, 0))
    assert check(of([volta])) == [
        "Tesla V100 has compute capability 7.0, which CUDA 13 builds no longer run on: "
        "take a lock for an older CUDA, or other GPUs",
        "Tesla V100 has compute capability 7.0, without bfloat16: set dtype: half in vllm_service_options",
    ]
    assert check(of([volta]), cuda=(12, 8), dtype="half") == []


@pytest.mark.parametrize(
    ("backend", "allowed"),
    [
        ("FLASHMLA", (H200, B200)),
        ("FLASH_ATTN_MLA", (H200,)),
        ("CUTLASS_MLA", (B200,)),
        ("FLASHINFER_MLA", (B200,)),
        ("TRITON_MLA", (H200, B200, RTX)),
        ("FLASH_ATTN", (H200, B200, RTX)),
    ],
)
def test_an_attention_backend_runs_on_some_generations(backend: str, allowed: tuple[Gpu, ...]) -> None:
    for gpu in (H200, B200, RTX):
        found = check(of([gpu]), latent=True, backend=backend)
        assert bool(found) is (gpu not in allowed)
        assert all(f"the attention backend {backend} does not run on {gpu.name}" in message for message in found)
        # A model without latent attention has other backends.
        assert check(of([gpu]), backend=backend) == []


def test_the_only_backend_of_a_generation_is_noted_unless_it_is_set() -> None:
    (found,) = check(of([RTX] * 8), 8, latent=True)
    assert found.startswith("note: only TRITON_MLA serves the model's latent attention on NVIDIA RTX PRO 6000")
    assert "mla_attention: TRITON_MLA" in found
    assert check(of([RTX] * 8), 8, latent=True, backend="TRITON_MLA") == []
    assert check(of([H200]), latent=True) == []


# --------------------------------------------------------------------------------------------------------------- memory


def test_weights_must_fit_into_each_gpu() -> None:
    assert check(of([H200] * 8), 8, weights=595 * 10**9) == []
    (found,) = check(of([H200] * 4), 4, weights=595 * 10**9)
    assert found == (
        "the weights take 141859 MiB of each of 4 GPUs, and vLLM may use 129393 MiB (gpu-memory-utilization 0.9): "
        "use more GPUs (tensor-parallel-size), or smaller weights"
    )


def test_little_room_for_the_cache_is_noted() -> None:
    (found,) = check(of([RTX]), weights=84 * GIB, utilization=0.9)
    assert found.startswith("note: the weights take 86016 MiB of each of 1 GPUs, which leaves 2082 MiB")


# ---------------------------------------------------------------------------------------------------- others and errors


def test_others_that_compute_are_named_and_a_display_is_not() -> None:
    display, other = Process(812, "G", "Xorg", 4), Process(7, "C+G", "render", 900)
    assert check(of([replace(H200, used=1000, processes=(display, other))])) == [
        "GPU 0 is in use by render (process 7, 900 MiB): stop it, or give the service other GPUs (CUDA_VISIBLE_DEVICES)"
    ]
    found = facts("h200.xml", own=frozenset({4000, 4001}))
    assert [message.split(" (")[0] for message in check(found, 4)] == [
        "GPU 2 is in use by VLLM::Worker_TP2",
        "GPU 3 is in use by VLLM::Worker_TP3",
    ]
    # What the service does not use is others' affair.
    assert check(found, 2) == []


def test_memory_that_nobody_has_is_named() -> None:
    assert check(of([replace(H200, used=40_000)])) == [
        "GPU 0 has 40000 MiB in use by no process that can be seen: find it (fuser -v /dev/nvidia*), or reset the GPU"
    ]
    assert check(of([replace(H200, used=600)])) == []
    # In a container nvidia-smi shows no processes, and the memory may well be our service's.
    assert check(of([replace(H200, used=40_000)], own=frozenset({9}))) == []


def test_broken_memory_and_fabric_are_named() -> None:
    assert check(facts("h100_broken.xml"), 4) == [
        "GPU 3 has 40000 MiB in use by no process that can be seen: find it (fuser -v /dev/nvidia*), or reset the GPU",
        "GPU 1 (00000000:2A:00.0) had 3 ECC errors that were not corrected: "
        "reset it (nvidia-smi --gpu-reset); replace it if they come back",
        "GPU 2 (00000000:3A:00.0) waits for a reset to replace broken memory: reset it, or reboot",
        "GPU 3 (00000000:5D:00.0) could not replace broken memory: replace it",
        "GPU 3 is not registered with its NVSwitches (In Progress): "
        "start nvidia-fabricmanager, of the driver's own release",
        "note: PCIe runs with fewer lanes than the GPU has: GPU 2 x8 of x16: reseat it, or see the slot",
    ]


def test_xid_errors_stop_if_hardware_is_broken_and_are_noted_otherwise() -> None:
    found = of([H200], xids=(Xid("0000:3b:00", 79, 2), Xid("0000:3b:00", 31, 1)))
    assert check(found) == [
        "the kernel log has Xid 79 of the GPU at 0000:3b:00 (2 times since boot): GPU has fallen off the bus: "
        "reboot; replace the GPU if it comes back",
        "note: the kernel log has Xid 31 of the GPU at 0000:3b:00 (1 times since boot): "
        "NVIDIA's catalogue of Xid errors says what it means",
    ]


def test_missing_nvlink_is_noted_unless_the_options_know() -> None:
    (found,) = check(of([RTX] * 2, nvlink=False), 2)
    assert found.startswith("note: no NVLink joins the GPUs: they talk over PCIe: set disable-custom-all-reduce: true")
    assert check(of([RTX] * 2, nvlink=False), 2, custom_all_reduce=False) == []
    assert check(of([RTX] * 2, nvlink=True), 2) == check(of([RTX], nvlink=False), 1) == []
