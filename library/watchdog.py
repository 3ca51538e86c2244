#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: have a vLLM service watched for an engine that is stuck."""

from __future__ import annotations

DOCUMENTATION = r"""
module: watchdog
short_description: Have a vLLM service that is stuck started again
description:
  - vLLM answers C(/health) with 200 while its engine is stuck. A timer looks at the service's progress (the counters of
    its engine), and asks it for one token where there is none. A service that neither made progress nor answered for
    O(limit_s) is ended, and systemd starts it again; the reason and what the processes did are in its journal.
  - A service that is starting is left alone, and so is one that Aerie switches to another release.
  - Installs the program below O(root)/tools, and C(aerie-watchdog.timer), which runs it.
options:
  state:
    description: Whether the service is watched.
    type: str
    choices: [present, absent]
    default: present
  root:
    description: Aerie's directory.
    type: path
    default: /opt/aerie
  unit:
    description: The systemd unit of the service.
    type: str
    default: vllm.service
  settings:
    description: The file that says where the service listens.
    type: path
    default: /etc/aerie/vllm.env
  group:
    description: The service's group, which may read the digest of the watchdog's key.
    type: str
    default: vllm
  limit_s:
    description: Seconds without progress and answer after which the service is ended.
    type: int
    default: 300
  every_s:
    description: Seconds from one look to the next.
    type: int
    default: 30
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Have the service watched
  watchdog:
    limit_s: 300

- name: Stop watching
  watchdog:
    state: absent
"""

RETURN = r"""
timer:
  description: The timer's unit.
  returned: always
  type: str
  sample: aerie-watchdog.timer
diff:
  description: The units before and after.
  returned: always
  type: dict
  sample: {before: "", after: "[Unit]"}
"""

import sys
from pathlib import Path

# The program itself, too: an Ansible module carries what it imports.
from ansible.module_utils.aerie import watchdog
from ansible.module_utils.aerie.files import write_atomically
from ansible.module_utils.aerie.program import home_of, install
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "root": {"type": "path", "default": "/opt/aerie"},
    "unit": {"type": "str", "default": "vllm.service"},
    "settings": {"type": "path", "default": "/etc/aerie/vllm.env"},
    "group": {"type": "str", "default": "vllm"},
    "limit_s": {"type": "int", "default": 300},
    "every_s": {"type": "int", "default": 30},
}

UNITS = Path("/etc/systemd/system")
SERVICE = "aerie-watchdog.service"
TIMER = "aerie-watchdog.timer"

_SERVICE = """\
# One look at vLLM. Written by Aerie.
[Unit]
Description=Aerie's look for a vLLM engine that is stuck
ConditionPathExists={settings}

[Service]
Type=oneshot
Environment=PYTHONPATH={home} PYTHONDONTWRITEBYTECODE=1
ExecStart={python} -m {program} --unit {unit} --settings {settings} --group {group} --limit {limit_s} --every {every_s}
TimeoutStartSec=5min
NoNewPrivileges=yes
ProtectSystem=full
ProtectHome=yes
PrivateTmp=yes
"""

_TIMER = """\
# Written by Aerie.
[Unit]
Description=Looks of Aerie's watchdog at vLLM

[Timer]
OnActiveSec={every_s}s
OnUnitInactiveSec={every_s}s
AccuracySec=1s

[Install]
WantedBy=timers.target
"""


def units(params: dict[str, object], home: Path) -> dict[str, str]:
    """Return the texts of the units, by name."""
    values = {**params, "home": home, "python": sys.executable, "program": watchdog.__name__}
    return {SERVICE: _SERVICE.format(**values), TIMER: _TIMER.format(**values)}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    params = module.params
    for name in ("limit_s", "every_s"):
        if params[name] < 1:
            module.fail_json(msg=f"{name} is {params[name]}; choose a number of seconds that is at least 1.")
    present = params["state"] == "present"
    tools = Path(params["root"]) / "tools"
    wanted = units(params, home_of(tools)) if present else {SERVICE: "", TIMER: ""}
    installed = {name: _text(UNITS / name) for name in wanted}
    stale = installed != wanted or (present and not home_of(tools).is_dir())
    enabled = module.run_command(["systemctl", "is-enabled", "--quiet", TIMER])[0] == 0
    active = module.run_command(["systemctl", "is-active", "--quiet", TIMER])[0] == 0
    changed = stale or present != enabled or present != active
    if changed and not module.check_mode:
        if present:
            install(tools)
            for name, text in wanted.items():
                write_atomically(UNITS / name, text.encode())
            _systemctl(module, "daemon-reload")
            _systemctl(module, "enable", TIMER)
            _systemctl(module, "restart", TIMER)
        else:
            if installed[TIMER]:
                _systemctl(module, "disable", "--now", TIMER)
            for name in wanted:
                (UNITS / name).unlink(missing_ok=True)
            _systemctl(module, "daemon-reload")
    diff = {"before": "\n".join(installed.values()), "after": "\n".join(wanted.values())}
    module.exit_json(changed=changed, timer=TIMER, diff=diff)


def _systemctl(module: AnsibleModule, *arguments: str) -> None:
    code, _, error = module.run_command(["systemctl", *arguments])
    if code != 0:
        module.fail_json(msg=f"systemctl {' '.join(arguments)} failed: {error.strip()}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
