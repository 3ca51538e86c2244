# SPDX-License-Identifier: Apache-2.0
"""Whether a host is what its current release says: every file hashed, the running process looked at. Writes nothing."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.digest_cache import cached_sha256
from ansible.module_utils.aerie.drafter import content_digest
from ansible.module_utils.aerie.files import sha256_file
from ansible.module_utils.aerie.release import (
    ReleaseError,
    Releases,
    read_settings,
    release_id,
    running_service,
    stat_digest,
)

# What a host remembers of large files that did not change; it may be removed at any time.
DIGEST_CACHE = Path("/var/cache/aerie/digests.json")


def verify(root: Path, unit: Path, settings: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the record of the current release below ``root`` and all that differs from it, each with a remedy."""
    releases = Releases(root)
    identity = releases.current()
    directory = releases.path(identity)
    try:
        record: dict[str, Any] = json.loads((directory / "release.json").read_text())
    except (OSError, ValueError):
        return {}, [f"{root}/current names no release: run deploy.yml"]
    problems = [
        *_check_own_files(releases, record, identity, unit),
        *_check_service(identity, unit, settings),
        *_check_environment(directory / "venv", record["inputs"].get("patches", {})),
        *_check_drafter(root, record["inputs"].get("drafter", "")),
    ]
    return record, problems


def quick_check(releases: Releases, identity: str, cache: Path, remember: bool = True) -> list[str]:
    """Return why a release cannot be trusted, from the cheap signs that ``verify`` looks behind.

    Its own files and the patched ones are read; of the environment's others only sizes and times are looked at, and the
    drafter's digests are taken from ``cache`` where size, time and inode are as they were.
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
    problems = list(_check_release_id(releases, record, identity))
    for package in (directory / "venv").glob("lib/python*/site-packages/vllm"):
        problems += [
            f"{package / path} is not as its patch set wrote it"
            for path, digest in patches.items()
            if _digest(package / path) != digest
        ]
    if stat_digest(directory / "venv") != completion["environment"]:
        problems.append(f"files of {directory / 'venv'} were edited, added or removed")
    return [*problems, *_check_drafter(releases.root, record["inputs"].get("drafter", ""), cache, remember)]


def _check_release_id(releases: Releases, record: Mapping[str, Any], identity: str) -> Iterator[str]:
    directory = releases.path(identity)
    files = {name: (directory / name).read_text() for name in record["files"] if (directory / name).is_file()}
    if release_id(record["inputs"], files) != identity:
        yield f"a file of {directory} was edited or removed: deploy again from another release, or restore it"


def _check_own_files(releases: Releases, record: Mapping[str, Any], identity: str, unit: Path) -> Iterator[str]:
    yield from _check_release_id(releases, record, identity)
    if not releases.is_active(identity, unit):
        yield f"{unit} is not the unit of release {identity}: run deploy.yml"


def _check_service(identity: str, unit: Path, settings: Path) -> Iterator[str]:
    running = running_service(unit.name)
    if not running.pid:
        yield f"{unit.name} does not run: see `systemctl status {unit.name}`, or run deploy.yml"
    elif running.release != identity:
        yield f"{unit.name} runs release {running.release or 'of another origin'}, not {identity}: run deploy.yml"
    elif not running.has_settings(read_settings(settings)):
        yield f"{unit.name} runs with other settings than {settings} has: run deploy.yml"


def _check_environment(environment: Path, patches: Mapping[str, str]) -> Iterator[str]:
    """Compare every installed file with its distribution's RECORD, and patched ones with what the patch set wrote."""
    expected: dict[Path, str] = {}
    for record in environment.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        site_packages = record.parent.parent
        for name, digest, _ in csv.reader(record.read_text().splitlines()):
            if digest.startswith("sha256="):
                expected[site_packages / name] = _hexadecimal(digest[len("sha256=") :])
    if not expected:
        yield f"there is no environment at {environment}: run deploy.yml"
    for package in environment.glob("lib/python*/site-packages/vllm"):
        expected.update({package / path: digest for path, digest in patches.items()})
    # hashlib works beside other threads.
    with ThreadPoolExecutor() as executor:
        for path, actual in zip(expected, executor.map(_digest, expected)):
            if actual != expected[path]:
                found = "is missing" if actual is None else "was edited"
                yield f"{path} {found}: deploy again after removing {environment}, or roll back"


def _check_drafter(root: Path, digest: str, cache: Path | None = None, remember: bool = True) -> Iterator[str]:
    store = root / "store" / digest
    if not digest:
        return
    if not store.is_dir():
        yield f"the drafter {store} is missing: run deploy.yml"
        return
    files = [path for path in store.iterdir() if not path.name.startswith(".")]
    digests = cached_sha256(files, cache, remember=remember)
    facts = [{"name": path.name, "sha256": digests[path], "size": path.stat().st_size} for path in files]
    if content_digest(facts) != digest:
        yield f"a file of the drafter {store} was edited, added or removed: remove the directory and run deploy.yml"


def _digest(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except OSError:
        return None


def _hexadecimal(urlsafe: str) -> str:
    return base64.urlsafe_b64decode(urlsafe + "=" * (-len(urlsafe) % 4)).hex()
