#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Switch a host's service to another release, by a program on the host that undoes what fails."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: switch
short_description: Switch the service to another release, and back if anything fails
description:
  - With O(state=started), starts the switch program on the host, as a systemd unit of its own. It stops the service,
    proves that nothing is left of it, activates the release, starts it, waits for its first token, measures
    acceptance, and waits for confirmation. If anything fails, or nobody confirms in time, or the host goes down
    meanwhile, it brings the previous release back without being asked.
  - With O(state=followed), tells how far it is. With O(state=confirmed), keeps the release. With O(state=aborted), has
    the previous release back.
  - With O(together), the program waits before it stops the service, and before it activates the release, until
    O(state=proceeded) says that all hosts of the replica are as far. They ask each other how they stand, and end alike;
    a host that was confirmed waits for the others.
  - A service that runs the release with these settings already is left alone.
options:
  root:
    description: The directory of releases, store and ledger.
    type: path
    required: true
  state:
    description: What is wanted.
    type: str
    choices: [started, followed, proceeded, confirmed, aborted]
    required: true
  deployment:
    description: The id of the run over the fleet.
    type: str
    required: true
  id:
    description: The release to switch to. For O(state=started).
    type: str
  unit:
    description: Where systemd looks for the service's unit. The release has a file of the same name.
    type: path
    default: /etc/systemd/system/vllm.service
  user:
    description: The service's user, which runs nothing else.
    type: str
    default: vllm
  settings:
    description:
      - Texts of the files with this host's settings, by path; none for a file that is not to be there. A service that
        runs with others is restarted.
      - One of them is an environment file with C(AERIE_HOST) and C(AERIE_PORT).
    type: dict
    default: {}
  restart:
    description: Restart the service even if it runs this release, since files of it were repaired.
    type: bool
    default: false
  who:
    description: Who switches, for those who find it under way.
    type: str
    default: ''
  why:
    description: Why the release is activated, for the ledger.
    type: str
    default: ''
  start_budget_s:
    description: The longest that a start may take, in seconds, whatever the size of the target.
    type: float
    default: 14400
  stuck_after_s:
    description: Seconds without any progress after which a start is stuck.
    type: float
    default: 900
  confirm_budget_s:
    description: Seconds that the program waits for confirmation, or for somebody who follows it to look again.
    type: float
    default: 300
  mates:
    description:
      - Whether other hosts are switched at the same time. They may take longer to start, so confirmation is waited for
        longer by twice the time that this one took.
    type: bool
    default: false
  together:
    description:
      - The addresses of the replica's other hosts that are switched at the same time, for O(state=started). A host that
        hears no more of one of them for O(confirm_budget_s) before it is confirmed has the previous release back.
      - O(settings) then have C(VLLM_HOST_IP) and C(AERIE_REPLICA_PORT).
    type: list
    elements: str
    default: []
  step:
    description: What all hosts of the replica may begin. For O(state=proceeded).
    type: str
    choices: [stop, activate]
  live:
    description: The gate of acceptance, with the keys C(mode) (enforce, advisory or off) and C(config).
    type: dict
    default: {mode: 'off', config: {}}
  numeric:
    description:
      - The numeric check of hidden states between stop and start, where it needs the GPUs; with the keys C(mode),
        C(argv) and C(budget_s). Empty runs none. A result that passed is kept in C(note), for this C(evidence), where
        they are given; M(hidden_state_check) reads it.
    type: dict
    default: {}
  in_progress:
    description:
      - What to do where another switch is under way, for O(state=started). C(wait) until it has ended, C(take_over) by
        having it undone, or C(fail).
    type: str
    choices: [fail, wait, take_over]
    default: fail
  follow_s:
    description:
      - Seconds after which the control node is not to wait any longer, for O(state=followed), but for a host that it
        cannot reach. With 0 it waits until the program needs an answer, or has ended.
    type: float
    default: 0
  patience_s:
    description: Seconds that the control node tries to reach the host again, for O(state=followed).
    type: float
    default: 300
  reason:
    description: Why the switch is aborted. For O(state=aborted).
    type: str
    default: ''
  window_s:
    description: Seconds that one call may wait for the next phase.
    type: float
    default: 5
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: Aerie
"""

EXAMPLES = r"""
- name: Switch to the staged release
  switch:
    root: /opt/aerie
    state: started
    deployment: 20261129T100000Z
    id: "{{ staged.id }}"
    settings: {/etc/aerie/vllm.env: "{{ lookup('ansible.builtin.template', 'vllm.env.j2') }}"}
    why: deploy

