# SPDX-License-Identifier: Apache-2.0
"""The symbolic and the numeric check of hidden states on a release that is installed.

Both return JSON-able data with ``gate``, ``verdict`` (passed, failed, not_run, not_applicable) and ``message``, one
sentence.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import numeric_check, proved
from ansible.module_utils.aerie.code_facts import Code
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patchset import PatchSet, prove_set, resolve_proof
from ansible.module_utils.aerie.prove import Proof
from ansible.module_utils.aerie.source import MARKER
from ansible.module_utils.aerie.wheel import package_of_directory

PASSED, FAILED, NOT_RUN, NOT_APPLICABLE = "passed", "failed", "not_run", "not_applicable"
# The user where the service's does not exist yet.
NOBODY = "nobody"
# Seconds that the program has to stop by itself after its budget.
_GRACE_S = 15
_MAX_SAID = 300
# What of a numeric check says how it is run, and not what is checked.
_HOW = ("python", "device", "threads", "budget_s", "user")


# ---------------------------------------------------------------------------------------------------------------------
# Symbolic


def symbolic(package_dir: Path, patch_sets: Sequence[PatchSet], layer_counts: Sequence[int]) -> dict[str, Any]:
    """Run the proofs of ``patch_sets`` on the files in ``package_dir``, as they are. Raises Refusal.

    A set whose marks are in the files is proved for every tap id; one that the release has itself, for those between
    the first layer and the last. Others say nothing about this release.
    """
    package = package_of_directory(package_dir)
    code = Code(package)
    proofs: dict[str, Proof] = {}
    for patch_set in patch_sets:
        applied = any(_is_marked(code, entry["path"], patch_set["name"]) for entry in patch_set["files"])
        native = bool(patch_set["native"]) and all(map(code.holds, patch_set["native"]))
        if applied or native:
            proof = resolve_proof(code, patch_set["proof"])
            proofs[patch_set["name"]] = prove_set(code.read, proof, layer_counts, inner_taps=not applied)
    run = sum(proof.run for proof in proofs.values())
    failures = [f"{case}: {fault}" for proof in proofs.values() for case, fault in proof.failures]
    verdict = NOT_APPLICABLE if not run else FAILED if failures else PASSED
    summary = "; ".join(f"{name}: {proof.summary}" for name, proof in proofs.items())
    nothing = f"vLLM {package.version} in {package_dir} has EAGLE-3 neither itself nor from a patch set"
    return {
        "gate": "symbolic",
        "verdict": verdict,
        "message": summary or nothing,
        "vllm_version": package.version,
        "cases": {"run": run, "passed": run - len(failures)},
        "first_failure": failures[0] if failures else "",
    }


def _is_marked(code: Code, path: str, name: str) -> bool:
    return code.has(path) and f"{MARKER}{name}:".encode() in code.read(path)


# ---------------------------------------------------------------------------------------------------------------------
# Numeric


@dataclass(frozen=True)
class Numeric:
    """What to run: the release's interpreter, the model's layers and tap ids (empty: vLLM's), and how.

    ``every_id`` also checks all other ids. ``stages`` are pipeline stages, and ``partition`` is how many layers each
    has, with commas; empty for vLLM's own rule. ``device`` names a GPU; empty uses none.
    """

    python: Path
    layers: int = 61
    tap_ids: Sequence[int] = ()
    every_id: bool = False
    stages: int = 1
    partition: str = ""
    device: str = ""
    threads: int = 1
    budget_s: int = 60
    user: str = ""

    def argv(self, home: Path) -> list[str]:
        """Return the whole command: another environment, another user, low priority.

        ``home`` has this package, as ``program.install`` writes it.
        """
        variables = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": str(home)}
        command = ["/usr/bin/env", "-i", "-C", "/", *(f"{name}={value}" for name, value in variables.items())]
        if self.user and os.geteuid() == 0:
            entry = account(self.user)
            command += ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups"]
            command += ["--no-new-privs"]
        command += [str(self.python), "-m", numeric_check.__name__, "--layers", str(self.layers)]
        if self.tap_ids:
            command += ["--ids", ",".join(map(str, self.tap_ids))]
        command += ["--every-id"] if self.every_id else []
        command += ["--stages", str(self.stages)] if self.stages > 1 else []
        command += ["--partition", self.partition] if self.partition else []
        command += ["--device", self.device] if self.device else []
        return [*command, "--threads", str(self.threads), "--budget-s", str(self.budget_s)]

    def evidence(self, home: Path) -> str:
        """Return a digest of all that the outcome depends on; how it is run makes no difference."""
        facts = {name: value for name, value in asdict(self).items() if name not in _HOW}
        code = proved.code_digest(self.python)
        return sha256_bytes(json.dumps({**facts, "code": code, "program": home.name}, sort_keys=True).encode())


def account(user: str) -> pwd.struct_passwd:
    """Return the account of ``user``, or that of nobody before the service's own was made."""
    try:
        return pwd.getpwnam(user)
    except KeyError:
        return pwd.getpwnam(NOBODY)


def numeric(check: Numeric, home: Path) -> dict[str, Any]:
    """Run the numeric check; what gives no verdict in time has not run, and is stopped with all its processes."""
    if not check.python.exists():
        return _not_run(f"there is no environment at {check.python} yet")
    argv = check.argv(home)
    try:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    except OSError as error:
        return _not_run(f"{argv[0]} cannot be started: {error.strerror}")
    try:
        output, errors = process.communicate(timeout=check.budget_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return _not_run(f"it took longer than {check.budget_s} s")
    return _verdict(output, errors, process.returncode)


def _verdict(output: str, errors: str, status: int) -> dict[str, Any]:
    try:
        result = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        said = (errors.strip().splitlines() or ["nothing"])[-1][:_MAX_SAID]
        return _not_run(f"it ended with status {status} and no verdict, and said {said}")
    if not isinstance(result, Mapping) or result.get("verdict") not in (PASSED, FAILED, NOT_RUN):
        return _not_run("its output is no verdict")
    return dict(result)


def _not_run(reason: str) -> dict[str, Any]:
    message = f"The numeric check was not run: {reason}."
    return {"gate": "numeric", "verdict": NOT_RUN, "fault": "", "message": message, "taps": []}
