# SPDX-License-Identifier: Apache-2.0
"""Real certificates with their keys, and a server that shows one."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID


class Pair(NamedTuple):
    """A certificate and its private key."""

    certificate: x509.Certificate
    private: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def key(self, passphrase: str = "") -> str:
        way = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
        return self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, way).decode()


def pair(days: int = 90, issuer: Pair | None = None) -> Pair:
    """Return a certificate that began 100 days ago and ends in ``days``; by itself, or by ``issuer``."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "leaf" if issuer else "itself")])
    now = datetime.now(timezone.utc)
    signer, signing = (issuer.certificate.subject, issuer.private) if issuer else (name, private)
    builder = x509.CertificateBuilder(signer, name, private.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=100)).not_valid_after(now + timedelta(days=days))
    return Pair(builder.sign(signing, hashes.SHA256()), private)


@contextlib.contextmanager
def serving(directory: Path, shown: Pair | None) -> Iterator[int]:
    """Give the port of a server that answers every request with 200, with TLS if it is to show a certificate."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if shown:
        wrap(server, directory, shown)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def wrap(server: ThreadingHTTPServer, directory: Path, shown: Pair) -> None:
    """Have a server speak TLS."""
    (directory / "shown.pem").write_text(shown.pem + shown.key())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "shown.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
