# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi says: ``-q -x`` of every generation of its schema, ``topo -m``, and its error messages.

No answer makes a parser raise, and none takes more than linear time: what cannot be read counts as not said.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, replace

# 16 GPUs with every field are 0.5 MB.
_LONGEST = 8 << 20
_NUMBER = re.compile(r"\s*([0-9]{1,15})")
_CAPABILITY = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")
# The words that nvidia-smi has instead of a value.
_NO_VALUE = re.compile(r"\[?(n/a|unknown error|gpu is lost|insufficient permissions|not supported)\]?", re.IGNORECASE)
# Compute capabilities by architecture and, where an architecture has several, by name; the first that fits counts.
# Drivers since 510 say it themselves (--query-gpu=compute_cap).
_CAPABILITIES = (
    ("Blackwell", r"B300", (10, 3)),
    ("Blackwell", r"B[12]00", (10, 0)),
    ("Blackwell", r"RTX", (12, 0)),
    ("Hopper", r"", (9, 0)),
    ("Ada Lovelace", r"", (8, 9)),
    ("Ampere", r"\bA(100|30)\b", (8, 0)),
    ("Ampere", r"", (8, 6)),
    ("Turing", r"", (7, 5)),
    ("Volta", r"", (7, 0)),
    ("Pascal", r"", (6, 0)),
)
# Memory that is broken and waits for a reset to be replaced, by the names of three schemas.
_WAITING = (
    "remapped_rows/remapped_row_pending",
    "retired_pages/pending_retirement",
    "retired_pages/pending_blacklist",
)


@dataclass(frozen=True)
class Process:
    """A process on a GPU; ``kind`` is C (compute), G (graphics) or C+G; ``memory`` in MiB."""

    pid: int
    kind: str
    name: str
    memory: int


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory is in MiB; numbers are 0 and words empty where nvidia-smi does not say.

    ``mig``: divided into MIG slices. ``lost``: it does not answer its driver. ``lanes``: of PCIe, now and at most.
    ``uncorrectable``: ECC errors since the driver was loaded. ``remapping``: what row remapping or page retirement
    waits for, ``pending`` or ``failed``. ``fabric``: the state of its registration with NVSwitches.
    """

    name: str
    memory: int
    index: int = 0
    bus: str = ""
    uuid: str = ""
    used: int = 0
    mig: bool = False
    lost: bool = False
    capability: tuple[int, int] | None = None
    lanes: tuple[int, int] = (0, 0)
    uncorrectable: int = 0
    remapping: str = ""
    fabric: str = ""
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True)
class GpuReport:
    """The GPUs of a host, its driver's release such as ``580.95``, and the newest CUDA that this driver runs."""

    driver: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]

    def with_capabilities(self, answer: str) -> GpuReport:
        """Return the report with what ``nvidia-smi --query-gpu=compute_cap --format=csv,noheader`` answered."""
        lines = answer.split("\n")
        found = [_CAPABILITY.fullmatch(line.strip()) for line in lines if line.strip()]
        if len(found) != len(self.gpus):
            return self
        gpus = [
            replace(gpu, capability=(int(match.group(1)), int(match.group(2)))) if match else gpu
            for gpu, match in zip(self.gpus, found)
        ]
        return replace(self, gpus=tuple(gpus))


def parse_nvidia_smi(text: str) -> GpuReport | None:
    """Parse ``nvidia-smi -q -x``; nothing if it is not that."""
    if len(text) > _LONGEST or "<!ENTITY" in text:
        return None
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        return None
    if root.tag != "nvidia_smi_log":
        return None
    gpus = tuple(_gpu(element, index) for index, element in enumerate(root.findall("gpu")))
    return GpuReport(_word(root, "driver_version"), _release(_word(root, "cuda_version")), gpus)


