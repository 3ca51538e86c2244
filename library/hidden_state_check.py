#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Checks that the hidden states which reach an EAGLE-3 drafter are the ones that it was trained on."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hidden_state_check
short_description: Check the hidden states that a vLLM gives to an EAGLE-3 drafter
description:
  - With wrong hidden states nothing fails, and speculation is merely useless. This module finds that out, in one of
    four ways. See C(docs/hidden-states.md).
  - Changes nothing, and disturbs no running service.
author: Aerie
attributes:
  check_mode:
    description: Changes nothing, and does the same in check mode; the numeric level may have nothing to run yet.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
options:
  level:
    description:
      - With C(symbolic) the source of an installed release is run with symbolic tensors, for many tap ids and pipeline
        splits. Takes O(package_dir) and O(patch_sets).
      - With C(numeric) the installed model classes are compared with Hugging Face transformers, tap by tap, in float32,
        by a program that the release's own interpreter O(python) runs. Without O(device) it uses no GPU, and where it
        cannot run without one the verdict is C(not_run).
      - With C(live) a running service's acceptance is measured on real prompts. Takes O(config).
      - With C(dump) two files of hidden states are compared, O(reference) and O(deployed).
    type: str
    choices: [symbolic, numeric, live, dump]
    required: true
  mode:
    description: Whether a failed check fails the task (C(enforce)) or is a warning (C(advisory)).
    type: str
    choices: [enforce, advisory]
    default: enforce
  package_dir:
    description: The installed C(vllm) package. For O(level=symbolic).
    type: path
  patch_sets:
    description: Rendered patch sets, see C(docs/patch-sets.md). For O(level=symbolic).
    type: list
    elements: dict
  layers:
    description: Number of layers of the target. For O(level=symbolic) and O(level=numeric).
    type: int
    default: 61
  python:
    description: The release's interpreter. For O(level=numeric).
    type: path
  tap_ids:
    description: The tap ids that the release serves. Empty takes vLLM's default. For O(level=numeric).
    type: list
    elements: int
    default: []
  every_id:
    description: Check all other ids, too, as the proof of a patch set covers them. For O(level=numeric).
    type: bool
    default: false
  stages:
    description:
      - Pipeline stages that the layers are cut into, each a process of its own. For O(level=numeric).
    type: int
    default: 1
  partition:
    description:
      - How many layers each stage has, with commas, as C(VLLM_PP_LAYER_PARTITION). Empty takes vLLM's rule. For
        O(level=numeric).
    type: str
    default: ""
  device:
    description:
      - A GPU, by its number or UUID, with 2 GB of free memory. Empty uses none. For O(level=numeric).
    type: str
    default: ""
  threads:
    description: Threads of the CPU. For O(level=numeric).
    type: int
    default: 1
  budget_s:
    description: Seconds after which the numeric check has not run. For O(level=numeric).
    type: int
    default: 60
  user:
    description: The unprivileged user that runs it, C(nobody) where there is no such user. For O(level=numeric).
    type: str
    default: vllm
  note:
    description:
      - A file, named for the release, that keeps a result which passed. Where one beside it is about the same code and
        the same question, the program is not run. Empty keeps nothing. For O(level=numeric).
    type: str
    default: ""
  tools:
    description: Where programs of Aerie are kept on the host. For O(level=numeric).
    type: path
    default: /opt/aerie/tools
  config:
    description: The live gate's configuration, see C(module_utils/aerie/acceptance.py). For O(level=live).
    type: dict
  group:
    description: The service's group, which may read the digest of a key of the moment. For O(level=live).
    type: str
    default: vllm
  reference:
    description: A file of hidden states that the drafter was trained on. For O(level=dump).
    type: path
  deployed:
    description: A file of hidden states of the deployed target. For O(level=dump).
    type: path
"""

EXAMPLES = r"""
- name: Compare the installed model classes with transformers
  hidden_state_check:
    level: numeric
    python: /opt/aerie/current/venv/bin/python
    layers: 61
    tap_ids: [2, 30, 58]
    every_id: true

- name: Prove the taps of what is installed
  hidden_state_check:
    level: symbolic
    package_dir: /opt/aerie/current/venv/lib/python3.12/site-packages/vllm
    patch_sets: "{{ rendered }}"

- name: Compare what the drafter was trained on with what it gets
  hidden_state_check:
    level: dump
    reference: /srv/dumps/training.safetensors
    deployed: /srv/dumps/deployed.safetensors
"""

RETURN = r"""
gate:
  description: The level.
  type: str
  returned: always
  sample: numeric
verdict:
  description: C(passed), C(warned), C(failed), C(not_run) or C(not_applicable).
  type: str
  returned: always
  sample: passed
message:
  description: One sentence with what was found, the numbers and the remedy.
  type: str
  returned: always
fault:
  description: The name of what is wrong, such as C(off by +1 layer); C(matches) where nothing is.
  type: str
  returned: for the levels numeric and dump
  sample: residual missing
