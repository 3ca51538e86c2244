# SPDX-License-Identifier: Apache-2.0
"""An adopted environment is changed while its unit is stopped: vllm_patch as Ansible runs it, with a systemctl."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import patched_host
import pytest
import toy_vllm
from ansible.module_utils.aerie.adopted import Adopted, UserUnit
from ansible.module_utils.aerie.patcher import Patcher, Work
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import package_of_directory
from modules import run_module
from patched_host import PATHS, PRISTINE, digests, patched, plan_of

UNIT = "ml-serve.service"
# What it does is decided by files beside it: `refuse` (no patched code), `brief` (the first start ends soon), `stuck`
# (cannot be stopped), `gone`.
SYSTEMCTL = """#!/bin/sh
cd {folder}
case $1 in
show)
  [ -e gone ] && echo LoadState=not-found || echo LoadState=loaded
  [ -e brief ] && [ "$(cat start)" = a1 ] && {{ [ -e seen ] && echo failed > state; touch seen; }}
  echo "ActiveState=$(cat state)"
  echo "InvocationID=$(cat start)"
  [ -e brief ] && [ "$(cat start)" = a1 ] && now=$(cut -d. -f1 /proc/uptime)
  echo "ExecMainStartTimestampMonotonic=${{now:-1}}000000"
  [ "$(cat state)" = failed ] && echo ExecMainStatus=3 ;;
stop)
  echo stop >> calls
  [ -e stuck ] && {{ echo 'Job canceled.' >&2; exit 1; }}
  echo inactive > state ;;
start)
  echo start >> calls
  echo "$(cat start)1" > start
  if [ -e refuse ] && grep -q 'aerie toy' {code}; then echo failed > state; else echo active > state; fi ;;
