# SPDX-License-Identifier: Apache-2.0
"""Files with a service's secrets and its certificate: its settings name them, and their names tell their content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ansible.module_utils.aerie.files import sha256_bytes

# A line of systemd's for a secret, and one of the service's environment for its certificate.
_NAMED = re.compile(r"^(?:(LoadCredential)=[\w-]+:|AERIE_CERTIFICATE=)(/\S+-([0-9a-f]{16})(?:\.pem)?)$", re.MULTILINE)


def named(settings: Mapping[str, str | None]) -> set[Path]:
    """Return the files that these settings name, which are texts by the path of their file."""
    return {Path(match[2]) for text in settings.values() for match in _NAMED.finditer(text or "")}


def faults(settings: Mapping[str, str | None]) -> Iterator[str]:
    """Yield what is wrong with the files of secrets that these settings name: missing, edited, open to others."""
    for text in settings.values():
        for match in _NAMED.finditer(text or ""):
            # The certificate is no secret, and is compared like other files.
            if match[1]:
                yield from _faults(Path(match[2]), match[3])


def _faults(path: Path, digest: str) -> Iterator[str]:
    try:
        content, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        yield f"{path} cannot be read ({error.strerror})"
        return
    if not sha256_bytes(content).startswith(digest):
        yield f"{path} was edited"
    elif mode & 0o077:
        yield f"{path} is open to others"


def forget(before: Mapping[str, str | None], now: Mapping[str, str | None]) -> None:
    """Remove the files that the settings named before and do not name now."""
    for path in named(before) - named(now):
        path.unlink(missing_ok=True)
