# SPDX-License-Identifier: Apache-2.0
"""When certificates end: the validity in X.509, read without a library for it, which hosts need not have."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import ssl
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ansible.module_utils.aerie.findings import Finding
from ansible.module_utils.aerie.preflight_findings import note, problem

_PEM = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----\s([A-Za-z0-9+/=\s]+)-----END ")
_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x17, 0x18, 0xA0
_SOON = timedelta(days=30)
_LONGEST = 1 << 20


class CertificateError(ValueError):
    """Bytes that are no certificate."""


def validity(der: bytes) -> tuple[datetime, datetime]:
    """Return the times between which a certificate (X.509, DER) is valid; raise CertificateError for other bytes."""
    certificate = _content(der, 0, _SEQUENCE)
    fields = list(_elements(_content(certificate, 0, _SEQUENCE)))
    if fields and fields[0][0] == _VERSION:
        del fields[0]
    # serial number, signature, issuer, validity
    if len(fields) < 4 or fields[3][0] != _SEQUENCE:
        raise CertificateError("there is no validity where a certificate has it")
    times = [_time(tag, content) for tag, content in _elements(fields[3][1])]
    if len(times) != 2:
        raise CertificateError("the validity is not two times")
    return times[0], times[1]


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each element of ``data``, one after the other (X.690)."""
    at = 0
    while at < len(data):
        tag, start, end = _header(data, at)
        yield tag, data[start:end]
        at = end


def _content(data: bytes, at: int, tag: int) -> bytes:
    found, start, end = _header(data, at)
    if found != tag:
        raise CertificateError(f"there is an element {found:#x} where a certificate has {tag:#x}")
    return data[start:end]


def _header(data: bytes, at: int) -> tuple[int, int, int]:
    if len(data) < at + 2:
        raise CertificateError("it ends in the middle")
    tag, length, start = data[at], data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        if not 1 <= count <= 4:
            raise CertificateError("an element has a length that no certificate has")
        length, start = int.from_bytes(data[start : start + count], "big"), start + count
    if start + length > len(data):
        raise CertificateError("it ends in the middle")
    return tag, start, start + length


def _time(tag: int, content: bytes) -> datetime:
    try:
        text = content.decode("ascii")
        if tag == _UTC_TIME:
            # RFC 5280: a year of two digits is one from 1950 to 2049.
            text = ("19" if text[:2] >= "50" else "20") + text
        elif tag != _GENERALIZED_TIME:
            raise CertificateError("its validity is no time")
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        raise CertificateError("its validity is no time") from None


def certificates(data: bytes) -> list[bytes]:
    """Return the certificates of a PEM file, or the one that a DER file is."""
    blocks = _PEM.findall(data)
    if not blocks:
        return [data]
    try:
        return [base64.b64decode(b"".join(block.split()), validate=True) for block in blocks]
    except (binascii.Error, ValueError):
        raise CertificateError("it is not base64 between its markers") from None


def check_certificate(path: Path, now: datetime, where: str = "") -> Iterator[Finding]:
    """Yield what is wrong with the certificates in the file ``path``: unreadable, not yet valid, ended, ending soon."""
    name = f"the certificate {path}{where}"
    try:
        with path.open("rb") as stream:
            data = stream.read(_LONGEST)
    except OSError as error:
        yield problem("certificate", f"{name} cannot be read ({error.strerror})", "put it there, or correct the path")
        return
    yield from _check_end(data, now, name)


def check_pair(certificate: str, key: str, now: datetime, names: tuple[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with a certificate and its private key, PEM texts that are called ``names``.

    Nothing of the key is in a finding, nor in a file.
    """
    yield from _check_end(certificate.encode(), now, names[0])
    with _in_memory(certificate) as chain, _in_memory(key) as private:
        try:
            # An empty passphrase, so that nobody is asked for one.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, private, password="")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                yield problem(
                    "certificate-key", f"{names[1]} is not the key of {names[0]}", "take those of one request"
                )
            elif "ENCRYPTED" in key:
                yield problem("certificate-key", f"{names[1]} has a passphrase", "take it off: Ansible Vault keeps it")
            else:
                message = f"{names[0]} and {names[1]} cannot be used together ({error.reason or 'no PEM text'})"
                yield problem("certificate-key", message, "take a PEM certificate and its PEM key")


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """Give a path under which this process, and no other, reads ``text``; it is on no disk."""
    descriptor = os.memfd_create("pem")
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _check_end(data: bytes, now: datetime, name: str) -> Iterator[Finding]:
    try:
        spans = [validity(der) for der in certificates(data)]
    except CertificateError as error:
        yield problem("certificate", f"{name} is none: {error}", "put a PEM certificate there")
        return
    begins, ends = max(start for start, _ in spans), min(end for _, end in spans)
    if now < begins:
        yield problem("certificate-early", f"{name} is valid from {begins:%Y-%m-%d %H:%M} UTC", "see the host's clock")
    elif ends <= now:
        yield problem("certificate-ended", f"{name} ended on {ends:%Y-%m-%d %H:%M} UTC", "renew it")
    elif ends - now < _SOON:
        yield note("certificate-soon", f"{name} ends in {(ends - now).days} days, on {ends:%Y-%m-%d}", "renew it")
