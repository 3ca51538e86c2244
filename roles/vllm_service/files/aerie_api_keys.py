# SPDX-License-Identifier: Apache-2.0
"""API keys for vLLM's HTTP server, added and withdrawn without a restart.

`vllm serve --middleware aerie_api_keys.RequireApiKey`, with this file's directory on PYTHONPATH. vLLM's own key is a
single one, is inherited by every child process, and guards only some path prefixes. Here the server holds no key at
all, only SHA-256 digests in a file that it may read and not write, and every path but two needs a key.

The file (environment variable AERIE_API_KEYS_FILE, default /etc/aerie/api-keys) has one digest a line, 64 hexadecimal
digits, with an optional comment: `<digest>  # name`. Lines that are empty or begin with `#` say nothing. Replace the
file by a rename, never in place, so that no reader sees half of it.

AERIE_API_KEYS=none has the service ask for no key. It then starts only if it listens on a loopback address, which
AERIE_HOST names.

Programs of the host that call the service (gates, watchdog) bring keys of the moment: files of the same form in a
directory (environment variable AERIE_HOST_KEYS_DIR, default /run/aerie/api-keys.d), whatever their names, as long as
root owns directory and file. `<digest>  # expires <seconds since 1970>` is a key that is no longer accepted then.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Probes and scrapes carry no key. Compared with the whole path: what lies below these is guarded.
OPEN_PATHS = frozenset({"/health", "/metrics"})

_DEFAULT_FILE = "/etc/aerie/api-keys"
_DEFAULT_DIRECTORY = "/run/aerie/api-keys.d"
_LOOPBACK = ("127.0.0.1", "::1")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_EXPIRES = re.compile(r"\s*expires (\d{1,12})\s*")
# Whose files in the directory are believed: root's.
_OWNER = 0
# A directory that changed so recently can change again without another time stamp; seconds.
_TIME_STAMP_S = 1.0
# RFC 6455: the client breaks a rule of the server.
_POLICY_VIOLATION = 1008

# Below vLLM's own logger, so that its handler and format apply.
_log = logging.getLogger("vllm.aerie_api_keys")


class Key(NamedTuple):
    """An accepted key: its digest, and when it stops being accepted in seconds since 1970 (None: it does not)."""

    digest: bytes
    expires: int | None = None


class KeyFile:
    """The accepted keys of a file, read again when it changes. Without a readable digest there are none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._keys: tuple[Key, ...] = ()
        self._fault = ""

    def keys(self) -> tuple[Key, ...]:
        """Return the keys that the file has at this moment."""
        self._refresh()
        return self._keys

    def _refresh(self) -> None:
        try:
            if _signature(self._path.stat()) == self._seen:
                return
            with self._path.open("rb") as stream:
                # Of the opened file: the path may name another one by now.
                seen = _signature(os.fstat(stream.fileno()))
                text = stream.read().decode(errors="replace")
        except OSError as error:
            self._seen, self._keys = None, ()
            self._report(f"cannot be read: {error.strerror}")
            return
        self._seen = seen
        self._keys, unusable = parse_keys(text)
        if unusable:
            self._report(f"line {unusable[0]} is no SHA-256 digest; {len(self._keys)} other keys are accepted")
        elif not self._keys:
            self._report("holds no digest")
        else:
            self._fault = ""
            _log.info("%s: %d API keys are accepted.", self._path, len(self._keys))

    def _report(self, fault: str) -> None:
        """Log a fault once, not at every request."""
        if fault != self._fault:
            self._fault = fault
            consequence = "" if self._keys else " Every guarded request is answered with 401."
            _log.error("API key file %s %s.%s", self._path, fault, consequence)


class KeyDirectory:
    """The accepted keys of a directory's files, read again when it changes. It need not be there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._keys: tuple[Key, ...] = ()

    def keys(self) -> tuple[Key, ...]:
        """Return the keys that the directory's files have at this moment."""
        try:
            status = self._path.stat()
        except OSError:
            self._seen, self._keys = None, ()
            return ()
        seen = _signature(status)
        if seen != self._seen:
            settled = time.time() - status.st_mtime > _TIME_STAMP_S
            self._seen = seen if settled else None
            self._keys = self._read() if status.st_uid == _OWNER else ()
        return self._keys

    def _read(self) -> tuple[Key, ...]:
        keys: list[Key] = []
        try:
            paths = sorted(self._path.iterdir())
        except OSError:
            return ()
        for path in paths:
            try:
                # Nothing but a file: a pipe would block the server.
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with os.fdopen(descriptor, "rb") as stream:
                    status = os.fstat(descriptor)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == _OWNER:
                        keys.extend(parse_keys(stream.read().decode(errors="replace"))[0])
            except OSError:
                # Its program ended, or is about to put it into place.
                continue
        return tuple(keys)


def _signature(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_size, status.st_ino


def parse_keys(text: str) -> tuple[tuple[Key, ...], list[int]]:
    """Return the keys of a key file's text, and the numbers of the lines that hold something else."""
    keys = []
    unusable = []
    for number, line in enumerate(text.splitlines(), start=1):
        content, _, comment = line.partition("#")
        if not content.strip():
            continue
        if _DIGEST.fullmatch(content.strip()):
            expires = _EXPIRES.fullmatch(comment)
            keys.append(Key(bytes.fromhex(content.strip()), int(expires[1]) if expires else None))
        else:
            unusable.append(number)
    return tuple(keys), unusable


def is_accepted(key: bytes, accepted: Iterable[Key]) -> bool:
    """Say whether ``key`` is an accepted one now, in a time that does not depend on which one it is like."""
    digest = hashlib.sha256(key).digest()
    now = time.time()
    found = False
    for known in accepted:
        valid = known.expires is None or now < known.expires
        found |= hmac.compare_digest(digest, known.digest) and valid
    return found


class RequireApiKey:
    """ASGI middleware: every HTTP request and WebSocket needs `Authorization: Bearer <key>`, OPEN_PATHS excepted."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._open = os.environ.get("AERIE_API_KEYS") == "none"
        if self._open and os.environ.get("AERIE_HOST") not in _LOOPBACK:
            raise RuntimeError(
                "This service would answer everybody: AERIE_API_KEYS is none, and AERIE_HOST is "
                f"{os.environ.get('AERIE_HOST') or 'not set'}. Give it API keys, or have it listen on 127.0.0.1."
            )
        self._file = KeyFile(Path(os.environ.get("AERIE_API_KEYS_FILE", _DEFAULT_FILE)))
        self._directory = KeyDirectory(Path(os.environ.get("AERIE_HOST_KEYS_DIR", _DEFAULT_DIRECTORY)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)
        else:
            await _refuse(send, "http.response")

    def _may_pass(self, scope: Scope) -> bool:
        if self._open or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            return True
        key = _bearer(scope)
        return key is not None and is_accepted(key, (*self._file.keys(), *self._directory.keys()))


def _bearer(scope: Scope) -> bytes | None:
    """Return the bearer token of a request, or None if it has none or several."""
    values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].strip().partition(b" ")
    key: bytes = token.strip()
    return key if scheme.lower() == b"bearer" and key else None


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    if "websocket.http.response" in (scope.get("extensions") or {}):
        await _refuse(send, "websocket.http.response")
    else:
        # Before an accept, servers turn this into an HTTP refusal of the handshake.
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "API key required"})


async def _refuse(send: Send, kind: str) -> None:
    error = {
        "message": "Missing or wrong API key. Send it as `Authorization: Bearer <key>`.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": f"{kind}.start", "status": 401, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
