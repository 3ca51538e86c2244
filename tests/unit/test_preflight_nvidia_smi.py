# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi says on several generations of GPUs, cut down to what counts, and whatever else it might say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ansible.module_utils.aerie.nvidia_smi import (
    Gpu,
    GpuReport,
    Process,
    failure,
    has_nvlink,
    parse_nvidia_smi,
)
from ansible.module_utils.aerie.preflight_gpu import GpuFacts, GpuNeeds, check_gpus
from ansible.module_utils.aerie.xid import Xid, parse_xids
from hypothesis import example, given, settings
from hypothesis import strategies as st

ANSWERS = {path.name: path.read_text() for path in (Path(__file__).parent / "nvidia_smi").iterdir()}
XML = [text for name, text in ANSWERS.items() if name.endswith(".xml")]
# Far more than the longest answer takes, on a busy machine.
SECONDS = 5.0


def report(name: str) -> GpuReport:
    found = parse_nvidia_smi(ANSWERS[name])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("answer", "driver", "cuda", "gpus"),
    [
        ("h100.xml", "550.54.15", (12, 4), [("NVIDIA H100 80GB HBM3", 81559, 0, False, (9, 0))] * 2),
        ("h200.xml", "580.95.05", (13, 0), [("NVIDIA H200", 143771, 1, False, (9, 0))] * 4),
        ("b200.xml", "580.105.08", (13, 0), [("NVIDIA B200", 183359, 0, False, (10, 0))] * 2),
        (
            "rtx_pro_6000.xml",
            "580.82.07",
            (13, 0),
            [
                ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, 2, False, (12, 0)),
                ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, 0, False, (12, 0)),
            ],
        ),
        (
            "mig.xml",
            "580.95.05",
            (13, 0),
            [
                ("NVIDIA H100 80GB HBM3", 81559, 0, True, (9, 0)),
                ("NVIDIA H100 80GB HBM3", 81559, 0, False, (9, 0)),
            ],
        ),
        ("no_gpu.xml", "580.95.05", (13, 0), []),
        ("lost.xml", "", (0, 0), [("[Unknown Error]", 0, 0, False, None)]),
        ("old_schema.xml", "440.33.01", (10, 2), [("Tesla V100-SXM2-32GB", 32510, 0, False, None)]),
    ],
)
def test_what_nvidia_smi_reports(
    answer: str,
    driver: str,
    cuda: tuple[int, int],
    gpus: list[tuple[str, int, int, bool, tuple[int, int] | None]],
) -> None:
    found = report(answer)
    assert (found.driver, found.cuda) == (driver, cuda)
    assert [(gpu.name, gpu.memory, len(gpu.processes), gpu.mig, gpu.capability) for gpu in found.gpus] == gpus


def test_a_gpu_that_does_not_answer_is_lost() -> None:
    assert [gpu.lost for gpu in report("lost.xml").gpus] == [True]
    assert not any(gpu.lost for name in ("h100.xml", "mig.xml", "old_schema.xml") for gpu in report(name).gpus)


def test_what_is_broken_is_read_from_the_newest_schema() -> None:
    found = report("h100_broken.xml").gpus
    assert [gpu.index for gpu in found] == [0, 1, 2, 3]
    assert [gpu.uncorrectable for gpu in found] == [0, 3, 0, 0]
    assert [gpu.remapping for gpu in found] == ["", "", "pending", "failed"]
    assert [gpu.lanes for gpu in found] == [(16, 16), (16, 16), (8, 16), (16, 16)]
    assert [gpu.fabric for gpu in found] == ["Completed", "Completed", "Completed", "In Progress"]
    assert [gpu.used for gpu in found] == [1, 1, 1, 40000]


def test_what_is_broken_is_read_from_an_old_schema() -> None:
    (found,) = report("old_schema.xml").gpus
    assert (found.uncorrectable, found.remapping, found.lanes, found.fabric) == (2, "pending", (16, 16), "")


def test_who_uses_a_gpu() -> None:
    first, second = report("faulty_blackwell.xml").gpus
    assert first.processes == (
        Process(812, "G", "/usr/lib/xorg/Xorg", 4),
        Process(99100, "C", "train.py", 90000),
    )
    assert second.processes == () and second.fabric == ""


def test_the_driver_knows_capabilities_better_than_names_do() -> None:
    found = report("h100.xml")
    assert [gpu.capability for gpu in found.with_capabilities("9.0\n12.1\n").gpus] == [(9, 0), (12, 1)]
    # An answer for another number of GPUs, or none at all, says nothing.
    for answer in ("", "9.0\n", "9.0\n9.0\n9.0\n", 'Field "compute_cap" is not a valid field to query.\n'):
        assert found.with_capabilities(answer) == found
    assert [gpu.capability for gpu in found.with_capabilities("[N/A]\n12.0").gpus] == [(9, 0), (12, 0)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        ANSWERS["no_driver.txt"],
        ANSWERS["no_devices.txt"],
        ANSWERS["mismatch.txt"],
        ANSWERS["h200.xml"][:-20],
        "<html><body>502</body></html>",
        "\x00",
        '<?xml version="1.0" encoding="no-such"?><nvidia_smi_log/',
    ],
)
def test_anything_else_is_no_report(text: str) -> None:
    assert parse_nvidia_smi(text) is None


