# SPDX-License-Identifier: Apache-2.0
"""A wheelhouse on the control node: the files of one or more locks, each verified against its lock's digest."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ansible.module_utils.aerie.digest_cache import cached_sha256
from ansible.module_utils.aerie.lockfile import Lock, Requirement, wheel_identity


class WheelhouseError(RuntimeError):
    """A file of a lock that could not be had; the text says which, why, and what to do."""


@dataclass(frozen=True)
class StagedFile:
    """A file to send to a host: ``path`` here, ``name`` there, ``size`` in bytes."""

    path: str
    name: str
    sha256: str
    size: int

    def as_dict(self) -> dict[str, str | int]:
        return asdict(self)


def find(lock: Lock, directory: Path) -> tuple[list[StagedFile], list[Requirement]]:
    """Return the files in ``directory`` that ``lock`` pins, and the requirements that have none."""
    pinned = {(requirement.name, requirement.version) for requirement in lock.requirements}
    candidates: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(directory.glob("*.whl")):
        if (identity := wheel_identity(path.name)) in pinned:
            candidates.setdefault(identity, []).append(path)
    digests = cached_sha256((path for paths in candidates.values() for path in paths), directory / ".sha256.json")
    files, missing = [], []
    for requirement in lock.requirements:
        for path in candidates.get((requirement.name, requirement.version), []):
            if digests[path] in requirement.sha256:
                files.append(StagedFile(str(path), path.name, digests[path], path.stat().st_size))
                break
        else:
            missing.append(requirement)
    return files, missing


def download(
    lock: Lock,
    missing: Sequence[Requirement],
    directory: Path,
    *,
    fallback_index: str = "",
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Download ``missing`` into ``directory`` with pip, which checks the digests.

    ``fallback_index`` is asked only for builds with a local version, such as ``torch==2.13.0+cpu``, that the configured
    index does not have: they are on an index of their own. ``progress`` gets pip's output, line by line.
    """
    directory.mkdir(parents=True, exist_ok=True)
    plain = [requirement for requirement in missing if "+" not in requirement.version]
    batches = [[requirement] for requirement in missing if "+" in requirement.version] + ([plain] if plain else [])
    for batch in batches:
        error = _pip_download(lock, batch, directory, [], progress)
        if error and fallback_index and batch is not plain:
            progress(f"{batch[0].key} is not on the configured index; asking {fallback_index}")
            error = _pip_download(lock, batch, directory, ["--extra-index-url", fallback_index], progress)
        if error:
            names = ", ".join(requirement.key for requirement in batch[:3]) + (", ..." if len(batch) > 3 else "")
            raise WheelhouseError(f"cannot download {names}: {error}")


def _pip_download(
    lock: Lock,
    requirements: Sequence[Requirement],
    directory: Path,
    index: Sequence[str],
    progress: Callable[[str], None],
) -> str:
    """Run ``pip download``; return its error, or nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("".join(f"{requirement.text()}\n" for requirement in requirements))
        wanted.flush()
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--progress-bar", "raw", "--no-input"]
        command += ["--implementation", "cp", "--python-version", lock.python]
        command += [part for tag in lock.platforms() for part in ("--platform", tag)]
        command += [*index, "--dest", str(directory), "--requirement", wanted.name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout
        errors, last = [], ""
        for line in process.stdout:
            last = line.strip() or last
            if line.startswith("ERROR:"):
                # pip lists every version that there is, which is no help.
                errors.append(re.sub(r" \(from versions: [^)]*\)", "", line[len("ERROR:") :].strip()))
            else:
                progress(line.strip())
        # A pip that does not even start, or was killed, has no such lines.
        return ("; ".join(errors) or last or "pip was killed") if process.wait() else ""
