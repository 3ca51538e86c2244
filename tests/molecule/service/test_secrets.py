# SPDX-License-Identifier: Apache-2.0
"""Nobody learns a secret of the service who need not: looked for everywhere, during a run that changes all of them."""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ansible_runner
import credentials
import pytest
from credentials import STATE
from fleet import HOME, SERVICE, Machine, await_that, machines

ROOT = Path(__file__).parents[3]
INVENTORY = Path(__file__).parent / "inventory"
PORT = 8000
START_S = 240.0
CREDENTIALS = f"/run/credentials/{SERVICE}"
TIMER = "aerie-watchdog.timer"
# Of a host: all that a run may write to, and not what it installs or the service compiles.
PLACES = ("/etc", HOME, "/home", "/root", "/run", "/srv", "/tmp", "/var", "/dev/shm")
# Of the control node: what Ansible, ansible-runner, Molecule and Aerie write to.
CONTROL = (Path.home() / ".ansible", Path.home() / ".cache", Path("/tmp"), Path("/var/log"), STATE)
INSTALLED = {"venv", "store", "pristine", "models", "site-packages", "python-cache", "hosts", "image", "wheels"}
LARGEST = 32 << 20


@pytest.fixture(scope="module")
def machine() -> Machine:
    return machines(INVENTORY / "hosts.yml")["service"]


# --- Looking


def files_below(directory: Path) -> Iterator[Path]:
    for here, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if name not in INSTALLED]
        yield from (Path(here, name) for name in names)


def found_in(paths: Iterable[Path], needles: dict[str, bytes], since: float = 0.0) -> set[tuple[str, str]]:
    """Return which files hold which of ``needles``; those only that changed after ``since``."""
    hits = set()
    for path in paths:
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST or status.st_ctime < since:
                continue
            content = path.read_bytes()
        except OSError:
            # It was somebody's temporary file.
            continue
        hits |= {(str(path), name) for name, needle in needles.items() if needle in content}
    return hits


class Sampler:
    """Reads, over and over, the arguments and the environment of every process of this machine and of its hosts."""

    def __init__(self, needles: dict[str, bytes]) -> None:
        self.hits: set[tuple[str, str]] = set()
        self.rounds = 0
        self.commands: set[bytes] = set()
        self._needles = needles
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.01):
            self.rounds += 1
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
                except OSError:
                    continue
                self.commands.add(command)
                for name, text in self._needles.items():
                    if text in command or text in environment:
                        self.hits.add((command.decode(errors="replace"), name))


def certificate_shown(machine: Machine) -> str:
    return ssl.get_server_certificate((str(machine.host.address), PORT), timeout=20)


def show(machine: Machine, name: str, unit: str = SERVICE) -> str:
    return machine.run("systemctl", "show", f"--property={name}", "--value", unit).strip()


def deploy(directory: Path, *options: str, accept_downtime: bool = True) -> tuple[str, str]:
    """Deploy through ansible-runner, which keeps every event below ``directory``; return status and output."""
    result: Any = ansible_runner.run(
        private_data_dir=str(directory),
        project_dir=str(ROOT),
        playbook="deploy.yml",
        inventory=[str(INVENTORY), str(credentials.INVENTORY)],
        cmdline=" ".join([f"-e accept_downtime={str(accept_downtime).lower()}", *options]),
        envvars={"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        quiet=True,
    )
    return result.status, result.stdout.read()


# --- The tests, one story


def test_the_service_has_its_secrets_and_nobody_else(machine: Machine) -> None:
    """The files that hold them, and who may read them."""
    await_that(machine.serves, "the service is up", START_S)
    secrets = credentials.load()
    assert certificate_shown(machine).split() == secrets.certificate.split()
    for name, text in {"tls-key": secrets.tls_key, "hub-token": secrets.hub_token}.items():
        (path,) = machine.path("/etc/aerie/secrets").glob(f"{name}-*")
        assert path.read_text() == text
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o600)
        command = f"cat {CREDENTIALS}/{name} > /dev/null 2>&1 && echo read || echo refused"
        readers = {user: machine.run("runuser", "-u", user, "--", "sh", "-c", command) for user in ("vllm", "nobody")}
        assert readers == {"vllm": "read\n", "nobody": "refused\n"}
    assert stat.S_IMODE(machine.path("/etc/aerie/secrets").stat().st_mode) == 0o700
    # The hub's own library finds the token where the unit says; it is in no environment.
    variables = machine.run("cat", f"/proc/{show(machine, 'MainPID')}/environ").split("\0")
    (place,) = [variable for variable in variables if variable.startswith("HF_TOKEN_PATH=")]
    program = "import hashlib, huggingface_hub as h; print(hashlib.sha256(h.get_token().encode()).hexdigest())"
    python = f"{HOME}/current/venv/bin/python"
    digest = machine.run("runuser", "-u", "vllm", "--", "env", place, "HOME=/tmp", python, "-c", program).strip()
    assert digest == hashlib.sha256(secrets.hub_token.encode()).hexdigest()


