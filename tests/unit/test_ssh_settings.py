# SPDX-License-Identifier: Apache-2.0
"""What ssh resolves its options to, as `ssh -G` of this machine prints it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ansible.module_utils.aerie.ssh_settings import Settings, parse_settings
from hypothesis import given
from hypothesis import strategies as st


def settings(config: Path, *options: str, host: str = "gpu-01") -> Settings:
    command = ["ssh", "-G", "-F", str(config), *options, host]
    return parse_settings(subprocess.run(command, capture_output=True, text=True, check=True).stdout, 10.0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config"
    path.write_text(
        "Host gpu-*\n  HostName %h.example.com\n  User deploy\n  Port 2222\n  IdentityFile /keys/one\n"
        "Host gpu-02\n  ProxyJump bastion\nHost gpu-03\n  ProxyCommand nc %h %p\n  HostKeyAlias three\n"
    )
    return path


def test_configuration_and_options_are_resolved(config: Path) -> None:
    found = settings(config, "-o", "ConnectTimeout=7", "-o", "UserKnownHostsFile=/a/known /b/known")
    assert (found.host, found.port, found.user, found.via) == ("gpu-01.example.com", 2222, "deploy", "")
    assert found.known_as == "gpu-01.example.com"
    assert found.known_hosts[:2] == (Path("/a/known"), Path("/b/known"))
    assert found.identities == (Path("/keys/one"),)
    assert (found.strict, found.use_agent, found.timeout_s) == ("ask", True, 7.0)


def test_a_way_through_another_host_is_seen(config: Path) -> None:
    assert settings(config, host="gpu-02").via == "bastion"
    found = settings(config, host="gpu-03")
    assert (found.via, found.known_as) == ("nc %h %p", "three")


def test_what_is_turned_off_is_off(config: Path) -> None:
    options = ("StrictHostKeyChecking=no", "IdentitiesOnly=yes", "UserKnownHostsFile=none", "GlobalKnownHostsFile=none")
    found = settings(config, *(word for option in options for word in ("-o", option)))
    assert (found.strict, found.use_agent, found.known_hosts) == ("no", False, ())


@pytest.mark.parametrize("policy", ["yes", "no", "ask", "accept-new"])
def test_the_policy_on_host_keys_has_its_manuals_name(config: Path, policy: str) -> None:
    assert settings(config, "-o", f"StrictHostKeyChecking={policy}").strict == policy


@given(st.text())
def test_no_answer_raises(answer: str) -> None:
    found = parse_settings(answer, 10.0)
    assert found.port >= 0 and found.timeout_s >= 0