- name: Wait until the release is ready, or the previous one is back
  switch:
    root: /opt/aerie
    state: followed
    deployment: 20261129T100000Z
  register: switched

- name: Keep it
  switch:
    root: /opt/aerie
    state: confirmed
    deployment: 20261129T100000Z
  when: switched.outcome == 'ready'
"""

RETURN = r"""
outcome:
  description:
    - C(unchanged) where the service runs the release already, C(started), C(under way), C(waiting) for the replica's
      other hosts, or C(ready) for confirmation.
    - C(confirmed), C(restored) or C(not restored) at the end, and C(none) where the host knows no such switch.
    - C(in progress) where another deployment's switch is under way; RV(switch) tells whose.
  type: str
  returned: success
phase:
  description: What the program does.
  type: str
  returned: when there is a switch
progress:
  description: How far the start of vLLM is.
  type: dict
  returned: when there is a switch
waits_to:
  description: The step that the program waits to begin, or nothing.
  type: str
  returned: while the switch is under way
disk_full:
  description: That there is no room on the disk with the journal, which the program waits for.
  type: bool
  returned: when it is full
switch:
  description:
    - The deployment, who started it and when, both releases, the gates' results, and why it was undone.
    - C(waits_for) are the hosts of the replica that one which was confirmed waits for.
  type: dict
  returned: when there is a switch
running:
  description: The release that the service's main process had mapped before the call, or nothing.
  type: str
  returned: when O(state=started)
changes:
  description: The inputs and files in which the release differs from the current one.
  type: list
  elements: str
  returned: when O(state=started)
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import switch
from ansible.module_utils.aerie.endpoint import environment
from ansible.module_utils.aerie.files import read_text, write_atomically
from ansible.module_utils.aerie.journal import (
    ACTIVATE,
    AWAITING,
    CONFIRMED,
    NOT_RESTORED,
    RESTORED,
    STOP,
    Journal,
    SwitchError,
    whose,
)
from ansible.module_utils.aerie.mates import KEEPS, UNITS, MatesError, note, place_of, units
from ansible.module_utils.aerie.program import install
from ansible.module_utils.aerie.release import ReleaseError, Releases, running_service
from ansible.module_utils.aerie.resume import UNIT, resume
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "root": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["started", "followed", "proceeded", "confirmed", "aborted"], "required": True},
    "deployment": {"type": "str", "required": True},
    "id": {"type": "str"},
    "unit": {"type": "path", "default": "/etc/systemd/system/vllm.service"},
    "user": {"type": "str", "default": "vllm"},
    "settings": {"type": "dict", "default": {}},
    "restart": {"type": "bool", "default": False},
    "who": {"type": "str", "default": ""},
    "why": {"type": "str", "default": ""},
    "start_budget_s": {"type": "float", "default": 14400},
    "stuck_after_s": {"type": "float", "default": 900},
    "confirm_budget_s": {"type": "float", "default": 300},
    "mates": {"type": "bool", "default": False},
    "together": {"type": "list", "elements": "str", "default": []},
    "step": {"type": "str", "choices": [STOP, ACTIVATE]},
    "live": {"type": "dict", "default": {"mode": "off", "config": {}}},
    "numeric": {"type": "dict", "default": {}},
    "in_progress": {"type": "str", "choices": ["fail", "wait", "take_over"], "default": "fail"},
    "follow_s": {"type": "float", "default": 0},
    "patience_s": {"type": "float", "default": 300},
    "reason": {"type": "str", "default": ""},
    "window_s": {"type": "float", "default": 5},
}

_POLL_S = 0.2
_OURS = "# Written by Aerie"
_TOLD = ("deployment", "who", "started", "from", "to", "why", "gates", "reason", "failed_gate", "failed_phase")
_TIMES = ("start_s", "downtime_s", "outcome", "message")

_PROGRAM_UNIT = """\
# The switch of a release. Written by Aerie; started by it, and by systemd after a crash or a reboot in the middle.
[Unit]
Description=Aerie's switch of the vLLM release
ConditionPathExists={root}/switch/journal.json
# After a reboot in the middle, what the service is to run is decided before it starts.
Before={service}
StartLimitIntervalSec=0

[Service]
Type=notify
Environment=PYTHONPATH={home} PYTHONDONTWRITEBYTECODE=1
ExecStart={python} -m ansible.module_utils.aerie.switch {root}
Restart=on-failure
# To systemd these are clean ends, too.
RestartForceExitStatus=SIGTERM SIGINT SIGPIPE
RestartSec=2
TimeoutStartSec=infinity

[Install]
WantedBy=multi-user.target
"""


