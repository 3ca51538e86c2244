# SPDX-License-Identifier: Apache-2.0
"""Wheels of a few bytes, and a package index on this machine that notes what it is asked."""

from __future__ import annotations

import base64
import hashlib
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


def make_wheel(directory: Path, name: str, version: str, text: str = "", tag: str = "py3-none-any") -> Path:
    """Write a wheel whose one module ``name`` has ``text``; the same arguments give the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    members = {
        f"{name}.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{member},{_record_digest(data)},{len(data)}\n" for member, data in members.items())
    path = directory / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, data in {**members, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(zipfile.ZipInfo(member), data)
    return path


def _record_digest(data: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data.encode()).digest()).rstrip(b"=").decode()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pin(*wheels: Path) -> str:
    """Return the requirement, as a line of a lock, that any of these files of one distribution satisfies."""
    name, version = wheels[0].name.split("-")[:2]
    return " ".join([f"{name}=={version}", *(f"--hash=sha256:{sha256(wheel)}" for wheel in wheels)]) + "\n"


@dataclass
class Index:
    """Indexes below ``url``, one for each of ``directories``; ``asked`` has the projects asked for, by index."""

    url: str
    directories: Mapping[str, Path]
    asked: dict[str, list[str]] = field(default_factory=dict)

    def answer(self, path: str) -> bytes | None:
        """Return what is at ``path``: /INDEX/PROJECT/ is a page of links, /INDEX/files/NAME is a file."""
        name, project, *rest = unquote(path).strip("/").split("/")
        if project == "files":
            return (self.directories[name] / rest[0]).read_bytes()
        self.asked.setdefault(name, []).append(project)
        wheels = sorted(self.directories[name].glob(f"{project}-*.whl"))
        links = [f'<a href="/{name}/files/{wheel.name}#sha256={sha256(wheel)}">{wheel.name}</a>' for wheel in wheels]
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode() if links else None


@contextmanager
def serve(**directories: Path) -> Iterator[Index]:
    """Serve each directory of wheels as an index of that name, on the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = index.answer(self.path)
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        index = Index(f"http://127.0.0.1:{server.server_address[1]}", directories)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()
