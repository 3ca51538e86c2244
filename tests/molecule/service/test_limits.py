# SPDX-License-Identifier: Apache-2.0
"""A memory limit that is hit is reported as one: the real unit and the kernel's OOM killer, around a small program."""

from __future__ import annotations

import re
from pathlib import Path

import ansible.module_utils
import pytest
from fleet import HOME, SERVICE, Machine, await_that, machines

ROOT = Path(__file__).parents[3]
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

from ansible.module_utils.aerie.vllm_log import root_cause  # noqa: E402

INVENTORY = Path(__file__).parent / "inventory"

# Like vLLM: a child takes the memory and is killed, and the service then ends with status 0.
PROGRAM = """
import os
child = os.fork()
taken = []
while child == 0:
    taken.append(bytearray(10 << 20))
os.waitpid(child, 0)
"""


@pytest.fixture
def limited() -> Machine:
    """A host whose systemd enforces limits, with the unit of the other host's release."""
    hosts = machines(INVENTORY / "hosts.yml")
    serving, limited = hosts["service"], hosts["limited"]
    limited.run("useradd", "--system", "--home-dir", "/var/lib/vllm", "--shell", "/usr/sbin/nologin", "vllm")
    files = [f"{HOME}/current/service.env", f"{HOME}/current/lib/aerie_stopped.py", "/etc/aerie/vllm.env"]
    texts = {path: serving.text(path) for path in files}
    command = f"ExecStart={HOME}/current/venv/bin/python {HOME}/current/lib/program.py"
    unit = re.sub(r"^ExecStart=.*$", command, serving.text(f"{HOME}/current/{SERVICE}"), flags=re.MULTILINE)
    texts[f"/etc/systemd/system/{SERVICE}"] = unit.replace("Restart=always", "Restart=no")
    texts[f"{HOME}/current/lib/program.py"] = PROGRAM
    for path, text in texts.items():
        assert text, path
        place = limited.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    limited.run("mkdir", "-p", f"{HOME}/current/venv/bin")
    limited.run("ln", "-s", "/usr/bin/python3", f"{HOME}/current/venv/bin/python")
    limited.run("systemctl", "daemon-reload")
    limited.run("systemctl", "set-property", "--runtime", SERVICE, "MemoryMax=100M")
    return limited


def test_a_memory_limit_that_is_hit_is_reported_as_such(limited: Machine) -> None:
    limited.run("systemctl", "start", SERVICE)
    state = ("systemctl", "show", "--property=ActiveState", "--value", SERVICE)
    await_that(lambda: limited.run(*state).strip() in ("inactive", "failed"), "the service ends")
    said = limited.run("journalctl", "--unit", SERVICE, "--output=cat")
    assert "killed by the OOM killer (1 processes): its memory limit of 0.1 GiB (MemoryMax)" in said
    cause = root_cause(said.splitlines())
    assert cause is not None
    assert (cause.kind, "MemoryMax" in cause.remedy) == ("oom_killer", True)
