# SPDX-License-Identifier: Apache-2.0
"""What a login on a host can do before any module runs there: a shell script, its answer, and what is wrong with it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ansible.module_utils.aerie.findings import Finding
from ansible.module_utils.aerie.preflight_findings import note, problem

_MARK = "aerie-probe"
# Modules of Aerie run on the host's own Python.
_OLDEST_PYTHON = (3, 9)
_TEMPORARY = "/tmp"
_TEMPORARY_MB = 64
_TEMPORARY_INODES = 100
# A few seconds make logs of several hosts hard to put in order; a minute breaks certificates and the order of a ledger.
_SKEW_NOTE_S, _SKEW_PROBLEM_S = 2.0, 60.0

# It changes nothing: a directory's writability is asked, not tried.
_SCRIPT = r"""
echo @MARK@
echo "clock=$(date +%s.%N)"
echo "user=$(id -un)"
directory() {
  d=$1
  while [ ! -e "$d" ]; do d=$(dirname "$d"); done
  w=no; [ -d "$d" ] && [ -w "$d" ] && [ -x "$d" ] && w=yes
  kb=$(df -Pk "$d" 2>/dev/null | tail -n 1 | awk '{print $(NF-2)}')
  inodes=$(df -Pi "$d" 2>/dev/null | tail -n 1 | awk '{print $(NF-4) " " $(NF-2)}')
  echo "directory=$w ${kb:--} ${inodes:-- -} $d"
}
@DIRECTORIES@
for p in @PYTHONS@; do
  found=$(command -v "$p" 2>/dev/null) || continue
  echo "python=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo broken) $found"
  break
