# SPDX-License-Identifier: Apache-2.0
"""When real certificates end, and what is no certificate."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from ansible.module_utils.aerie.preflight_certificate import (
    CertificateError,
    certificates,
    check_certificate,
    check_pair,
    validity,
)
from certificates_made import Pair, pair
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st
from preflight_findings_text import messages

NOW = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)
KEY = ec.generate_private_key(ec.SECP256R1())


def certificate(begins: datetime, ends: datetime, encoding: Encoding = Encoding.PEM) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    builder = x509.CertificateBuilder(name, name, KEY.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(begins).not_valid_after(ends)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(encoding)


DER = certificate(NOW, NOW + timedelta(days=90), Encoding.DER)


@given(st.datetimes(datetime(1960, 1, 1), datetime(2090, 1, 1)), st.integers(1, 10_000))
def test_the_validity_is_what_was_signed(begins: datetime, days: int) -> None:
    begins = begins.replace(microsecond=0, tzinfo=timezone.utc)
    ends = begins + timedelta(days=days)
    assert validity(certificate(begins, ends, Encoding.DER)) == (begins, ends)


@given(st.binary(max_size=300))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CertificateError):
        validity(data)


@given(st.integers(0, len(DER) - 1), st.integers(0, 255))
def test_a_broken_byte_never_raises_anything_else(at: int, byte: int) -> None:
    try:
        begins, ends = validity(DER[:at] + bytes([byte]) + DER[at + 1 :])
    except CertificateError:
        return
    assert begins.tzinfo is ends.tzinfo is timezone.utc


@pytest.mark.parametrize("length", range(0, len(DER), 7))
def test_a_part_of_a_certificate_is_refused(length: int) -> None:
    with pytest.raises(CertificateError):
        validity(DER[:length])


def check(tmp_path: Path, *spans: tuple[int, int]) -> list[str]:
    """Return the messages for a file with a certificate for each span of days from now."""
    path = tmp_path / "chain.pem"
    days = [(NOW + timedelta(days=first), NOW + timedelta(days=last)) for first, last in spans]
    path.write_bytes(b"".join(certificate(*span) for span in days))
    return [message.replace(str(path), "FILE") for message in messages(check_certificate(path, NOW))]


def test_a_certificate_that_holds_long_is_no_finding(tmp_path: Path) -> None:
    assert check(tmp_path, (-10, 80)) == []


def test_an_end_is_a_problem_and_a_near_end_a_note(tmp_path: Path) -> None:
    assert check(tmp_path, (-90, -1)) == ["the certificate FILE ended on 2026-11-28 12:00 UTC: renew it"]
    assert check(tmp_path, (-60, 29)) == ["note: the certificate FILE ends in 29 days, on 2026-12-28: renew it"]
    assert check(tmp_path, (1, 90)) == ["the certificate FILE is valid from 2026-11-30 12:00 UTC: see the host's clock"]


def test_a_chain_ends_with_its_first_certificate_to_end(tmp_path: Path) -> None:
    assert check(tmp_path, (-10, 400), (-10, 5), (-10, 800)) == [
        "note: the certificate FILE ends in 5 days, on 2026-12-04: renew it"
    ]


def test_what_is_no_certificate_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gateway.pem"
    assert messages(check_certificate(path, NOW, " on the control node")) == [
        f"the certificate {path} on the control node cannot be read (No such file or directory): "
        "put it there, or correct the path"
    ]
    for text in (b"", b"hello", b"-----BEGIN CERTIFICATE-----\nA=A=\n-----END CERTIFICATE-----\n"):
        path.write_bytes(text)
        (found,) = messages(check_certificate(path, NOW))
        assert found.startswith(f"the certificate {path} is none: ")


def test_text_around_a_certificate_is_ignored() -> None:
    pem = certificate(NOW, NOW + timedelta(days=1))
    assert len(certificates(b"subject=gateway\n" + pem + b"\n# next\n" + pem)) == 2
    assert certificates(DER) == [DER]


def of_pair(certificate: str, key: str) -> list[str]:
    return messages(check_pair(certificate, key, datetime.now(timezone.utc), ("CERTIFICATE", "KEY")))


OWN, AUTHORITY = pair(), pair()
SIGNED = pair(issuer=AUTHORITY)


@pytest.mark.parametrize("made", [OWN, SIGNED])
def test_a_certificate_with_its_key_is_no_finding(made: Pair) -> None:
    assert of_pair(made.pem, made.key()) == []
    assert of_pair(made.pem + AUTHORITY.pem, made.key()) == []


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        (OWN.pem, pair().key(), "KEY is not the key of CERTIFICATE: take those of one request"),
        (OWN.pem, OWN.key("passphrase"), "KEY has a passphrase: take it off"),
        (OWN.pem, OWN.pem, "CERTIFICATE and KEY cannot be used together (no PEM text): take a PEM certificate"),
        (OWN.pem, "", "CERTIFICATE and KEY cannot be used together (no PEM text): take a PEM certificate"),
        # The chain in the wrong order.
        (AUTHORITY.pem + SIGNED.pem, SIGNED.key(), "KEY is not the key of CERTIFICATE: take those of one request"),
    ],
)
def test_what_cannot_serve_is_a_problem(certificate: str, key: str, said: str) -> None:
    (found,) = of_pair(certificate, key)
    assert found.startswith(said)
    assert not any(line in found for line in OWN.key().splitlines())


def test_a_pair_that_ended_and_one_that_is_none() -> None:
    ended = pair(days=-1)
    (found,) = of_pair(ended.pem, ended.key())
    assert found.startswith("CERTIFICATE ended on ")
    assert of_pair(OWN.key(), OWN.key())[0].startswith("CERTIFICATE is none: ")


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_texts_are_looked_at(certificate: str, key: str) -> None:
    assert of_pair(certificate, key) != []
