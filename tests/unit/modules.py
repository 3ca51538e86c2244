# SPDX-License-Identifier: Apache-2.0
"""Run an Ansible module of library/ in this process, as Ansible would: arguments in, one JSON object out."""

from __future__ import annotations

import importlib
import json
from typing import Any
from unittest.mock import patch

import pytest
from ansible.module_utils.common import warnings
from ansible.module_utils.testing import patch_module_args


def run_module(
    name: str, arguments: dict[str, Any], capsys: pytest.CaptureFixture[str], check_mode: bool = False
) -> dict[str, Any]:
    """Return the result of the module ``name``; ``failed`` is always in it."""
    module = importlib.import_module(name)
    capsys.readouterr()
    # Ansible gives every module a process of its own, on a host. Here one would report the warnings of those before it,
    # and none at all once a test has used a part of Ansible's control node.
    warnings._global_warnings.clear()
    host = patch("ansible.module_utils._internal.is_controller", False)
    with host, patch_module_args({**arguments, "_ansible_check_mode": check_mode}), pytest.raises(SystemExit) as caught:
        module.main()
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    failed = bool(result.get("failed", False))
    assert caught.value.code == (1 if failed else 0)
    return {**result, "failed": failed}