taps:
  description:
    - For each tap its C(id), C(max_abs_error) relative to the largest element, C(cosine), and in C(best) which stream
      it matches best.
  type: list
  elements: dict
  returned: for the levels numeric and dump
cases:
  description: How many symbolic cases were C(run) and C(passed).
  type: dict
  returned: for the level symbolic
first_failure:
  description: The first symbolic case that failed, and how.
  type: str
  returned: for the level symbolic
argv:
  description: The whole command of the numeric check, for whoever has to run it later, with the GPUs free.
  type: list
  elements: str
  returned: for the level numeric
evidence:
  description: A digest of all that the outcome depends on, for whoever runs the command later and keeps its result.
  type: str
  returned: for the level numeric, with O(note) and an environment
"""

from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ansible.module_utils.aerie import proved
from ansible.module_utils.aerie.acceptance import live_gate
from ansible.module_utils.aerie.hidden_state_gates import FAILED, PASSED, Numeric, numeric, symbolic
from ansible.module_utils.aerie.host_key import HostKeyError, host_key
from ansible.module_utils.aerie.program import install
from ansible.module_utils.aerie.safetensors_header import SafetensorsError
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.tap_dump import DumpError, compare_files
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "level": {"type": "str", "choices": ["symbolic", "numeric", "live", "dump"], "required": True},
    "mode": {"type": "str", "choices": ["enforce", "advisory"], "default": "enforce"},
    "package_dir": {"type": "path"},
    "patch_sets": {"type": "list", "elements": "dict"},
    "layers": {"type": "int", "default": 61},
    "python": {"type": "path"},
    "tap_ids": {"type": "list", "elements": "int", "default": []},
    "every_id": {"type": "bool", "default": False},
    "stages": {"type": "int", "default": 1},
    "partition": {"type": "str", "default": ""},
    "device": {"type": "str", "default": ""},
    "threads": {"type": "int", "default": 1},
    "budget_s": {"type": "int", "default": 60},
    "user": {"type": "str", "default": "vllm"},
    "note": {"type": "str", "default": ""},
    "tools": {"type": "path", "default": "/opt/aerie/tools"},
    "config": {"type": "dict"},
    "group": {"type": "str", "default": "vllm"},
    "reference": {"type": "path"},
    "deployed": {"type": "path"},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec=ARGUMENT_SPEC,
        required_if=[
            ("level", "symbolic", ("package_dir", "patch_sets")),
            ("level", "numeric", ("python",)),
            ("level", "live", ("config",)),
            ("level", "dump", ("reference", "deployed")),
        ],
        supports_check_mode=True,
    )
    levels = {"symbolic": _symbolic, "numeric": _numeric, "live": _live, "dump": _dump}
    try:
        result = levels[module.params["level"]](module)
    except (Refusal, HostKeyError, DumpError, SafetensorsError) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename} cannot be read or written: {error.strerror}; mend that and run again")
    if result["verdict"] == FAILED and module.params["mode"] == "enforce":
        module.fail_json(msg=result["message"], **result)
    if result["verdict"] in (FAILED, "warned"):
        module.warn(result["message"])
    module.exit_json(changed=False, **result)


def _symbolic(module: AnsibleModule) -> dict[str, Any]:
    return symbolic(Path(module.params["package_dir"]), module.params["patch_sets"], [module.params["layers"]])


def _numeric(module: AnsibleModule) -> dict[str, Any]:
    names = [field.name for field in fields(Numeric) if field.name != "python"]
    check = Numeric(Path(module.params["python"]), **{name: module.params[name] for name in names})
    if not module.check_mode:
        return _numeric_once(check, install(Path(module.params["tools"])), module.params["note"], check_mode=False)
    with TemporaryDirectory() as scratch:
        # For the unprivileged user.
        Path(scratch).chmod(0o755)
        return _numeric_once(check, install(Path(scratch)), module.params["note"], check_mode=True)


def _numeric_once(check: Numeric, home: Path, note: str, *, check_mode: bool) -> dict[str, Any]:
    """Run the numeric check, unless a release of the same code has passed it."""
    if not note or not check.python.exists():
        return {**numeric(check, home), "argv": check.argv(home)}
    evidence = check.evidence(home)
    known = proved.known(Path(note), evidence)
    result = known["result"] if known else numeric(check, home)
    if result["verdict"] == PASSED and not check_mode:
        proved.keep(Path(note), evidence, **(known or {"result": result}))
    if known:
        result = {**result, "message": f"{result['message']} Found with release {known['by']} at {known['at']}."}
    return {**result, "argv": check.argv(home), "evidence": evidence}


def _live(module: AnsibleModule) -> dict[str, Any]:
    with host_key(group=module.params["group"]) as key:
        return live_gate(module.params["config"], key)


def _dump(module: AnsibleModule) -> dict[str, Any]:
    return compare_files(Path(module.params["reference"]), Path(module.params["deployed"]))


if __name__ == "__main__":
    main()
