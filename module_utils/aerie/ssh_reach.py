# SPDX-License-Identifier: Apache-2.0
"""Why ssh does not get into a host: the same steps one by one, until the first that fails. Control node only.

ssh itself decides whether a host can be reached; this explains a failure that it saw, with paramiko, since ssh's own
message is the same for many causes.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import logging
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko  # type: ignore[import-untyped]
from ansible.module_utils.aerie.findings import Finding
from ansible.module_utils.aerie.preflight_findings import problem
from ansible.module_utils.aerie.ssh_settings import Settings
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey  # type: ignore[import-untyped]

# It logs what it raises, with tracebacks.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

_RSA = ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class _Cause(Exception):
    """The step that failed, as a finding."""

    def __init__(self, name: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.finding = problem(name, message, remedy)


@dataclass(frozen=True)
class KnownKey:
    """A line of a known_hosts file that is about the host."""

    file: Path
    line: int
    type: str
    fingerprint: str
    revoked: bool


def explain(settings: Settings, key_file: str, password: str, said: str) -> Finding:
    """Return why ssh failed with ``said``.

    ``key_file`` is the key that the inventory names, or empty; ``password`` the login's, or empty.
    """
    words = _last_line(said)
    if settings.via:
        message = f"ssh does not get in, and its way through {settings.via} cannot be looked at more closely: {words}"
        return problem("ssh-via", message, "try it by hand: ssh -v with the same options")
    try:
        with contextlib.closing(_connect(settings)) as connection:
            transport = paramiko.Transport(connection)
            try:
                _check_host_key(transport, settings)
                _log_in(transport, settings, key_file, password)
            finally:
                transport.close()
    except _Cause as cause:
        return cause.finding
    except (paramiko.SSHException, EOFError, OSError) as error:
        words = f"{words} ({error})" if str(error) else words
    message = f"ssh does not get into {settings.host}, port {settings.port}, as {settings.user}: {words}"
    return problem("ssh", message, "try it by hand: ssh -v with the same options")


def _last_line(said: str) -> str:
    """Return what ssh said last, without what it always says."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and "Permanently added" not in line]
    return lines[-1] if lines else "it says nothing"


def _connect(settings: Settings) -> socket.socket:
    where = f"{settings.host}, port {settings.port}"
    try:
        return socket.create_connection((settings.host, settings.port), timeout=settings.timeout_s)
    except socket.gaierror:
        message = f"the name {settings.host} has no address"
        raise _Cause("ssh-name", message, "correct ansible_host, or see DNS and /etc/hosts here") from None
    except TimeoutError:
        message = f"{where} does not answer within {settings.timeout_s:g} s"
        remedy = "see whether the host is on, its address is right, and no firewall is between"
        raise _Cause("ssh-timeout", message, remedy) from None
    except ConnectionRefusedError:
        message = f"nothing listens at {where} (connection refused)"
        raise _Cause("ssh-refused", message, "start sshd there, or correct ansible_port or ansible_host") from None
    except OSError as error:
        if error.errno not in _NO_ROUTE:
            raise
        message = f"there is no way to {where} ({error.strerror})"
        raise _Cause("ssh-no-route", message, "see the host, its address, and this machine's routes") from None


# -------------------------------------------------------------------------------------------------------- host keys


def _check_host_key(transport: paramiko.Transport, settings: Settings) -> None:
    known = list(known_keys(settings))
    options = transport.get_security_options()
    # As ssh does: ask for a key of a type that is known, since a host has several.
    types = [name for key in known for name in (_RSA if key.type == "ssh-rsa" else (key.type,))]
    options.key_types = tuple(dict.fromkeys([name for name in types if name in options.key_types])) + tuple(
        name for name in options.key_types if name not in types
    )
    transport.banner_timeout = settings.timeout_s
    where = f"{settings.host}, port {settings.port}"
    try:
        transport.start_client(timeout=settings.timeout_s)
    except (paramiko.SSHException, EOFError) as error:
        if transport.remote_version:
            raise
        message = f"what listens at {where} does not greet as an SSH server"
        remedy = "correct ansible_port; a server that turns callers away (MaxStartups, fail2ban) looks the same"
        raise _Cause("ssh-no-server", message, remedy) from error
    key = transport.get_remote_server_key()
    own = f"{key.get_name()} {key.fingerprint}"
    matching = [entry for entry in known if entry.fingerprint == key.fingerprint]
    if any(entry.revoked for entry in matching):
        message = f"the host key of {settings.known_as} ({own}) is revoked in {matching[0].file}"
        raise _Cause("ssh-host-key-revoked", message, "give the host a new key, and keep that one")
    trusted = [entry for entry in known if not entry.revoked]
    if matching or settings.strict == "no":
        return
    if trusted:
        entry = trusted[0]
        message = (
            f"the host key of {settings.known_as} has changed: {entry.file}, line {entry.line}, has "
            f"{entry.type} {entry.fingerprint}, and the host shows {own}"
        )
        remedy = (
            "unless the host was installed anew, somebody may be in between; if it was: "
            f"ssh-keygen -R '{_lookup_names(settings)[0]}' -f {entry.file}, and keep the new key"
        )
        raise _Cause("ssh-host-key-changed", message, remedy)
    if settings.strict != "accept-new":
        file = settings.known_hosts[0] if settings.known_hosts else Path("~/.ssh/known_hosts")
        message = f"the host key of {settings.known_as} is not known: {file} has none, and the host shows {own}"
        port = f"-p {settings.port} " if settings.port != 22 else ""
        remedy = f"compare it with the host's console, then: ssh-keyscan {port}{settings.host} >> {file}"
        raise _Cause("ssh-host-key-unknown", message, remedy)


