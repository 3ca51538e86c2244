# SPDX-License-Identifier: Apache-2.0
"""The secrets of the service in the scenario `service`: new for each run, and kept as a user would, by Ansible Vault.

They are in an inventory of its own, outside the repository.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import yaml
from ansible.parsing.vault import VaultLib, VaultSecret
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

STATE = Path(os.environ.get("AERIE_STATE", "/var/tmp/aerie"))
INVENTORY = STATE / "service-secrets"
ADDRESS = "10.77.7.11"
_FILE = INVENTORY / "group_vars" / "inference" / "vault.yml"
# Beyond the time in which the preflight begins to warn.
_VALID = datetime.timedelta(days=60)


class Secrets(NamedTuple):
    """A certificate (no secret), its private key, an API key, and what the hub would give a token for."""

    certificate: str
    tls_key: str
    api_key: str
    hub_token: str

    def needles(self) -> dict[str, bytes]:
        """Return what must be nowhere, by what it is. The lines of a PEM text are looked for one by one."""
        lines = [line for line in self.tls_key.splitlines() if "-----" not in line]
        found = {f"line {number} of the TLS key": line for number, line in enumerate(lines, start=1)}
        found |= {"API key": self.api_key, "hub token": self.hub_token}
        return {name: text.encode() for name, text in found.items()}


def make() -> Secrets:
    """Make new secrets, and have the inventory hold them."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "service")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ADDRESS))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key = private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    made = Secrets(
        certificate.public_bytes(pem).decode(), key.decode(), secrets.token_urlsafe(32), f"hf_{secrets.token_hex(17)}"
    )
    keep(made)
    return made


def keep(made: Secrets) -> None:
    """Have the inventory hold these secrets."""
    _FILE.parent.mkdir(parents=True, exist_ok=True)
    (INVENTORY / "hosts.yml").write_text("inference: {}\n")
    variables = {f"vault_service_{name}": text for name, text in made._asdict().items()}
    _FILE.write_bytes(_vault().encrypt(yaml.safe_dump(variables)))


def load() -> Secrets:
    """Return the secrets that the inventory holds."""
    variables = yaml.safe_load(_vault().decrypt(_FILE.read_bytes()))
    return Secrets(**{name: variables[f"vault_service_{name}"] for name in Secrets._fields})


def _vault() -> VaultLib:
    password = Path(os.environ.get("ANSIBLE_VAULT_PASSWORD_FILE", STATE / "vault-password")).read_text().strip()
    return VaultLib([("default", VaultSecret(password.encode()))])


if __name__ == "__main__":
    make()
