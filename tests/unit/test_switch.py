# SPDX-License-Identifier: Apache-2.0
"""The switch of a service to another release, with real processes: whatever happens, the old or the new one serves."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import resume, switch
from ansible.module_utils.aerie.journal import (
    ACTIVATING,
    AWAITING,
    CHECKING,
    CONFIRMING,
    MEASURING,
    REQUESTED,
    RESTORING,
    STARTING,
    STOP,
    STOPPING,
)
from ansible.module_utils.aerie.proved import known
from switched_host import SERVICE, Host, Program, host_below, until

START = ["daemon-reload", f"reset-failed {SERVICE}", f"enable {SERVICE}", f"start {SERVICE}"]


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with host_below(tmp_path, capsys, monkeypatch, Host) as made:
        yield made


@pytest.fixture
def old(host: Host) -> str:
    """The release that serves."""
    identity = host.stage("old")
    host.serve(identity)
    host.calls()
    return identity


def last(host: Host) -> dict[str, Any]:
    """Return how the switch of the second deployment ended, as the module tells."""
    return host.switch("followed")


def confirm(host: Host) -> dict[str, Any]:
    host.awaits(AWAITING)
    return host.switch("confirmed", window_s=20)


# -------------------------------------------------------------------------------------------------------------- success


def test_a_release_is_switched_to_and_kept(host: Host, old: str) -> None:
    new = host.stage("new")
    before = host.pid()
    settings = host.settings(TOY="2")
    drop_in = host.etc / f"{SERVICE}.d/limits.conf"
    started = host.start(new, settings={**settings, str(drop_in): "[Service]\nLimitNOFILE=9\n"}, who="me", why="deploy")
    assert (started["changed"], started["outcome"], started["running"]) == (True, "started", old)
    assert started["changes"] == ["name", SERVICE]
    assert {name: started["switch"][name] for name in ("deployment", "who", "from", "to")} == {
        "deployment": "second",
        "who": "me",
        "from": old,
        "to": new,
    }
    # Nothing happens before the program runs, which systemd starts.
    assert host.calls() == ["daemon-reload", f"enable {resume.UNIT}", f"start --no-block {resume.UNIT}"]
    assert host.pid() == before
    program = host.program()
    host.awaits(AWAITING)
    ready = host.switch("followed")
    assert (ready["outcome"], ready["phase"], ready["changed"]) == ("ready", AWAITING, False)
    assert host.serves(new)
    assert confirm(host)["outcome"] == "confirmed"
    assert program.wait() == 0
    assert host.calls() == [f"stop {SERVICE}", *START]
    assert host.serves(new)
    assert host.is_enabled()
    assert drop_in.read_text() == "[Service]\nLimitNOFILE=9\n"
    assert (host.etc / "vllm.env").read_text() == settings[str(host.etc / "vllm.env")]
    host.over()
    assert host.actions() == ["activate", "confirm"]
    activate, kept = host.releases.ledger()[-2:]
    assert {name: activate[name] for name in ("from", "to", "why")} == {"from": old, "to": new, "why": "deploy"}
    assert [(gate["gate"], gate["verdict"]) for gate in kept["gates"]] == [("health", "passed")]
    assert 0 < kept["start_s"] <= kept["downtime_s"] < 60
    assert [at["phase"] for at in host.journal.last()["phases"]] == [
        STOPPING,
        ACTIVATING,
        STARTING,
        AWAITING,
        CONFIRMING,
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_secret_that_was_replaced_stays_as_long_as_it_may_be_needed(host: Host, old: str, fails: bool) -> None:
    drop_in = str(host.etc / f"{SERVICE}.d/secrets.conf")
    before, after = (host.etc / f"tls-key-{digit * 16}" for digit in "01")
    for path in (before, after):
        path.write_text("secret")
    Path(drop_in).parent.mkdir()
    Path(drop_in).write_text(f"[Service]\nLoadCredential=tls-key:{before}\n")
    wanted = f"[Service]\nLoadCredential=tls-key:{after}\n"
    new = host.stage("new", health=503 if fails else 200)
    host.start(new, settings={**host.settings(), drop_in: wanted}, start_budget_s=3 if fails else 20)
    program = host.program()
    if not fails:
        host.awaits(AWAITING)
        assert before.exists()
        assert confirm(host)["outcome"] == "confirmed"
    assert program.wait() == 0
    assert (last(host)["outcome"], before.exists()) == ("restored" if fails else "confirmed", fails)
    assert after.exists()
    assert (Path(drop_in).read_text() == wanted) != fails


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("joins", [False, True])
def test_files_that_only_one_of_both_releases_has_come_and_go_with_it(
    host: Host, old: str, joins: bool, fails: bool
) -> None:
    """As those of a host that becomes a part of a replica, or leaves one."""
    rules, drop_in = host.etc / "replica.nft", host.etc / f"{SERVICE}.d/replica.conf"
    texts = {rules: "table inet aerie_replica\n", drop_in: f"[Service]\nExecStartPre=+nft -f {rules}\n"}
    drop_in.parent.mkdir()
    if not joins:
        for path, text in texts.items():
            path.write_text(text)
    settings = {**host.settings(), **{str(path): text if joins else None for path, text in texts.items()}}
    new = host.stage("new", health=503 if fails else 200)
    host.start(new, settings=settings, start_budget_s=3 if fails else 20)
    program = host.program()
    if not fails:
        assert confirm(host)["outcome"] == "confirmed"
    assert program.wait() == 0
    assert host.serves(old if fails else new)
    there = {path: path.read_text() for path in texts if path.exists()}
    assert there == (texts if joins != fails else {})
    assert last(host)["outcome"] == ("restored" if fails else "confirmed")
    # The same again is no reason for a switch.
    settings = {**host.settings(), **{str(path): there.get(path) for path in texts}}
    assert host.start(old if fails else new, settings=settings)["changed"] is False


def test_a_service_that_runs_the_release_is_left_alone(host: Host, old: str) -> None:
    drop_in = host.etc / f"{SERVICE}.d/limits.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nLimitNOFILE=9\n")
    settings = {**host.settings(), str(drop_in): drop_in.read_text()}
    before = host.tree()
    for check_mode in (True, False):
        found = host.start(old, check_mode, settings=settings)
        assert (found["changed"], found["outcome"], found["running"]) == (False, "unchanged", old)
    assert host.calls() == []
    assert host.tree() == before


def other_release(host: Host) -> dict[str, Any]:
    return {"identity": host.stage("new")}


def other_settings(host: Host) -> dict[str, Any]:
    return {"identity": host.releases.current(), "settings": host.settings(TOY="2")}


def other_drop_in(host: Host) -> dict[str, Any]:
    drop_in = str(host.etc / f"{SERVICE}.d/limits.conf")
    return {"identity": host.releases.current(), "settings": {**host.settings(), drop_in: "[Service]\n"}}


def repaired(host: Host) -> dict[str, Any]:
    return {"identity": host.releases.current(), "restart": True}


def edited_unit(host: Host) -> dict[str, Any]:
    host.unit.write_text("edited")
    return {"identity": host.releases.current()}


def edited_settings(host: Host) -> dict[str, Any]:
    (host.etc / "vllm.env").write_text("AERIE_HOST=127.0.0.1\n")
    return {"identity": host.releases.current()}


def stopped(host: Host) -> dict[str, Any]:
    host.power_cut()
    return {"identity": host.releases.current()}


@pytest.mark.parametrize(
    "change", [other_release, other_settings, other_drop_in, repaired, edited_unit, edited_settings, stopped]
)
def test_anything_else_is_predicted_and_begun(host: Host, old: str, change: Callable[[Host], dict[str, Any]]) -> None:
    arguments = change(host)
    before = host.tree()
    predicted = host.start(**arguments, check_mode=True)
    assert host.calls() == []
    assert host.tree() == before
    started = host.start(**arguments)
    assert (started["changed"], started["outcome"]) == (True, "started")
    assert {name: started[name] for name in predicted if name != "invocation"} == {
        name: value for name, value in predicted.items() if name != "invocation"
    }


def test_the_unit_of_the_program_runs_it_from_files_that_stay(host: Host, old: str) -> None:
    host.start(host.stage("new"))
    unit = (host.etc / resume.UNIT).read_text().splitlines()
    assert f"ExecStart={sys.executable} -m ansible.module_utils.aerie.switch {host.root}" in unit
    assert f"Before={SERVICE}" in unit
    (path,) = (line.split("=")[2].split()[0] for line in unit if line.startswith("Environment=PYTHONPATH="))
    assert (Path(path) / "ansible/module_utils/aerie/switch.py").is_file()
    assert Path(path).parent == host.root / "tools"


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_release_that_cannot_be_switched_to_is_refused(host: Host, old: str) -> None:
    half = host.stage("half", complete=False)
    assert host.start("0" * 16)["msg"].startswith(f"release {'0' * 16} is not on this host; these are: ")
    assert host.start(half)["msg"] == f"release {half} is not wholly staged on this host: run deploy.yml"
    assert host.calls() == []
    assert not host.journal.path.exists()
    # In check mode it may not be there yet.
    assert host.start("0" * 16, check_mode=True)["outcome"] == "started"


@pytest.mark.parametrize("check_mode", [True, False])
def test_a_unit_of_somebody_else_is_not_replaced(host: Host, check_mode: bool) -> None:
    host.unit.write_text("[Service]\nExecStart=/usr/bin/mine\n")
    refused = host.start(host.stage("new"), check_mode)
    assert refused["msg"] == f"{host.unit} is not Aerie's: stop and disable it, and move it away"


def test_an_id_is_needed_to_start(host: Host) -> None:
    assert "id" in host.switch("started")["msg"]


# ---------------------------------------------------------------------------------------------- failures at every phase


def numeric(text: str) -> dict[str, Any]:
    return {"mode": "enforce", "argv": ["/bin/sh", "-c", f"echo noise; echo '{text}'"], "budget_s": 10}


# Which of the two limits is noticed first depends on the machine.
NOT_READY = "start may take 0 s|was not ready after 0.2 s"
NUMERIC_FAILED = '{"gate": "numeric", "verdict": "failed", "message": "tap 2 differs"}'
FAILURES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str | None]] = {
    # What the release does, what the switch is told, and: which phase, why, and at which gate it failed.
    "numeric": ({}, {"numeric": numeric(NUMERIC_FAILED)}, CHECKING, "tap 2 differs", "numeric"),
    "died": ({"die": True}, {}, STARTING, "vLLM on .* did not start: ", "health"),
    "never healthy": ({"health": 503}, {"start_budget_s": 0.2}, STARTING, NOT_READY, "health"),
    "other model": ({"model": "llama"}, {}, STARTING, "serves llama, expected kimi", "health"),
    "no token": ({"silent": True}, {"start_budget_s": 0.2}, STARTING, NOT_READY, "health"),
    "no draft accepted": (
        {"depth": 2},
        {"live": {"mode": "enforce", "config": {"prompts": ["x"] * 6, "concurrency": 1}}},
        MEASURING,
        "acceptance",
        "live",
    ),
    # Whatever goes wrong, and be it in the program.
    "no verdict": ({}, {"numeric": numeric('{"gate": "numeric"}')}, CHECKING, "KeyError: 'verdict'", None),
    "nobody confirms": ({}, {"confirm_budget_s": 0.05}, AWAITING, "nobody confirmed the release within", None),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_release_that_fails_makes_way_for_the_old_one(host: Host, old: str, name: str) -> None:
    faults, told, phase, reason, gate = FAILURES[name]
    settings = host.settings(TOY="2")
    new = host.stage("new", **faults)
    before = host.tree()
    host.start(new, settings=settings, **told)
    assert host.program().wait() == 0
    assert host.serves(old)
    assert host.is_enabled()
    end = last(host)
    assert (end["outcome"], end["switch"]["message"]) == ("restored", f"release {old} serves again")
    assert (end["switch"]["failed_phase"], end["switch"].get("failed_gate")) == (phase, gate)
    assert re.search(reason, end["switch"]["reason"])
    assert host.actions() == ([] if phase == CHECKING else ["activate", "restore"])
    after = host.tree()
    assert {path: after[path] for path in before if not path.endswith("ledger.jsonl")} == {
        path: content for path, content in before.items() if not path.endswith("ledger.jsonl")
    }
    host.over()


def test_a_service_whose_sample_takes_longer_than_a_window_is_ready(host: Host, old: str) -> None:
    # A request is waited for a second at least.
    host.start(host.stage("new", depth=2, sample_s=1.2))
    program = host.program()
    assert confirm(host)["outcome"] == "confirmed"
    assert program.wait() == 0
    assert last(host)["switch"]["gates"][0]["speculation"]["drafts"] == 31


def test_whoever_follows_a_start_learns_rate_and_estimate(host: Host, old: str) -> None:
    host.put_program("journalctl", f"#!/bin/sh\ncat {Path(__file__).parent}/logs/loading.log\n")
    new = host.stage("new", health=503)
    host.start(new, start_budget_s=15)
    program = host.program()
    until(lambda: host.switch("followed", window_s=0)["progress"])
    progress = host.switch("followed", window_s=0)["progress"]
    assert progress["words"] == "loading weights 40 % (26 of 64, 0.0 MB/s, about 76 s left)"
    host.journal.tell("abort", "second")
    assert program.wait() == 0


def test_what_the_processes_of_a_stuck_start_did_outlives_them(host: Host, old: str) -> None:
    host.put_program("py-spy", "#!/bin/sh\necho 'Thread 1 (idle): all_reduce (distributed.py:1)'\n")
    kept = host.root / "switch/evidence.txt"
    host.start(host.stage("new", health=503), stuck_after_s=0.1)
    assert host.program().wait() == 0
    assert host.serves(old)
    end = last(host)
    assert (end["outcome"], end["switch"]["failed_gate"]) == ("restored", "health")
    reason = end["switch"]["reason"]
    assert " is stuck at starting: " in reason
    assert reason.endswith(f" What its processes did is in {kept} on this host.")
    (gate,) = end["switch"]["gates"]
    process, stack = gate["evidence"]
    assert re.fullmatch(r"pid \d+ \(.+\): state \w, waits in the kernel for \S+", process)
    assert stack == "  Thread 1 (idle): all_reduce (distributed.py:1)"
    fault, *lines = kept.read_text().splitlines()
    assert (reason.startswith(fault), lines) == (True, gate["evidence"])
    # Nobody takes it for the next one's.
    host.start(host.stage("third"), deployment="third")
    assert not kept.exists()


def test_evidence_that_there_is_no_room_for_is_not_promised(host: Host, old: str) -> None:
    kept = host.root / "switch/evidence.txt"
    host.start(host.stage("new", health=503), stuck_after_s=0.1)
    kept.symlink_to("/dev/full")
    assert host.program().wait() == 0
    end = last(host)
    assert "is stuck at starting" in end["switch"]["reason"]
    assert "What its processes did" not in end["switch"]["reason"]
    assert end["switch"]["gates"][0]["evidence"] != []
    assert host.serves(old)


def test_memory_that_a_gpu_does_not_give_back_keeps_the_next_release_from_it(host: Host, old: str) -> None:
    used = "<fb_memory_usage><total>143771 MiB</total><used>131072 MiB</used></fb_memory_usage>"
    # The process goes with the stop, and its memory stays.
    holder = "<process_info><pid>$pid</pid><used_memory>131000 MiB</used_memory></process_info>"
    gpu = f'<gpu id=\'0\'>{used}<processes>$([ -z "$pid" ] || echo "{holder}")</processes></gpu>'
    asks = f"#!/bin/sh\npid=$(cat {host.state}/pid 2>/dev/null)\n"
    host.put_program("nvidia-smi", f'{asks}echo "<nvidia_smi_log>{gpu}</nvidia_smi_log>"\n')
    host.start(host.stage("new"))
    assert host.program().wait() == 0
    end = last(host)
    assert (end["outcome"], end["switch"]["failed_phase"]) == ("restored", STOPPING)
    assert "this remains of it: 131000 MiB of GPU 0 that no process holds" in end["switch"]["reason"]
    assert host.serves(old)


@pytest.mark.parametrize("verb", ["stop", "daemon-reload", "enable"])
def test_a_systemctl_that_fails_is_quoted(host: Host, old: str, verb: str) -> None:
    host.start(host.stage("new"))
    host.hold(verb)
    program = host.program()
    host.held()
    host.fail(verb)
    host.release(verb)
    until(lambda: host.journal.load() and host.journal.state["phase"] == RESTORING)
    host.mend(verb)
    assert program.wait() == 0
    end = last(host)
    assert end["outcome"] == "restored"
    assert re.fullmatch(rf"systemctl {verb}.* failed: Unit is broken\.", end["switch"]["reason"])
    assert host.serves(old)


def port_is_free(host: Host) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", host.port))
        except OSError:
            return False
    return True


def test_a_service_that_leaves_something_behind_is_not_followed_by_another(host: Host) -> None:
    fifo = host.etc / "fifo"
    os.mkfifo(fifo)
    old = host.stage("old", orphan=str(fifo))
    host.serve(old)
    host.start(host.stage("new"))
    host.hold("daemon-reload")
    program = host.program()
    host.held()
    assert host.releases.is_active(old, host.unit)
    fifo.write_text("")
    until(lambda: port_is_free(host))
    host.release("daemon-reload")
    assert program.wait() == 0
    end = last(host)
    assert (end["outcome"], end["switch"]["failed_phase"]) == ("restored", STOPPING)
    assert end["switch"]["reason"].endswith(f"this remains of it: somebody listens on 127.0.0.1:{host.port}")
    assert host.serves(old)
    assert host.actions() == []
    fifo.write_text("")


def test_a_process_that_the_service_left_behind_is_killed(host: Host) -> None:
    fifo = host.etc / "fifo"
    os.mkfifo(fifo)
    host.serve(host.stage("old", orphan=str(fifo), seen=str(host.proc)))
    until(lambda: len(host.processes()) == 2)
    host.start(host.stage("new"))
    host.program()
    assert confirm(host)["outcome"] == "confirmed"
    assert host.processes() == [host.pid()]


def test_what_a_numeric_check_says_of_itself_is_kept(host: Host, old: str) -> None:
    passed = '{"gate": "numeric", "verdict": "passed", "message": "", "taps": [2]}'
    host.start(host.stage("new"), numeric=numeric(passed))
    program = host.program()
    assert confirm(host)["outcome"] == "confirmed"
    assert program.wait() == 0
    assert last(host)["switch"]["gates"][0] == {**json.loads(passed), "mode": "enforce"}


def test_a_numeric_check_that_passed_is_noted_for_releases_of_the_same_code(host: Host, old: str) -> None:
    note = host.root / "proved" / "new.json"
    passed = {"gate": "numeric", "verdict": "passed", "message": "130 taps hold."}
    host.start(host.stage("new"), numeric={**numeric(json.dumps(passed)), "note": str(note), "evidence": "e"})
    program = host.program()
    assert confirm(host)["outcome"] == "confirmed"
    assert program.wait() == 0
    found = known(note, "e")
    assert found is not None
    assert (found["result"], found["by"]) == (passed, "new")


@pytest.mark.parametrize("verdict", ["failed", "not_run", "passed"])
def test_one_that_cannot_be_noted_or_did_not_pass_leaves_no_note(host: Host, old: str, verdict: str) -> None:
    folder = host.root / "proved"
    if verdict == "passed":
        folder.write_text("no directory\n")
    text = json.dumps({"gate": "numeric", "verdict": verdict, "message": ""})
    order = {**numeric(text), "mode": "advisory", "note": str(folder / "new.json"), "evidence": "e"}
    host.start(host.stage("new"), numeric=order)
    program = host.program()
    assert confirm(host)["outcome"] == "confirmed"
    assert program.wait() == 0
    assert not folder.is_dir()


@pytest.mark.parametrize(
    ("argv", "budget_s", "message"),
    [
        (["/nowhere/python"], 10, "/nowhere/python gave no verdict: "),
        (["/bin/sh", "-c", "echo no JSON"], 10, "/bin/sh gave no verdict: "),
        (["/bin/sh", "-c", "exit 3"], 10, "/bin/sh gave no verdict: "),
        (["/bin/cat", "/dev/zero"], 0.05, "it took longer than 0.05 s"),
    ],
)
def test_a_numeric_check_without_a_verdict_has_not_run(argv: list[str], budget_s: float, message: str) -> None:
    found = switch.run_numeric(argv, budget_s)
    assert (found["verdict"], found["message"][: len(message)]) == ("not_run", message)


def test_a_gate_that_only_advises_ends_nothing(host: Host, old: str) -> None:
    new = host.stage("new")
    host.start(new, numeric={**numeric(NUMERIC_FAILED), "mode": "advisory"})
    host.program()
    assert confirm(host)["outcome"] == "confirmed"
    assert [gate["verdict"] for gate in last(host)["switch"]["gates"]] == ["failed", "passed"]


def test_a_service_that_dies_while_it_waits_is_not_kept(host: Host, old: str) -> None:
    host.start(host.stage("new"))
    program = host.program()
    host.awaits(AWAITING)
    os.kill(host.pid(), signal.SIGKILL)
    assert program.wait() == 0
    assert last(host)["switch"]["reason"] == "the service ended while it waited for confirmation"
    assert host.serves(old)


def test_an_old_release_that_does_not_come_back_is_said(host: Host) -> None:
    old = host.stage("old", die=True)
    host.serve(old)
    (host.state / "pid").write_text("0")
    host.start(host.stage("new", die=True))
    # It was up: systemd started it again and again.
    host.journal.load()
    host.journal.state["from"]["up"] = True
    host.journal.save()
    assert host.program().wait() == 0
    end = last(host)
    assert end["outcome"] == "not restored"
    assert end["switch"]["message"].startswith(f"release {old} was put back, but: vLLM on ")
    assert host.actions() == ["activate", "restore"]
    assert host.releases.ledger()[-1]["outcome"] == "not restored"
    assert host.releases.is_active(old, host.unit)
    host.over()


def test_an_old_release_that_is_gone_is_said(host: Host, old: str) -> None:
    host.start(host.stage("new", die=True))
    program_name = host.releases.path(old) / SERVICE
    program_name.unlink()
    assert host.program().wait() == 0
    end = last(host)
    assert end["outcome"] == "not restored"
    assert end["switch"]["message"] == f"release {old} is not staged on this host: {program_name} is missing"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_service_that_was_stopped_is_stopped_again(host: Host, old: str, enabled: bool) -> None:
    host.power_cut()
    if not enabled:
        (host.state / "enabled").unlink()
    host.start(host.stage("new", die=True))
    assert host.program().wait() == 0
    end = last(host)
    assert (end["outcome"], end["switch"]["message"]) == (
        "restored",
        f"release {old} is current and stopped, as before",
    )
    assert (host.pid(), host.is_enabled(), host.releases.is_active(old, host.unit)) == (0, enabled, True)


# ------------------------------------------------------------------------------------------------- the first deployment


def test_the_first_release_is_kept(host: Host) -> None:
    new = host.stage("new")
    assert host.start(new)["running"] == ""
    host.program()
    assert confirm(host)["outcome"] == "confirmed"
    assert host.serves(new)
    assert host.is_enabled()


def nothing_serves(host: Host) -> bool:
    return not (host.pid() or host.unit.exists() or host.releases.current() or host.is_enabled())


def test_a_first_release_that_fails_leaves_the_host_as_it_was(host: Host) -> None:
    new = host.stage("new", die=True)
    (host.etc / "vllm.env").write_text("# mine\n")
    host.start(new)
    before = {path: content for path, content in host.tree().items() if "/switch/" not in path}
    assert host.program().wait() == 0
    end = last(host)
    assert (end["outcome"], end["switch"]["message"]) == ("restored", "no release serves, as before")
    assert nothing_serves(host)
    after = host.tree()
    assert {path: after.get(path) for path in before} == before
    assert {Path(path).name for path in after.keys() - before.keys()} == {"last.json", "ledger.jsonl"}
    assert host.releases.newest_deployment() == {}


# -------------------------------------------------------------------------------------------------------- interruptions


def explore(run: Callable[[int], bool]) -> int:
    """Call ``run`` with 1, 2, 3 ... until it says that this was beyond the last step; return how many there are."""
    step = 1
    while run(step):
        step += 1
    return step - 1


def confirmed(host: Host, program: Program) -> int:
    """Confirm what this program brings as soon as it asks, if it does; return how it ended."""
    until(lambda: not program.runs() or (host.journal.load() and host.journal.state["phase"] == AWAITING))
    if program.runs():
        host.journal.tell("confirm", host.journal.state["deployment"])
    return program.wait()


def test_a_program_that_is_killed_at_any_step_leaves_the_old_or_the_new_release(host: Host, old: str) -> None:
    """Kill it before each of its steps, and start it again as systemd does."""
    settings = {False: host.settings(), True: host.settings(TOY="2")}
    new = host.stage("new")
    killed_in = set()

    def run(step: int) -> bool:
        host.start(new, settings=settings[True], deployment=f"at {step}")
        program = host.program(die_at=step)
        died = confirmed(host, program) == -signal.SIGKILL
        if died:
            killed_in.add(host.journal.state["phase"] if host.journal.load() else "over")
            assert confirmed(host, host.program()) == 0
        end = host.journal.last()
        assert end["deployment"] == f"at {step}"
        kept = end["outcome"] == "confirmed"
        assert end["outcome"] in ("confirmed", "restored")
        assert host.serves(new if kept else old), (step, end)
        assert (host.etc / "vllm.env").read_text() == settings[kept][str(host.etc / "vllm.env")]
        assert host.is_enabled()
        host.over()
        actions = host.actions(f"at {step}")
        assert actions in ([["activate", "confirm"]] if kept else [["activate", "restore"], []]), (step, end)
        if kept:
            assert host.releases.newest_deployment() == {
                "deployment": f"at {step}",
                "from": old,
                "to": new,
                "why": "",
            }
            host.power_cut()
            host.serve(old, deployment=f"back from {step}")
        return died

    steps = explore(run)
    assert steps >= 20
    assert killed_in >= {
        REQUESTED,
        STOPPING,
        ACTIVATING,
        STARTING,
        AWAITING,
        CONFIRMING,
    }


def test_a_restore_that_is_killed_at_any_step_is_finished(host: Host, old: str) -> None:
    new = host.stage("new", die=True)
    over: list[bool] = []

    def run(step: int) -> bool:
        host.start(new, settings=host.settings(TOY="2"), deployment=f"at {step}")
        died = host.program(die_at=step, after=RESTORING).wait() == -signal.SIGKILL
        if died:
            pid, was_over = host.pid(), host.journal.load() and "outcome" in host.journal.state
            assert host.program().wait() == 0
            # It is not done again once it was done.
            assert host.pid() == pid or not was_over
            over.append(was_over)
        end = host.journal.last()
        assert (end["outcome"], end["failed_phase"], end["failed_gate"]) == ("restored", STARTING, "health")
        assert "did not start" in end["reason"]
        assert host.serves(old)
        assert (host.etc / "vllm.env").read_text() == host.settings()[str(host.etc / "vllm.env")]
        assert host.actions(f"at {step}") == ["activate", "restore"]
        host.over()
        return died

    assert explore(run) >= 8
    assert over.count(True) >= 2
    assert host.releases.newest_deployment() == {"deployment": "first", "from": "", "to": old, "why": ""}


def test_a_first_release_is_undone_from_wherever_its_undoing_was_killed(host: Host) -> None:
    new = host.stage("new", die=True)

    def run(step: int) -> bool:
        host.start(new, deployment=f"at {step}")
        died = host.program(die_at=step, after=RESTORING).wait() == -signal.SIGKILL
        if died:
            assert host.program().wait() == 0
        assert nothing_serves(host)
        assert not (host.etc / "vllm.env").exists()
        assert host.actions(f"at {step}") == ["activate", "restore"]
        host.over()
        return died

    assert explore(run) >= 8


@pytest.mark.parametrize("phase", [REQUESTED, STOPPING, ACTIVATING, STARTING, AWAITING])
def test_after_a_reboot_the_old_release_is_there_before_anything_starts(
    host: Host, old: str, phase: str, tmp_path: Path
) -> None:
    new = host.stage("new")
    host.start(new)
    if phase == AWAITING:
        program = host.program()
        host.awaits(phase)
        program.kill()
    elif phase != REQUESTED:
        # ACTIVATING: in the middle of it.
        assert host.program(die_at=4 if phase == ACTIVATING else 1, after=phase).wait() == -signal.SIGKILL
    host.power_cut()
    host.journal.load()
    assert host.journal.state["phase"] == phase
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        host.hold("reset-failed")
        program = host.program(boot="another", notify=tmp_path / "notify")
        if phase != REQUESTED:
            host.held()
            assert host.releases.is_active(old, host.unit)
            with pytest.raises(BlockingIOError):
                systemd.recv(99)
        host.release("reset-failed")
        assert program.wait() == 0
        assert systemd.recv(99) == b"READY=1"
    end = last(host)
    assert (end["outcome"], end["switch"]["reason"]) == ("restored", f"the host was rebooted while {phase}")
    if phase == REQUESTED:
        # systemd starts it, as always.
        assert host.pid() == 0
        assert host.releases.is_active(old, host.unit)
    else:
        assert host.serves(old)


def test_what_a_killed_program_was_about_to_write_goes_with_the_next_switch(host: Host, old: str) -> None:
    host.start(host.stage("new"), confirm_budget_s=0)
    # The journal's next version lies beside it.
    assert host.program(die_at=1).wait() == -signal.SIGKILL
    assert len(list(host.journal.directory.glob(".*"))) == 1
    assert host.program().wait() == 0
    host.start(host.stage("third"), deployment="third")
    assert list(host.journal.directory.glob(".*")) == []


def test_a_program_that_starts_again_is_up_at_once_if_there_is_nothing_to_decide(host: Host, tmp_path: Path) -> None:
    assert host.program(notify=tmp_path / "nobody").wait() == 0


# ------------------------------------------------------------------------------------------------- answers from outside


@pytest.mark.parametrize("phase", [REQUESTED, STOPPING, CHECKING, STARTING, AWAITING])
def test_a_switch_that_is_aborted_is_undone(host: Host, old: str, phase: str) -> None:
    checks = {"mode": "enforce", "argv": ["/bin/sh", "-c", f"cat {host.etc}/wait; echo '{NUMERIC_FAILED}'"]}
    arguments: dict[str, Any] = {"numeric": {**checks, "budget_s": 20}} if phase == CHECKING else {}
    os.mkfifo(host.etc / "wait")
    before = host.pid()
    host.start(host.stage("new", silent=phase == STARTING), **arguments)
    verb = {STOPPING: "stop"}.get(phase)
    if verb:
        host.hold(verb)
    program = None if phase == REQUESTED else host.program()
    host.awaits(phase)
    aborted = host.switch("aborted", reason="changed my mind", window_s=0)
    assert (aborted["changed"], aborted["outcome"]) == (False, "ready" if phase == AWAITING else "under way")
    if verb:
        host.release(verb)
    if phase == CHECKING:
        (host.etc / "wait").write_text("")
    assert (program or host.program()).wait() == 0
    end = last(host)
    reason = "tap 2 differs" if phase == CHECKING else "changed my mind"
    assert (end["outcome"], end["switch"]["reason"]) == ("restored", reason)
    assert host.serves(old)
    assert (host.pid() == before) == (phase == REQUESTED)


def test_an_abort_after_the_confirmation_is_too_late(host: Host, old: str) -> None:
    new = host.stage("new")
    host.start(new)
    program = host.program()
    host.awaits(AWAITING)
    with (host.root / "ledger.jsonl").open("rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        host.switch("confirmed", window_s=0)
        host.awaits(CONFIRMING)
        assert host.switch("aborted", window_s=0)["outcome"] == "under way"
    assert program.wait() == 0
    assert last(host)["outcome"] == "confirmed"
    assert host.serves(new)


def test_a_confirmation_before_the_release_is_ready_counts_for_nothing(host: Host, old: str) -> None:
    host.start(host.stage("new"), confirm_budget_s=0.1)
    assert host.switch("confirmed", window_s=0)["outcome"] == "under way"
    assert not (host.journal.directory / "confirm").exists()
    assert host.program().wait() == 0
    late = host.switch("confirmed")
    assert (late["outcome"], host.serves(old)) == ("restored", True)


def test_a_release_that_is_ready_waits_as_long_as_it_is_followed(host: Host, old: str) -> None:
    """Whoever follows it may wait for a batch-mate that starts."""
    host.start(host.stage("new"), confirm_budget_s=1)
    program = host.program()
    host.awaits(AWAITING)
    since = time.monotonic()
    until(lambda: host.switch("followed", window_s=0)["outcome"] == "ready" and time.monotonic() - since > 3)
    assert program.runs()
    # To look in check mode, or for another deployment, is not to follow.
    until(lambda: host.switch("followed", window_s=0, deployment="third")["outcome"] == "none")
    assert program.wait() == 0
    assert last(host)["switch"]["reason"] == "nobody confirmed the release within 1 s"
    assert host.serves(old)


def test_answers_to_an_earlier_switch_count_for_nothing(host: Host, old: str) -> None:
    for what in ("confirm", "abort"):
        host.journal.directory.mkdir(exist_ok=True)
        host.journal.tell(what, "second")
    host.start(host.stage("new"), confirm_budget_s=0.2)
    for what in ("confirm", "abort"):
        host.journal.tell(what, "first")
    assert host.program().wait() == 0
    assert "nobody confirmed" in last(host)["switch"]["reason"]


def test_check_mode_tells_the_program_nothing(host: Host, old: str) -> None:
    host.start(host.stage("new"))
    host.program()
    host.awaits(AWAITING)
    for state in ("confirmed", "aborted", "proceeded"):
        assert host.switch(state, check_mode=True, window_s=0, step=STOP)["outcome"] == "ready"
        assert not (host.journal.directory / state.removesuffix("ed")).exists()


def test_nothing_is_known_of_a_switch_that_never_was(host: Host, old: str) -> None:
    for state in ("followed", "confirmed", "aborted"):
        assert host.switch(state) == {**host.switch(state), "outcome": "none", "changed": False}
    host.start(host.stage("new", die=True))
    assert host.program().wait() == 0
    host.journal.last_path.unlink()
    assert host.switch("confirmed")["outcome"] == "none"


# ------------------------------------------------------------------------------------------------------ two deployments


def test_a_switch_that_is_under_way_says_whose_it_is(host: Host, old: str) -> None:
    new, third = host.stage("new"), host.stage("third")
    host.start(new, who="ann@desk")
    for check_mode in (True, False):
        refused = host.start(third, check_mode, deployment="third")
        assert re.fullmatch(
            f"a switch to release {new} is under way on this host: deployment second, started by ann@desk at "
            rf"20\S+Z, now {REQUESTED}\. Wait for its end with -e switch_in_progress=wait, or have it undone "
            "with -e switch_in_progress=take_over",
            refused["msg"],
        )


STOPPED = "ActiveState=inactive"
RUN = f"start --no-block {resume.UNIT}"


def stop_program(host: Host, program: Program | None = None) -> None:
    """End the program as `systemctl stop` does; systemd does not start it again."""
    if program:
        program.kill()
    host.switch_unit(STOPPED)
    host.calls()


@pytest.mark.parametrize("state", ["followed", "confirmed", "aborted"])
def test_a_program_that_was_stopped_runs_again_once_somebody_follows(host: Host, old: str, state: str) -> None:
    new = host.stage("new", silent=True)
    host.start(new)
    program = host.program()
    until(lambda: host.running() == new)
    stop_program(host, program)
    host.switch(state, check_mode=True, window_s=0)
    assert host.calls() == []
    assert host.switch(state, window_s=0)["outcome"] == "under way"
    assert host.calls() == [RUN]
    # It runs: nothing is to be done.
    host.switch(state, window_s=0)
    assert host.calls() == []
    assert host.program().wait() == 0
    end = last(host)
    assert (end["outcome"], host.serves(old)) == ("restored", True)
    assert end["switch"]["reason"] == f"the switch program was killed while {STARTING}"


def test_a_program_that_was_never_started_is_for_whom_asked_for_it(host: Host, old: str) -> None:
    new = host.stage("new")
    host.start(new)
    stop_program(host)
    assert last(host)["outcome"] == "under way"
    assert host.calls() == [RUN]
    program = host.program()
    assert confirm(host)["outcome"] == "confirmed"
    assert program.wait() == 0
    assert host.serves(new)


def test_what_another_deployment_finds_not_begun_does_not_begin(host: Host, old: str) -> None:
    before = host.pid()
    host.start(host.stage("new"))
    stop_program(host)
    third = host.stage("third")
    assert "is under way" in host.start(third, deployment="third")["msg"]
    assert host.calls() == [RUN]
    assert host.program().wait() == 0
    end = last(host)
    assert (end["outcome"], end["switch"]["message"]) == ("restored", "nothing had been changed yet")
    assert end["switch"]["reason"] == "deployment third found that it had not begun"
    assert (host.pid(), host.serves(old)) == (before, True)
    assert host.start(third, deployment="third")["outcome"] == "started"


def test_a_program_that_does_not_come_up_is_named(host: Host, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_COMES_UP_S", 0.3)
    host.start(host.stage("new"))
    stop_program(host)
    host.switch_unit(STOPPED, broken=True)
    refused = host.switch("followed")
    assert (refused["failed"], refused["msg"]) == (
        True,
        "aerie-switch.service did not come up within 0.3 s. A switch is under way there, and does not end before it "
        "runs: see journalctl -u aerie-switch.service, and run again",
    )
    host.fail("start")
    assert "within 0.3 s (Unit is broken.). A switch" in host.switch("followed")["msg"]


@pytest.mark.parametrize(("crashes", "fails"), [(2, False), (10, True)])
def test_a_program_that_crashes_time_and_again_is_not_followed(host: Host, old: str, crashes: int, fails: bool) -> None:
    host.start(host.stage("new"))
    host.switch_unit("ActiveState=activating", "SubState=auto-restart", f"NRestarts={crashes}")
    found = host.switch("followed")
    assert found["failed"] is fails
    if fails:
        assert found["msg"].startswith("aerie-switch.service failed 10 times in a row. A switch is under way there")


def until_started(host: Host, identity: str, in_progress: str) -> dict[str, Any]:
    """Call the module again and again, as its action plugin does."""
    found: dict[str, Any] = {"outcome": "in progress"}
    while found["outcome"] == "in progress":
        found = host.start(identity, deployment="third", in_progress=in_progress, window_s=5)
        assert not found["failed"]
    return found


def test_a_switch_is_taken_over(host: Host, old: str) -> None:
    new, third = host.stage("new"), host.stage("third")
    host.start(new)
    program = host.program()
    host.awaits(AWAITING)
    assert until_started(host, third, "take_over")["outcome"] == "started"
    assert program.wait() == 0
    # Who followed the first one learns of its end, although another is under way.
    end = host.switch("followed")
    assert (end["outcome"], end["switch"]["reason"]) == ("restored", "deployment third took over")
    assert host.switch("followed", deployment="fourth", window_s=0)["outcome"] == "in progress"
    program = host.program()
    host.awaits(AWAITING)
    assert host.switch("confirmed", deployment="third", window_s=20)["outcome"] == "confirmed"
    assert program.wait() == 0
    assert host.serves(third)
    assert host.actions() == ["activate", "restore"]
    assert host.releases.newest_deployment() == {"deployment": "third", "from": old, "to": third, "why": ""}


def test_the_end_of_a_switch_is_waited_for(host: Host, old: str) -> None:
    new, third = host.stage("new"), host.stage("third")
    host.start(new)
    program = host.program()
    host.awaits(AWAITING)
    assert host.start(third, deployment="third", in_progress="wait", window_s=0)["outcome"] == "in progress"
    host.journal.tell("confirm", "second")
    started = until_started(host, third, "wait")
    assert program.wait() == 0
    assert (started["outcome"], started["running"], started["switch"]["from"]) == ("started", new, new)


def test_a_start_that_is_repeated_is_one(host: Host, old: str) -> None:
    new = host.stage("new")
    host.start(new)
    before = host.journal.path.read_bytes()
    assert host.start(new)["outcome"] == "started"
    assert host.journal.path.read_bytes() == before


def test_of_two_that_start_at_the_same_time_one_does(host: Host, old: str) -> None:
    host.journal.directory.mkdir()
    children, gates = [], []
    for number, identity in enumerate([host.stage("new"), host.stage("third")]):
        gate, opener = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                signal.alarm(20)
                os.read(gate, 1)
                found = host.start(identity, deployment=f"of {number}")
                status = 0 if found.get("outcome") == "started" else 1 if "is under way" in found["msg"] else 2
            finally:
                os._exit(status)
        children.append(pid)
        gates += [gate, opener]
    with host.journal.alone():
        for opener in gates[1::2]:
            os.write(opener, b"!")
        # Both are at the lock: neither has begun.
        directory = str(host.journal.directory.stat().st_ino)
        until(lambda: _waiters(directory) == len(children))
        assert not host.journal.path.exists()
    for descriptor in gates:
        os.close(descriptor)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert sorted(ends) == [0, 1]
    assert host.journal.load()
    assert host.journal.state["deployment"] == f"of {ends.index(0)}"


def _waiters(inode: str) -> int:
    lines = Path("/proc/locks").read_text().splitlines()
    return sum("->" in line and line.split()[6].endswith(f":{inode}") for line in lines)


def test_a_deployment_switches_twice(host: Host, old: str) -> None:
    """Such as one that tries releases out, in the same second."""
    for name in ("new", "third"):
        identity = host.stage(name)
        host.start(identity)
        program = host.program()
        assert confirm(host)["outcome"] == "confirmed"
        assert program.wait() == 0
        assert host.serves(identity)
    assert host.actions() == ["activate", "confirm", "activate", "confirm"]
    assert host.releases.newest_deployment() == {"deployment": "second", "from": old, "to": identity, "why": ""}


# ------------------------------------------------------------------------------------------------------------ full disk


def may_mount() -> bool:
    """Say whether this process may mount file systems, tried where nothing else sees it."""
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return os.getuid() == 0 and tried.returncode == 0


class Disk:
    """What the releases lie on. ``fill`` takes all room that is left, ``free`` gives it back."""

    def __init__(self, host: Host) -> None:
        self._filler = host.root / "filler"

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(4096))

    def free(self) -> None:
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(host: Host) -> Iterator[Disk]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "aerie", host.root], check=True)
    try:
        yield Disk(host)
    finally:
        host.power_cut()
        subprocess.run(["umount", "--lazy", host.root], check=True)


def fill_before_the_start(host: Host, old: str, disk: Disk) -> None:
    new = host.stage("new")
    host.start(host.releases.current())
    pid = host.pid()
    disk.fill()
    refused = host.start(new)
    assert refused["failed"]
    assert "No space left on device" in refused["msg"]
    assert not host.journal.load()
    assert not (host.journal.directory / "ballast").exists()
    assert (host.pid(), host.serves(old)) == (pid, True)


def fill_before_the_program_runs(host: Host, old: str, disk: Disk) -> None:
    host.start(host.stage("new"))
    pid = host.pid()
    disk.fill()
    assert host.program().wait() == 0
    end = host.journal.last()
    assert (end["outcome"], end["message"]) == ("restored", "nothing had been changed yet")
    assert "No space left on device" in end["reason"]
    assert (host.pid(), host.serves(old)) == (pid, True)


def fill_before_the_confirmation(host: Host, old: str, disk: Disk) -> None:
    host.start(host.stage("new"))
    program = host.program()
    host.awaits(AWAITING)
    disk.fill()
    os.mkfifo(host.etc / "confirm")
    # Ansible would have no room to say it, either: it is said from another file system.
    (host.journal.directory / "confirm").symlink_to(host.etc / "confirm")
    (host.etc / "confirm").write_text("second\n")
    assert program.wait() == 0
    end = host.journal.last()
    assert (end["outcome"], end["failed_phase"]) == ("restored", AWAITING)
    assert host.serves(old)
    assert host.actions() == ["activate", "restore"]


def await_touch(path: Path) -> None:
    before = path.stat().st_ctime_ns
    until(lambda: path.stat().st_ctime_ns != before)


def fill_for_good(host: Host, old: str, disk: Disk) -> None:
    host.start(host.stage("new"))
    program = host.program()
    host.awaits(AWAITING)
    ledger = host.root / "ledger.jsonl"
    with ledger.open("ab") as stream:
        # Its next line needs a page of its own.
        stream.write(b" " * (mmap.PAGESIZE - ledger.stat().st_size % mmap.PAGESIZE - 1) + b"\n")
    # Somebody else was faster to use what the program gives away.
    (host.journal.directory / "ballast").unlink()
    disk.fill()
    os.kill(host.pid(), signal.SIGKILL)
    until(lambda: host.serves(old))
    pid = host.pid()
    # It tries to note that, again and again, and the service is left alone.
    for _ in range(2):
        await_touch(ledger)
    assert program.runs()
    assert host.switch("followed", window_s=0)["disk_full"]
    disk.free()
    assert program.wait() == 0
    assert "disk_full" not in host.switch("followed", window_s=0)
    end = host.journal.last()
    assert (host.pid(), end["outcome"], end["failed_phase"]) == (pid, "restored", AWAITING)
    assert [entry["action"] for entry in host.releases.ledger()][-2:] == ["activate", "restore"]


def a_ledger_too_large(host: Host, old: str) -> None:
    """Where nothing may be mounted, files may be kept from growing: a line fits in part."""
    new = host.stage("new")
    host.start(new)
    host.releases.append_to_ledger({"deployment": "earlier", "action": "note", "text": "x" * 100_000})
    before = (host.root / "ledger.jsonl").read_bytes()
    assert host.program(largest=len(before) + 10).wait() == 0
    end = last(host)
    assert (end["outcome"], end["switch"]["failed_phase"]) == ("restored", ACTIVATING)
    assert "File too large" in end["switch"]["reason"]
    assert (host.root / "ledger.jsonl").read_bytes() == before
    assert host.serves(old)
    host.over()


@pytest.mark.parametrize(
    "when", [fill_before_the_start, fill_before_the_program_runs, fill_before_the_confirmation, fill_for_good]
)
def test_a_full_disk_is_survived(host: Host, when: Callable[[Host, str, Disk], None]) -> None:
    if not may_mount():
        old = host.stage("old")
        host.serve(old)
        a_ledger_too_large(host, old)
        return
    with small_disk(host) as disk:
        old = host.stage("old")
        host.serve(old)
        when(host, old, disk)


def test_a_line_that_does_not_fit_leaves_the_ledger_as_it_was(host: Host, old: str) -> None:
    a_ledger_too_large(host, old)


def test_a_confirmation_that_cannot_be_noted_is_noted_later(host: Host, old: str) -> None:
    new = host.stage("new")
    host.releases.append_to_ledger({"deployment": "earlier", "action": "note", "text": "x" * 100_000})
    size = (host.root / "ledger.jsonl").stat().st_size
    host.start(new)
    # Room for one line.
    program = host.program(largest=size + 300)
    host.awaits(AWAITING)
    host.switch("confirmed", window_s=0)
    # systemd starts it again.
    assert program.wait() == 70
    assert host.serves(new)
    host.awaits(CONFIRMING)
    assert host.program().wait() == 0
    assert last(host)["outcome"] == "confirmed"
    assert host.actions() == ["activate", "confirm"]
