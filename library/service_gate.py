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
  - While waiting, the phase of the start (starting, downloading, loading weights, loading drafter, compiling, capturing
    graphs, warming up, serving) is read from the journal of this very start, with percentage, rate and estimate.
  - How long a start may take follows from its phase, the checkpoint's size and the rate that is measured. One that says
    nothing new and reads nothing for O(stuck_after_s) is stuck; RV(evidence) then shows what its processes do.
  - Fails at once when the unit failed, was started again, or serves something else; the message holds the root-cause
    line of vLLM's log, not the last line of a wrapped traceback, and the remedy where one is known.
  - The action plugin of the same name repeats short calls until O(budget_s) is used up, and shows phase, percentage,
    rate and estimate on the control node at least every 10 seconds.
  - Calls the service with a key of the moment, which it makes on the host and whose digest it puts where the service
    looks (aerie_api_keys.py). No client's key is needed, and none travels.
  - Changes nothing else. Run it as root.
options:
  unit:
    description: The systemd unit of the service.
    type: str
    default: vllm.service
  url:
    description: Where the service listens, as seen from its own host, such as V(http://127.0.0.1:8000).
    type: str
    required: true
  certificate:
    description: The file with the certificate that the service shows. Empty without TLS.
    type: path
    default: ""
  model:
    description: The model id that must be served.
    type: str
    required: true
  speculative:
    description: Whether the release speculates. The counters of speculative decoding must be there exactly then.
    type: bool
    required: true
  group:
    description: The service's group, which may read the digest of the key of the moment.
    type: str
    default: vllm
  keys_dir:
    description: Where the service looks for the digests of such keys.
    type: path
    default: /run/aerie/api-keys.d
  budget_s:
    description: Seconds that the service may take to become ready, over all calls.
    type: float
    default: 1800
  window_s:
    description:
      - Seconds that one call may wait, at most 10. If it is waiting for an answer of the service then, it goes on for
        half a minute at most.
    type: float
    default: 5
  target_bytes:
    description: Size of the checkpoint, of which rate and budget are made; 0 if it is not known.
    type: int
    default: 0
  stuck_after_s:
    description: Seconds without progress after which a start is given up.
    type: float
    default: 900
  moved:
    description: What an earlier call returned as RV(moved). By default the start has not been watched yet.
    type: dict
    default: {}
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
state:
  description: C(under way), C(ready), C(stuck) or C(failed).
  returned: always, but in check mode
  type: str
  sample: under way
done:
  description: How much of RV(total) is done, where vLLM counts it.
  returned: always, but in check mode
  type: int
  sample: 26
total:
  description: The files or graphs of the phase.
  returned: always, but in check mode
  type: int
  sample: 64
rate:
  description: Bytes a second that the weights are read with, where it is measured.
  returned: always, but in check mode
  type: float
  sample: 4900000000.0
left_s:
  description: The estimate for the rest of the phase, in seconds.
  returned: always, but in check mode
  type: float
  sample: 78.0
budget_s:
  description: Seconds that the whole start may take, as far as is known by now; none without a limit.
  returned: always, but in check mode
  type: float
  sample: 4790.0
evidence:
  description: What the processes of a stuck start do; with their Python stacks where py-spy is installed.
  returned: always, but in check mode
  type: list
  elements: str
  sample: ["pid 310 (VLLM::Worker_TP0): state D, waits in the kernel for folio_wait_bit_common"]
moved:
  description: When the start last moved on, for the next call.
  returned: always, but in check mode
  type: dict
  sample: {mark: "loading weights, 40 %, 26, 41 lines", at: 83010.2}
words:
  description: Phase, percentage, rate and estimate in words.
  returned: always, but in check mode
  type: str
  sample: loading weights 40 % (26 of 64, 4.9 GB/s, about 78 s left)
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
from pathlib import Path

from ansible.module_utils.aerie.host_key import DIRECTORY, HostKeyError, host_key
from ansible.module_utils.aerie.readiness import Budget, Gate, Moved, phase_words
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC = {
    "unit": {"type": "str", "default": "vllm.service"},
    "url": {"type": "str", "required": True},
    "certificate": {"type": "path", "default": ""},
    "model": {"type": "str", "required": True},
    "speculative": {"type": "bool", "required": True},
    "group": {"type": "str", "default": "vllm"},
    "keys_dir": {"type": "path", "default": str(DIRECTORY), "no_log": False},
    "budget_s": {"type": "float", "default": 1800},
    "window_s": {"type": "float", "default": 5},
    "target_bytes": {"type": "int", "default": 0},
    "stuck_after_s": {"type": "float", "default": 900},
    "moved": {"type": "dict", "default": {}},
    "start_id": {"type": "str", "default": ""},
    "host": {"type": "str", "default": ""},
}

_LONGEST_WINDOW_S = 10.0
# Longer than any call; the last answers are waited for.
_KEY_LIFETIME_S = 300.0


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
    try:
        moved = Moved(str(params["moved"].get("mark", "")), float(params["moved"].get("at", 0.0)))
    except (TypeError, ValueError):
        module.fail_json(msg="moved is not what an earlier call returned: leave it out.")
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, ready=None, phase="not started", percent=None, elapsed_s=0.0)

    def run(command: list[str]) -> str:
        code, out, _ = module.run_command(command, errors="replace")
        return str(out) if code == 0 else ""

    try:
        with host_key(params["group"], Path(params["keys_dir"]), _KEY_LIFETIME_S) as key:
            # The service may repeat in an answer what it was sent.
            module.no_log_values.add(key)
            gate = Gate(
                host=params["host"] or platform.node(),
                unit=params["unit"],
                url=params["url"],
                model=params["model"],
                speculative=params["speculative"],
                api_key=key,
                run=run,
                budget=Budget(params["target_bytes"], stuck_after_s=params["stuck_after_s"]),
                moved=moved,
                certificate=params["certificate"],
            )
            status = gate.watch(params["start_id"], min(params["window_s"], params["budget_s"]))
    except HostKeyError as error:
        module.fail_json(msg=str(error))
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"The certificate {params['certificate']} cannot be read: {error}. Deploy again.")
    result = status._asdict()
    fault = result.pop("fault")
    result["moved"] = status.moved._asdict()
    result["words"] = phase_words(status)
    result["speculation"] = status.speculation._asdict() if status.speculation is not None else None
    if fault is not None:
        module.fail_json(msg=fault, **result)
    if status.ready:
        del result["journal_tail"]
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
