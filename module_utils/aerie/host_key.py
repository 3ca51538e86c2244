# SPDX-License-Identifier: Apache-2.0
"""A key of the moment for programs of ours that call the service from its own host.

The program makes a random key, and puts its SHA-256 digest where the service's middleware (aerie_api_keys.py) looks
besides its key file. So no client's key has to come to the host, and none is in an argument or a log.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DIRECTORY = Path("/run/aerie/api-keys.d")

# Longer than any program of ours calls the service. The digest of a key whose holder was killed is no danger, since
# nobody has the key any more: the limit keeps the directory clean.
LIFETIME_S = 4 * 3600.0

# A file that a killed program was about to put into place.
_HALF_MADE = ".half-made."
_HALF_MADE_S = 60.0

_EXPIRES = re.compile(r"# expires (\d{1,12})\s*$", re.MULTILINE)


class HostKeyError(RuntimeError):
    """The service cannot be given a key; the text says why and what to do."""


@contextlib.contextmanager
def host_key(group: str = "vllm", directory: Path = DIRECTORY, lifetime_s: float = LIFETIME_S) -> Iterator[str]:
    """Give a key that the service accepts until the block ends, and at most for ``lifetime_s`` seconds.

    ``group`` is the service's, which may read the digest. What programs that were killed left behind is removed.
    Needs root, since the service believes no other owner. Raises HostKeyError.
    """
    key = secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    try:
        group_id = grp.getgrnam(group).gr_gid
    except KeyError:
        raise HostKeyError(f"The group {group} does not exist on this host: deploy the service first.") from None
    try:
        _prepare(directory, group_id)
        _remove_leftovers(directory)
        path = _put(directory, group_id, f"{digest}  # expires {int(time.time() + lifetime_s)}\n")
    except OSError as error:
        raise HostKeyError(
            f"{error.filename or directory} cannot be written: {error.strerror}. Run as root, which the service's keys "
            "belong to."
        ) from error
    try:
        yield key
    finally:
        path.unlink(missing_ok=True)


def _prepare(directory: Path, group_id: int) -> None:
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    directory.mkdir(mode=0o750, exist_ok=True)
    status = directory.stat()
    if status.st_gid != group_id:
        os.chown(directory, -1, group_id)
    if status.st_mode & 0o777 != 0o750:
        directory.chmod(0o750)


def _remove_leftovers(directory: Path) -> None:
    now = time.time()
    for path in directory.iterdir():
        # Another program may remove its own at this moment.
        with contextlib.suppress(FileNotFoundError):
            if path.name.startswith(_HALF_MADE):
                over = path.stat().st_mtime + _HALF_MADE_S < now
            else:
                expiry = _EXPIRES.search(path.read_text(errors="replace"))
                over = expiry is not None and int(expiry[1]) < now
            if over:
                path.unlink()


def _put(directory: Path, group_id: int, text: str) -> Path:
    """Let a file appear with text, group and mode at once: the service looks at it once, when the directory changes."""
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=_HALF_MADE)
    half_made = Path(name)
    try:
        with os.fdopen(descriptor, "w") as stream:
            os.fchown(descriptor, -1, group_id)
            os.fchmod(descriptor, 0o640)
            stream.write(text)
        return half_made.rename(directory / secrets.token_hex(8))
    except BaseException:
        half_made.unlink(missing_ok=True)
        raise
