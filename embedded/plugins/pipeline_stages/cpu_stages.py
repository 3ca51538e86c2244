# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin for tests: keep asynchronous scheduling on CPUs.

vLLM's CPU platform turns it off as unneeded. Speculation over pipeline stages needs it: without it the runner fails on
`num_scheduled_tokens >= num_logits`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@functools.cache  # vLLM may call it twice in a process
def register() -> None:
    """Wrap the platform's check of the configuration."""
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(checked)
    def check_and_update_config(cls: type, vllm_config: VllmConfig) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        checked(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
