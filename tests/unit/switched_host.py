# SPDX-License-Identifier: Apache-2.0
"""A host below a directory: releases with a toy vLLM, a systemctl that starts and stops it, and the switch program.

Everything is real but systemd: processes, sockets, files, signals. The program runs as a child of the test, so that it
can be killed at any step. What it takes for the service's processes are those that this systemctl started, and no
others: it kills what remains of them.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import http.client
import json
import os
import pwd
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from ansible.module_utils.aerie import readiness, switch
from ansible.module_utils.aerie.evidence import bytes_read, stack_lines
from ansible.module_utils.aerie.host_key import host_key
from ansible.module_utils.aerie.journal import Journal
from ansible.module_utils.aerie.leftovers import Service
from ansible.module_utils.aerie.release import Releases, release_id
from ansible.module_utils.aerie.resume import UNIT
from modules import run_module

USER = pwd.getpwuid(os.getuid()).pw_name
GROUP = grp.getgrgid(os.getgid()).gr_name
SERVICE = "vllm.service"
_LIMIT_S = 20

_VLLM = """\
#!{python} -IS
import hashlib, json, os, socket, sys, time

release = os.path.realpath(__file__).rsplit("/venv/", 1)[0]
faults = json.load(open(release + "/serve.yaml"))
keys = os.environ["TOY_KEYS"]
depth, drafts = faults.get("depth", 0), 0


def accepted(header):
    digest = hashlib.sha256(header[len("Bearer "):].encode()).hexdigest()
    return any(digest in open(os.path.join(keys, name)).read() for name in os.listdir(keys))


def answer(path, head, body):
    global drafts
    if path == "/health":
        return faults.get("health", 200), ""
    if path == "/metrics":
        lines = ["vllm:num_requests_running 0.0"]
        if depth:
            lines += ["vllm:spec_decode_num_drafts_total %d" % drafts]
            lines += ["vllm:spec_decode_num_draft_tokens_total %d" % (depth * drafts)]
            lines += ["vllm:spec_decode_num_accepted_tokens_total 0"]
            for position in range(depth):
                lines += ['vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="%d"}} 0' % position]
        return 200, "\\n".join(lines) + "\\n"
    if not accepted(head.get("authorization", "")):
        return 401, ""
    if path == "/v1/models":
        return 200, json.dumps({{"data": [{{"id": faults.get("model", "kimi")}}]}})
    if faults.get("silent"):
        time.sleep(3600)
    count = json.loads(body)["max_tokens"]
    if count > 1:
        time.sleep(faults.get("sample_s", 0))
    drafts += count - 1
    return 200, json.dumps({{"usage": {{"completion_tokens": count}}}})


if faults.get("die"):
    sys.exit("the toy was told to die")
server = socket.create_server((os.environ["AERIE_HOST"], int(os.environ["AERIE_PORT"])))
os.close(3)
if faults.get("orphan"):
    orphan = os.fork()
    if not orphan:
        # Holds the port until it is let go.
        os.close(os.open(faults["orphan"], os.O_RDONLY))
        os._exit(0)
    if faults.get("seen"):
        os.symlink("/proc/%d" % orphan, "%s/%d" % (faults["seen"], orphan))
while True:
    client, _ = server.accept()
    stream = client.makefile("rb")
    path = stream.readline().decode().split()[1]
    head = {{}}
    for line in stream:
        if not line.strip():
            break
        name, _, value = line.decode().partition(":")
        head[name.lower()] = value.strip()
    body = stream.read(int(head.get("content-length", 0)))
    status, text = answer(path, head, body)
    client.sendall(("HTTP/1.0 %d X\\r\\n\\r\\n%s" % (status, text)).encode())
    stream.close()
    client.close()
"""

# `start` returns when the toy serves, or has ended: it holds descriptor 3 open until then.
_SYSTEMCTL = """\
#!/bin/sh
cd {state}
echo "$*" >> calls
verb=$1
if [ -e "hold-$verb" ]; then
    touch held
    while [ -e "hold-$verb" ]; do sleep 0.01; done
