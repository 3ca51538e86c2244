# SPDX-License-Identifier: Apache-2.0
"""Filters that show what the dialect probe measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ansible.constants as C
import ansible.module_utils

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie.tap_probe import recommend, table  # noqa: E402


class FilterModule:
    """What Ansible looks for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"aerie_tap_table": table, "aerie_tap_advice": recommend}
