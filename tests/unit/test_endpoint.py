# SPDX-License-Identifier: Apache-2.0
"""Programs on the service's host speak with the service that has the certificate, and with no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.aerie.endpoint import Endpoint, endpoint_of, opener, stranger
from certificates_made import Pair, pair, serving

AUTHORITY = pair()


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({"AERIE_HOST": "10.0.0.1", "AERIE_PORT": "8000"}, "http://10.0.0.1:8000"),
        ({"AERIE_HOST": "0.0.0.0", "AERIE_PORT": "9", "AERIE_CERTIFICATE": ""}, "http://127.0.0.1:9"),
        ({"AERIE_HOST": "::", "AERIE_PORT": "9", "AERIE_CERTIFICATE": "/a.pem"}, "https://[::1]:9"),
        ({"AERIE_HOST": "fd00::1", "AERIE_PORT": "9"}, "http://[fd00::1]:9"),
        ({}, "http://:0"),
    ],
)
def test_where_a_service_is_asked(variables: dict[str, str], url: str) -> None:
    assert endpoint_of(variables).url == url
    assert endpoint_of(variables).certificate == variables.get("AERIE_CERTIFICATE", "")


def ask(directory: Path, shown: Pair | None, expected: str) -> str:
    """Return how a server that shows one certificate is taken by who expects another: ``serves``, or the phrase."""
    file = directory / "expected.pem"
    file.write_text(expected)
    with serving(directory, shown) as port:
        try:
            with opener(str(file)).open(Endpoint("127.0.0.1", port, str(file)).url, timeout=10) as answer:
                return "serves" if answer.status == 200 else "odd"
        except OSError as error:
            return stranger(error)


@pytest.mark.parametrize("shown", [pair(), pair(days=-1), pair(issuer=AUTHORITY)], ids=["own", "ended", "signed"])
def test_the_certificate_itself_is_what_counts(tmp_path: Path, shown: Pair) -> None:
    """Whoever signed it, whatever its name, and after its end."""
    assert ask(tmp_path, shown, shown.pem) == "serves"
    # The rest of the chain is no other certificate that would do.
    assert ask(tmp_path, shown, shown.pem + AUTHORITY.pem) == "serves"


def test_another_certificate_is_a_strangers(tmp_path: Path) -> None:
    assert ask(tmp_path, pair(), pair().pem) == "with another certificate than"
    # One of the same authority, which is in the chain that is expected.
    other = pair(issuer=AUTHORITY)
    assert ask(tmp_path, other, pair(issuer=AUTHORITY).pem + AUTHORITY.pem) == "with another certificate than"


def test_no_tls_is_a_strangers(tmp_path: Path) -> None:
    assert ask(tmp_path, None, pair().pem) == "without TLS, and its settings name"


def test_no_answer_says_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, None) as port:
        pass
    with pytest.raises(OSError) as caught:
        opener().open(Endpoint("127.0.0.1", port).url, timeout=10)
    assert stranger(caught.value) == ""


@pytest.mark.parametrize("text", ["", "garbage", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_file_without_a_certificate_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "expected.pem"
    file.write_text(text)
    with pytest.raises((OSError, ValueError)):
        opener(str(file))
    with pytest.raises(OSError):
        opener(str(tmp_path / "none.pem"))
