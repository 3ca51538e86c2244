# SPDX-License-Identifier: Apache-2.0
"""Send files that the host lacks over Ansible's own connection, and show the progress."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_SHOW_SECONDS = 10
_INCOMING = ".incoming"  # as module_utils/aerie/staging.py has it


class ActionModule(ActionBase):
    """Documented in library/stage_files.py."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        login = self._connection.get_option("remote_user") if self._connection.transport == "ssh" else ""
        try:
            files = [{"size": Path(file["path"]).stat().st_size, **file} for file in self._task.args.get("files", [])]
        except OSError as error:
            raise AnsibleActionFail(f"{error.filename}: there is no such file on the control node to send") from error
        options = {**self._task.args, "files": files, "login": login or ""}
        result: dict[str, Any] = self._execute_module(
            module_args={**options, "step": "query"}, task_vars=variables, tmp=tmp
        )
        if result.get("failed") or not result.get("missing") or self._task.check_mode:
            return result
        by_name = {file["name"]: file for file in files}
        self._send([by_name[name] for name in result["unsent"]], str(options["dest"]), variables)
        accepted = self._execute_module(module_args={**options, "step": "accept"}, task_vars=variables, tmp=tmp)
        return accepted if accepted.get("failed") else result

    def _send(self, files: list[dict[str, Any]], dest: str, variables: dict[str, Any]) -> None:
        display = Display()
        host = variables.get("inventory_hostname", "")
        total = sum(int(file["size"]) for file in files)
        sent, shown = 0, 0.0
        for count, file in enumerate(files):
            if time.monotonic() - shown > _SHOW_SECONDS:
                display.display(f"{host}: sending file {count + 1} of {len(files)}, {sent >> 20} of {total >> 20} MB")
                shown = time.monotonic()
            self._connection.put_file(file["path"], f"{dest}/{_INCOMING}/{file['name']}")
            sent += int(file["size"])
