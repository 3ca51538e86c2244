# SPDX-License-Identifier: Apache-2.0
"""The API key middleware, driven through the ASGI protocol in front of a tiny application."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import os
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[2] / "roles" / "vllm_service" / "files" / "aerie_api_keys.py"
_SPEC = importlib.util.spec_from_file_location("aerie_api_keys", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
aerie_api_keys = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(aerie_api_keys)

Message = MutableMapping[str, Any]


async def application(scope: Message, receive: Any, send: Any) -> None:  # noqa: ANN401
    """Answers everything with 200, accepts every WebSocket, notes every lifespan."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
    else:
        await receive()
        await send({"type": "lifespan.startup.complete"})


class Client:
    """Holds one middleware instance, as a server does, and makes requests of it."""

    def __init__(self) -> None:
        self._app = aerie_api_keys.RequireApiKey(application)

    def call(self, kind: str, first: str, **scope: Any) -> list[Message]:  # noqa: ANN401
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": first}

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(self._app({"type": kind, "headers": [], **scope}, receive, send))
        return sent

    def get(self, path: str, *authorization: bytes, method: str = "GET") -> int:
        return self.answer(path, *authorization, method=method)[0]["status"]  # type: ignore[no-any-return]

    def answer(self, path: str, *authorization: bytes, method: str = "GET") -> list[Message]:
        headers = [(b"authorization", value) for value in authorization]
        return self.call("http", "http.request", path=path, method=method, headers=headers)

    def key(self, key: str) -> int:
        return self.get("/v1/models", b"Bearer " + key.encode())


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def replace(path: Path, text: str) -> None:
    """Write the way the role does: a new file, renamed over the old one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "api-keys"
    path.write_text(f"# accepted keys\n\n{digest('first')}  # ada\n{digest('second').upper()}\n")
    monkeypatch.setenv("AERIE_API_KEYS_FILE", str(path))
    monkeypatch.setenv("AERIE_HOST_KEYS_DIR", str(tmp_path / "none"))
    return path


@pytest.fixture
def directory(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of host keys, whose owner is the user that runs the tests."""
    path = tmp_path / "api-keys.d"
    path.mkdir()
    monkeypatch.setenv("AERIE_HOST_KEYS_DIR", str(path))
    monkeypatch.setattr(aerie_api_keys, "_OWNER", os.getuid())
    return path


@pytest.mark.usefixtures("keys")
def test_each_key_of_the_file_opens_and_nothing_else_does() -> None:
    client = Client()
    assert [client.key(key) for key in ("first", "second", "third", digest("first"), "")] == [200, 200, 401, 401, 401]


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1/models",
            "/",
            "/invocations",
            "/tokenize",
            "/pause",
            "/ping",
            "/docs",
            "/nothing",
            "/health/",
            "/health/x",
        ),
        *("/metrics/", "/metrics/x", "//health", "/Health", "/x/../health", "/health%20", "health", ""),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_every_path_but_two_is_guarded(path: str, method: str) -> None:
    client = Client()
    assert client.get(path, method=method) == 401
    assert client.get(path, b"Bearer first", method=method) == 200


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_and_scrapes_need_no_key(path: str) -> None:
    assert Client().get(path) == 200
    assert Client().get(path, b"Bearer wrong") == 200


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ((b"Bearer first",), 200),
        ((b"bearer first",), 200),
        ((b"  BEARER   first  ",), 200),
        ((b"Basic first",), 401),
        ((b"first",), 401),
        ((b"Bearer",), 401),
        ((b"Bearer ",), 401),
        ((b"Bearer first second",), 401),
        ((b"Bearer \xff\xfe",), 401),
        ((b"Bearer first", b"Bearer second"), 401),
        ((), 401),
    ],
)
def test_how_the_key_may_be_sent(authorization: tuple[bytes, ...], status: int) -> None:
    assert Client().get("/v1/models", *authorization) == status


@pytest.mark.usefixtures("keys")
def test_a_refusal_has_the_shape_of_an_openai_error() -> None:
    start, body = Client().answer("/v1/chat/completions", b"Bearer wrong", method="POST")
    headers = dict(start["headers"])
    assert start["status"] == 401
    assert headers[b"www-authenticate"] == b"Bearer"
    assert headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(body["body"])
    error = json.loads(body["body"])["error"]
    assert error["code"] == "invalid_api_key"
    assert "wrong" not in body["body"].decode().replace("Missing or wrong", "")


@pytest.mark.usefixtures("keys")
def test_a_websocket_needs_a_key_on_every_path() -> None:
    client = Client()
    granted = client.call(
        "websocket", "websocket.connect", path="/v1/realtime", headers=[(b"authorization", b"Bearer first")]
    )
    assert [message["type"] for message in granted] == ["websocket.accept"]
    for path in ("/v1/realtime", "/health"):
        refused = client.call("websocket", "websocket.connect", path=path)
        assert [(message["type"], message["code"]) for message in refused] == [("websocket.close", 1008)]


@pytest.mark.usefixtures("keys")
def test_a_websocket_is_refused_with_a_response_where_the_server_can() -> None:
    start, body = Client().call(
        "websocket", "websocket.connect", path="/v1/realtime", extensions={"websocket.http.response": {}}
    )
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert body["type"] == "websocket.http.response.body"


