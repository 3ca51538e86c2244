# SPDX-License-Identifier: Apache-2.0
"""The module, against a socket that speaks like HAProxy's master."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie import haproxy
from haproxy_master import DRAINED, Master, Process
from modules import run_module

ROOT = Path(__file__).parents[2]
Call = Callable[..., dict[str, Any]]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    servers = ("a", "b")
    master = Master(
        tmp_path / "master.sock",
        [Process(100, dict.fromkeys(servers, 0), dict.fromkeys(servers, 2), {})],
    )
    yield master
    master.close()


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(haproxy, "_POLL_S", 0.01)

    def call(state: str, *servers: str, check_mode: bool = False, **options: object) -> dict[str, Any]:
        places = {"master_socket": str(tmp_path / "master.sock"), "state_file": str(tmp_path / "state")}
        arguments = {"state": state, "servers": list(servers), **places, **options}
        return run_module("gateway_server", arguments, capsys, check_mode)

    return call


def recorded(tmp_path: Path) -> dict[str, str]:
    """Return what the state file says."""
    servers = haproxy.parse_state((tmp_path / "state").read_text(), "replicas")
    return {name: server.state for name, server in servers.items()}


def test_drained_and_back(call: Call, master: Master, tmp_path: Path) -> None:
    drained = call("drained", "a")
    assert drained["changed"] and not drained["failed"]
    assert drained["diff"] == {"before": "a ready\n", "after": "a drained\n"}
    assert [(server["name"], server["state"]) for server in drained["servers"]] == [("a", "drained"), ("b", "ready")]
    assert master.processes[0].admin == {"a": DRAINED, "b": 0}
    assert recorded(tmp_path) == {"a": "drained", "b": "ready"}
    assert not call("drained", "a")["changed"]

    assert call("ready", "a", "b")["changed"]
    assert master.processes[0].admin == {"a": 0, "b": 0}
    assert recorded(tmp_path) == {"a": "ready", "b": "ready"}
    assert not call("ready", "a", "b")["changed"]


def test_check_mode_predicts_and_does_nothing(call: Call, master: Master, tmp_path: Path) -> None:
    master.processes[0].in_flight["a"] = 1
    predicted = call("drained", "a", check_mode=True)
    assert predicted["changed"] and predicted["in_flight"] == {"a": 1}
    assert master.processes[0].admin == {"a": 0, "b": 0} and not (tmp_path / "state").exists()
    assert not [command for command in master.commands if "set server" in command]
    master.processes[0].in_flight["a"] = 0
    assert predicted["diff"] == call("drained", "a")["diff"]
    assert not call("drained", "a", check_mode=True)["changed"]


@pytest.mark.parametrize("content", [None, "", "garbage\n", "1\n# be_id be_name srv_name\n"])
def test_a_state_file_that_does_not_say_so_is_a_change(
    call: Call, master: Master, tmp_path: Path, content: str | None
) -> None:
    call("drained", "a")
    (tmp_path / "state").unlink() if content is None else (tmp_path / "state").write_text(content)
    assert call("drained", "a")["changed"]
    assert recorded(tmp_path)["a"] == "drained"


def test_requests_of_replaced_processes_are_waited_for(call: Call, master: Master) -> None:
    master.processes[0].in_flight["a"] = 2
    master.replace({"a": 0, "b": 0})
    master.processes[0].in_flight["a"] = 1

    looks = iter(range(100))

    def end(command: str) -> None:
        if "show stat" in command and (look := next(looks)) % 5 == 4:
            master.processes[look // 5].in_flight["a"] = 0

    master.before = end
    drained = call("drained", "a", timeout_s=30)
    assert not drained["failed"] and drained["in_flight"] == {"a": 0}
    assert next(looks) > 9
    assert [process.admin["a"] for process in master.processes] == [DRAINED, 0]


def test_a_replaced_process_that_ends_meanwhile_has_no_requests(call: Call, master: Master) -> None:
    master.replace({"a": 0, "b": 0})
    gone = master.processes.pop()
    answer = master.answer("show proc").decode()
    old = f"# old workers\n{gone.pid}             worker          1               0d00h00m00s     2.6.12\n# programs"
    master.garble["show proc"] = answer.replace("# programs", old).encode()
    drained = call("drained", "a")
    assert not drained["failed"] and drained["in_flight"] == {"a": 0}


def test_requests_that_do_not_end(call: Call, master: Master) -> None:
    master.processes[0].in_flight["a"] = 3
    failed = call("drained", "a", timeout_s=0.05)
    assert failed["failed"] and failed["changed"] and failed["in_flight"] == {"a": 3}
    assert failed["msg"].startswith("Requests are still in flight after 0.05 s (a 3): wait longer")
    left = call("drained", "a", timeout_s=0.05, fail_on_timeout=False)
    assert not left["failed"] and left["in_flight"] == {"a": 3}


def test_up_is_waited_for(call: Call, master: Master) -> None:
    call("drained", "a")
    master.processes[0].operation["a"] = 0
    failed = call("ready", "a", wait_up=True, timeout_s=0.05)
    assert failed["failed"] and "a: * L4CON" in failed["msg"]
    assert not call("ready", "a")["failed"]

    looks = iter(range(100))

    def rise(command: str) -> None:
        if "show servers state" in command and next(looks) == 9:
            master.processes[0].operation["a"] = 2

    master.before = rise
    assert not call("ready", "a", wait_up=True, timeout_s=30)["failed"]
    assert next(looks) > 9


def test_who_is_drained_is_found_up_and_stays_drained(call: Call, master: Master) -> None:
    call("drained", "a")
    found = call("listed", "a", wait_up=True, timeout_s=0.05)
    assert not found["failed"] and not found["changed"]
    master.processes[0].operation["a"] = 0
    failed = call("listed", "a", wait_up=True, timeout_s=0.05)
    assert failed["failed"] and "HAProxy's check does not find these up after 0.05 s: a: * L4CON" in failed["msg"]
    # In check mode nothing is waited for.
    assert not call("listed", "a", wait_up=True, timeout_s=0.05, check_mode=True)["failed"]
    assert master.processes[0].admin == {"a": DRAINED, "b": 0}
    assert call("listed", wait_up=True)["msg"] == "servers is empty: name those that should be up."


def test_unknown_servers_are_named(call: Call, master: Master) -> None:
    failed = call("drained", "a", "c", "d")
    assert failed["msg"] == "HAProxy has no server c, d; it has a, b: deploy.yml configures it"
    assert master.processes[0].admin == {"a": 0, "b": 0}


def test_a_refusal_is_passed_on(call: Call, master: Master, tmp_path: Path) -> None:
    master.garble["set server"] = b"Permission denied\n"
    assert call("drained", "a")["msg"] == "HAProxy does not change server a: Permission denied"
    master.garble["set server"] = b"\n"
    assert "HAProxy did not change a" in call("drained", "a")["msg"]


def test_without_haproxy(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "PATIENCE_S", 0.05)
    listed = call("listed")
    assert (listed["failed"], listed["running"], listed["servers"]) == (False, False, [])
    assert not call("listed", configuration="digest", check_mode=True)["running"]
    for failed in (call("drained", "a"), call("listed", configuration="digest"), call("listed", "a", wait_up=True)):
        assert failed["failed"] and "HAProxy does not answer on" in failed["msg"]


def test_the_configuration_is_waited_for(call: Call, master: Master) -> None:
    assert call("listed", configuration="digest")["configuration"] == "digest"
    failed = call("listed", configuration="other", timeout_s=0.05)
    assert failed["msg"].startswith("HAProxy runs the configuration digest and not other")


def test_check_mode_predicts_for_a_gateway_that_is_not_there_yet(call: Call, master: Master) -> None:
    for servers in (("c",), ("a", "c")):
        predicted = call("drained", *servers, check_mode=True)
        assert predicted["changed"] and "c ready\n" in predicted["diff"]["before"]
        assert not call("ready", *servers, check_mode=True)["changed"]
    # As a file that no HAProxy serves.
    master.close()
    master.path.touch()
    predicted = call("drained", "a", check_mode=True)
    assert predicted["changed"] and not predicted["running"]
    assert not call("ready", "a", check_mode=True)["changed"]


def test_servers_are_required_for_a_change(call: Call, master: Master) -> None:
    assert call("drained")["msg"] == "servers is empty: name those that should be drained."
    assert call("ready")["failed"]


def test_where_the_role_looks_for_replicas_is_where_the_service_is() -> None:
    """The gateway's hosts do not have the defaults of the role vllm_service."""
    defaults = yaml.safe_load((ROOT / "roles/vllm_service/defaults/main.yml").read_text())
    text = yaml.safe_load((ROOT / "roles/load_balancer/vars/main.yml").read_text())["_load_balancer_replicas"]
    for name in ("vllm_service_host", "vllm_service_port", "vllm_service_tls_certificate"):
        value = defaults[name]
        assert f"{name} | default({value!r})" in text
