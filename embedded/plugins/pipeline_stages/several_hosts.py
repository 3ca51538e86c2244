# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin for tests: what the CPU platform lacks for one replica over several hosts, and GPUs have.

The name by which Ray knows the device, in every process that asks for its platform; and a name of shared memory that is
this host's own: the workers of both hosts would otherwise take it for the same memory, and not find it.
"""

from __future__ import annotations

import functools
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def name_device() -> None:
    """Name the CPU's device for Ray. A platform plugin, since Ray's workers ask before they load general ones."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


@functools.cache  # vLLM may call it twice in a process
def register() -> None:
    """Put the host's name in front of the name of the group's shared memory."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    named = _CPUSHMDistributed.make_group_name

    @functools.wraps(named)
    def make_group_name(communicator: CpuCommunicator) -> str:
        return f"{platform.node()}-{named(communicator)}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