def start(module: AnsibleModule, releases: Releases, journal: Journal) -> dict[str, Any]:
    params = module.params
    identity, unit = params["id"], Path(params["unit"])
    if journal.load():
        under_way = meet(module, journal)
        if under_way:
            return under_way
    # Before the old release is stopped. In check mode a release may not be there yet.
    if not module.check_mode:
        releases.record(identity)
        if not releases.completion(identity):
            raise ReleaseError(f"release {identity} is not wholly staged on this host: run deploy.yml")
    running = running_service(unit.name)
    previous = releases.current()
    unit_before = read_text(unit)
    if not previous and unit_before is not None and not unit_before.startswith(_OURS):
        raise ReleaseError(f"{unit} is not Aerie's: stop and disable it, and move it away")
    wanted = environment(params["settings"])
    settings_before = {path: read_text(Path(path)) for path in params["settings"]}
    serves = releases.is_active(identity, unit) and running.release == identity and running.has_settings(wanted)
    as_wanted = serves and settings_before == params["settings"] and not params["restart"]
    together = _together(params["together"], wanted)
    if together and not module.check_mode:
        _have_answers(journal, unit, together)
    started: dict[str, Any] = {}
    if as_wanted and together and not module.check_mode:
        # The others learn that this one will not go back.
        note(journal.told_path, params["deployment"], KEEPS)
    if not as_wanted and not module.check_mode:
        request = {
            "deployment": params["deployment"],
            "who": params["who"],
            "why": params["why"],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "unit": str(unit),
            "user": params["user"],
            "from": {
                "id": previous,
                "settings": settings_before,
                "up": switch.is_up(unit.name),
                "enabled": switch.is_enabled(unit.name),
            },
            "to": {"id": identity, "settings": params["settings"]},
            "start_s_budget": params["start_budget_s"],
            "stuck_after_s": params["stuck_after_s"],
            "confirm_s": params["confirm_budget_s"],
            "mates": params["mates"],
            "together": together,
            "live": params["live"],
            "numeric": params["numeric"],
        }
        _start_program(releases.root, unit, journal, request)
        started = _describe(journal.state)
    before = f"release {running.release or 'none'} runs\n"
    return {
        **started,
        "changed": not as_wanted,
        "outcome": "unchanged" if as_wanted else "started",
        "running": running.release,
        "changes": releases.differences(previous, identity),
        "diff": {"before": before, "after": before if as_wanted else f"release {identity} runs\n"},
    }


def _together(others: list[str], settings: dict[str, str]) -> dict[str, Any]:
    """Return where this host and the replica's others ask each other; nothing for a host alone."""
    if not others:
        return {}
    here, port = place_of(settings)
    return {"here": here, "port": port, "others": others}


def _have_answers(journal: Journal, unit: Path, together: dict[str, Any]) -> None:
    """Have systemd answer the replica's other hosts."""
    socket, _ = UNITS
    texts = units(journal.told_path, together["here"], together["port"])
    if any(read_text(unit.with_name(name)) != text for name, text in texts.items()):
        for name, text in texts.items():
            write_atomically(unit.with_name(name), text.encode())
        switch.systemctl("daemon-reload")
        switch.systemctl("stop", socket, fine=(0, 5))
    switch.systemctl("enable", "--now", socket)


def meet(module: AnsibleModule, journal: Journal) -> dict[str, Any]:
    """Deal with a switch that is under way; return the result if it still is."""
    params = module.params
    ours = (journal.state["deployment"], journal.state["to"]["id"]) == (params["deployment"], params["id"])
    if not module.check_mode:
        resume(journal, "" if ours else f"deployment {params['deployment']} found that it had not begun")
        if not journal.load():
            return {}
    if ours:
        # Its start was answered, and the answer lost.
        return {"changed": True, **_describe(journal.state), "outcome": "started", "running": "", "changes": []}
    if params["in_progress"] == "fail":
        raise SwitchError(whose(journal.state))
    if params["in_progress"] == "take_over" and not module.check_mode:
        journal.tell("abort", journal.state["deployment"], f"deployment {params['deployment']} took over")
    seen = follow(module, journal)
    return {**seen, "running": "", "changes": []} if "phase" in seen and journal.load() else {}