fi
if [ -e "fail-$verb" ]; then echo "Unit is broken." >&2; exit 1; fi
pid=$(cat pid 2>/dev/null)
alive() {{ grep -q '^State:[[:space:]]*[^Z[:space:]]' "/proc/${{1:-none}}/status" 2>/dev/null; }}
active=inactive sub=dead main=0 result=success code=0 status=0
if alive "$pid"; then active=active sub=running main=$pid
elif [ -n "$pid" ]; then active=failed sub=failed result=exit-code code=1 status=1
fi
case "$*" in
"show --property=MainPID --value {service}") echo "$main" ;;
"show --property=ActiveState --value {service}") echo "$active" ;;
"show {service} "*)
    group=$(head -n 1 /proc/self/cgroup | cut -d : -f 3-)
    printf '%s\\n' LoadState=loaded "ActiveState=$active" "SubState=$sub" "MainPID=$main" NRestarts=0 \
        "InvocationID=$(cat invocation)" "Result=$result" "ExecMainCode=$code" "ExecMainStatus=$status" \
        "ExecMainStartTimestampMonotonic=$(cat began)" "ControlGroup=$group"
    ;;
"start {service}")
    if alive "$pid"; then exit 0; fi
    tr -d - < /proc/sys/kernel/random/uuid > invocation
    awk '{{ printf "%.0f", $1 * 1000000 }}' /proc/uptime > began
    command=$(sed -n s/^ExecStart=//p {unit})
    rm -f serving; mkfifo serving
    (set -a; . {settings}; exec $command) < /dev/null >> log 2>&1 3> serving &
    echo $! > pid
    echo $! > cgroup/toy/cgroup.procs
    ln -sf /proc/$! {proc}/
    cat serving
    ;;
"stop {service}")
    if [ ! -e {unit} ]; then exit 5; fi
    if alive "$pid"; then kill "$pid"; fi
    while alive "$pid"; do sleep 0.002; done
    rm -f pid
    ;;
"enable {service}") touch enabled ;;
"disable {service}") rm -f enabled ;;
"show aerie-watchdog.timer "*) cat timer ;;
"show {switch} "*) cat switch ;;
"start --no-block {switch}") if [ ! -e broken ]; then echo ActiveState=active > switch; fi ;;
"is-enabled {service}") if [ -e enabled ]; then echo enabled; else exit 1; fi ;;
esac
"""


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; a failure says which one did not come true."""
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.005)


