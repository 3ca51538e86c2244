# SPDX-License-Identifier: Apache-2.0
"""Action plugin: digest what a release is planned from on the control node, and have the host compare."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ansible.constants as C
import ansible.module_utils
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie.digest_cache import cached_sha256  # noqa: E402
from ansible.module_utils.aerie.drafter import is_for_training  # noqa: E402
from ansible.module_utils.aerie.files import sha256_bytes  # noqa: E402
from ansible.module_utils.aerie.release import canonical  # noqa: E402


class ActionModule(ActionBase):
    """Documented in library/release_probe.py."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        request = {name: sha256_bytes(canonical(value)) for name, value in arguments.get("request", {}).items()}
        cache = arguments.pop("digest_cache", "")
        request["Aerie"] = _content(arguments.pop("code", []), None)
        request["the lock"] = _content([arguments.pop("lock", "")], None)
        request["the drafter"] = _content([arguments.pop("drafter", "")], Path(cache) if cache else None)
        arguments["request"] = request
        try:
            result.update(self._execute_module("release_probe", module_args=arguments, task_vars=task_vars))
        except AnsibleConnectionFailure as error:
            if not self._task.ignore_unreachable:
                raise
            # Ansible ends a play of `any_errors_fatal` even at an unreachable host that it was told to ignore.
            result["msg"] = error.message
        return result


def _content(paths: list[str], cache: Path | None) -> str:
    """Return a digest of the names and the content of all files at or below ``paths``.

    What is missing there is no request that a host could have; the checks that follow say so better than this one.
    """
    try:
        files = [file for path in paths if path for file in _files(Path(path))]
        digests = cached_sha256([file for _, file in files], cache)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return sha256_bytes(canonical([[name, digests[file]] for name, file in files]))


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield path.name, path
        return
    if not path.is_dir():
        raise FileNotFoundError(2, "there is no such file or directory on the control node", str(path))
    for file in sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and not is_for_training(file):
            yield str(file.relative_to(path)), file
