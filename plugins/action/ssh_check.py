# SPDX-License-Identifier: Apache-2.0
"""Reach a host over Ansible's own connection, and say what is in the way before any module runs there."""

from __future__ import annotations

import shlex
import subprocess
import time
from typing import Any

import ansible.constants as C
import ansible.module_utils
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

# Ansible gives modules this search path, but not the plugins that run on the control node.
ansible.module_utils.__path__.extend(set(C.DEFAULT_MODULE_UTILS_PATH) - set(ansible.module_utils.__path__))

from ansible.module_utils.aerie import ssh_probe  # noqa: E402
from ansible.module_utils.aerie.findings import ERROR, Finding  # noqa: E402
from ansible.module_utils.aerie.preflight_findings import problem  # noqa: E402
from ansible.module_utils.aerie.ssh_reach import explain  # noqa: E402
from ansible.module_utils.aerie.ssh_settings import Settings, parse_settings  # noqa: E402

ARGUMENT_SPEC: dict[str, Any] = {}


class ActionModule(ActionBase):
    """Documented in library/ssh_check.py."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        findings, reached = self._look(task_vars or {})
        return {
            **result,
            "changed": False,
            "reached": reached,
            "usable": not any(finding.severity == ERROR for finding in findings),
            "login": {"user": self._option("remote_user"), "key": self._option("private_key_file")},
            "findings": [finding.as_dict() for finding in findings],
        }

    def _look(self, variables: dict[str, Any]) -> tuple[list[Finding], bool]:
        """Return the findings, and whether the login works."""
        command = ssh_probe.script(str(self.get_shell_option("remote_tmp", "~/.ansible/tmp")), self._pythons(variables))
        try:
            asked = time.time()
            _, output, errors = self._connection.exec_command(command, sudoable=False)
            answered = time.time()
        except AnsibleError as error:
            return [self._explain(str(error))], False
        probe = ssh_probe.parse(output.decode(errors="replace"))
        if probe is None:
            said = (output + errors).decode(errors="replace").strip().splitlines() or ["nothing"]
            message = f"the login works, and its shell runs no commands: it says {said[0][:120]!r}"
            return [problem("ssh-shell", message, "give the account a shell such as /bin/bash")], True
        findings = list(ssh_probe.check_probe(probe, asked, answered))
        if self._connection.become:
            findings += self._check_become(probe.user)
        return findings, True

    def _pythons(self, variables: dict[str, Any]) -> list[str]:
        """Return the interpreters that Ansible would take on the host, best first."""
        chosen = C.config.get_config_value("INTERPRETER_PYTHON", variables=variables)
        if (chosen := self._templar.template(chosen)) and not str(chosen).startswith("auto"):
            return [str(chosen)]
        return [str(name) for name in C.config.get_config_value("INTERPRETER_PYTHON_FALLBACK", variables=variables)]

    def _option(self, name: str) -> str:
        try:
            return str(self._connection.get_option(name) or "")
        except KeyError:
            return ""  # not an option of this kind of connection

    def _explain(self, said: str) -> Finding:
        settings = self._settings() if self._connection.transport == "ssh" else None
        if settings is None:
            return problem("connection", said, "see the host's connection variables")
        return explain(settings, self._option("private_key_file"), self._option("password"), said)

    def _settings(self) -> Settings | None:
        """Return what ssh makes of the options that Ansible gives it; nothing if ssh does not say."""
        arguments = ["ssh", "-G"]
        arguments += shlex.split(self._option("ssh_args"))
        if self._connection.get_option("host_key_checking") is False:
            arguments += ["-o", "StrictHostKeyChecking=no"]
        named = {"Port": "port", "IdentityFile": "private_key_file", "User": "remote_user", "ConnectTimeout": "timeout"}
        for option, name in named.items():
            if value := self._option(name):
                arguments += ["-o", f'{option}="{value}"']
        arguments += shlex.split(self._option("ssh_common_args")) + shlex.split(self._option("ssh_extra_args"))
        try:
            result = subprocess.run(
                [*arguments, self._option("host")], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return parse_settings(result.stdout, float(self._option("timeout") or 10))

    def _check_become(self, user: str) -> list[Finding]:
        """Return what keeps the login from getting the privileges that the inventory asks for."""
        become = self._connection.become
        try:
            result = self._low_level_execute_command("id -un")
        except AnsibleError as error:
            said = str(error)
        else:
            if result["rc"] == 0:
                return []
            # With a terminal, which sudo may want, all comes in one stream.
            said = f"{result['stdout']}\n{result['stderr']}"
        wanted = str(become.get_option("become_user") or "root")
        return [ssh_probe.explain_become(become.name, user, wanted, said)]