def test_entities_are_not_expanded() -> None:
    entities = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(9))
    bomb = f'<!DOCTYPE nvidia_smi_log [<!ENTITY e0 "ha">{entities}]><nvidia_smi_log>&e9;</nvidia_smi_log>'
    assert parse_nvidia_smi(bomb) is None


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (ANSWERS["no_driver.txt"], "nvidia-smi does not answer: the NVIDIA driver is not loaded"),
        (ANSWERS["no_devices.txt"], "the NVIDIA driver finds no GPU"),
        (ANSWERS["mismatch.txt"], "the NVIDIA driver in the kernel and its libraries are of different releases"),
        (ANSWERS["handle.txt"], "a GPU does not answer the driver"),
        ("Failed to initialize NVML: Insufficient Permissions\n", "nvidia-smi may not see the GPUs"),
        ("No such file or directory", "nvidia-smi does not answer (it says: No such file or directory)"),
        ("", "nvidia-smi does not answer"),
        ("\x1b[31mred\n", "nvidia-smi does not answer"),
    ],
)
def test_an_error_message_is_explained(answer: str, what: str) -> None:
    message, remedy = failure(answer)
    assert message == what and remedy


def test_nvlink_is_read_from_the_topology() -> None:
    assert has_nvlink(ANSWERS["topo_nvlink.txt"]) is True
    assert has_nvlink(ANSWERS["topo_pcie.txt"]) is False
    assert has_nvlink("") is None and has_nvlink(ANSWERS["no_driver.txt"]) is None


# -------------------------------------------------------------------------------------------------------------- fuzzing

edits = st.tuples(st.sampled_from(XML), st.integers(0), st.integers(0, 400), st.text(max_size=40))


def edited(edit: tuple[str, int, int, str]) -> str:
    text, start, length, inserted = edit
    start %= len(text)
    return text[:start] + inserted + text[start + length :]


def values(edit: tuple[str, int, int, str]) -> str:
    """Replace one value of an answer, so that the document stays well formed."""
    text, which, _, inserted = edit
    parts = text.split(">")
    leaves = [number for number, part in enumerate(parts) if "</" in part and not part.startswith(("\n", "<"))]
    if not leaves:
        return text
    number = leaves[which % len(leaves)]
    clean = "".join(letter for letter in inserted if letter.isprintable() and letter not in "<&>")
    parts[number] = clean + parts[number][parts[number].index("</") :]
    return ">".join(parts)


NEEDS = GpuNeeds((13, 0), 2, ("0", "GPU-"), 1 << 40, 0.9, True, "FLASHMLA")


@given(st.text() | edits.map(edited) | edits.map(values))
@example("<nvidia_smi_log>" + "<gpu>" * 1000 + "</gpu>" * 1000 + "</nvidia_smi_log>")
@example("<nvidia_smi_log>" + "<a>" * 50_000 + "</a>" * 50_000 + "</nvidia_smi_log>")
@example("<nvidia_smi_log><cuda_version>" + "9" * 100_000 + "</cuda_version></nvidia_smi_log>")
@example(
    "<nvidia_smi_log><gpu><fb_memory_usage><total>"
    + "9" * 9000
    + " MiB</total></fb_memory_usage></gpu></nvidia_smi_log>"
)
@example("\ud800<nvidia_smi_log/>")
@example(" " * 3_000_000)
@settings(max_examples=400, deadline=None)
def test_no_answer_of_nvidia_smi_raises_or_takes_long(answer: str) -> None:
    began = time.monotonic()
    found = parse_nvidia_smi(answer)
    message, remedy = failure(answer)
    assert message and remedy
    has_nvlink(answer)
    parse_xids(answer)
    if found is not None:
        facts = GpuFacts(found.with_capabilities(answer), nvlink=False)
        assert all(finding.message for finding in check_gpus(facts, NEEDS))
        assert all(gpu.memory >= 0 and gpu.used >= 0 and gpu.index < len(found.gpus) for gpu in found.gpus)
    assert time.monotonic() - began < SECONDS


@given(
    st.text()
    | st.lists(st.sampled_from(["GPU0", "X", "NV4", "\n", "\t", "\x1b[4m", "PIX", "9.0", "N/A"])).map(" ".join)
)
@settings(max_examples=300, deadline=None)
def test_no_matrix_raises(answer: str) -> None:
    assert has_nvlink(answer) in (True, False, None)
    two = GpuReport("580", (13, 0), (Gpu("a", 1), Gpu("b", 1)))
    assert len(two.with_capabilities(answer).gpus) == 2


# ------------------------------------------------------------------------------------------------------------------ Xid

LOG = """\
nvidia-nvlink: Nvlink Core is being initialized, major device number 236
NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.95.05
NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
NVRM: Xid (PCI:0000:3B:00): 79, pid=1, GPU has fallen off the bus.
NVRM: Xid (PCI:0000:c1:00.0): 31, pid=4242, name=python3, Ch 00000008, MMU Fault
NVRM: Xid (PCI:00000000:18:00): 94, pid='<unknown>', Contained: SM (0x1).
"""


def test_xid_errors_are_counted_by_gpu_and_number() -> None:
    assert parse_xids(LOG) == (
        Xid("00000000:18:00", 94, 1),
        Xid("0000:3b:00", 79, 2),
        Xid("0000:c1:00", 31, 1),
    )
    assert [xid.meaning for xid in parse_xids(LOG)] == ["", "GPU has fallen off the bus", ""]
    assert parse_xids("") == ()