def test_lifespan_passes_even_without_a_key_file(keys: Path) -> None:
    keys.unlink()
    assert Client().call("lifespan", "lifespan.startup") == [{"type": "lifespan.startup.complete"}]


def test_keys_change_without_a_restart(keys: Path) -> None:
    client = Client()
    assert [client.key("first"), client.key("third")] == [200, 401]
    replace(keys, f"{digest('third')}\n")
    assert [client.key("first"), client.key("third")] == [401, 200]
    replace(keys, f"{digest('first')}\n")
    assert [client.key("first"), client.key("third")] == [200, 401]


def test_a_missing_file_opens_nothing_and_its_return_is_noticed(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    assert client.key("first") == 200
    text = keys.read_text()
    keys.unlink()
    with caplog.at_level(logging.ERROR):
        assert [client.key("first") for _ in range(3)] == [401, 401, 401]
    assert client.get("/health") == 200
    # Said once, not at every request, and without a key.
    assert len(caplog.records) == 1
    assert str(keys) in caplog.text
    assert "first" not in caplog.text
    keys.write_text(text)
    assert client.key("first") == 200


@pytest.mark.parametrize("content", ["", "\n# nobody\n", "not a digest\n", "ab" * 31 + "\n"])
def test_a_file_without_a_digest_opens_nothing(keys: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    keys.write_text(content)
    client = Client()
    with caplog.at_level(logging.ERROR):
        assert [client.key("first"), client.key(""), client.key(content.strip())] == [401, 401, 401]
    assert "401" in caplog.text


def test_a_directory_in_place_of_the_file_opens_nothing(keys: Path) -> None:
    keys.unlink()
    keys.mkdir()
    assert Client().key("first") == 401


def test_a_bad_line_does_not_lock_the_others_out(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys.write_text(f"{digest('first')}\nfirst # a key in clear\n")
    with caplog.at_level(logging.ERROR):
        assert Client().key("first") == 200
    assert "line 2" in caplog.text
    assert "in clear" not in caplog.text


def test_a_key_of_the_directory_opens_as_long_as_its_file_is_there(directory: Path) -> None:
    client = Client()
    assert [client.key("first"), client.key("host")] == [200, 401]
    # At once, though the directory's time stamp is coarser than the steps of this test.
    for _ in range(20):
        (directory / "any name").write_text(f"{digest('host')}\n")
        assert [client.key("first"), client.key("host"), client.key("third")] == [200, 200, 401]
        (directory / "any name").unlink()
        assert [client.key("first"), client.key("host")] == [200, 401]
    directory.rmdir()
    assert [client.key("first"), client.key("host")] == [200, 401]


def test_a_directory_that_rests_is_not_read_again(directory: Path) -> None:
    path = directory / "a"
    path.write_text(f"{digest('host')}\n")
    os.utime(directory, (time.time() - 60, time.time() - 60))
    client = Client()
    assert client.key("host") == 200
    # In place, which nobody does: the directory does not change by it.
    path.write_text(f"{digest('other')}\n")
    assert [client.key("host"), client.key("other")] == [200, 401]
    (directory / "b").write_text("")
    assert [client.key("host"), client.key("other")] == [401, 200]


def test_a_key_of_the_directory_ends_with_its_time(directory: Path) -> None:
    (directory / "past").write_text(f"{digest('past')}  # expires {int(time.time()) - 1}\n")
    (directory / "future").write_text(f"{digest('future')}  # expires {int(time.time()) + 600}\n")
    (directory / "prose").write_text(f"{digest('prose')}  # whose? expires 17\n")
    client = Client()
    assert [client.key(key) for key in ("past", "future", "prose")] == [401, 200, 200]


def test_a_key_ends_while_its_file_stays(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "a").write_text(f"{digest('host')}  # expires {int(time.time()) + 600}\n")
    os.utime(directory, (time.time() - 60, time.time() - 60))
    client = Client()
    assert client.key("host") == 200
    later = time.time() + 601
    monkeypatch.setattr(time, "time", lambda: later)
    assert client.key("host") == 401


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "unreadable text"])
def test_only_files_of_the_directory_count(directory: Path, tmp_path: Path, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(f"{digest('host')}\n")
    path = directory / "a"
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"\xff\x00\n")
    (directory / "b").write_text(f"{digest('good')}\n")
    client = Client()
    assert [client.key("host"), client.key("good")] == [401, 200]


def test_files_of_somebody_else_do_not_count(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "a").write_text(f"{digest('host')}\n")
    monkeypatch.setattr(aerie_api_keys, "_OWNER", os.getuid() + 1)
    client = Client()
    assert [client.key("first"), client.key("host")] == [200, 401]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_without_keys_a_service_of_its_own_host_asks_for_none(
    keys: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("AERIE_API_KEYS", "none")
    monkeypatch.setenv("AERIE_HOST", host)
    keys.unlink()
    assert Client().get("/v1/models") == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost", "127.0.0.2", ""])
@pytest.mark.usefixtures("keys")
def test_without_keys_a_service_that_others_reach_does_not_start(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("AERIE_API_KEYS", "none")
    monkeypatch.setenv("AERIE_HOST", host)
    with pytest.raises(RuntimeError, match="would answer everybody"):
        Client()
    monkeypatch.setenv("AERIE_API_KEYS", "required")
    assert Client().get("/v1/models") == 401
