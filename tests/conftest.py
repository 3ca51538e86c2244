# SPDX-License-Identifier: Apache-2.0
"""One import spelling everywhere: `ansible.module_utils.aerie.x`, as Ansible itself ships it to a host."""

import sys
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).parent.parent
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))
sys.path.insert(0, str(ROOT / "library"))