def test_a_key_of_another_certificate_is_refused_before_anything_changes(machine: Machine, tmp_path: Path) -> None:
    secrets = credentials.load()
    start, files = show(machine, "InvocationID"), sorted(machine.path("/etc/aerie/secrets").iterdir())
    other = credentials.make()
    credentials.keep(secrets._replace(tls_key=other.tls_key))
    try:
        status, said = deploy(tmp_path)
    finally:
        credentials.keep(secrets)
    assert status == "failed"
    assert "vllm_service_tls_key is not the key of vllm_service_tls_certificate: take those of one request" in said
    assert not any(text.decode() in said for text in other.needles().values())
    assert (show(machine, "InvocationID"), sorted(machine.path("/etc/aerie/secrets").iterdir())) == (start, files)


def test_a_deploy_with_other_secrets_tells_nobody(machine: Machine, tmp_path: Path) -> None:
    before, started = credentials.load(), time.time()
    start, release = show(machine, "InvocationID"), machine.current()
    after = credentials.make()
    ages = {"old": before.needles(), "new": after.needles()}
    needles = {f"{age} {name}": text for age, found in ages.items() for name, text in found.items()}
    with Sampler(needles) as sampler:
        status, said = deploy(tmp_path, "-vvv", "--diff")
    assert status == "successful", said[-3000:]
    # The service was started with them, and its release is the same.
    assert certificate_shown(machine).split() == after.certificate.split()
    assert show(machine, "InvocationID") != start
    assert machine.current() == release
    # No process had one, of those of the control node and of the host.
    for known in (b"ansible-playbook", b"-m\0ansible.module_utils.aerie.switch", b"/bin/vllm\0serve", b"sudo\0"):
        assert any(known in command for command in sampler.commands), known
    assert sampler.rounds > 100
    assert sampler.hits == set()
    # Neither did a file of the control node: events, output, facts, temporary files.
    assert "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER" in said
    control = {path for directory in (*CONTROL, tmp_path) for path in files_below(directory)}
    assert any("job_events" in str(path) for path in control)
    assert found_in(control, needles, since=started) == set()
    # On the host, those that systemd hands over have them; what they replaced is gone.
    root = str(machine.path("/")).rstrip("/")
    host = [path for place in PLACES for path in files_below(machine.path(place))]
    holding = {(path.removeprefix(root), name.partition(" ")[0]) for path, name in found_in(host, needles)}
    names = {"tls-key": after.tls_key, "hub-token": after.hub_token}
    stored = {
        f"/etc/aerie/secrets/{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}" for name, text in names.items()
    }
    assert holding == {(path, "new") for path in (*stored, *(f"{CREDENTIALS}/{name}" for name in names))}
    # The journal's files are binary: as text, too.
    journal = machine.run("sh", "-c", "journalctl --quiet --no-pager --output=export").encode()
    assert b"ansible-" in journal
    assert {name for name, text in needles.items() if text in journal} == set()


def test_a_watchdog_that_was_stopped_by_hand_is_started_by_a_deploy(machine: Machine, tmp_path: Path) -> None:
    """And the service is left alone."""
    start = show(machine, "InvocationID")
    machine.run("systemctl", "disable", "--now", TIMER)
    status, said = deploy(tmp_path)
    assert status == "successful", said[-3000:]
    assert (show(machine, "ActiveState", TIMER), show(machine, "UnitFileState", TIMER)) == ("active", "enabled")
    assert show(machine, "InvocationID") == start


def test_the_only_replica_is_not_restarted_before_somebody_says_so(machine: Machine, tmp_path: Path) -> None:
    start, release = show(machine, "InvocationID"), machine.current()
    status, said = deploy(tmp_path, "-e vllm_service_shutdown_timeout=29", accept_downtime=False)
    # Long lines are broken where they are shown.
    said = " ".join(said.split())
    assert status == "failed"
    assert f"{machine.name} is the only replica, and has to restart: nothing serves meanwhile." in said
    # What it would be, why, and for how long.
    assert f"{machine.name}: restarts with release " in said
    assert "serve.yaml" in said and "the last start took" in said
    assert "There is no gateway (group load_balancer)" in said
    assert (show(machine, "InvocationID"), machine.current()) == (start, release)
