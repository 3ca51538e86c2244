# SPDX-License-Identifier: Apache-2.0
"""Stands in for a user's service: loads a file of vLLM when it starts, and tells anybody the digest of what it loaded.

With /srv/refuse it cannot run patched code. With /srv/linger it takes its time to end.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

(FILE,) = Path(sys.prefix).glob("lib/python*/site-packages/vllm/model_executor/models/deepseek_v2.py")
CODE = FILE.read_bytes()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(hashlib.sha256(CODE).hexdigest().encode())


def end(*_: object) -> None:
    while Path("/srv/linger").exists():
        time.sleep(0.1)
    sys.exit(0)


if Path("/srv/refuse").exists() and b"  # aerie " in CODE:
    sys.exit("RuntimeError: no kernel for this code")
signal.signal(signal.SIGTERM, end)
HTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
