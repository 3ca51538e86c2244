# SPDX-License-Identifier: Apache-2.0
"""Why ssh fails, step by step, against SSH servers that the tests run on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko  # type: ignore[import-untyped]
import pytest
from ansible.module_utils.aerie.ssh_reach import explain, known_keys
from ansible.module_utils.aerie.ssh_settings import Settings
from preflight_findings_text import messages

HOST_KEY = paramiko.ECDSAKey.generate()
OTHER_KEY = paramiko.ECDSAKey.generate()
SAID = "Failed to connect to the host via ssh: deploy@127.0.0.1: Permission denied (publickey)."


class Login(paramiko.ServerInterface):  # type: ignore[misc]
    """Takes one key, or one password, from the user `deploy`."""

    def __init__(self, key: paramiko.PKey | None, password: str, methods: str, more: bool) -> None:
        self.key, self.password, self.methods, self.more = key, password, methods, more

    def get_allowed_auths(self, username: str) -> str:
        return self.methods

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if username != "deploy" or self.key is None or key.asbytes() != self.key.asbytes():
            return int(paramiko.AUTH_FAILED)
        return int(paramiko.AUTH_PARTIALLY_SUCCESSFUL if self.more else paramiko.AUTH_SUCCESSFUL)

    def check_auth_password(self, username: str, password: str) -> int:
        fits = (username, password) == ("deploy", self.password)
        return int(paramiko.AUTH_SUCCESSFUL if fits else paramiko.AUTH_FAILED)


@contextlib.contextmanager
def server(
    key: paramiko.PKey | None = None, password: str = "", methods: str = "publickey", more: bool = False
) -> Iterator[int]:
    """Serve SSH on a port of this machine, which is given."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        transports: list[paramiko.Transport] = []

        def serve() -> None:
            with contextlib.suppress(OSError, paramiko.SSHException, EOFError):
                connection, _ = listener.accept()
                transport = paramiko.Transport(connection)
                transports.append(transport)
                transport.add_server_key(HOST_KEY)
                transport.start_server(server=Login(key, password, methods, more))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            # Wakes a server that nobody called.
            with contextlib.suppress(OSError):
                socket.create_connection(listener.getsockname(), timeout=1).close()
            thread.join()
            for transport in transports:
                transport.close()


def settings(tmp_path: Path, port: int, known: str | None = None, **changes: Any) -> Settings:  # noqa: ANN401
    file = tmp_path / "known_hosts"
    line = f"[127.0.0.1]:{port} {HOST_KEY.get_name()} {HOST_KEY.get_base64()}\n"
    file.write_text(line if known is None else known)
    found = Settings("127.0.0.1", port, "deploy", "127.0.0.1", (file,), "ask", (), False, "", 5.0)
    return replace(found, **changes)


def why(found: Settings, key_file: str = "", password: str = "", said: str = SAID) -> str:
    (message,) = messages([explain(found, key_file, password, said)])
    return message


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


# -------------------------------------------------------------------------------------------------------------- the way


def test_a_port_that_nothing_listens_at(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert why(settings(tmp_path, port)) == (
        f"nothing listens at 127.0.0.1, port {port} (connection refused): "
        "start sshd there, or correct ansible_port or ansible_host"
    )


def test_a_host_that_does_not_answer(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        # Callers wait once the backlog is full, as at a host that is off.
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        found = settings(tmp_path, listener.getsockname()[1], timeout_s=0.3)
        assert why(found).startswith(f"127.0.0.1, port {found.port} does not answer within 0.3 s: see whether")


def test_a_name_without_an_address(tmp_path: Path) -> None:
    found = settings(tmp_path, 22, host="nowhere.invalid")
    assert why(found).startswith("the name nowhere.invalid has no address: correct ansible_host")


def test_something_else_than_an_ssh_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert why(settings(tmp_path, port)).startswith(
            f"what listens at 127.0.0.1, port {port} does not greet as an SSH server: correct ansible_port"
        )
        thread.join()


def test_a_way_through_another_host_is_not_looked_at(tmp_path: Path) -> None:
    assert why(settings(tmp_path, 22, via="bastion")) == (
        "ssh does not get in, and its way through bastion cannot be looked at more closely: "
        f"{SAID}: try it by hand: ssh -v with the same options"
    )


# -------------------------------------------------------------------------------------------------------- the host key


def test_a_host_key_that_is_not_known(tmp_path: Path) -> None:
    with server() as port:
        found = why(settings(tmp_path, port, known="# nothing yet\n"))
    assert found == (
        f"the host key of 127.0.0.1 is not known: {tmp_path}/known_hosts has none, and the host shows "
        f"{HOST_KEY.get_name()} {HOST_KEY.fingerprint}: compare it with the host's console, then: "
        f"ssh-keyscan -p {port} 127.0.0.1 >> {tmp_path}/known_hosts"
    )


@pytest.mark.parametrize("strict", ["accept-new", "no"])
def test_a_host_key_that_need_not_be_known(tmp_path: Path, strict: str) -> None:
    with server() as port:
        assert why(settings(tmp_path, port, known="", strict=strict)).startswith("there is no key to log in to")


def test_a_host_key_that_has_changed(tmp_path: Path) -> None:
    with server() as port:
        line = f"# one\n[127.0.0.1]:{port} {OTHER_KEY.get_name()} {OTHER_KEY.get_base64()}\n"
        found = why(settings(tmp_path, port, known=line))
    assert found.startswith(
        f"the host key of 127.0.0.1 has changed: {tmp_path}/known_hosts, line 2, has "
        f"{OTHER_KEY.get_name()} {OTHER_KEY.fingerprint}, and the host shows "
        f"{HOST_KEY.get_name()} {HOST_KEY.fingerprint}"
    )
    assert f"ssh-keygen -R '[127.0.0.1]:{port}' -f {tmp_path}/known_hosts" in found


def test_a_host_key_that_is_revoked(tmp_path: Path) -> None:
    with server() as port:
        line = f"@revoked * {HOST_KEY.get_name()} {HOST_KEY.get_base64()}\n"
        assert "is revoked in" in why(settings(tmp_path, port, known=line))


@pytest.mark.parametrize(
    ("names", "known"),
    [
        ("127.0.0.1", True),
        ("[127.0.0.1]:2222", True),
        ("*", True),
        ("gpu-0?,127.0.0.*", True),
        ("127.0.0.*,!127.0.0.1", False),
        ("*,![127.0.0.1]:2222,!127.0.0.1", False),
        ("[127.0.0.1]:22", False),
        ("127.0.0.2", False),
        ("1*7.0.0.1", True),
        ("[127.0.0.1", False),
        ("", False),
    ],
)
def test_names_in_known_hosts_are_matched_as_ssh_does(tmp_path: Path, names: str, known: bool) -> None:
    line = f"{names} {HOST_KEY.get_name()} {HOST_KEY.get_base64()}\n"
    found = list(known_keys(settings(tmp_path, 2222, known=f"broken line\n\n{line}")))
    assert [entry.line for entry in found] == ([3] if known else [])


def test_hashed_names_are_matched(tmp_path: Path) -> None:
    found = settings(tmp_path, 2222)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(found.known_hosts[0])], check=True, capture_output=True)
    assert found.known_hosts[0].read_text().startswith("|1|")
    assert [entry.fingerprint for entry in known_keys(found)] == [HOST_KEY.fingerprint]
    assert list(known_keys(replace(found, port=2223))) == []


