# SPDX-License-Identifier: Apache-2.0
"""What the hosts of a replica tell each other while they are switched, over the network between them.

A host notes in a file how its part of each deployment stands, and systemd hands that file to whoever connects: also
while no program of ours runs, and after a reboot. Nothing that is sent is read. The port is one of those that only the
replica's hosts reach (roles/multi_node).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ansible.module_utils.aerie.files import write_atomically

# How a host's part of a deployment stands. Of the last two there is no way back to the others.
UNDER_WAY = "under way"
READY = "ready"
KEEPS = "keeps its release"
BACK = "goes back"

UNITS = ("aerie-mates.socket", "aerie-mates@.service")
# After the replica's first port.
_PORT = 10
_DEPLOYMENTS = 20
_ASK_S = 1.0
_MOST_BYTES = 1 << 14


class MatesError(ValueError):
    """Settings that do not say where the replica's hosts ask each other; the text is for users."""


def place_of(settings: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port where the host with these variables is asked."""
    try:
        return settings["VLLM_HOST_IP"], int(settings["AERIE_REPLICA_PORT"]) + _PORT
    except (KeyError, ValueError) as error:
        raise MatesError(f"the settings do not say where the hosts of the replica ask each other: {error}") from error


def note(path: Path, deployment: str, state: str) -> None:
    """Note in the file at ``path`` how this host's part of ``deployment`` stands."""
    before = _lines(path)
    others = [line for line in before if line.partition(" ")[0] != deployment]
    lines = [*others, f"{deployment} {state}"][-_DEPLOYMENTS:]
    if lines != before:
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())


def units(path: Path, address: str, port: int) -> dict[str, str]:
    """Return the texts of the units that hand out the file at ``path``, by their names."""
    listens = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return dict(zip(UNITS, (_SOCKET.format(listens=listens), _ANSWER.format(path=path))))


_SOCKET = """\
# Where the other hosts of the replica ask how this one's switch stands. Written by Aerie.
[Unit]
Description=Questions about Aerie's switch of the vLLM release

[Socket]
ListenStream={listens}
Accept=yes
# It may be there before the address is.
FreeBind=yes

[Install]
WantedBy=sockets.target
"""

_ANSWER = """\
# Answers one question of another host of the replica. Written by Aerie.
[Unit]
Description=Answer about Aerie's switch of the vLLM release
CollectMode=inactive-or-failed

[Service]
ExecStart=-/bin/cat {path}
StandardInput=null
StandardOutput=socket
StandardError=null
CapabilityBoundingSet=
NoNewPrivileges=yes
# It is asked once a second.
LogLevelMax=warning
"""


class Mates:
    """The other hosts of the replica that take part in ``deployment``; none where ``others`` is empty."""

    def __init__(self, deployment: str, here: str, port: int, others: Sequence[str]) -> None:
        self._deployment = deployment
        self._here = here
        self._port = port
        self._others = list(others)
        self._asked = float("-inf")
        self._states: dict[str, str] = {}
        self._heard = dict.fromkeys(self._others, time.monotonic())

    def states(self, age_s: float) -> dict[str, str]:
        """Return how each one's part stands, as it was at most ``age_s`` ago; one that does not answer has none."""
        now = time.monotonic()
        if self._others and now - self._asked >= age_s:
            self._asked = now
            with ThreadPoolExecutor(len(self._others)) as pool:
                answers = dict(zip(self._others, pool.map(self._ask, self._others)))
            self._states = {address: state for address, state in answers.items() if state}
            self._heard.update(dict.fromkeys(self._states, time.monotonic()))
        return self._states

    def all_are(self, state: str, age_s: float) -> bool:
        """Say whether all of them answer ``state``."""
        self.states(age_s)
        return not self.others_than(state)

    def others_than(self, state: str) -> list[str]:
        """Return those that did not answer ``state`` when they were asked last."""
        return [address for address in self._others if self._states.get(address) != state]

    def silent(self, seconds: float) -> list[str]:
        """Return those that have not answered for ``seconds``."""
        since = time.monotonic() - seconds
        return [address for address, heard in self._heard.items() if heard < since]

    def _ask(self, address: str) -> str:
        text = ""
        try:
            # The firewall there knows this host by its address.
            with socket.create_connection((address, self._port), _ASK_S, (self._here, 0)) as connection:
                while (piece := connection.recv(_MOST_BYTES)) and len(text) < _MOST_BYTES:
                    text += piece.decode(errors="replace")
        except OSError:
            return ""
        lines = (line.partition(" ") for line in text.splitlines())
        found = [state for name, _, state in lines if name == self._deployment]
        # One that has not begun is not silent.
        return found[-1] if found else UNDER_WAY


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []
