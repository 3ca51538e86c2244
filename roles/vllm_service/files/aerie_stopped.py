# SPDX-License-Identifier: Apache-2.0
"""Say in the journal, after the service ended, that its memory limit was hit: systemd does not always learn it.

`ExecStopPost=` of the unit runs it, in the cgroup of the service, which is gone after it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_KILLS = re.compile(r"^oom_kill (\d{1,18})$", re.MULTILINE)


def main(own: Path = _OWN) -> None:
    """Print a line if the kernel killed a process of this cgroup for want of memory."""
    groups = own.read_text()
    kills = sum(int(count) for text in map(read, event_files(groups)) for count in _KILLS.findall(text))
    if kills:
        limit = next((value for value in map(read, limit_files(groups)) if value.strip().isdigit()), "")
        size = f" of {int(limit) / 2**30:.1f} GiB" if limit else ""
        print(
            f"The service was killed by the OOM killer ({kills} processes): its memory limit{size} (MemoryMax) or the "
            f"host's memory is too small. Result for systemd: {os.environ.get('SERVICE_RESULT', 'unknown')}.",
            file=sys.stderr,
        )


def event_files(groups: str) -> list[Path]:
    """Return the files that count kills, from the text of /proc/self/cgroup: of cgroup v2, and of v1."""
    return [
        *(directory / "memory.events" for directory in _directories(groups, "")),
        *(directory / "memory.oom_control" for directory in _directories(groups, "memory")),
    ]


def limit_files(groups: str) -> list[Path]:
    """Return the files that hold the limit in bytes."""
    return [
        *(directory / "memory.max" for directory in _directories(groups, "")),
        *(directory / "memory.limit_in_bytes" for directory in _directories(groups, "memory")),
    ]


def _directories(groups: str, controller: str) -> list[Path]:
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            found.append(_CGROUPS / controller / path.lstrip("/"))
    return found


def read(path: Path) -> str:
    """Return the text of a file; nothing if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
