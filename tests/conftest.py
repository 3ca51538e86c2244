# SPDX-License-Identifier: Apache-2.0
"""One import spelling everywhere: `ansible.module_utils.aerie.x`, as Ansible itself ships it to a host.

What tests start prints without colours, which Molecule and CI ask for, since tests read it."""

import os
import sys
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).parent.parent
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))
sys.path.insert(0, str(ROOT / "library"))

for name in ("ANSIBLE_FORCE_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS"):
    os.environ.pop(name, None)
os.environ["NO_COLOR"] = "1"