esac
exit 0
"""


class Machine:
    """A host with an environment, its unit, and the programs of systemd."""

    def __init__(self, folder: Path, run: Callable[..., dict[str, Any]]) -> None:
        self.host = patched_host.Host(folder)
        self.folder = folder / "systemd"
        self.folder.mkdir()
        self._run = run
        code = self.host.package_dir / toy_vllm.MODEL
        self._program("systemctl", SYSTEMCTL.format(folder=self.folder, code=code))
        self._program("journalctl", "#!/bin/sh\necho 'RuntimeError: no kernel'\n")
        self.state("active")
        (self.folder / "start").write_text("a")

    def _program(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def state(self, value: str) -> None:
        (self.folder / "state").write_text(f"{value}\n")

    def it(self, what: str) -> None:
        (self.folder / what).touch()

    @property
    def active(self) -> str:
        return (self.folder / "state").read_text().strip()

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().split() if path.exists() else []

    def ledger(self) -> list[dict[str, Any]]:
        path = self.host.store / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def noted(self) -> bool:
        return (self.host.store / f"stopped-{UNIT}").exists()

    def run(self, check_mode: bool = False, **arguments: object) -> dict[str, Any]:
        common = {"package_dir": str(self.host.package_dir), "store": str(self.host.store), "unit": UNIT}
        ledger = {"deployment": "now", "why": "deploy"}
        return self._run("vllm_patch", {"start_budget": 2, **common, **ledger, **arguments}, check_mode)


@pytest.fixture
def machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path, lambda name, arguments, check: run_module(name, arguments, capsys, check))
    monkeypatch.setenv("PATH", f"{machine.folder}:{os.environ['PATH']}")
    return machine


@pytest.fixture
def server() -> Iterator[tuple[str, list[int]]]:
    """Return a URL, and the statuses that it answers: the first until it is the only one."""
    statuses = [503, 200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}/health", statuses
        http.shutdown()
        thread.join()


def test_the_unit_is_stopped_for_the_change_and_started_after_it(machine: Machine) -> None:
    plan = plan_of()
    predicted = machine.run(True, plan=plan)
    assert (machine.calls, machine.host.store.exists()) == ([], False)
    done = machine.run(plan=plan)
    assert (predicted["changed"], predicted["diff"]) == (done["changed"], done["diff"])
    assert (machine.calls, machine.active, machine.noted()) == (["stop", "start"], "active", False)
    assert done["unit_state"] == "active"
    assert digests(machine.host.bytes()) == patched(plan)
    (entry,) = machine.ledger()
    assert {**entry, "time": "", "files": ""} == {
        "time": "",
        "deployment": "now",
        "why": "deploy",
        "action": "patch",
        "package_dir": str(machine.host.package_dir),
        "from": "",
        "to": "toy",
        "files": "",
    }
    before, after = digests(PRISTINE), patched(plan)
    assert entry["files"] == {path: {"before": before[path], "after": after[path]} for path in PATHS}


def test_nothing_to_change_touches_nothing(machine: Machine) -> None:
    plan = plan_of()
    machine.run(plan=plan)
    assert not machine.run(plan=plan)["changed"]
    assert machine.calls == ["stop", "start"]
    assert len(machine.ledger()) == 1


@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_a_unit_that_does_not_run_is_not_started(machine: Machine, state: str) -> None:
    machine.state(state)
    assert machine.run(plan=plan_of())["changed"]
    assert (machine.calls, machine.active, machine.noted()) == ([], state, False)
    assert machine.run(True, plan=plan_of())["unit_state"] == state
    assert len(machine.ledger()) == 1


@pytest.mark.parametrize("check_mode", [True, False])
def test_an_unknown_unit_is_refused(machine: Machine, check_mode: bool) -> None:
    machine.it("gone")
    result = machine.run(check_mode, plan=plan_of())
    assert result["msg"] == f"{UNIT} is no unit of this host: correct aerie_adopted_unit"
    assert machine.host.bytes() == PRISTINE


def test_a_url_that_cannot_be_asked_is_refused(machine: Machine) -> None:
    result = machine.run(plan=plan_of(), health_url="localhost:8000")
    assert "vllm_patch_adopted_health_url is localhost:8000: begin it with http://" in result["msg"]
    assert (machine.calls, machine.host.bytes()) == ([], PRISTINE)


def test_the_unit_is_started_where_the_ledger_cannot_be_written(machine: Machine) -> None:
    (machine.host.store / "ledger.jsonl").mkdir(parents=True)
    result = machine.run(plan=plan_of())
    assert f"Is a directory: '{machine.host.store / 'ledger.jsonl'}'" in result["msg"]
    assert (machine.calls, machine.active, machine.noted()) == (["stop", "start"], "active", False)


def test_a_unit_that_cannot_be_stopped_leaves_the_files(machine: Machine) -> None:
    machine.it("stuck")
    result = machine.run(plan=plan_of())
    assert result["msg"] == f"{UNIT} cannot be stopped, so nothing was changed: Job canceled."
    assert machine.host.bytes() == PRISTINE


def test_files_are_put_back_where_the_unit_does_not_come_back(machine: Machine) -> None:
    machine.it("refuse")
    result = machine.run(plan=plan_of())
    assert result["failed"]
    assert f"{UNIT} on {os.uname().nodename} did not come back with the changed files: " in result["msg"]
    assert "exited with status 3: RuntimeError: no kernel" in result["msg"]
    assert result["msg"].endswith(f"The files are as they were, and {UNIT} runs again")
    assert machine.host.bytes() == PRISTINE
    assert (machine.active, machine.noted()) == ("active", False)
    assert machine.calls == ["stop", "start", "stop", "start"]
    tried, undone = machine.ledger()
    assert [(entry["action"], entry["from"], entry["to"]) for entry in (tried, undone)] == [
        ("patch", "", "toy"),
        ("unpatch", "toy", ""),
    ]
    assert undone["files"] == {path: {"before": d["after"], "after": d["before"]} for path, d in tried["files"].items()}
    assert "no kernel" in undone["why"]
    # As if it had never been tried.
    assert not machine.run(state="absent")["changed"]


def test_what_was_there_before_is_put_back_and_not_the_pristine_files(machine: Machine) -> None:
    edit = {"id": "opt-in", "op": "add_class_attribute", "class": "Mixin", "code": "touched = True"}
    older = plan_of(files=[{"path": toy_vllm.INTERFACES, "edits": [edit]}])
    machine.run(plan=older)
    before = machine.host.bytes()
    assert before != PRISTINE
    machine.it("refuse")
    assert machine.run(plan=plan_of())["failed"]
    assert machine.host.bytes() == before
    assert (machine.active, machine.ledger()[-1]["to"]) == ("active", "toy")
    # The record is that of the older patch.
    assert machine.run(state="absent")["changed"]
    assert machine.host.bytes() == PRISTINE


def test_a_unit_that_runs_with_neither_is_said(machine: Machine) -> None:
    program = machine.folder / "systemctl"
    program.write_text(program.read_text().replace("echo active > state", "echo failed > state"))
    result = machine.run(plan=plan_of())
    assert f"The files are as they were, and {UNIT} does not run either: it exited with status 3" in result["msg"]
    assert machine.host.bytes() == PRISTINE
    # The next run starts it.
    assert machine.noted()


def test_the_unit_is_back_when_its_url_answers_200(machine: Machine, server: tuple[str, list[int]]) -> None:
    url, statuses = server
    assert machine.run(plan=plan_of(), health_url=url)["changed"]
    assert statuses == [200]


def test_a_url_that_does_not_answer_200_in_time_is_a_failure(machine: Machine, server: tuple[str, list[int]]) -> None:
    url, statuses = server
    statuses[:] = [503]
    result = machine.run(plan=plan_of(), health_url=url, start_budget=1)
    assert f"{url} did not answer 200 after 1 s" in result["msg"]
    assert machine.host.bytes() == PRISTINE


def test_without_a_url_it_has_to_stay_up(machine: Machine) -> None:
    machine.it("brief")
    result = machine.run(plan=plan_of())
    assert "did not come back with the changed files: it exited with status 3" in result["msg"]
    assert machine.host.bytes() == PRISTINE


def test_the_unit_is_started_where_the_files_cannot_be_written(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = (machine.host.package_dir / toy_vllm.MODEL).parent
    monkeypatch.setattr("ansible.module_utils.aerie.patcher.tempfile.mkstemp", _full(folder))
    result = machine.run(plan=plan_of())
    assert "No space left on device" in result["msg"]
    assert machine.host.bytes() == PRISTINE
    assert (machine.calls, machine.active, machine.noted()) == (["stop", "start"], "active", False)


def _full(folder: Path) -> Callable[..., tuple[int, str]]:
    """Return a mkstemp for a disk that is full below ``folder``."""
    real = tempfile.mkstemp

    def mkstemp(**options: Any) -> tuple[int, str]:  # noqa: ANN401
        if Path(options["dir"]) == folder:
            raise OSError(28, "No space left on device", str(folder))
        return real(**options)

    return mkstemp


@pytest.mark.parametrize("undo", [False, True])
def test_a_run_killed_while_the_unit_is_stopped_is_finished_by_the_next(machine: Machine, undo: bool) -> None:
    plan = plan_of()
    if undo:
        machine.run(plan=plan)
    arguments: dict[str, Any] = {"state": "absent"} if undo else {"plan": plan}
    before = machine.host.bytes()
    _killed_before_the_start(machine, None if undo else plan)
    assert (machine.active, machine.noted()) == ("inactive", True)
    assert machine.host.bytes() != before

    predicted = machine.run(True, **arguments)
    assert (predicted["changed"], predicted["interrupted"], predicted["diff"]) == (True, True, [])
    assert machine.active == "inactive"
    assert machine.run(**arguments)["changed"]
    assert (machine.active, machine.noted()) == ("active", False)
    assert not machine.run(**arguments)["changed"]


def _killed_before_the_start(machine: Machine, plan: dict[str, Any] | None) -> None:
    class Killed(UserUnit):
        def start(self) -> str:
            os.kill(os.getpid(), signal.SIGKILL)
            return ""

    child = os.fork()
    if not child:
        host = machine.host
        unit = Killed(UNIT, "", 2, host.store / f"stopped-{UNIT}")
        package = package_of_directory(host.package_dir)
        try:
            Adopted(Patcher(host.package_dir, host.store), package, unit, {}).change(host.work(plan))
        except Refusal:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def adopted(machine: Machine) -> Adopted:
    host = machine.host
    unit = UserUnit(UNIT, "", 2, host.store / f"stopped-{UNIT}")
    return Adopted(Patcher(host.package_dir, host.store), package_of_directory(host.package_dir), unit, {})


@pytest.mark.parametrize("second", ["the same patch", "the undo"])
def test_of_two_runs_planned_at_once_the_second_leaves_the_unit_alone(machine: Machine, second: str) -> None:
    plan = plan_of()
    if second == "the undo":
        adopted(machine).change(machine.host.work(plan_of(versions=">=0.30", name="older")))
    works = [machine.host.work(plan), machine.host.work(plan if second == "the same patch" else None)]
    adopted(machine).change(works[0])
    calls = machine.calls
    with pytest.raises(Refusal, match="was patched by another run meanwhile: run again"):
        adopted(machine).change(works[1])
    assert (machine.calls, machine.active, machine.noted()) == (calls, "active", False)
    assert digests(machine.host.bytes()) == patched(plan)


def test_another_run_is_kept_out_from_the_stop_until_the_unit_is_back(machine: Machine) -> None:
    """The other run plans and tries whenever the first one has systemd do something."""
    host, said = machine.host, []

    class Watched(UserUnit):
        def stop(self) -> None:
            super().stop()
            self.other()

        def start(self) -> str:
            self.other()
            fault = super().start()
            self.other()
            return fault

        def other(self) -> None:
            before = machine.calls
            with pytest.raises(Refusal) as refusal:
                adopted(machine).change(host.work(None))
            said.append(str(refusal.value))
            assert machine.calls == before

    first = adopted(machine)
    unit = Watched(UNIT, "", 2, host.store / f"stopped-{UNIT}")
    Adopted(first.patcher, first.package, unit, {}).change(host.work(plan_of()))
    assert len(said) == 3
    assert all(message.startswith("another run is patching (") for message in said)
    assert (machine.calls, machine.active, machine.noted()) == (["stop", "start"], "active", False)


def test_a_unit_that_another_run_has_started_again_is_not_stopped_once_more(machine: Machine) -> None:
    plan = plan_of()
    machine.run(plan=plan)
    # Planned while the other run had the unit stopped: nothing to change, but to start it.
    done: Work = machine.host.work(plan)
    adopted(machine).change(done)
    assert machine.calls == ["stop", "start"]


def test_without_a_unit_nothing_is_stopped(machine: Machine) -> None:
    assert machine.run(plan=plan_of(), unit="")["changed"]
    assert machine.calls == []
    assert len(machine.ledger()) == 1


def test_without_a_deployment_there_is_no_ledger(machine: Machine) -> None:
    assert machine.run(plan=plan_of(), deployment="")["changed"]
    assert machine.ledger() == []