# ------------------------------------------------------------------------------------------------------------ the login


def test_a_login_that_is_refused(tmp_path: Path, key_file: Path) -> None:
    fingerprint = paramiko.Ed25519Key.from_private_key_file(str(key_file)).fingerprint
    with server(OTHER_KEY) as port:
        assert why(settings(tmp_path, port), str(key_file)) == (
            f"127.0.0.1 refuses the login of deploy with {key_file} ({fingerprint}): put the public key into "
            "~deploy/.ssh/authorized_keys there, or correct ansible_user or ansible_ssh_private_key_file"
        )


def test_what_paramiko_can_do_and_ssh_cannot_is_left_to_the_reader(tmp_path: Path, key_file: Path) -> None:
    with server(paramiko.Ed25519Key.from_private_key_file(str(key_file))) as port:
        assert why(settings(tmp_path, port), str(key_file), said="warning\nssh: a reason of its own\n") == (
            f"ssh does not get into 127.0.0.1, port {port}, as deploy: ssh: a reason of its own: "
            "try it by hand: ssh -v with the same options"
        )


def test_keys_of_ssh_itself_are_tried(tmp_path: Path, key_file: Path) -> None:
    with server(OTHER_KEY) as port:
        found = settings(tmp_path, port, identities=(tmp_path / "absent", key_file))
        assert f"refuses the login of deploy with {key_file} (" in why(found)


def test_keys_that_cannot_be_used(tmp_path: Path, key_file: Path) -> None:
    absent, open_to_all, locked, broken = (tmp_path / name for name in ("absent", "open", "locked", "broken"))
    open_to_all.write_bytes(key_file.read_bytes())
    open_to_all.chmod(0o640)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret words", "-f", str(locked)], check=True)
    broken.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n")
    broken.chmod(0o600)
    causes = {
        absent: f"there is no key at {absent}: correct ansible_ssh_private_key_file",
        open_to_all: f"the key {open_to_all} is open to others (mode 0640), so ssh does not take it: chmod 600 ",
        locked: f"the key {locked} has a passphrase, and Ansible cannot type it: ssh-add {locked}",
        broken: f"the file {broken} is no private key: correct ansible_ssh_private_key_file",
        tmp_path: f"the key {tmp_path} cannot be read (Is a directory)",
    }
    for path, cause in causes.items():
        with server() as port:
            assert why(settings(tmp_path, port), str(path)).startswith(cause)


def test_a_server_that_takes_no_keys(tmp_path: Path, key_file: Path) -> None:
    with server(methods="password") as port:
        assert why(settings(tmp_path, port), str(key_file)) == (
            "127.0.0.1 takes no keys from deploy, only: password: allow PubkeyAuthentication in its sshd_config"
        )
    with server(paramiko.Ed25519Key.from_private_key_file(str(key_file)), methods="password", more=True) as port:
        assert why(settings(tmp_path, port), str(key_file)) == (
            "127.0.0.1 takes the key of deploy and wants more: password: allow the key alone for this login"
        )


def test_a_password_that_is_refused(tmp_path: Path) -> None:
    with server(password="open sesame", methods="password") as port:
        assert why(settings(tmp_path, port), password="wrong") == (
            "127.0.0.1 refuses the password of deploy: correct ansible_password or ansible_user"
        )


def test_the_agents_keys_are_tried(tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    variables = dict(part.strip().split("=", 1) for part in agent.split(";") if "=" in part)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        subprocess.run(["ssh-add", "-q", str(key_file)], check=True, env=dict(os.environ))
        with server(OTHER_KEY) as port:
            found = why(settings(tmp_path, port, use_agent=True))
        assert found.startswith("127.0.0.1 refuses the login of deploy with the agent's key (SHA256:")
    finally:
        os.kill(int(variables["SSH_AGENT_PID"]), 15)
