# SPDX-License-Identifier: Apache-2.0
"""verify.yml finds what was changed behind Aerie's back, and changes nothing itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scenario import Run, on_host

SITE_PACKAGES = "/opt/aerie/current/venv/lib/python3.11/site-packages"


def test_untouched_hosts_pass(playbook: Callable[..., Run]) -> None:
    run = playbook("playbooks/verify.yml")
    assert (run.status, run.messages, sum(run.changed.values())) == ("successful", "", 0)


@pytest.mark.parametrize(
    "path",
    [
        f"{SITE_PACKAGES}/vllm/model_executor/models/deepseek_v2.py",
        f"{SITE_PACKAGES}/torch/version.py",
        "/opt/aerie/current/serve.yaml",
        "/etc/systemd/system/vllm.service",
    ],
)
def test_edited_file_is_named(playbook: Callable[..., Run], path: str) -> None:
    on_host(f"sudo cp --archive {path} /srv/kept && echo '# edited' | sudo tee --append {path}")
    try:
        run = playbook("playbooks/verify.yml", limit="rot")
    finally:
        on_host(f"sudo cp --archive --remove-destination /srv/kept {path}")
    assert run.status == "failed"
    # A release's own file is named by its directory.
    assert path.rsplit("/", 1)[-1] in run.messages or "a file of /opt/aerie/releases" in run.messages