def known_keys(settings: Settings) -> Iterator[KnownKey]:
    """Yield the lines of the known_hosts files that are about the host."""
    names = _lookup_names(settings)
    for file in settings.known_hosts:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, start=1):
            marker, rest = line.split(None, 1) if line.startswith("@") and " " in line else ("", line)
            if marker == "@cert-authority":
                continue
            try:
                entry = HostKeyEntry.from_line(rest, number)
            except (InvalidHostKey, paramiko.SSHException, ValueError):
                continue
            if entry is not None and _is_about(entry.hostnames, names):
                yield KnownKey(file, number, entry.key.get_name(), entry.key.fingerprint, marker == "@revoked")


def _lookup_names(settings: Settings) -> list[str]:
    """Return the names that ssh looks for: with a port other than 22 first the one with the port."""
    name = settings.known_as.lower()
    return [name] if settings.port == 22 else [f"[{name}]:{settings.port}", name]


def _is_about(patterns: list[str], names: list[str]) -> bool:
    for name in names:
        plain = [pattern for pattern in patterns if not pattern.startswith("|1|")]
        if any(fnmatch.fnmatchcase(name, _glob(pattern[1:])) for pattern in plain if pattern.startswith("!")):
            continue
        if any(fnmatch.fnmatchcase(name, _glob(pattern)) for pattern in plain):
            return True
        hashed = (pattern for pattern in patterns if pattern.startswith("|1|"))
        if any(pattern == paramiko.HostKeys.hash_host(name, pattern) for pattern in hashed):
            return True
    return False


def _glob(pattern: str) -> str:
    """Return ssh's pattern as one of fnmatch's, to which a bracket is something special."""
    return pattern.lower().replace("[", "[[]")


# ------------------------------------------------------------------------------------------------------------ login


def _log_in(transport: paramiko.Transport, settings: Settings, key_file: str, password: str) -> None:
    named = Path(key_file).expanduser() if key_file else None
    keys: list[tuple[str, paramiko.PKey]] = []
    identities = dict.fromkeys([*([named] if named else []), *settings.identities])
    for path in identities:
        try:
            keys.append((str(path), _load(path)))
        except _Cause:
            # What ssh would take by itself may be missing or locked; what the inventory names may not.
            if path == named:
                raise
    if settings.use_agent and os.environ.get("SSH_AUTH_SOCK"):
        with contextlib.suppress(paramiko.SSHException, OSError):
            keys += [("the agent's key", key) for key in paramiko.Agent().get_keys()]
    for _, key in keys:
        if _accepted(transport, settings, key):
            return
    if password:
        _try_password(transport, settings, password)
        return
    if not keys:
        message = f"there is no key to log in to {settings.host} with"
        raise _Cause("ssh-no-key", message, "set ansible_ssh_private_key_file, or add one to ssh-agent")
    tried = ", ".join(f"{name} ({key.fingerprint})" for name, key in keys)
    message = f"{settings.host} refuses the login of {settings.user} with {tried}"
    remedy = (
        f"put the public key into ~{settings.user}/.ssh/authorized_keys there, or correct ansible_user or "
        "ansible_ssh_private_key_file"
    )
    raise _Cause("ssh-login", message, remedy)


def _load(path: Path) -> paramiko.PKey:
    try:
        status = path.stat()
        path.read_bytes()
    except FileNotFoundError:
        message = f"there is no key at {path}"
        raise _Cause("ssh-key-missing", message, "correct ansible_ssh_private_key_file, or put the key there") from None
    except OSError as error:
        message = f"the key {path} cannot be read ({error.strerror})"
        raise _Cause("ssh-key-unreadable", message, "run as a user who may read it") from None
    if status.st_uid == os.getuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"the key {path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}), so ssh does not take it"
        raise _Cause("ssh-key-mode", message, f"chmod 600 {path}")
    try:
        return paramiko.PKey.from_path(path)
    except (TypeError, paramiko.PasswordRequiredException):
        message = f"the key {path} has a passphrase, and Ansible cannot type it"
        raise _Cause("ssh-key-passphrase", message, f"ssh-add {path} before you run Ansible") from None
    except (ValueError, paramiko.SSHException):
        message = f"the file {path} is no private key"
        raise _Cause("ssh-key-broken", message, "correct ansible_ssh_private_key_file") from None


def _accepted(transport: paramiko.Transport, settings: Settings, key: paramiko.PKey) -> bool:
    try:
        missing = transport.auth_publickey(settings.user, key)
    except paramiko.BadAuthenticationType as error:
        methods = ", ".join(error.allowed_types)
        message = f"{settings.host} takes no keys from {settings.user}, only: {methods}"
        raise _Cause("ssh-method", message, "allow PubkeyAuthentication in its sshd_config") from None
    except paramiko.AuthenticationException:
        return False
    if missing:
        message = f"{settings.host} takes the key of {settings.user} and wants more: {', '.join(missing)}"
        raise _Cause("ssh-method", message, "allow the key alone for this login") from None
    return True


def _try_password(transport: paramiko.Transport, settings: Settings, password: str) -> None:
    try:
        transport.auth_password(settings.user, password)
    except paramiko.BadAuthenticationType as error:
        message = f"{settings.host} takes no password from {settings.user}, only: {', '.join(error.allowed_types)}"
        raise _Cause("ssh-method", message, "use a key (ansible_ssh_private_key_file)") from None
    except paramiko.AuthenticationException:
        message = f"{settings.host} refuses the password of {settings.user}"
        raise _Cause("ssh-password", message, "correct ansible_password or ansible_user") from None
