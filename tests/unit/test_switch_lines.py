# SPDX-License-Identifier: Apache-2.0
"""What a deploy shows of a start, by a real ansible-playbook that follows a switch on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils.aerie.journal import RESTORED, STARTING
from switched_host import Host, host_below

ROOT = Path(__file__).parents[2]
PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - switch:
        root: "{{ root }}"
        state: followed
        deployment: second
        window_s: 9.5
"""
WORDS = "loading weights 40 % (26 of 64, 4.9 GB/s, about 78 s left)"


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with host_below(tmp_path, capsys, monkeypatch, Host) as made:
        yield made


def test_a_deploy_shows_rate_and_estimate_and_no_ten_seconds_are_without_a_line(host: Host, tmp_path: Path) -> None:
    host.start(host.stage("new"))
    host.journal.load()
    host.journal.enter(STARTING)
    host.journal.progress({"phase": "loading weights", "words": WORDS, "elapsed_s": 61.0})
    (tmp_path / "play.yml").write_text(PLAYBOOK)
    variables = {"root": str(host.root), "ansible_python_interpreter": sys.executable}
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    command = [program, "-i", "host-1,", "-c", "local", str(tmp_path / "play.yml"), "-e", json.dumps(variables)]
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    shown, output = [], ""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as play:
        assert play.stdout is not None
        for line in play.stdout:
            output += line
            if line.startswith("host-1: "):
                shown.append(line.strip())
            if WORDS in line:
                host.journal.close(RESTORED, "as before")
    assert play.returncode == 0, output
    assert re.fullmatch(r"host-1: no answer yet \((9|10) s\)", shown[0])
    assert f"host-1: {STARTING}: {WORDS} (61 s)" in shown
