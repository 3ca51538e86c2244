#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a gateway sees of vLLM: /health, completions that take their time, and routes that are nobody's business.

toy_engine.py NAME ADDRESS PORT [PEM]: with TLS if it is given a file with certificate and key. A completion's
`max_tokens` tokens take a tenth of a second each; with `stream` they are sent one by one. Every answer names the
engine; GET /count says how many completions it was asked for, and how many of more than one token are under way. GET
/finish ends all streams with the token that they are at.
"""

from __future__ import annotations

import json
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_S = 0.1


class Engine(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    name = ""
    asked = 0
    running = 0
    finished = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        Engine.finished += self.path == "/finish"
        body = {"engine": self.name, "path": self.path, "asked": Engine.asked, "running": Engine.running}
        self._answer(json.dumps({**body, "authorization": self.headers.get("Authorization", "")}).encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Engine.lock:
            Engine.asked += 1
            Engine.running += request["max_tokens"] > 1
        try:
            if request.get("stream"):
                self._stream(request["max_tokens"])
            else:
                time.sleep(TOKEN_S * request["max_tokens"])
                self._answer(json.dumps({"engine": self.name, "tokens": request["max_tokens"]}).encode())
        finally:
            with Engine.lock:
                Engine.running -= request["max_tokens"] > 1

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        finished = Engine.finished
        for number in range(tokens):
            if Engine.finished != finished:
                break
            self._chunk(json.dumps({"engine": self.name, "token": number}))
            time.sleep(TOKEN_S)
        self._chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing: the tests count."""


if __name__ == "__main__":
    Engine.name = sys.argv[1]
    server = ThreadingHTTPServer((sys.argv[2], int(sys.argv[3])), Engine)
    if len(sys.argv) > 4:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(sys.argv[4])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
