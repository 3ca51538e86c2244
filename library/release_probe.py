#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""See from one look at a host whether anything is to be done there."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: release_probe
short_description: See from one look at a host whether anything is to be done there
description:
  - Compares what is on a host with what is wanted, by signs that are cheap to read; writes nothing but a cache of
    digests. The full comparison is M(release_verify)'s.
  - Has systemd run the switch program again where a switch is under way and it was stopped.
  - The digests of the request are computed on the control node, by the action plugin of the same name.
options:
  root:
    description: The directory of releases, store and ledger.
    type: path
    required: true
  unit:
    description: Where systemd looks for the service's unit.
    type: path
    default: /etc/systemd/system/vllm.service
  settings:
    description: Texts of the files with this host's settings, by path, which the service reads at its start.
    type: dict
    default: {}
  reread:
    description: Texts of the files that the service reads again when they change, by path.
    type: dict
    default: {}
  target:
    description: The target's directory.
    type: path
    required: true
  timers:
    description: Timers of systemd's that are to run, and to be enabled.
    type: list
    elements: str
    default: []
  request:
    description: All that a release is planned from, by name; compared with what the current one was planned from.
    type: dict
    default: {}
  code:
    description: Directories on the control node with the code that plans; part of the request.
    type: list
    elements: path
    default: []
  drafter:
    description: The drafter's directory on the control node; its content is part of the request.
    type: path
    default: ''
  lock:
    description: The lock on the control node; its content is part of the request.
    type: path
    default: ''
  digest_cache:
    description: A file of the control node that keeps the drafter's digests.
    type: path
    default: ''
  cache:
    description: A file of the host that keeps digests of large files; it may be removed at any time.
    type: path
    default: /var/cache/aerie/digests.json
  in_progress:
    description: What to do where a switch is under way. Anything but C(fail) says so in RV(reasons).
    type: str
    choices: [fail, wait, take_over]
    default: fail
  aim:
    description:
      - A release to go back to, or C(previous) for what this host served before the newest deployment that changed
        it. It is looked at as well.
    type: str
    default: ''
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: Aerie
"""

EXAMPLES = r"""
- name: See what is to be done
  release_probe:
    root: /opt/aerie
    target: /srv/models/Kimi-K2.5
    settings: {/etc/aerie/vllm.env: "{{ lookup('ansible.builtin.template', 'vllm.env.j2') }}"}
    request: {vllm_service_options: "{{ vllm_service_options }}"}
    lock: requirements/vllm-0.33.0-cu130-py312.txt
  register: probed
"""

RETURN = r"""
reasons:
  description: Why there is something to be done, one phrase each; empty if all is as wanted.
  type: list
  elements: str
  returned: success
request:
  description: The digests that were compared.
  type: dict
  returned: success
current:
  description: The release that is current, or nothing.
  type: str
  returned: success
running:
  description: The release that the service's main process runs, or nothing.
  type: str
  returned: success
healthy:
  description: Whether the service answers /health.
  type: bool
  returned: success
listens:
  description: The address and the port that the service's settings on the host name; empty where there are none.
  type: dict
  returned: success
  sample: {address: 192.0.2.11, port: '8000'}
certificate:
  description: The certificate that the service's settings on the host name, as a PEM text; empty without TLS.
  type: str
  returned: success
deployments:
  description: The two newest deployments that changed what this host serves, newest first, and from which release to
    which.
  type: list
  elements: dict
  returned: success
last_start_s:
  description: How long the current release took to start when it was confirmed last.
  type: float
  returned: success
releases:
  description: The releases on this host.
  type: list
  elements: str
  returned: success
aim:
  description: The release that O(aim) means, or nothing.
  type: str
  returned: success
aim_problems:
  description: Why the host cannot go back to it.
  type: list
  elements: str
  returned: success
aim_changes:
  description: The inputs and files in which it differs from the current release.
  type: list
  elements: str
  returned: success
"""

from pathlib import Path

from ansible.module_utils.aerie.journal import Journal, SwitchError, whose
from ansible.module_utils.aerie.probe import UNDER_WAY, Desired, describe, reasons
from ansible.module_utils.aerie.release import Releases
from ansible.module_utils.aerie.resume import resume
from ansible.module_utils.aerie.verification import DIGEST_CACHE, quick_check
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "root": {"type": "path", "required": True},
    "unit": {"type": "path", "default": "/etc/systemd/system/vllm.service"},
    "settings": {"type": "dict", "default": {}},
    "reread": {"type": "dict", "default": {}},
    "target": {"type": "path", "required": True},
    "timers": {"type": "list", "elements": "str", "default": []},
    "request": {"type": "dict", "default": {}},
    "code": {"type": "list", "elements": "path", "default": []},
    "drafter": {"type": "path", "default": ""},
    "lock": {"type": "path", "default": ""},
    "digest_cache": {"type": "path", "default": ""},
    "in_progress": {"type": "str", "choices": ["fail", "wait", "take_over"], "default": "fail"},
    "cache": {"type": "path", "default": str(DIGEST_CACHE)},
    "aim": {"type": "str", "default": ""},
}


def look(module: AnsibleModule) -> None:
    params = module.params
    root, unit = Path(params["root"]), Path(params["unit"])
    cache = Path(params["cache"])
    releases, journal = Releases(root), Journal(root)
    if journal.load() and not module.check_mode:
        # Not between the request of another run and its start of the program.
        with journal.alone():
            resume(journal, "another run found that it had not begun")
    if journal.load() and params["in_progress"] == "fail":
        module.fail_json(msg=whose(journal.state))
    found = describe(root, unit, params["settings"])
    aim = params["aim"]
    # In check mode nothing is written.
    remember = not module.check_mode
    if aim == "previous":
        aim = found["deployments"][0]["from"] if found["deployments"] else ""
    problems = []
    if params["aim"]:
        problems = quick_check(releases, aim, cache, remember, name_files=True) if aim else []
        # What is under way ends before anything else is done there; until then nobody calls this host ready.
        wanted = [UNDER_WAY] if journal.state else []
    else:
        desired = Desired(
            params["request"], params["settings"], params["reread"], Path(params["target"]), params["timers"]
        )
        wanted = reasons(releases, unit, desired, cache, remember)
    module.exit_json(
        changed=False,
        reasons=wanted,
        request=params["request"],
        aim=aim,
        aim_problems=problems,
        aim_changes=releases.differences(found["current"], aim) if aim else [],
        **found,
    )


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        look(module)
    except (OSError, SwitchError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
