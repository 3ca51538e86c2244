# SPDX-License-Identifier: Apache-2.0
"""A wheel's files over HTTP byte ranges, from a server on this machine."""

from __future__ import annotations

import random
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import toy_vllm
from ansible.module_utils.aerie.remote_wheel import RangeFile, RemoteWheelError, partial_wheel
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import package_of_wheel

MEMBERS = [f"vllm/{path}" for path in toy_vllm.files()]


class Server(ThreadingHTTPServer):
    """An index page with one wheel, which it serves in ranges or not; counts the bytes of it that it sent."""

    def __init__(self, wheel: Path, ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.data, self.ranges, self.sent = wheel.name, wheel.read_bytes(), ranges, 0
        self.index = f"http://127.0.0.1:{self.server_port}/"
        self.url = f"{self.index}{self.name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.answer(200, b"", len(self.server.data))

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.path == "/":
            page = f'<a href="{self.server.name}">{self.server.name}</a>'.encode()
            self.answer(200, page, len(page), "text/html")
        elif wanted and self.server.ranges:
            first, last = map(int, wanted.groups())
            body = self.server.data[first : last + 1]
            self.server.sent += len(body)
            self.answer(206, body, len(body))
        else:
            self.answer(200, self.server.data, len(self.server.data))

    def answer(self, status: int, body: bytes, length: int, kind: str = "application/octet-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes" if self.server.ranges else "none")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_args: object) -> None:
        """Say nothing."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Return what starts a server, which uv then takes for the only place that wheels are at."""
    servers: list[Server] = []

    def start(wheel: Path, ranges: bool = True) -> Server:
        server = Server(wheel, ranges)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        for name, value in (
            ("UV_FIND_LINKS", server.index),
            ("UV_NO_INDEX", "1"),
            ("UV_CACHE_DIR", str(tmp_path / "uv")),
        ):
            monkeypatch.setenv(name, value)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Return a wheel of which the ballast is most."""
    folder = tmp_path / "released"
    folder.mkdir()
    ballast = random.Random(0).randbytes(8 * RangeFile.BLOCK)
    path = toy_vllm.wheel(folder, {**toy_vllm.files(), "ballast.bin": ballast})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(
            "vllm-0.33.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    return path


def test_the_named_files_are_had_without_the_wheel(serve: Callable[..., Server], wheel: Path, tmp_path: Path) -> None:
    server = serve(wheel)
    cache = tmp_path / "cache"
    partial = partial_wheel("vllm", "0.33.0", [*MEMBERS, "vllm/not_in_this_release.py"], cache)
    assert partial == cache / wheel.name
    package = package_of_wheel(partial)
    assert {path: package.read(path) for path in toy_vllm.files()} == toy_vllm.files()
    assert "ballast.bin" in package.recorded
    with pytest.raises(Refusal, match=r"has no file vllm/ballast\.bin"):
        package.read("ballast.bin")
    assert 0 < server.sent < len(server.data) / 2


def test_what_is_cached_is_not_fetched_again_and_grows(
    serve: Callable[..., Server], wheel: Path, tmp_path: Path
) -> None:
    server = serve(wheel)
    one, other = MEMBERS[:2], MEMBERS[2:]
    partial_wheel("vllm", "0.33.0", one, tmp_path)
    sent = server.sent
    partial = partial_wheel("vllm", "0.33.0", [*one, "vllm/not_in_this_release.py"], tmp_path)
    assert server.sent == sent
    partial_wheel("vllm", "0.33.0", other, tmp_path)
    assert server.sent > sent
    assert set(MEMBERS) <= set(zipfile.ZipFile(partial).namelist())
    assert [path.name for path in tmp_path.glob("*.whl")] == [wheel.name]


def test_a_release_that_is_not_there_is_named(serve: Callable[..., Server], wheel: Path, tmp_path: Path) -> None:
    serve(wheel)
    with pytest.raises(RemoteWheelError, match=r"^uv finds no wheel of vllm 0\.34\.0: check the version"):
        partial_wheel("vllm", "0.34.0", MEMBERS, tmp_path)


def test_a_server_without_ranges_is_named(serve: Callable[..., Server], wheel: Path, tmp_path: Path) -> None:
    server = serve(wheel, ranges=False)
    with pytest.raises(RemoteWheelError) as error:
        partial_wheel("vllm", "0.33.0", MEMBERS, tmp_path)
    assert str(error.value).startswith(f"{server.url} cannot be read: {server.url} does not answer byte ranges")
    assert not list(tmp_path.glob("*.whl"))


def test_a_range_file_reads_like_a_file(serve: Callable[..., Server], wheel: Path) -> None:
    remote, data = RangeFile(serve(wheel).url), wheel.read_bytes()
    assert remote.seek(-10, 2) == len(data) - 10
    assert remote.read() == data[-10:]
    start = RangeFile.BLOCK - 5
    remote.seek(start)
    assert remote.read(10) == data[start : start + 10]
    assert remote.tell() == start + 10