class Program:
    """The switch program, a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = False

    def runs(self) -> bool:
        return not self.ended and _runs(self.pid)

    def wait(self) -> int:
        """Return its exit status, or the negative number of the signal that ended it."""
        _, status = os.waitpid(self.pid, 0)
        self.ended = True
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL


class Host:
    """The host. ``root`` is what /opt/aerie is elsewhere."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._directory = directory
        self._capsys = capsys
        self._path = os.environ["PATH"]
        self.root = directory / "aerie"
        self.etc = directory / "etc"
        self.state = directory / "systemd"
        self.keys = directory / "keys"
        self.proc = directory / "proc"
        self.shared_memory = directory / "shm"
        for path in (self.root, self.etc, self.state, self.keys, self.proc, self.shared_memory, directory / "bin"):
            path.mkdir()
        (self.state / "cgroup/toy").mkdir(parents=True)
        (self.proc / "self").symlink_to("/proc/self")
        self.unit = self.etc / SERVICE
        self.releases = Releases(self.root)
        self.journal = Journal(self.root)
        self.programs: list[Program] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        text = _SYSTEMCTL.format(
            state=self.state,
            service=SERVICE,
            switch=UNIT,
            unit=self.unit,
            settings=self.etc / "vllm.env",
            proc=self.proc,
        )
        self.switch_unit("ActiveState=inactive")
        self.put_program("systemctl", text)
        self.put_program("journalctl", "#!/bin/sh\n")
        # Programs of the host's own would tell of its GPUs, and stop its processes.
        self.put_program("nvidia-smi", "#!/bin/sh\n")
        self.put_program("py-spy", "#!/bin/sh\n")

    def put_program(self, name: str, text: str) -> None:
        path = self._directory / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def _at_home(self) -> None:
        """Have this process find the host's programs, and no other's."""
        os.environ["PATH"] = f"{self._directory / 'bin'}:{self._path}"

    # --- What a deploy does before

    def settings(self, **more: str) -> dict[str, str]:
        variables = {"AERIE_HOST": "127.0.0.1", "AERIE_PORT": str(self.port), "TOY_KEYS": str(self.keys), **more}
        return {str(self.etc / "vllm.env"): "".join(f"{name}={value}\n" for name, value in variables.items())}

    def stage(
        self,
        name: str,
        depth: int = 0,
        complete: bool = True,
        more: Mapping[str, object] | None = None,
        **faults: object,
    ) -> str:
        """Stage a release whose vLLM has these faults, and which is made from ``more`` as well; return its id."""
        inputs = {
            "name": name,
            "serves": {"model": "kimi", "speculative_tokens": depth, "tap_ids": [], "target_bytes": 1},
            **(more or {}),
        }
        unit = f"# Written by Aerie: {name}\n[Service]\nExecStart={self.root}/current/venv/bin/vllm\n"
        files = {"serve.yaml": json.dumps({"depth": depth, **faults}), SERVICE: unit}
        identity = release_id(inputs, files)
        self.releases.stage(identity, self.releases.changes(inputs, files))
        programs = self.releases.path(identity) / "venv/bin"
        programs.mkdir(parents=True, exist_ok=True)
        (programs / "python").symlink_to(Path(sys.executable).resolve())
        (programs / "vllm").write_text(_VLLM.format(python=programs / "python"))
        (programs / "vllm").chmod(0o755)
        if complete:
            self.releases.complete(identity, {})
        return identity

    def serve(self, identity: str, deployment: str = "first") -> None:
        """Have a release serve, as an earlier deployment left it."""
        for path, text in self.settings().items():
            Path(path).write_text(text)
        self._at_home()
        self.releases.activate(identity, self.unit)
        for verb in ("enable", "start"):
            subprocess.run(["systemctl", verb, SERVICE], check=True)
        entry = {"deployment": deployment, "from": "", "to": identity, "gates": []}
        self.releases.append_to_ledger({**entry, "action": "activate"})
        self.releases.append_to_ledger({**entry, "action": "confirm"})

    # --- The switch

    def switch(self, state: str, check_mode: bool = False, **arguments: object) -> dict[str, Any]:
        """Call the module."""
        self._at_home()
        common = {"root": str(self.root), "state": state, "deployment": "second", "window_s": 0.3}
        return run_module("switch", {**common, **arguments}, self._capsys, check_mode)

    def start(self, identity: str, check_mode: bool = False, **arguments: object) -> dict[str, Any]:
        common = {"unit": str(self.unit), "user": GROUP, "settings": self.settings(), "start_budget_s": 10}
        return self.switch("started", check_mode, id=identity, **{**common, **arguments})

    def program(
        self, die_at: int = 0, after: str = "", boot: str = "", notify: Path | None = None, largest: int = 0
    ) -> Program:
        """Run the program, which kills itself before its ``die_at``-th step (of those in the phase ``after``).

        It takes ``boot`` for the name of the boot, ``notify`` for systemd's socket, and can write no file larger than
        ``largest``.
        """
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                signal.alarm(_LIMIT_S)
                log = os.open(self._directory / "program.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                self._at_home()
                self._confine(boot, notify, largest)
                if die_at:
                    sys.addaudithook(_Death(self, die_at, after))
                status = switch.main(self.root)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        self.programs.append(Program(pid))
        return self.programs[-1]

    def _confine(self, boot: str, notify: Path | None, largest: int) -> None:
        # In the child only.
        cgroups = self.state / "cgroup"
        vars(readiness).update(
            stack_lines=lambda _, run: stack_lines("toy", run, cgroups=cgroups),
            bytes_read=lambda _: bytes_read("toy", cgroups=cgroups),
        )
        vars(switch).update(
            Service=lambda _, address, port: Service(USER, address, port, self.proc, self.shared_memory),
            host_key=functools.partial(host_key, directory=self.keys),
            _POLL_S=0.01,
            _WATCH_S=0.3,
            _ROOM_S=0.01,
            _CLEAR_S=0.3,
            _HEARD_S=0.05,
            _HEARD_SOON_S=0.02,
        )
        if largest:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        if boot:
            vars(switch).update(boot_id=lambda: boot)
        os.environ["NOTIFY_SOCKET"] = str(notify or "")

    def awaits(self, phase: str) -> None:
        """Wait until the switch is in this phase."""
        until(lambda: self.journal.load() and self.journal.state["phase"] == phase)

    def hold(self, verb: str) -> None:
        """Have systemctl wait before it does this."""
        (self.state / f"hold-{verb}").touch()

    def held(self) -> None:
        """Wait until systemctl waits."""
        until((self.state / "held").exists)

    def release(self, verb: str) -> None:
        (self.state / "held").unlink(missing_ok=True)
        (self.state / f"hold-{verb}").unlink()

    def fail(self, verb: str) -> None:
        """Have systemctl fail to do this."""
        (self.state / f"fail-{verb}").touch()

    def mend(self, verb: str) -> None:
        (self.state / f"fail-{verb}").unlink()

    def switch_unit(self, *properties: str, broken: bool = False) -> None:
        """Have systemd tell this of the program's unit until it is started, which it cannot be if it is ``broken``."""
        (self.state / "switch").write_text("".join(f"{line}\n" for line in properties))
        if broken:
            (self.state / "broken").touch()

    def power_cut(self) -> None:
        """What a reboot ends."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        until(lambda: not self.processes())
        (self.state / "pid").unlink(missing_ok=True)

    # --- What there is

    def pid(self) -> int:
        """Return the service's main process, or 0."""
        try:
            pid = int((self.state / "pid").read_text())
        except FileNotFoundError:
            return 0
        return pid if _runs(pid) else 0

    def processes(self) -> list[int]:
        """Return what runs of all that a service of this host ever started."""
        return [int(path.name) for path in self.proc.glob("[0-9]*") if _runs(int(path.name))]

    def running(self) -> str:
        """Return the release that the service's process runs, or nothing; it answers if there is one."""
        pid = self.pid()
        if not pid:
            return ""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        except ConnectionError:
            # It is not up yet, or ends at this moment.
            return ""
        finally:
            connection.close()
        # One that answered and has ended since has no command line any more.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, _, path = Path(f"/proc/{pid}/cmdline").read_text().partition("/releases/")
            return path.partition("/")[0]
        return ""

    def serves(self, identity: str) -> bool:
        """Say whether this release runs, and is all that there is of a release that serves."""
        unit = (self.releases.path(identity) / SERVICE).read_text()
        return (self.running(), self.releases.current(), self.unit.read_text()) == (identity, identity, unit)

    def is_enabled(self) -> bool:
        return (self.state / "enabled").exists()

    def said(self) -> str:
        return (self._directory / "program.log").read_text()

    def actions(self, deployment: str = "second") -> list[str]:
        entries = [json.loads(line) for line in (self.root / "ledger.jsonl").read_text().splitlines()]
        return [entry["action"] for entry in entries if entry["deployment"] == deployment]

    def calls(self) -> list[str]:
        """Return what systemctl was told to do since the last look."""
        path = self.state / "calls"
        calls = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [call for call in calls if not call.startswith(("show", "is-"))]

    def tree(self) -> dict[str, object]:
        """Return every file of the host's with its bytes and mode, but for what systemctl notes."""
        found: dict[str, object] = {}
        for top in (self.root, self.etc):
            for path in top.rglob("*"):
                if path.is_symlink():
                    found[str(path)] = str(path.readlink())
                elif path.is_file():
                    found[str(path)] = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        return found

    def over(self) -> None:
        """Assert that nothing of a switch is left but its end."""
        assert not self.journal.path.exists()
        assert not (self.journal.directory / "ballast").exists()
        assert list(self.keys.iterdir()) == []


class _Death:
    """An audit hook that kills its process before one of the steps that change anything."""

    def __init__(self, host: Host, step: int, after: str) -> None:
        self._host = host
        self._left = step
        self._after = after

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._changes(event, arguments) and (not self._after or self._phase() == self._after):
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def _phase(self) -> str:
        return str(json.loads(self._host.journal.path.read_text())["phase"])

    def _changes(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "subprocess.Popen":
            return bool(arguments[1][0] == "systemctl" and arguments[1][1] not in ("show", "is-enabled"))
        if event == "open":
            return str(arguments[0]).endswith("/ledger.jsonl") and "a" in str(arguments[1])
        if event in ("os.rename", "os.symlink", "os.remove"):
            place = str(arguments[0 if event == "os.remove" else 1])
            return place.startswith((str(self._host.root), str(self._host.etc)))
        return False


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


AnyHost = TypeVar("AnyHost", bound=Host)


@contextlib.contextmanager
def host_below(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: type[AnyHost]
) -> Iterator[AnyHost]:
    """Yield a host; end what it runs."""
    host = kind(directory, capsys)
    monkeypatch.setenv("PATH", f"{directory / 'bin'}:{os.environ['PATH']}")
    try:
        yield host
    finally:
        for program in host.programs:
            if not program.ended:
                os.kill(program.pid, signal.SIGKILL)
                program.wait()
        for hold in host.state.glob("hold-*"):
            hold.unlink()
        host.power_cut()
