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

from ansible.module_utils.aerie.files import sha256_bytes, sha256_file, write_atomically
from ansible.module_utils.aerie.installed import files_below

_DRIVER = Path("/proc/driver/nvidia/version")
# What an installer notes of where a distribution came from.
_ORIGIN = (".dist-info/direct_url.json,", ".dist-info/uv_cache.json,")


def code_digest(python: Path) -> str:
    """Return a digest of what runs with the interpreter ``python`` of an environment, wherever the environment is.

    vLLM's own source files count as they are, since patch sets write them; all other files as their RECORDs have them,
    whose truth the note of a staged release vouches for. The interpreter and a GPU's driver are a part of it.
    """
    return sha256_bytes("\n".join(_code(python)).encode(errors="surrogateescape"))


def _code(python: Path) -> Iterator[str]:
    interpreter = python.resolve()
    status = interpreter.stat()
    yield f"{interpreter} {status.st_size} {status.st_mtime_ns}"
    yield _DRIVER.read_text(errors="replace") if _DRIVER.exists() else "no driver"
    for packages in sorted(python.parents[1].glob("lib/python*/site-packages")):
        for record in sorted(packages.glob("*.dist-info/RECORD")):
            yield from _recorded(record.read_text(encoding="utf-8", errors="replace"))
        sources = sorted(Path(entry.path) for entry in files_below(packages / "vllm") if entry.name.endswith(".py"))
        # hashlib works beside other threads.
        with ThreadPoolExecutor() as executor:
            for path, digest in zip(sources, executor.map(sha256_file, sources)):
                yield f"{path.relative_to(packages)} {digest}"


def _recorded(record: str) -> Iterator[str]:
    for line in record.splitlines():
        # Programs of the environment name it in their first line.
        if not line.startswith("..") and not any(origin in line for origin in _ORIGIN):
            yield line


def known(note: Path, evidence: str) -> dict[str, Any] | None:
    """Return what a note beside ``note`` says of the same ``evidence``: ``result``, and by which release and when."""
    for path in sorted(note.parent.glob("*.json")):
        try:
            found = json.loads(path.read_bytes())
            if found["evidence"] == evidence and isinstance(found["result"], dict):
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
    note.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(note, json.dumps(text, sort_keys=True).encode())
