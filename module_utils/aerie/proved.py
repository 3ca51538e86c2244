# SPDX-License-Identifier: Apache-2.0
"""What was proved about the code of a release on this host: another release of the same code has no need to prove it.

A note is a file with the release's name in one directory for all; it goes when its release does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import read_text, sha256_bytes, sha256_file, write_atomically
from ansible.module_utils.aerie.installed import files_below

_PROC = Path("/proc")
# What an installer writes anew into each environment.
_WRITTEN = ("/RECORD", "/INSTALLER", "/REQUESTED", "/direct_url.json", "/uv_cache.json")


def code_digest(python: Path) -> str:
    """Return a digest of what runs with the interpreter ``python`` of an environment, wherever the environment is.

    vLLM's own source files count as they are, since patch sets write them. All other files are shared with the package
    cache, and with every other environment from it: they count by size and time. The interpreter is a part of it, and
    so are the driver and the kinds of the GPUs and the CPU.
    """
    return sha256_bytes("\n".join(_code(python)).encode(errors="surrogateescape"))


def _code(python: Path) -> Iterator[str]:
    interpreter = python.resolve()
    status = interpreter.stat()
    yield f"{interpreter} {status.st_size} {status.st_mtime_ns}"
    yield from _machine()
    for packages in sorted(python.parents[1].glob("lib/python*/site-packages")):
        read: list[Path] = []
        for entry in sorted(files_below(packages), key=lambda entry: entry.path):
            name = entry.path[len(str(packages)) + 1 :]
            # In the top directory are the files that run at every start of Python.
            if "/" not in name or (name.startswith("vllm/") and name.endswith(".py")):
                read.append(Path(entry.path))
            elif not name.endswith(_WRITTEN):
                status = entry.stat(follow_symlinks=False)
                yield f"{name} {status.st_size} {status.st_mtime_ns}"
        # hashlib works beside other threads.
        with ThreadPoolExecutor() as executor:
            for path, digest in zip(read, executor.map(sha256_file, read)):
                yield f"{path.relative_to(packages)} {digest}"


def _machine() -> Iterator[str]:
    for name, start in (("driver/nvidia/version", "NVRM"), ("cpuinfo", "flags")):
        yield next(_lines(_PROC / name, start), f"no {name}")
    for path in sorted(_PROC.glob("driver/nvidia/gpus/*/information")):
        yield from _lines(path, "Model")


def _lines(path: Path, start: str) -> Iterator[str]:
    yield from (line for line in (read_text(path) or "").splitlines() if line.startswith(start))


def known(note: Path, evidence: str) -> dict[str, Any] | None:
    """Return what a note beside ``note`` says of the same ``evidence``: ``result``, and by which release and when."""
    for path in sorted(note.parent.glob("*.json")):
        try:
            found = json.loads(path.read_bytes())
            if found["evidence"] == evidence and found["result"]["verdict"] == "passed" and found["result"]["message"]:
                return {"result": found["result"], "by": str(found["by"]), "at": str(found["at"])}
        except (OSError, ValueError, TypeError, KeyError):
            # One that was damaged proves nothing.
            continue
    return None


def keep(note: Path, evidence: str, result: Mapping[str, Any], by: str = "", at: str = "") -> None:
    """Note ``result``, found just now with the release that ``note`` is named for unless it says otherwise."""
    text = {
        "evidence": evidence,
        "result": dict(result),
        "by": by or note.stem,
        "at": at or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    data = json.dumps(text, sort_keys=True)
    if read_text(note) != data:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, data.encode())
