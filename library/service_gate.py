#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: wait for a vLLM service by what it does."""

from __future__ import annotations

DOCUMENTATION = r"""
module: service_gate
short_description: Wait until a vLLM service under systemd is ready, or say why it never will be
description:
  - Ready means that the unit runs, C(/health) answers 200, the expected model id is served, a token was generated, and
    the counters of speculative decoding are there exactly when the release speculates.
  - While waiting, the phase of the start (starting, loading weights, loading drafter, compiling, capturing graphs,
    warming up, serving) is read from the journal of this very start.
  - Fails at once when the unit failed, was started again, or serves something else; the message holds the root-cause
    line of vLLM's log, not the last line of a wrapped traceback, and the remedy where one is known.
  - The action plugin of the same name repeats short calls until O(budget_s) is used up, and shows the phase on the
    control node at least every 10 seconds.
  - Changes nothing. Run it as a user who may read the system journal.
options:
  unit:
    description: The systemd unit of the service.
    type: str
    default: vllm.service
  url:
    description: Where the service listens, as seen from its own host, such as V(http://127.0.0.1:8000).
    type: str
    required: true
  model:
    description: The model id that must be served.
    type: str
    required: true
  speculative:
    description: Whether the release speculates. The counters of speculative decoding must be there exactly then.
    type: bool
    required: true
  api_key:
    description: Key to call the service with. It is sent to O(url) only.
    type: str
  budget_s:
    description: Seconds that the service may take to become ready, over all calls.
    type: float
    default: 1800
  window_s:
    description: Seconds that one call may wait, at most 10.
    type: float
    default: 5
  start_id:
    description:
      - The start to watch, as an earlier call returned it. A later one is a failure.
      - By default the one that is under way.
    type: str
    default: ""
  host:
    description: The host's name in messages. By default the name that the host gives itself.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: In check mode nothing is waited for; RV(ready) is none and RV(phase) is C(not started).
  diff_mode:
    support: none
author:
  - Aerie
"""

EXAMPLES = r"""
- name: Wait until vLLM is ready
  service_gate:
    url: http://127.0.0.1:8000
    model: kimi-k2.5
    speculative: true
    api_key: "{{ vault_vllm_service_api_key }}"
    budget_s: 3600
"""

RETURN = r"""
ready:
  description: Whether the service is ready; none in check mode.
  returned: always
  type: bool
  sample: true
phase:
  description: How far the start is.
  returned: always
  type: str
  sample: loading weights
percent:
  description: How far the phase is, where vLLM reports it.
  returned: always
  type: int
  sample: 40
elapsed_s:
  description: Seconds since the start of the unit's process.
  returned: always
  type: float
  sample: 23.4
start_id:
  description: The start that was watched, as systemd's invocation id.
  returned: always
  type: str
  sample: 0b5c6a6e4e4f4f0f8f8e1f0c6f6a6b6c
restarts:
  description: How often systemd restarted the unit by itself since it was last started on purpose.
  returned: always
  type: int
  sample: 0
speculation:
  description:
    - What one request of the gate moved in the counters of speculative decoding.
    - Requests of others that run at the same moment count too.
  returned: when ready and O(speculative)
  type: dict
  sample: {drafts: 8, draft_tokens: 24, accepted_tokens: 24, accepted_per_position: [8, 8, 8]}
tap_ids_logged:
  description: The auxiliary hidden-state layers that vLLM's log names; none where it names none.
  returned: always
  type: list
  elements: int
  sample: [2, 30, 58]
journal_tail:
  description: The last 30 lines of this start in the journal.
  returned: when not ready
  type: list
  elements: str
  sample: ["Application startup complete."]
"""

import platform

from ansible.module_utils.aerie.readiness import Gate
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "unit": {"type": "str", "default": "vllm.service"},
    "url": {"type": "str", "required": True},
    "model": {"type": "str", "required": True},
    "speculative": {"type": "bool", "required": True},
    "api_key": {"type": "str", "no_log": True},
    "budget_s": {"type": "float", "default": 1800},
    "window_s": {"type": "float", "default": 5},
    "start_id": {"type": "str", "default": ""},
    "host": {"type": "str", "default": ""},
}

_LONGEST_WINDOW_S = 10.0


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    params = module.params
    if not 0 < params["window_s"] <= _LONGEST_WINDOW_S:
        module.fail_json(
            msg=f"window_s is {params['window_s']:g}; choose more than 0 and at most {_LONGEST_WINDOW_S:g}."
        )
    if params["budget_s"] < 0:
        module.fail_json(msg=f"budget_s is {params['budget_s']:g}; choose a number of seconds that is not negative.")
    if not params["url"].startswith(("http://", "https://")):
        module.fail_json(msg=f"url is {params['url']}; it must begin with http:// or https://.")
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, ready=None, phase="not started", percent=None, elapsed_s=0.0)

    def run(command: list[str]) -> str:
        code, out, _ = module.run_command(command, errors="replace")
        return str(out) if code == 0 else ""

    gate = Gate(
        host=params["host"] or platform.node(),
        unit=params["unit"],
        url=params["url"],
        model=params["model"],
        speculative=params["speculative"],
        api_key=params["api_key"],
        run=run,
    )
    status = gate.watch(params["start_id"], min(params["window_s"], params["budget_s"]))
    result = status._asdict()
    fault = result.pop("fault")
    result["speculation"] = status.speculation._asdict() if status.speculation is not None else None
    if fault is not None:
        module.fail_json(msg=fault, **result)
    if status.ready:
        del result["journal_tail"]
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
