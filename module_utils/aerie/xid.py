# SPDX-License-Identifier: Apache-2.0
"""Xid errors of NVIDIA's driver in the kernel log."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

# NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})[^)]*\): ([0-9]{1,4})")
# Those that say that hardware is broken or a GPU is unusable until it is reset, from NVIDIA's catalogue of Xid errors.
# The others come from programs (13, 31, 43, 45), or were corrected (63, 92, 94).
BROKEN = {
    48: "double bit ECC error",
    62: "micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
}


@dataclass(frozen=True)
class Xid:
    """An error of the driver: the GPU's PCI address, the error's number, and how often it came since boot."""

    bus: str
    number: int
    count: int

    @property
    def meaning(self) -> str:
        return BROKEN.get(self.number, "")


def parse_xids(log: str) -> tuple[Xid, ...]:
    """Return the Xid errors of a kernel log, by GPU and number."""
    found = Counter((match.group(1).lower(), int(match.group(2))) for match in _XID.finditer(log))
    return tuple(Xid(bus, number, count) for (bus, number), count in sorted(found.items()))
