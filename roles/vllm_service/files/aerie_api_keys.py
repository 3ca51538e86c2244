# SPDX-License-Identifier: Apache-2.0
"""API keys for vLLM's HTTP server, added and withdrawn without a restart.

`vllm serve --middleware aerie_api_keys.RequireApiKey`, with this file's directory on PYTHONPATH. vLLM's own key is a
single one, is inherited by every child process, and guards only some path prefixes. Here the server holds no key at
all, only SHA-256 digests in a file that it may read and not write, and every path but two needs a key.

The file (environment variable AERIE_API_KEYS_FILE, default /etc/aerie/api-keys) has one digest a line, 64 hexadecimal
digits, with an optional comment: `<digest>  # name`. Lines that are empty or begin with `#` say nothing. Replace the
file by a rename, never in place, so that no reader sees half of it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Probes and scrapes carry no key. Compared with the whole path: what lies below these is guarded.
OPEN_PATHS = frozenset({"/health", "/metrics"})

_DEFAULT_FILE = "/etc/aerie/api-keys"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
# RFC 6455: the client breaks a rule of the server.
_POLICY_VIOLATION = 1008

# Below vLLM's own logger, so that its handler and format apply.
_log = logging.getLogger("vllm.aerie_api_keys")


class KeyFile:
    """The accepted keys' digests, read again when the file changes. Without a readable digest no key is accepted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._digests: tuple[bytes, ...] = ()
        self._fault = ""

    def accepts(self, key: bytes) -> bool:
        """Say whether ``key`` is one of the accepted ones, in a time that does not depend on which one it is like."""
        self._refresh()
        digest = hashlib.sha256(key).digest()
        accepted = False
        for known in self._digests:
            accepted |= hmac.compare_digest(digest, known)
        return accepted

    def _refresh(self) -> None:
        try:
            if _signature(self._path.stat()) == self._seen:
                return
            with self._path.open("rb") as stream:
                # Of the opened file: the path may name another one by now.
                seen = _signature(os.fstat(stream.fileno()))
                text = stream.read().decode(errors="replace")
        except OSError as error:
            self._seen, self._digests = None, ()
            self._report(f"cannot be read: {error.strerror}")
            return
        self._seen = seen
        self._digests, unusable = parse_digests(text)
        if unusable:
            self._report(f"line {unusable[0]} is no SHA-256 digest; {len(self._digests)} other keys are accepted")
        elif not self._digests:
            self._report("holds no digest")
        else:
            self._fault = ""
            _log.info("%s: %d API keys are accepted.", self._path, len(self._digests))

    def _report(self, fault: str) -> None:
        """Log a fault once, not at every request."""
        if fault != self._fault:
            self._fault = fault
            consequence = "" if self._digests else " Every guarded request is answered with 401."
            _log.error("API key file %s %s.%s", self._path, fault, consequence)


def _signature(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_size, status.st_ino


def parse_digests(text: str) -> tuple[tuple[bytes, ...], list[int]]:
    """Return the digests of a key file's text, and the numbers of the lines that hold something else."""
    digests = []
    unusable = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        if _DIGEST.fullmatch(content):
            digests.append(bytes.fromhex(content))
        else:
            unusable.append(number)
    return tuple(digests), unusable


class RequireApiKey:
    """ASGI middleware: every HTTP request and WebSocket needs `Authorization: Bearer <key>`, OPEN_PATHS excepted."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._keys = KeyFile(Path(os.environ.get("AERIE_API_KEYS_FILE", _DEFAULT_FILE)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)
        else:
            await _refuse(send, "http.response")

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return True
        key = _bearer(scope)
        return key is not None and self._keys.accepts(key)


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
