# SPDX-License-Identifier: Apache-2.0
"""verify.yml finds what was changed behind Aerie's back, and changes nothing itself."""

from __future__ import annotations

from collections.abc import Callable

from scenario import Run, on_host

SITE_PACKAGES = "/opt/aerie/current/venv/lib/python3.11/site-packages"
EDITED = {
    f"{SITE_PACKAGES}/vllm/model_executor/models/deepseek_v2.py": "models/deepseek_v2.py was edited",
    f"{SITE_PACKAGES}/torch/version.py": "torch/version.py was edited",
    "/opt/aerie/current/serve.yaml": "a file of /opt/aerie/releases/",
    "/etc/systemd/system/vllm.service": "/etc/systemd/system/vllm.service is not the unit of release",
}


def test_untouched_hosts_pass(playbook: Callable[..., Run]) -> None:
    run = playbook("playbooks/verify.yml")
    assert (run.status, run.messages, sum(run.changed.values())) == ("successful", "", 0)


def test_every_edited_file_is_named(playbook: Callable[..., Run]) -> None:
    for number, path in enumerate(EDITED):
        # By another inode: the environment shares its files with uv's cache.
        copies = f"cp -a {path} /srv/kept-{number}; cp -a {path} {path}.new"
        on_host(f"sudo sh -ec \"{copies}; echo '# edited' >> {path}.new; mv {path}.new {path}\"")
    try:
        run = playbook("playbooks/verify.yml", limit="rot")
    finally:
        for number, path in enumerate(EDITED):
            on_host(f"sudo mv /srv/kept-{number} {path}")
    assert run.status == "failed"
    assert [finding for finding in EDITED.values() if finding not in run.messages] == []
