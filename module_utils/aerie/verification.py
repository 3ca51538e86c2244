# SPDX-License-Identifier: Apache-2.0
"""Whether a host is what its current release says: every file hashed, the running process looked at. Writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.digest_cache import cached_sha256
from ansible.module_utils.aerie.drafter import content_digest
from ansible.module_utils.aerie.files import read_text, sha256_file
from ansible.module_utils.aerie.installed import ADDED, faults, listing, others, stat_digest
from ansible.module_utils.aerie.release import ReleaseError, Releases, release_id
from ansible.module_utils.aerie.serving import service_faults

# What a host remembers of large files that did not change; it may be removed at any time.
DIGEST_CACHE = Path("/var/cache/aerie/digests.json")


def verify(root: Path, unit: Path, settings: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the record of the current release below ``root`` and all that differs from it, each with a remedy."""
    releases = Releases(root)
    identity = releases.current()
    try:
        record = releases.record(identity)
    except ReleaseError:
        return {}, [f"{root}/current names no release: run deploy.yml"]
    problems = [
        *_check_own_files(releases, record, identity),
        *map(str, service_faults(releases, identity, unit, {str(settings): read_text(settings)})),
        *_check_environment(releases, record, identity),
        *_check_drafter(root, record["inputs"].get("drafter", "")),
    ]
    return record, problems


def quick_check(
    releases: Releases, identity: str, cache: Path, remember: bool = True, name_files: bool = False
) -> list[str]:
    """Return why a release cannot be trusted, from the cheap signs that ``verify`` looks behind.

    Its own files and the patched ones are read; of the environment's others only sizes and times are looked at, and the
    drafter's digests are taken from ``cache`` where size, time and inode are as they were. Which of the environment's
    files are others only reading all of them tells: with ``name_files`` that is done where sizes or times say so.
    """
    directory = releases.path(identity)
    try:
        record = releases.record(identity)
    except ReleaseError as error:
        return [str(error)]
    completion = releases.completion(identity)
    if not completion:
        return [f"release {identity} is not wholly staged"]
    patches = record["inputs"].get("patches", {})
    problems = list(_check_own_files(releases, record, identity))
    for package in (directory / "venv").glob("lib/python*/site-packages/vllm"):
        problems += [
            f"{package / path} is not as its patch set wrote it"
            for path, digest in patches.items()
            if _digest(package / path) != digest
        ]
    if stat_digest(directory / "venv") != completion["environment"]:
        found = list(faults(directory / "venv", patches, completion["others"])) if name_files else []
        which = f": {listing(found)}" if found else ""
        problems.append(f"files of {directory / 'venv'} were edited, added or removed{which}")
    return [*problems, *_check_drafter(releases.root, record["inputs"].get("drafter", ""), cache, remember)]


def _check_own_files(releases: Releases, record: Mapping[str, Any], identity: str) -> Iterator[str]:
    """Compare all that is in a release's directory, but for its environment."""
    directory = releases.path(identity)
    present = {name: directory / name for name in record["files"] if (directory / name).is_file()}
    files = {name: path.read_bytes().decode(errors="replace") for name, path in present.items()}
    if release_id(record["inputs"], files) != identity:
        yield f"a file of {directory} was edited or removed: deploy again from another release, or restore it"
    expected = {*present.values(), directory / "release.json", directory / "venv"}
    for path in sorted(_files(directory, expected)):
        # What an interrupted write left has a name that nothing imports.
        if not path.name.startswith("."):
            yield f"{path} was added: remove it"


def _files(directory: Path, expected: Collection[Path]) -> Iterator[Path]:
    """Yield what is below ``directory`` besides directories and what is expected, which is not looked into."""
    for path in directory.iterdir():
        if path in expected:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files(path, expected)
        else:
            yield path


def _check_environment(releases: Releases, record: Mapping[str, Any], identity: str) -> Iterator[str]:
    """Read every installed file, and see whether a deploy knows the environment as it is."""
    directory = releases.path(identity)
    environment, completion = directory / "venv", releases.completion(identity)
    if not completion:
        yield f"release {identity} is not wholly staged: run deploy.yml"
    noted = completion["others"] if completion else others(environment)
    found = list(faults(environment, record["inputs"].get("patches", {}), noted))
    added = [fault for fault in found if fault.what == ADDED]
    if added:
        yield f"{listing(added)}: remove what was added"
    damaged = [fault for fault in found if fault.what != ADDED]
    if damaged:
        yield f"{listing(damaged)}: roll back to another release, then remove {directory} and deploy again"
    if completion and not found and stat_digest(environment) != completion["environment"]:
        yield f"sizes or times of files of {environment} changed, and nothing else: run deploy.yml"


def _check_drafter(root: Path, digest: str, cache: Path | None = None, remember: bool = True) -> Iterator[str]:
    store = root / "store" / digest
    if not digest:
        return
    if not store.is_dir():
        yield f"the drafter {store} is missing: run deploy.yml"
        return
    entries = [path for path in store.iterdir() if not path.name.startswith(".")]
    files = [path for path in entries if path.is_file()]
    digests = cached_sha256(files, cache, remember=remember)
    facts = [{"name": path.name, "sha256": digests[path], "size": path.stat().st_size} for path in files]
    if files != entries or content_digest(facts) != digest:
        yield f"a file of the drafter {store} was edited, added or removed: remove the directory and run deploy.yml"


def _digest(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except OSError:
        return None