done
echo end=@MARK@
"""
# What sudo and its like say, and Ansible about them: the finding, its message and the remedy.
_BECOME = (
    (
        r"Missing \S+ password|password is required",
        "become-password",
        "{how} asks {user} for a password, and the inventory has none",
        "set ansible_become_password (Vault), or allow NOPASSWD",
    ),
    (
        r"Incorrect \S+ password|incorrect password attempt",
        "become-wrong-password",
        "{how} refuses the password of {user}",
        "correct ansible_become_password",
    ),
    (
        r"not in the sudoers|not allowed to",
        "become-denied",
        "{user} may not use {how}",
        "let {user} run everything as {wanted} ({how})",
    ),
    (
        r"not found|No such file",
        "become-missing",
        "there is no {how} on the host",
        "install {how}, or set ansible_become_method",
    ),
)


@dataclass(frozen=True)
class Directory:
    """A directory that Ansible writes to, or the nearest one above it that exists; none where a size is not known."""

    path: str
    writable: bool
    free_mb: int | None
    inodes: int | None


@dataclass(frozen=True)
class Probe:
    """What the host answered. ``clock`` is its time in seconds; ``python`` a release and a path, empty if none."""

    user: str
    clock: float | None
    directories: tuple[Directory, ...]
    python: tuple[str, str]


def script(remote_tmp: str, pythons: Sequence[str]) -> str:
    """Return the script to run in the login's shell.

    ``remote_tmp`` is Ansible's directory for temporary files there, which may start with ``~`` or ``$HOME``;
    ``pythons`` are the interpreters that Ansible would take, the first that is there.
    """
    home = re.match(r"(~|\$HOME|\$\{HOME\})(?=/|$)", remote_tmp)
    where = f'"$HOME"{shlex.quote(remote_tmp[home.end() :])}' if home else shlex.quote(remote_tmp)
    calls = "\n".join(f"directory {directory}" for directory in (where, _TEMPORARY))
    text = _SCRIPT.replace("@MARK@", _MARK).replace("@DIRECTORIES@", calls)
    return f"/bin/sh -c {shlex.quote(text.replace('@PYTHONS@', ' '.join(map(shlex.quote, pythons))))}"


def parse(answer: str) -> Probe | None:
    """Return what the script found; nothing if something else than it answered."""
    if _MARK not in answer or f"end={_MARK}" not in answer:
        return None
    fields: dict[str, list[str]] = {}
    for line in answer.partition(_MARK)[2].splitlines():
        name, _, value = line.partition("=")
        fields.setdefault(name, []).append(value)
    clock = re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", fields.get("clock", [""])[0])
    release, _, path = fields.get("python", [""])[0].partition(" ")
    return Probe(
        fields.get("user", [""])[0],
        float(clock.group()) if clock else None,
        tuple(_directory(value) for value in fields.get("directory", [])),
        (release, path),
    )


def _directory(value: str) -> Directory:
    writable, kilobytes, inodes, free_inodes, path = [*value.split(" ", 4), "", "", "", ""][:5]
    # A file system without a limit says 0 of 0, or a dash.
    limited = inodes.isdigit() and int(inodes) > 0
    return Directory(
        path,
        writable == "yes",
        int(kilobytes) >> 10 if kilobytes.isdigit() else None,
        int(free_inodes) if limited and free_inodes.isdigit() else None,
    )


def check_directories(probe: Probe) -> Iterator[Finding]:
    for directory in probe.directories:
        remedy = "make room there" if directory.writable else "change its mode or owner, or set ansible_remote_tmp"
        if not directory.writable:
            yield problem("remote-tmp", f"{directory.path} is not writable for {probe.user}", remedy)
        elif directory.free_mb is not None and directory.free_mb < _TEMPORARY_MB:
            message = f"{directory.path} has {directory.free_mb} MB free, and Ansible needs {_TEMPORARY_MB} MB there"
            yield problem("remote-tmp-full", message, remedy)
        elif directory.inodes is not None and directory.inodes < _TEMPORARY_INODES:
            yield problem("remote-tmp-full", f"{directory.path} has {directory.inodes} inodes free (df -i)", remedy)


def check_python(probe: Probe) -> Iterator[Finding]:
    """Yield a problem unless the host has a Python that runs Ansible's modules and Aerie's."""
    oldest = "{}.{}".format(*_OLDEST_PYTHON)
    remedy = f"install Python {oldest} or newer there, or set ansible_python_interpreter"
    release, path = probe.python
    if not path:
        yield problem("ansible-python", "the host has no Python that Ansible can use", remedy)
        return
    match = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", release)
    if not match:
        yield problem("ansible-python", f"{path}, which Ansible would use, does not run", remedy)
    elif (int(match.group(1)), int(match.group(2))) < _OLDEST_PYTHON:
        message = f"{path}, which Ansible would use, is Python {release}, and Aerie's modules need {oldest} or newer"
        yield problem("ansible-python", message, remedy)


def check_clock(probe: Probe, asked: float, answered: float) -> Iterator[Finding]:
    """Yield a finding if the host's clock is off by more than the time between question and answer explains.

    ``asked`` and ``answered`` are the control node's times in seconds around the probe.
    """
    if probe.clock is None:
        return
    off = max(asked - probe.clock, probe.clock - answered)
    if off < _SKEW_NOTE_S:
        return
    make = problem if off >= _SKEW_PROBLEM_S else note
    direction = "behind" if probe.clock < asked else "ahead of"
    message = f"the host's clock is {off:.0f} s {direction} the control node's"
    yield make("clock", message, "set both by NTP (timedatectl set-ntp true)")


def check_probe(probe: Probe, asked: float, answered: float) -> Iterator[Finding]:
    """Yield what keeps Ansible's modules from running on the host."""
    yield from check_python(probe)
    yield from check_directories(probe)
    yield from check_clock(probe, asked, answered)


def explain_become(how: str, user: str, wanted: str, said: str) -> Finding:
    """Return why ``user`` did not become ``wanted`` by ``how``, such as sudo, which ``said`` something about it."""
    for pattern, name, message, remedy in _BECOME:
        if re.search(pattern, said):
            words = {"how": how, "user": user, "wanted": wanted}
            return problem(name, message.format(**words), remedy.format(**words))
    # ssh adds that it hangs up.
    lines = [
        line.strip() for line in said.splitlines() if line.strip() and not line.startswith("Shared connection to ")
    ]
    last = lines[-1] if lines else "it says nothing"
    return problem("become", f"{how} fails for {user}: {last}", f"let {user} run everything as {wanted} ({how})")