def _start_program(root: Path, unit: Path, journal: Journal, request: dict[str, Any]) -> None:
    home = install(root / "tools")
    text = _PROGRAM_UNIT.format(root=root, service=unit.name, home=home, python=sys.executable)
    path = unit.with_name(UNIT)
    if read_text(path) != text:
        write_atomically(path, text.encode())
        switch.systemctl("daemon-reload")
    switch.systemctl("enable", UNIT)
    journal.open(request)
    switch.systemctl("start", "--no-block", UNIT)


def look(journal: Journal, deployment: str) -> dict[str, Any]:
    """Say how the switch of ``deployment`` stands."""
    under_way = journal.load()
    if under_way and journal.state["deployment"] == deployment:
        waits_to = journal.state.get("waits_to", "")
        outcome = "ready" if journal.state["phase"] == AWAITING else "waiting" if waits_to else "under way"
        return {**_describe(journal.state), "outcome": outcome, "waits_to": waits_to, **_room(journal.directory)}
    last = journal.last()
    if last.get("deployment") == deployment:
        return {**_describe(last), "outcome": last["outcome"]}
    return {**_describe(journal.state), "outcome": "in progress"} if under_way else {"outcome": "none"}


def follow(module: AnsibleModule, journal: Journal, until: tuple[str, ...] = ()) -> dict[str, Any]:
    """Wait for the next phase, or for one of the outcomes ``until``, as long as one call may."""
    deadline = time.monotonic() + module.params["window_s"]
    first = seen = look(journal, module.params["deployment"])
    if not module.check_mode and journal.state.get("deployment") == module.params["deployment"]:
        journal.follow()
    while time.monotonic() < deadline:
        if seen["outcome"] in until or (seen["outcome"] not in ("under way", "in progress") and not until):
            break
        if not until and seen["phase"] != first["phase"]:
            break
        time.sleep(_POLL_S)
        seen = look(journal, module.params["deployment"])
    return {"changed": False, **seen}


def confirm(module: AnsibleModule, journal: Journal) -> dict[str, Any]:
    if look(journal, module.params["deployment"])["outcome"] == "ready" and not module.check_mode:
        journal.tell("confirm", module.params["deployment"])
    return follow(module, journal, until=(CONFIRMED, RESTORED, NOT_RESTORED, "none"))


def proceed(module: AnsibleModule, journal: Journal) -> dict[str, Any]:
    deployment, step = module.params["deployment"], module.params["step"]
    deadline = time.monotonic() + module.params["window_s"]
    seen = look(journal, deployment)
    if seen.get("waits_to") == step and not module.check_mode:
        journal.tell("proceed", deployment, step)
        while seen.get("waits_to") == step and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            seen = look(journal, deployment)
    # The others are told before anybody waits for all.
    return {"changed": False, **seen}


def abort(module: AnsibleModule, journal: Journal) -> dict[str, Any]:
    # Whoever's it is: taking over another deployment's switch is what this is for, too.
    if journal.load() and not module.check_mode:
        journal.tell("abort", journal.state["deployment"], module.params["reason"])
    # Ready for confirmation is what it may still be until the program has read this.
    return follow(module, journal, until=(CONFIRMED, RESTORED, NOT_RESTORED, "none"))


def _room(directory: Path) -> dict[str, bool]:
    """Tell of a full disk: the program waits on it, and has no room to say so itself."""
    return {} if os.statvfs(directory).f_bfree else {"disk_full": True}


def _describe(state: dict[str, Any]) -> dict[str, Any]:
    told = {name: state[name] for name in (*_TOLD, *_TIMES) if name in state}
    for side in ("from", "to"):
        told[side] = state[side]["id"]
    if state["progress"].get("waits_for"):
        told["waits_for"] = state["progress"]["waits_for"]
    return {"phase": state["phase"], "progress": state["progress"], "switch": told}


def main() -> None:
    module = AnsibleModule(
        argument_spec=ARGUMENT_SPEC,
        required_if=[("state", "started", ["id"]), ("state", "proceeded", ["step"])],
        supports_check_mode=True,
    )
    releases = Releases(Path(module.params["root"]))
    journal = Journal(releases.root)
    try:
        if module.params["state"] == "started":
            with contextlib.nullcontext() if module.check_mode else journal.alone():
                result = start(module, releases, journal)
        else:
            if not module.check_mode:
                # Nothing but the program ends a switch.
                resume(journal)
            act = {"followed": follow, "proceeded": proceed, "confirmed": confirm, "aborted": abort}
            result = act[module.params["state"]](module, journal)
    except (ReleaseError, SwitchError, MatesError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