def _gpu(element: ElementTree.Element, index: int) -> Gpu:
    name, architecture = _text(element, "product_name"), _text(element, "product_architecture")
    total = _text(element, "fb_memory_usage/total")
    link = "pci/pci_gpu_link_info/link_widths"
    return Gpu(
        name=name or "unknown",
        memory=_number(total),
        index=index,
        bus=str(element.get("id", "")),
        uuid=_word(element, "uuid"),
        used=_number(_text(element, "fb_memory_usage/used")),
        mig=_text(element, "mig_mode/current_mig") == "Enabled",
        lost=bool(total and _NO_VALUE.fullmatch(total) and "n/a" not in total.lower()),
        capability=_capability(architecture, name),
        lanes=(
            _number(_text(element, f"{link}/current_link_width")),
            _number(_text(element, f"{link}/max_link_width")),
        ),
        uncorrectable=_uncorrectable(element),
        remapping=_remapping(element),
        fabric=_word(element, "fabric/state"),
        processes=tuple(_processes(element)),
    )


def _processes(element: ElementTree.Element) -> Iterator[Process]:
    for info in element.findall("processes/process_info"):
        yield Process(
            _number(_text(info, "pid")),
            _text(info, "type"),
            _text(info, "process_name") or "unknown",
            _number(_text(info, "used_memory")),
        )


def _uncorrectable(element: ElementTree.Element) -> int:
    """Return the ECC errors since the driver was loaded that nothing corrected, by whichever names the schema has."""
    errors = element.find("ecc_errors/volatile")
    if errors is None:
        return 0
    newer = sum(_number(field.text or "") for field in errors if "uncorrectable" in str(field.tag))
    return newer or _number(_text(errors, "double_bit/total"))


def _remapping(element: ElementTree.Element) -> str:
    if _text(element, "remapped_rows/remapped_row_failure") == "Yes":
        return "failed"
    return "pending" if any(_text(element, path) == "Yes" for path in _WAITING) else ""


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _word(element: ElementTree.Element, path: str) -> str:
    """Return the text at ``path``; nothing if it is one of the words for a value that is not there."""
    text = _text(element, path)
    return "" if _NO_VALUE.fullmatch(text) else text


def _number(text: str) -> int:
    match = _NUMBER.match(text)
    return int(match.group(1)) if match else 0


def _release(text: str) -> tuple[int, int]:
    match = _CAPABILITY.match(text)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _capability(architecture: str, name: str) -> tuple[int, int] | None:
    return next(
        (value for family, pattern, value in _CAPABILITIES if family == architecture and re.search(pattern, name)), None
    )


def has_nvlink(matrix: str) -> bool | None:
    """Say whether any two GPUs of ``nvidia-smi topo -m`` are linked by NVLink; nothing if it is not such a matrix."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", matrix[:_LONGEST]).split("\n")]
    links = [cell for row in rows if row and re.fullmatch(r"GPU[0-9]+", row[0]) for cell in row[1:]]
    if "X" not in links:
        return None
    return any(re.fullmatch(r"NV[0-9]+", cell) for cell in links)


def failure(answer: str) -> tuple[str, str]:
    """Return what an answer of nvidia-smi that is no report means, and what to do about it."""
    text = answer[:4000]
    if "version mismatch" in text:
        return (
            "the NVIDIA driver in the kernel and its libraries are of different releases",
            "reboot, so that the kernel loads the driver that is installed",
        )
    if "No devices were found" in text:
        return "the NVIDIA driver finds no GPU", "see the kernel log (journalctl -k -g NVRM)"
    if "Unable to determine the device handle" in text:
        return "a GPU does not answer the driver", "see the kernel log (journalctl -k -g Xid) and reboot"
    if "communicate with the NVIDIA driver" in text:
        return (
            "nvidia-smi does not answer: the NVIDIA driver is not loaded",
            "load or install it (Aerie does not), or use a lock of a CPU build",
        )
    if re.search(r"insufficient permissions", text, re.IGNORECASE):
        return "nvidia-smi may not see the GPUs", "give the account access to /dev/nvidia*"
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    said = f" (it says: {first[:120]})" if first.isprintable() and first else ""
    return (
        f"nvidia-smi does not answer{said}",
        "install the NVIDIA driver (Aerie does not), or use a lock of a CPU build",
    )
