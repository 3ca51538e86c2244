# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin for tests: keep asynchronous scheduling on CPUs.

vLLM's CPU platform turns it off as unneeded. Speculation over pipeline stages needs it: without it the scheduler hands
out a next step before the tokens of the last one are known to every stage.
"""

from __future__ import annotations

import functools
from typing import Any


def register() -> None:
    """Wrap the platform's check of the configuration; vLLM calls this in each of its processes, maybe twice."""
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config.__func__
    if hasattr(checked, "__wrapped__"):
        return

    @functools.wraps(checked)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        checked(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
