# SPDX-License-Identifier: Apache-2.0
"""The network between a replica's hosts: measured for real on this machine's addresses, and judged from numbers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils.aerie import fabric
from ansible.module_utils.aerie.fabric import (
    Measurement,
    admission,
    describe,
    interface_of,
    kept_out,
    lead,
    let_in,
    listen,
    measure,
    misnamed,
    mtu_of,
    problems,
    serve,
)
from modules import run_module

HERE, THERE = "127.77.1.1", "127.77.1.2"
NAMES = {HERE: "h1", THERE: "h2"}
GOOD = Measurement(THERE, True, HERE, 0.01, 0.05, 180.0, 9000, 9000, "gpu-2", THERE)


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server((THERE, 0))
    found = int(listener.getsockname()[1])
    threading.Thread(target=serve, args=(listener, 5.0, 9000), daemon=True).start()
    yield found


def test_what_is_measured(port: int) -> None:
    found = measure(HERE, THERE, port, 0.2, 1500)
    assert (found.seen_as, found.mtu, found.peer_mtu) == (HERE, 1500, 9000)
    assert abs(found.clock_s) < 0.1
    assert 0 < found.rtt_ms < 100
    assert found.gbit_s and found.gbit_s > 0.1
    assert found.name == socket.gethostname()
    assert found.leads_to == lead(found.name, THERE)


def test_nobody_there() -> None:
    with socket.create_server((THERE, 0)) as listener:
        closed = int(listener.getsockname()[1])
    found = measure(HERE, THERE, closed, 0.1, 1500)
    assert not found.reached
    (problem,) = problems("h1", HERE, NAMES, [found], 0)
    assert problem.startswith(f"h1 cannot reach h2 at {THERE} from {HERE} (")
    assert problem.endswith("correct multi_node_address, or open the network between them")


def test_a_way_that_carries_small_packets_only() -> None:
    """A peer that answers questions and swallows nothing, as behind a switch that drops large packets."""
    with socket.create_server((THERE, 0)) as listener:

        def answer() -> None:
            while True:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    threading.Thread(target=questions, args=(connection,), daemon=True).start()

        def questions(connection: socket.socket) -> None:
            with connection:
                while connection.recv(1) == b"?":
                    connection.sendall(b'{"clock": 0, "seen_as": "127.77.1.1", "mtu": 1500, "name": "gpu-2"}\n')

        threading.Thread(target=answer, daemon=True).start()
        found = measure(HERE, THERE, listener.getsockname()[1], 0.2, 1500)
    assert found.reached and found.gbit_s is None
    assert "small packets from h1 to h2 arrive and large ones do not" in "".join(
        problems("h1", HERE, NAMES, [found], 0)
    )


def test_a_good_way_has_no_problems_and_is_described() -> None:
    assert list(problems("h1", HERE, NAMES, [GOOD], 100)) == []
    assert describe("h1", NAMES, [GOOD]) == [
        "h1 to h2: 0.05 ms there and back, 180.0 Gbit/s over TCP, MTU 9000, clock +0.01 s"
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seen_as": "10.9.9.9"}, "h2 sees h1 as 10.9.9.9 and not as 127.77.1.1: there must be no NAT between them"),
        ({"clock_s": -3.2}, "the clock of h2 is -3.2 s from that of h1: synchronise them (chrony)"),
        ({"peer_mtu": 1500}, "h1 has MTU 9000 and h2 1500 on the fabric: give both the same"),
        ({"gbit_s": 0.9}, "h1 sends 0.9 Gbit/s to h2, and multi_node_least_bandwidth is 10: see the link's speed"),
    ],
)
def test_each_problem_names_both_hosts_and_both_values(change: dict[str, object], words: str) -> None:
    (problem,) = problems("h1", HERE, NAMES, [GOOD._replace(**change)], 10)  # type: ignore[arg-type]
    assert problem.startswith(words)


@pytest.fixture
def own_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a name of this machine that leads nowhere, so that only the other host's counts."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-1.invalid")
    return "gpu-1.invalid"


@pytest.mark.usefixtures("own_name")
def test_names_that_lead_to_the_fabric_or_nowhere_are_right() -> None:
    for leads_to in (THERE, ""):
        assert list(misnamed("h1", HERE, NAMES, [GOOD._replace(leads_to=leads_to)])) == []


@pytest.mark.usefixtures("own_name")
@pytest.mark.parametrize("leads_to", ["192.0.2.12", "127.0.1.1"])
def test_another_hosts_name_that_leads_elsewhere(leads_to: str) -> None:
    (problem,) = misnamed("h1", HERE, NAMES, [GOOD._replace(leads_to=leads_to)])
    assert problem == (
        f"on h1 the name gpu-2 of h2 leads to {leads_to} and not to {THERE}, its address on the fabric: have "
        f"{THERE} gpu-2 in /etc/hosts there"
    )


def test_a_hosts_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that is an address leads to it, whatever this machine's files have.
    for name in (HERE, "198.51.100.1", "127.0.1.1"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert list(misnamed("h1", "198.51.100.1", NAMES, [GOOD])) == []
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.1")
    (problem,) = misnamed("h1", "198.51.100.1", NAMES, [GOOD])
    assert problem.startswith("on h1 the name 192.0.2.1 of h1 leads to 192.0.2.1 and not to 198.51.100.1")


@pytest.mark.parametrize("hostnames", ["enforce", "advisory"])
def test_the_module_fails_or_warns_of_names(
    hostnames: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener, 5.0, mtu_of("lo")), daemon=True).start()
        options = {"address": "127.0.0.1", "port": listener.getsockname()[1], "seconds": 0.1, "host": "h1"}
        options |= {"state": "measured", "peers": {"127.0.0.1": "h2"}, "hostnames": hostnames}
        result = run_module("fabric_check", options, capsys)
    assert result["failed"] == (hostnames == "enforce")
    said = str(result["problems" if hostnames == "enforce" else "warnings"])
    for whose in ("h1", "h2"):
        assert f"on h1 the name 192.0.2.1 of {whose} leads to 192.0.2.1 and not to 127.0.0.1" in said


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert mtu_of("lo") > 1500
    assert interface_of("192.0.2.1") == ""


def test_the_module_listens_measures_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = int(listener.getsockname()[1])
    here = {"address": "127.0.0.1", "port": free, "host": "h1"}
    absent = run_module(
        "fabric_check", {**here, "state": "measured", "seconds": 0.1, "peers": {"127.0.0.1": "h2"}}, capsys
    )
    assert absent["problems"] == [absent["msg"]]
    assert "h1 cannot reach h2 at 127.0.0.1" in absent["msg"]
    result = run_module("fabric_check", {**here, "state": "listening", "seconds": 3, "address": "192.0.2.1"}, capsys)
    assert "no network interface of h1 has the address 192.0.2.1" in result["msg"]


def test_a_later_run_takes_the_port_from_an_earlier_one() -> None:
    with socket.create_server((THERE, 0)) as listener:
        free = int(listener.getsockname()[1])
    for _ in range(3):
        listen(THERE, free, 5.0)
        assert measure(HERE, THERE, free, 0.1, 1500).gbit_s


@pytest.mark.parametrize(("first", "last"), [(1024, 1030), (65000, 65535)])
def test_ports_that_programs_are_given_and_anybody_reaches_are_refused(
    first: int, last: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    order = {"state": "listening", "address": "127.0.0.1", "port": 1, "seconds": 1, "host": "gpu-01"}
    found = run_module("fabric_check", {**order, "first_engine_port": first, "last_engine_port": last}, capsys)
    assert found["msg"].startswith(
        f"gpu-01 gives the ports {given} to programs that ask for any, and multi_node_engine_ports is {first}-{last}: "
    )
    assert f"Set it to {given}, or net.ipv4.ip_local_port_range on the host" in found["msg"]


# --------------------------------------------------------------------------------------- the rules of the release there

# As nft 1.0.6 lists them, shortened.
RULES = """\
table inet aerie_replica {
    set newcomers {
        type ipv4_addr . inet_service
        flags timeout
        elements = { 127.0.0.3 . 6388 timeout 1m1s expires 1m880ms,
                     127.0.0.3 . 6389 }
    }

    chain input {
        type filter hook input priority filter - 5; policy accept;
        iifname "lo" accept
        ip saddr 127.0.0.1 accept
        ip saddr . tcp dport @newcomers accept
        tcp dport { 6379-6478, 32768-60999 } tcp flags syn / syn,ack counter packets 0 bytes 0 drop
    }
}
"""


def test_whom_the_loaded_rules_keep_out() -> None:
    hosts = ["127.0.0.1", "127.0.0.3", "127.0.0.11", "27.0.0.3"]
    # The preflight's leave ends, and is given anew.
    assert kept_out(RULES, hosts, 6388) == ["127.0.0.3", "127.0.0.11", "27.0.0.3"]
    assert kept_out(RULES, hosts, 6389) == ["127.0.0.11", "27.0.0.3"]
    assert kept_out(RULES, hosts, 638) == hosts[1:]
    assert kept_out("", hosts, 6388) == []


def test_who_is_let_in_for_a_while_is_so_for_all_of_it() -> None:
    one = "element inet aerie_replica newcomers { 127.0.0.3 . 6388"
    assert admission(["127.0.0.3"], 6388, 62.5) == f"add {one} }}; delete {one} }}; add {one} timeout 63s }}"
    assert admission(["127.0.0.3", "127.0.0.4"], 6389) == (
        "add element inet aerie_replica newcomers { 127.0.0.3 . 6389, 127.0.0.4 . 6389 }"
    )


@pytest.fixture
def nft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with what nft was told; it has the rules above, and changes nothing."""
    (tmp_path / "rules").write_text(RULES)
    (tmp_path / "nft").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\ncat {tmp_path}/rules\n')
    (tmp_path / "nft").chmod(0o755)
    monkeypatch.setattr(fabric, "_NFT", str(tmp_path / "nft"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "told"


LOOK = "list table inet aerie_replica"


@pytest.mark.parametrize("check_mode", [False, True])
def test_a_host_that_is_new_is_let_in_while_this_one_listens(
    check_mode: bool, nft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = int(listener.getsockname()[1])
    options = {"state": "listening", "address": "127.0.0.1", "port": free, "seconds": 3, "addresses": ["127.0.0.1"]}
    known = run_module("fabric_check", options, capsys, check_mode)
    assert (known["kept_out"], nft.read_text()) == ([], f"{LOOK}\n")
    found = run_module("fabric_check", {**options, "addresses": ["127.0.0.1", "127.0.0.9"]}, capsys, check_mode)
    assert found["changed"] is False
    assert found["kept_out"] == (["127.0.0.9"] if check_mode else [])
    told = nft.read_text().splitlines()[1:]
    assert told == [LOOK] if check_mode else told == [LOOK, admission(["127.0.0.9"], free, 3)]


@pytest.mark.parametrize("check_mode", [False, True])
def test_hosts_are_let_in_until_rules_are_loaded(
    check_mode: bool, nft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"state": "admitted", "address": "127.0.0.1", "port": 6389, "addresses": ["127.0.0.1", "127.0.0.3"]}
    assert run_module("fabric_check", options, capsys, check_mode)["changed"] is False
    assert nft.read_text() == f"{LOOK}\n"
    options["addresses"] = ["127.0.0.3", "127.0.0.9"]
    assert run_module("fabric_check", options, capsys, check_mode)["changed"] is True
    assert (admission(["127.0.0.9"], 6389) in nft.read_text()) != check_mode


def test_rules_that_cannot_be_changed_are_told(nft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nft").write_text(f'#!/bin/sh\n[ "$1" = list ] && exec cat {tmp_path}/rules\necho denied >&2; exit 1\n')
    with pytest.raises(OSError, match="nft: denied"):
        let_in(["127.0.0.9"], 6388)
    options = {"state": "admitted", "address": "127.0.0.1", "port": 6389, "addresses": ["127.0.0.9"], "host": "h1"}
    said = run_module("fabric_check", options, capsys)["msg"]
    assert said == "h1 cannot let 127.0.0.9 in (nft: denied): see nft list table inet aerie_replica"
