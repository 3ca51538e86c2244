#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Says what an installed vLLM is and what it can do with EAGLE-3."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_facts
short_description: Describe an installed vLLM without importing it
description:
  - Reads version, build and torch from the environment's files, and from the code whether DeepSeek-V3 and Kimi-K2.5
    have the EAGLE-3 interface, all taps, and taps over pipeline stages, each with the file and the line.
  - Names the files that are not what the RECORD of their distribution names.
  - Imports neither vLLM nor torch, and answers for a broken environment too; RV(problems) says what is broken.
  - Changes nothing.
author: Aerie
attributes:
  check_mode:
    description: Changes nothing, and does the same in check mode.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
options:
  environment:
    description: The Python environment that vLLM is installed in, such as C(/srv/ml-env). Or give O(package_dir).
    type: path
  package_dir:
    description: The installed C(vllm) package.
    type: path
  full:
    description: Also hash the compiled libraries (files over 1 MiB), which takes seconds.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: See what is installed in an environment made by hand
  vllm_facts:
    environment: /srv/ml-env
  register: __vllm
"""

RETURN = r"""
package_dir:
  description: The installed package; empty if there is none.
  type: str
  returned: always
  sample: /srv/ml-env/lib/python3.12/site-packages/vllm
vllm_version:
  description: The release; empty if nothing states it.
  type: str
  returned: always
  sample: 0.33.0
distribution:
  description: The distribution whose RECORD lists the package; empty if there is none.
  type: str
  returned: always
  sample: vllm
build:
  description: C(cuda), C(rocm), C(xpu) or C(cpu); empty if nothing tells.
  type: str
  returned: always
  sample: cuda
torch_version:
  description: The installed torch; empty if there is none.
  type: str
  returned: always
  sample: 2.14.0+cu130
torch_cuda:
  description: The CUDA that torch was built for; empty for other builds.
  type: str
  returned: always
  sample: "13.0"
capabilities:
  description: For C(interface), C(taps) and C(pipeline) the C(state) (native, patched, missing; unknown where this
    Python cannot parse the code) and the C(evidence), a list of C(state), C(file), C(line) and C(what).
  type: dict
  returned: always
differing:
  description: Files that differ from RECORD, each with C(path), C(state) (patched where it carries Aerie's marks,
    changed, missing), C(sha256) and C(edits).
  type: list
  elements: dict
  returned: always
problems:
  description: What is broken, each with its remedy.
  type: list
  elements: str
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.facts import describe, find_package
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.basic import AnsibleModule

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "environment": {"type": "path"},
    "package_dir": {"type": "path"},
    "full": {"type": "bool", "default": False},
}
NOTHING: dict[str, Any] = {
    "package_dir": "",
    "vllm_version": "",
    "distribution": "",
    "build": "",
    "torch_version": "",
    "torch_cuda": "",
    "capabilities": {},
    "differing": [],
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec=ARGUMENT_SPEC,
        mutually_exclusive=[("environment", "package_dir")],
        required_one_of=[("environment", "package_dir")],
        supports_check_mode=True,
    )
    try:
        package_dir = _package_dir(module.params)
    except Refusal as refusal:
        module.exit_json(changed=False, **NOTHING, problems=[str(refusal)])
    module.exit_json(changed=False, **describe(package_dir, full=module.params["full"]))


def _package_dir(parameters: dict[str, Any]) -> Path:
    if parameters["environment"]:
        return find_package(Path(parameters["environment"]))
    package_dir = Path(parameters["package_dir"])
    if not package_dir.is_dir():
        raise Refusal(f"{package_dir} is no directory: name the installed vllm package")
    return package_dir


if __name__ == "__main__":
    main()
