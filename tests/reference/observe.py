#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a host's vllm.service really is, seen from outside: systemd, /proc, the bytes on disk and the journal. As root.

    observe.py FILE < secrets      FILE: a path below the environment's site-packages; secrets: one a line

Prints JSON: `unit` (properties), `environments` (those that any process of the service has mapped), `sha256` of FILE in
the running environment, `file_changed` and `process_started` (seconds since the epoch), `journal` (of this start), and
`leaks`: where a secret stands in arguments or environments of any process, in the journal, or below /etc and /opt.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

UNIT = "vllm.service"


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unit() -> dict[str, str]:
    names = "ActiveState,NRestarts,MainPID,ControlGroup,User,InvocationID"
    return dict(line.split("=", 1) for line in output("systemctl", "show", UNIT, f"--property={names}").splitlines())


def environments(control_group: str) -> list[str]:
    pids = Path(f"/sys/fs/cgroup{control_group}/cgroup.procs").read_text().split()
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return sorted(set(re.findall(r"/opt/aerie/releases/[^/\s]+/venv", maps)))


def leaks(secrets: list[str], journal: str) -> list[str]:
    found = ["the journal"] if any(secret in journal for secret in secrets) else []
    written = [*Path("/etc").rglob("*"), *Path("/opt/aerie").glob("*"), *Path("/opt/aerie/releases").glob("*/*")]
    processes = [path for name in ("cmdline", "environ") for path in Path("/proc").glob(f"[0-9]*/{name}")]
    for path in [*written, *processes]:
        try:
            if path.stat().st_size < 1 << 20 and path.is_file():
                data = path.read_bytes()
                found += [str(path)] if any(secret.encode() in data for secret in secrets) else []
        except OSError:
            continue  # the process ended, or a link leads nowhere
    return found


def main() -> None:
    secrets = [line for line in sys.stdin.read().splitlines() if line]
    properties = unit()
    mapped = environments(properties["ControlGroup"])
    (file,) = Path(mapped[0]).glob(f"lib/python*/site-packages/{sys.argv[1]}")
    journal = output("journalctl", f"_SYSTEMD_INVOCATION_ID={properties['InvocationID']}", "--output=cat", "--no-pager")
    facts = {
        "unit": properties,
        "environments": mapped,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "file_changed": file.stat().st_ctime,
        "process_started": Path(f"/proc/{properties['MainPID']}").stat().st_ctime,
        "journal": journal,
        "leaks": leaks(secrets, journal),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
