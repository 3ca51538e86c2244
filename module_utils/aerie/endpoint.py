# SPDX-License-Identifier: Apache-2.0
"""Where a service listens, and how a program on its own host speaks with it."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.aerie.preflight_certificate import certificates

# What a service that listens everywhere is reached at.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# OpenSSL's X509_V_FLAG_PARTIAL_CHAIN and X509_V_FLAG_NO_CHECK_TIME; Python has names for them late, or none.
_PARTIAL_CHAIN, _NO_CHECK_TIME = 0x80000, 0x200000
# OpenSSL's names for an answer of another service, or of one without TLS.
_WRONG = {
    "CERTIFICATE_VERIFY_FAILED": "with another certificate than",
    "WRONG_VERSION_NUMBER": "without TLS, and its settings name",
}


class Endpoint(NamedTuple):
    """An address and a port (0: unknown), and the file with the certificate that the service shows (empty: no TLS)."""

    address: str
    port: int
    certificate: str = ""

    @property
    def url(self) -> str:
        """The root of the service's endpoints."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"http{'s' if self.certificate else ''}://{address}:{self.port}"


def endpoint_of(variables: Mapping[str, str]) -> Endpoint:
    """Return where the service with these settings is asked from its own host."""
    address = variables.get("AERIE_HOST", "")
    port = int(variables.get("AERIE_PORT", 0))
    return Endpoint(_EVERYWHERE.get(address, address), port, variables.get("AERIE_CERTIFICATE", ""))


def parse_settings(text: str) -> dict[str, str]:
    """Parse an environment file of systemd as Aerie writes it: one NAME=value a line, nothing quoted."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def environment(settings: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables that the service's process has of these settings: of the environment files among them."""
    texts = [text or "" for path, text in settings.items() if path.endswith(".env")]
    return {name: value for text in texts for name, value in parse_settings(text).items()}


def endpoint(settings: Mapping[str, str | None]) -> Endpoint:
    """Return where a service with these settings is asked from its own host."""
    return endpoint_of(environment(settings))


def opener(certificate: str = "") -> urllib.request.OpenerDirector:
    """Return what opens URLs of the service on this host.

    It is the service that has the first certificate of the file ``certificate``, whatever its names and its end: a
    program that took a service for dead because its certificate ended would end it. Raises OSError or ValueError where
    the file has none.
    """
    # A proxy of the environment must not answer for the service.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= _PARTIAL_CHAIN | _NO_CHECK_TIME
        context.load_verify_locations(cadata=certificates(Path(certificate).read_bytes())[0])
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def stranger(error: Exception) -> str:
    """Say how who answered showed that it is not the service, as a phrase before the certificate's file; or nothing."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return _WRONG.get(reason.reason or "", "") if isinstance(reason, ssl.SSLError) else ""
