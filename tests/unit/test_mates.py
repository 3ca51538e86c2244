# SPDX-License-Identifier: Apache-2.0
"""The switches of the hosts of one replica: whatever ends on one of them, all end with the same release."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import switch
from ansible.module_utils.aerie.journal import ACTIVATE, AWAITING, CONFIRMING, STARTING, STOP
from ansible.module_utils.aerie.mates import BACK, KEEPS, READY, UNDER_WAY, UNITS, Mates, MatesError, note, place_of
from switched_host import Host, Program, host_below, until

ADDRESSES = {"head": "127.78.0.1", "worker": "127.78.0.2"}
FIRST_PORT = 31000
PORT = FIRST_PORT + 10


class Member(Host):
    """One of the replica's two hosts. What systemd does for those who ask it is a thread's here.

    ``before`` is the release that it serves, ``aim`` the one that it is switched to.
    """

    before = ""
    aim = ""

    def join(self, name: str) -> None:
        self.name = name
        self.address = ADDRESSES[name]
        (self.other,) = set(ADDRESSES.values()) - {self.address}
        self._server: socket.socket | None = None
        self.answer()

    def answer(self) -> None:
        """Answer the other host."""
        self._server = server = socket.create_server((self.address, PORT))
        threading.Thread(target=self._hand_out, args=(server,), daemon=True).start()

    def _hand_out(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                asker, _ = server.accept()
                with asker, contextlib.suppress(OSError):
                    asker.sendall(self.journal.told_path.read_bytes())

    def vanish(self) -> None:
        """Be cut off from the other host."""
        if self._server:
            # A thread that waits in accept() holds the socket.
            self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
            self._server = None

    def begin(self, name: str = "new", budget_s: float = 20, mates: bool = True, **faults: Any) -> Program:  # noqa: ANN401
        """Begin the switch to a release, and run the program."""
        identity = self.stage(name, **faults)
        settings = self.settings(
            VLLM_HOST_IP=self.address,
            AERIE_REPLICA_PORT=str(FIRST_PORT),
            AERIE_REPLICA_HOSTS=",".join(ADDRESSES.values()),
        )
        found = self.start(
            identity,
            settings=settings,
            together=[self.other],
            mates=mates,
            confirm_budget_s=budget_s,
            start_budget_s=20,
        )
        assert found["outcome"] == "started", found
        self.aim = identity
        return self.program()

    def waits(self, step: str) -> None:
        until(lambda: self.switch("followed", window_s=0).get("waits_to") == step)

    def goes(self, *steps: str) -> None:
        for step in steps:
            self.waits(step)
            self.switch("proceeded", step=step, window_s=0)

    def end(self) -> dict[str, Any]:
        return self.journal.last()

    def keeps(self) -> bool:
        """Say which release it ended with, of the two that there are; nothing between."""
        outcome = self.end()["outcome"]
        assert outcome in ("confirmed", "restored"), self.end()
        kept: bool = outcome == "confirmed"
        assert self.serves(self.aim if kept else self.before)
        assert self.journal.told_path.read_text().split(" ", 1)[1].strip() == (KEEPS if kept else BACK)
        self.over()
        return kept


@pytest.fixture
def pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Member, Member]]:
    """The head and the worker, which serve a release."""
    with contextlib.ExitStack() as stack:
        members = []
        for name in ADDRESSES:
            (tmp_path / name).mkdir()
            member = stack.enter_context(host_below(tmp_path / name, capsys, monkeypatch, Member))
            member.join(name)
            stack.callback(member.vanish)
            member.before = member.stage("old")
            member.serve(member.before)
            members.append(member)
        yield members[0], members[1]


Pair = tuple[Member, Member]


def until_ready(pair: Pair) -> None:
    for step in (STOP, ACTIVATE):
        for member in pair:
            member.goes(step)
    for member in pair:
        member.awaits(AWAITING)


def test_all_hosts_stop_and_start_together_and_are_confirmed(pair: Pair) -> None:
    head, worker = pair
    pid = head.pid()
    programs = [member.begin() for member in pair]
    head.waits(STOP)
    assert head.switch("followed")["outcome"] == "waiting"
    # What comes later is not allowed before.
    assert head.switch("proceeded", step=ACTIVATE, window_s=0)["waits_to"] == STOP
    assert head.pid() == pid
    head.goes(STOP)
    head.waits(ACTIVATE)
    assert (head.pid(), head.releases.current()) == (0, head.before)
    assert worker.serves(worker.before)
    assert head.switch("proceeded", step=STOP, window_s=0)["outcome"] == "waiting"
    worker.goes(STOP)
    for member in pair:
        member.goes(ACTIVATE)
        member.awaits(AWAITING)
        assert member.switch("followed")["waits_to"] == ""
    for member in pair:
        member.switch("confirmed", window_s=0)
    assert [program.wait() for program in programs] == [0, 0]
    assert [member.keeps() for member in pair] == [True, True]
    assert [member.actions() for member in pair] == [["activate", "confirm"]] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_what_one_host_is_told_to_keep_all_keep(pair: Pair, first: int) -> None:
    """The control node dies between two confirmations."""
    programs = [member.begin() for member in pair]
    until_ready(pair)
    pair[first].switch("confirmed", window_s=0)
    assert [program.wait() for program in programs] == [0, 0]
    assert [member.keeps() for member in pair] == [True, True]


def test_a_confirmed_host_goes_back_with_one_that_did_not_hear_of_it(pair: Pair) -> None:
    """The control node dies between two confirmations, and the hosts cannot reach each other."""
    head, worker = pair
    programs = [head.begin(), worker.begin(budget_s=1)]
    until_ready(pair)
    head.vanish()
    worker.vanish()
    head.switch("confirmed", window_s=0)
    assert programs[1].wait() == 0
    assert not worker.keeps()
    # The head knows of nothing, keeps the way back, and says for whom it waits.
    until(lambda: "waits_for" in head.switch("followed", window_s=0).get("switch", {}))
    waiting = head.switch("confirmed", window_s=0)
    assert (waiting["outcome"], waiting["switch"]["waits_for"]) == ("under way", [worker.address])
    assert head.serves(head.aim)
    worker.answer()
    assert programs[0].wait() == 0
    assert not head.keeps()
    assert head.end()["reason"] == f"another host of the replica ({worker.address}) has its previous release back"
    assert [member.actions() for member in pair] == [["activate", "restore"]] * 2


def test_a_confirmed_host_that_waits_may_be_aborted_or_cut_off(pair: Pair) -> None:
    head, worker = pair
    program = head.begin()
    other = worker.begin(budget_s=1)
    until_ready(pair)
    for member in pair:
        member.vanish()
    head.switch("confirmed", window_s=0)
    head.awaits(CONFIRMING)
    program.kill()
    head.power_cut()
    program = head.program(boot="another")
    # After a reboot it waits on.
    until(lambda: "waits_for" in head.switch("followed", window_s=0).get("switch", {}))
    head.switch("aborted", window_s=0, reason="took over")
    assert program.wait() == 0
    assert (head.end()["outcome"], head.end()["reason"]) == ("restored", "took over")
    assert other.wait() == 0
    assert not worker.keeps()


@pytest.mark.parametrize("phase", [AWAITING, CONFIRMING])
def test_both_end_alike_wherever_one_is_killed_once_it_may_be_confirmed(pair: Pair, phase: str) -> None:
    head, worker = pair
    outcomes = []
    for step in range(1, 30):
        for member in pair:
            member.power_cut()
            member.serve(member.before)
            # The deployments of this test all have one id.
            member.journal.told_path.unlink(missing_ok=True)
        other = head.begin(f"new {step}")
        worker.begin(f"new {step}").kill()
        struck = worker.program(die_at=step, after=phase)
        until_ready_or_dead(pair, struck)
        if struck.runs():
            worker.switch("confirmed", window_s=0)
        died = struck.wait() == -signal.SIGKILL
        if died:
            assert worker.program().wait() == 0
        assert other.wait() == 0
        kept = [member.keeps() for member in pair]
        assert len(set(kept)) == 1, (step, kept)
        outcomes.append(kept[0])
        if not died:
            break
    assert len(outcomes) >= 3
    assert outcomes[-1]


def until_ready_or_dead(pair: Pair, struck: Program) -> None:
    for step in (STOP, ACTIVATE):
        for member in pair:
            member.goes(step)
    until(lambda: not struck.runs() or (pair[1].journal.load() and pair[1].journal.state["phase"] == AWAITING))
    until(lambda: not pair[0].journal.load() or pair[0].journal.state["phase"] not in (STARTING,))


@pytest.mark.parametrize("failed", [0, 1])
def test_a_host_whose_mate_failed_goes_back_early(pair: Pair, failed: int) -> None:
    other = pair[1 - failed]
    programs = [member.begin(die=member is not other, silent=member is other) for member in pair]
    began = time.monotonic()
    for step in (STOP, ACTIVATE):
        for member in pair:
            member.goes(step)
    assert [program.wait() for program in programs] == [0, 0]
    # Not after its own budget, which is 20 s.
    assert time.monotonic() - began < 10
    assert [member.keeps() for member in pair] == [False, False]
    assert pair[failed].end()["failed_gate"] == "health"
    address = pair[failed].address
    assert other.end()["reason"] == f"another host of the replica ({address}) has its previous release back"
    assert other.end()["failed_phase"] == STARTING


@pytest.mark.parametrize("step", [STOP, ACTIVATE])
@pytest.mark.parametrize("ends", ["silence", "abort", "kill"])
def test_a_host_that_hears_no_more_of_the_others_goes_back(pair: Pair, step: str, ends: str) -> None:
    head, _ = pair
    pid = head.pid()
    program = head.begin(budget_s=0.5 if ends == "silence" else 20)
    head.waits(STOP)
    if step == ACTIVATE:
        head.goes(STOP)
        head.waits(ACTIVATE)
    if ends == "kill":
        program.kill()
        program = head.program()
    if ends == "kill" and step == STOP:
        # Nothing was done yet: it waits again.
        head.waits(STOP)
    if ends == "abort" or (ends == "kill" and step == STOP):
        head.switch("aborted", reason="another host failed", window_s=0)
    assert program.wait() == 0
    assert {"silence": "nothing was heard", "abort": "another host", "kill": ""}[ends] in head.end()["reason"]
    assert not head.keeps()
    assert (head.pid() == pid) == (step == STOP)


def test_a_host_waits_for_the_others_as_long_as_it_is_followed(pair: Pair) -> None:
    """The others may not be told before a replica of the batch that begins by itself has started."""
    head, _ = pair
    pid = head.pid()
    program = head.begin(budget_s=1)
    head.waits(STOP)
    since = time.monotonic()
    until(lambda: head.switch("followed", window_s=0)["waits_to"] == STOP and time.monotonic() - since > 3)
    assert program.runs()
    assert program.wait() == 0
    assert head.end()["reason"] == "nothing was heard of the replica's other hosts within 1 s, to stop together"
    assert head.pid() == pid


def test_a_mate_that_is_lost_while_it_starts_is_not_waited_for(pair: Pair) -> None:
    head, worker = pair
    program = head.begin(budget_s=1, silent=True)
    worker.begin(silent=True)
    for step in (STOP, ACTIVATE):
        for member in pair:
            member.goes(step)
    head.awaits(STARTING)
    worker.vanish()
    assert program.wait() == 0
    assert head.end()["reason"] == f"nothing was heard of another host of the replica ({worker.address}) for 1 s"
    assert not head.keeps()


def test_a_previous_release_that_lacks_a_host_is_not_waited_for(pair: Pair) -> None:
    head, worker = pair
    head.power_cut()
    several = {"VLLM_HOST_IP": head.address, "AERIE_REPLICA_HOSTS": ",".join(ADDRESSES.values())}
    head.before = head.stage("waits", silent=True)
    head.serve(head.before)
    for path, text in head.settings(**several).items():
        Path(path).write_text(text)
    program = head.begin(budget_s=1, die=True)
    worker.begin()
    for step in (STOP, ACTIVATE):
        for member in pair:
            member.goes(step)
    worker.vanish()
    assert program.wait() == 0
    assert head.end()["outcome"] == "not restored"
    assert head.end()["message"] == (
        f"release {head.before} was put back, but: nothing was heard of another host of the replica "
        f"({worker.address}) for 1 s"
    )
    # It serves once that host does.
    assert head.pid()


def test_a_host_that_is_ready_waits_for_one_that_takes_longer(pair: Pair) -> None:
    head, worker = pair
    programs = [head.begin(), worker.begin(budget_s=0.5, mates=False)]
    head.hold("start")
    for step in (STOP, ACTIVATE):
        for member in pair:
            member.goes(step)
    worker.awaits(AWAITING)
    head.held()
    since = time.monotonic()
    until(lambda: time.monotonic() - since > 1.5)
    assert programs[1].runs()
    assert worker.journal.told_path.read_text() == f"second {READY}\n"
    assert head.journal.told_path.read_text() == f"second {UNDER_WAY}\n"
    # From then on its budget counts.
    head.release("start")
    assert [program.wait() for program in programs] == [0, 0]
    assert worker.end()["reason"].startswith("nobody confirmed the release within ")
    assert [member.keeps() for member in pair] == [False, False]


def test_a_host_that_serves_the_release_already_counts_as_one_that_keeps_it(pair: Pair) -> None:
    head, worker = pair
    settings = {"VLLM_HOST_IP": head.address, "AERIE_REPLICA_PORT": str(FIRST_PORT)}
    head.power_cut()
    aim = head.stage("new")
    head.releases.activate(aim, head.unit)
    for path, text in head.settings(**settings).items():
        Path(path).write_text(text)
    head._at_home()
    switch.systemctl("start", head.unit.name)
    found = head.start(aim, settings=head.settings(**settings), together=[worker.address])
    assert found["outcome"] == "unchanged"
    program = worker.begin()
    worker.goes(STOP, ACTIVATE)
    assert program.wait() == 0
    assert worker.keeps()


# ------------------------------------------------------------------------------------------------------------ questions


def test_systemd_answers_for_the_host(pair: Pair) -> None:
    head, worker = pair
    head.calls()
    head.begin().kill()
    name, answer = UNITS
    assert f"ListenStream={head.address}:{PORT}" in (head.etc / name).read_text().splitlines()
    assert f"ExecStart=-/bin/cat {head.journal.told_path}" in (head.etc / answer).read_text().splitlines()
    assert head.calls()[:3] == ["daemon-reload", f"stop {name}", f"enable --now {name}"]
    head.switch("aborted", window_s=0)
    assert head.program().wait() == 0
    head.calls()
    # They stay, as long as they are right.
    head.begin("other").kill()
    assert head.calls()[0] == f"enable --now {name}"
    assert worker.journal.told_path.exists() is False


def test_ray_leaves_the_port_alone(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "roles/multi_node/files/aerie_node.py"
    spec = importlib.util.spec_from_file_location("aerie_node", path)
    assert spec is not None and spec.loader is not None
    program = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    hosts = tuple(ADDRESSES.values())
    command = program.ray_command(program.Node(tmp_path, hosts, hosts[0], FIRST_PORT, 8, 512, 600.0))
    ports = {option: int(port) for option, _, port in (word.partition("=") for word in command) if "-port" in option}
    assert PORT not in ports.values()
    assert (
        PORT
        == ports["--min-worker-port"] - 1
        == place_of({"VLLM_HOST_IP": hosts[0], "AERIE_REPLICA_PORT": str(FIRST_PORT)})[1]
    )


def test_settings_that_name_no_place_are_refused(pair: Pair) -> None:
    head, worker = pair
    refused = head.start(head.stage("new"), together=[worker.address])
    assert "the settings do not say where the hosts of the replica ask each other: 'VLLM_HOST_IP'" in refused["msg"]
    assert head.serves(head.before)
    with pytest.raises(MatesError):
        place_of({"VLLM_HOST_IP": "10.0.0.1", "AERIE_REPLICA_PORT": "ray"})


def test_a_host_tells_of_each_deployment_and_of_the_newest_ones_alone(tmp_path: Path) -> None:
    path = tmp_path / "told"
    for number in range(30):
        note(path, f"d{number}", UNDER_WAY)
    note(path, "d28", BACK)
    lines = path.read_text().splitlines()
    assert len(lines) == 20
    assert (lines[-1], lines[-2]) == (f"d28 {BACK}", f"d29 {UNDER_WAY}")
    before = path.stat().st_ino
    note(path, "d28", BACK)
    assert path.stat().st_ino == before


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (b"d1 keeps its release\n", KEEPS),
        (b"d0 goes back\nd1 ready\n", READY),
        # One that has not begun is not silent.
        (b"d0 goes back\n", UNDER_WAY),
        (b"", UNDER_WAY),
        (b"\xff\xfe\x00 d1\n", UNDER_WAY),
        (b"d1 " + b"x" * 100_000, None),
    ],
)
def test_answers(answer: bytes, state: str | None) -> None:
    with socket.create_server((ADDRESSES["worker"], 0)) as server:
        port = server.getsockname()[1]

        def give() -> None:
            asker, _ = server.accept()
            with asker, contextlib.suppress(OSError):
                asker.sendall(answer)

        thread = threading.Thread(target=give)
        thread.start()
        mates = Mates("d1", ADDRESSES["head"], port, [ADDRESSES["worker"]])
        (found,) = mates.states(0).values()
        thread.join()
        assert found == state if state else found not in (KEEPS, BACK, READY)
        assert mates.silent(10) == []
        # Not asked again before it is time to.
        assert mates.states(60) == {ADDRESSES["worker"]: found}
    assert mates.states(0) == {}
    assert mates.silent(0) == [ADDRESSES["worker"]]
    assert mates.all_are(READY, age_s=60) is False
    assert Mates("d1", "", 0, []).all_are(READY, age_s=0)
