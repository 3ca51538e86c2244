# SPDX-License-Identifier: Apache-2.0
"""The parts of a replica over several hosts: processes on addresses of this machine, with toys for Ray and vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "roles/multi_node/files/aerie_node.py"
HOSTS = ("127.77.0.1", "127.77.0.2", "127.77.0.3")
PATIENCE_S = 20.0

# Listens where Ray would.
TOY_RAY = """
    #!{python}
    import signal, socket, sys
    options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[2:])
    ports = [options["node-manager-port"], *([options["port"]] if "head" in options else [])]
    open(f"{log}/" + options["node-ip-address"], "a").write(" ".join(sys.argv[1:]) + "\\n")
    listeners = [socket.create_server((options["node-ip-address"], int(port))) for port in ports]
    signal.pause()
"""
TOY_VLLM = """
    #!{python}
    import os, signal, sys
    signal.signal(signal.SIGTERM, lambda *_: (print("vllm: answers what runs", flush=True), sys.exit(0)))
    print("vllm: serves with", os.environ["RAY_ADDRESS"], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
    while True:
        signal.pause()
"""


class Part:
    """One host's program, and what it printed."""

    def __init__(self, command: list[str], settings: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line)
                self._more.notify_all()

    def says(self, words: str) -> bool:
        """Wait until it said ``words``."""
        with self._more:
            return self._more.wait_for(lambda: words in "".join(self.lines), PATIENCE_S)

    def children(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def child(self, name: str) -> int:
        """Return the process of a toy that this part runs."""
        (found,) = [pid for pid in self.children() if name in Path(f"/proc/{pid}/cmdline").read_text()]
        return found

    def ends(self) -> int:
        """Return its exit status, as systemd would see it, and kill what it leaves, as systemd would."""
        status = self.process.wait(PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return status

    def kill(self) -> None:
        """Have the whole part end at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Starter = Callable[..., Part]


def free_range() -> int:
    """Return a port after which ten more are free on all addresses."""
    for base in range(21000, 32000, 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for host in HOSTS:
                for port in range(base, base + 10):
                    stack.enter_context(socket.create_server((host, port)))
            return base
    raise AssertionError("no free ports")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    port = free_range()
    parts: list[Part] = []

    def script(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip().format(python=sys.executable, log=tmp_path))
        path.chmod(0o755)

    def starter(place: int, hosts: int = 2, release: str = "1111111111111111", wait_s: float = 60, **more: str) -> Part:
        root = tmp_path / "releases" / release
        if not root.exists():
            (root / "lib").mkdir(parents=True)
            shutil.copy(PROGRAM, root / "lib")
            script(root / "venv/bin/ray", TOY_RAY)
            script(root / "venv/bin/vllm", TOY_VLLM)
            (root / "venv/bin/python").symlink_to(sys.executable)
        settings = {
            "PATH": "/usr/bin:/bin",
            "AERIE_REPLICA_HOSTS": ",".join(HOSTS[:hosts]),
            "VLLM_HOST_IP": HOSTS[place],
            "AERIE_REPLICA_PORT": str(port),
            "AERIE_REPLICA_GPUS": "8",
            "AERIE_REPLICA_OBJECT_STORE_MB": "512",
            "AERIE_REPLICA_WAIT_S": str(wait_s),
            **more,
        }
        # As the unit does: by another path, which is not the release's own.
        parts.append(Part([sys.executable, str(root / "lib/aerie_node.py"), str(root / "venv/bin/vllm")], settings))
        return parts[-1]

    yield starter
    for part in parts:
        with contextlib.suppress(ProcessLookupError):
            part.kill()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_in_whatever_order_they_start_vllm_begins_once_all_are_there(start: Starter, order: tuple[int, ...]) -> None:
    parts = {place: start(place, hosts=3) for place in order[:2]}
    # The last one is missing.
    told = f"waits for {HOSTS[order[2]]}" if order[2] else f"waits for the head at {HOSTS[0]}"
    assert parts[0 if order[2] else 1].says(told)
    assert not any("vllm:" in line for part in parts.values() for line in part.lines)
    parts[order[2]] = start(order[2], hosts=3)
    assert parts[0].says("vllm: serves with 127.77.0.1:")
    assert parts[0].says(" lo\n")
    for place in (1, 2):
        assert parts[place].says(f"joined {HOSTS[0]}")
        assert not any("vllm:" in line for line in parts[place].lines)


def test_every_port_of_ray_is_fixed_and_there_is_no_dashboard(start: Starter, tmp_path: Path) -> None:
    head, worker = start(0), start(1)
    assert head.says("vllm: serves")
    assert worker.says("joined")
    of_head, of_worker = ((tmp_path / host).read_text() for host in HOSTS[:2])
    assert "--include-dashboard=false" in of_head
    assert "--num-gpus=8 " in of_head and "--num-gpus=8 " in of_worker
    assert f"--object-store-memory={512 << 20} " in of_worker
    ports = [int(word.partition("=")[2]) for word in of_head.split() if "port=" in word]
    assert len(set(ports)) == len(ports) == 9
    assert max(ports) - min(ports) < 100


def test_the_command_line_names_the_release(start: Starter) -> None:
    head = start(0)
    assert head.says("waits for")
    assert "/releases/1111111111111111/venv/bin/python" in Path(f"/proc/{head.process.pid}/cmdline").read_text()


@pytest.mark.parametrize("victim", ["worker", "worker's Ray", "head's Ray", "vLLM", "head"])
def test_whatever_ends_all_parts_end_at_once(start: Starter, victim: str) -> None:
    head, worker = start(0), start(1)
    assert head.says("vllm: serves")
    began = time.monotonic()
    if victim == "worker":
        worker.kill()
    elif victim == "head":
        head.kill()
    else:
        part, name = {"worker's Ray": (worker, "ray"), "head's Ray": (head, "ray"), "vLLM": (head, "vllm")}[victim]
        os.kill(part.child(f"bin/{name}"), signal.SIGKILL)
    if victim != "head":
        assert head.ends() == 1
    if victim != "worker":
        assert worker.ends() == 1
    assert time.monotonic() - began < 5
    # And come again.
    head, worker = start(0), start(1)
    assert head.says("vllm: serves")
    assert worker.says("joined")


def test_a_host_that_starts_again_before_its_end_was_noticed(start: Starter) -> None:
    head, worker = start(0), start(1)
    assert head.says("vllm: serves")
    # As after a power failure: the old connection says nothing.
    os.killpg(worker.process.pid, signal.SIGSTOP)
    with from_the_worker(head) as again:
        again.sendall(greeting())
        assert head.ends() == 1
    assert head.says(f"{HOSTS[1]} is gone")


def test_what_connects_from_a_present_host_and_is_not_it_does_no_harm(start: Starter) -> None:
    head, worker = start(0), start(1)
    assert head.says("vllm: serves")
    with from_the_worker(head):  # It says nothing, and keeps nobody waiting.
        for text in (b"", b"\n", b"[1]\n", b"{}\n", b"\xff\xfe\n", b"x" * 100000):
            with from_the_worker(head) as other, contextlib.suppress(ConnectionError):
                other.sendall(text)
                other.shutdown(socket.SHUT_WR)
                while other.recv(1024):
                    pass
        # A head that had forgotten its worker would answer at most one of these.
        for _ in range(3):
            with from_the_worker(head) as other, other.makefile() as answers:
                other.sendall(greeting("2222222222222222"))
                assert "the head has release 1111111111111111" in answers.readline()
    assert head.process.poll() is None
    assert worker.process.poll() is None


def from_the_worker(head: Part) -> socket.socket:
    """Return a connection to the head's program from the other host's address."""
    return socket.create_connection((HOSTS[0], int(port_of(head)) + 1), PATIENCE_S, (HOSTS[1], 0))


def greeting(release: str = "1111111111111111") -> bytes:
    return f"{json.dumps({'release': release, 'python': platform.python_version()})}\n".encode()


def port_of(head: Part) -> str:
    (line,) = [line for line in head.lines if "serves with" in line]
    return line.split()[3].rpartition(":")[2]


def test_a_stop_lets_vllm_answer_what_runs(start: Starter) -> None:
    head, worker = start(0), start(1)
    assert head.says("vllm: serves")
    head.process.send_signal(signal.SIGTERM)
    assert head.ends() == 0
    assert head.says("vllm: answers what runs")
    assert worker.ends() == 1
    alone = start(1)
    assert alone.says("waits for the head")
    alone.process.send_signal(signal.SIGTERM)
    assert alone.ends() == 0


def test_another_release_is_refused_until_it_is_the_same(start: Starter) -> None:
    head, other = start(0), start(1, release="2222222222222222")
    assert other.says(f"the head has release 1111111111111111, and {HOSTS[1]} has 2222222222222222")
    assert not any("serves" in line for line in head.lines)
    assert other.process.poll() is None
    head.process.send_signal(signal.SIGTERM)
    assert head.ends() == 0
    assert start(0, release="2222222222222222").says("vllm: serves")
    assert other.says("joined")


def test_a_stranger_is_refused(start: Starter) -> None:
    head = start(0)
    assert head.says("waits for")
    stranger = start(2, AERIE_REPLICA_HOSTS=",".join((HOSTS[0], HOSTS[2])))
    assert stranger.says(f"{HOSTS[2]} is no host of this replica")


def test_the_head_does_not_wait_for_ever(start: Starter) -> None:
    head = start(0, wait_s=1)
    assert head.ends() == 1
    assert head.says(f"{HOSTS[1]} did not come within 1 s: see vllm.service there")


def test_garbage_does_not_harm_the_head(start: Starter) -> None:
    head = start(0)
    assert head.says("waits for")
    worker = start(1)
    assert head.says("vllm: serves")
    for text in (b"", b"\n", b"[1]\n", b"\xff\xfe\n", b"x" * 100000):
        with socket.create_connection((HOSTS[0], int(port_of(head)) + 1)) as connection:
            connection.sendall(text)
    assert head.process.poll() is None
    assert worker.process.poll() is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"VLLM_HOST_IP": "127.77.0.9"}, "VLLM_HOST_IP is 127.77.0.9, which is none of AERIE_REPLICA_HOSTS"),
        ({"AERIE_REPLICA_PORT": "ray"}, "the settings in /etc/aerie are not complete"),
        (
            {"VLLM_HOST_IP": "192.0.2.1", "AERIE_REPLICA_HOSTS": "192.0.2.1,192.0.2.2"},
            "no network interface of this host has the address 192.0.2.1: correct multi_node_address",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(start: Starter, settings: dict[str, str], why: str) -> None:
    part = start(0, **settings)
    assert part.ends() == 1
    assert part.says(why)


def test_systemd_is_told_how_far_it_is(start: Starter, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(PATIENCE_S)
        start(0, NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert notified.recv(1000).decode() == f"STATUS=waits for {HOSTS[1]}"
