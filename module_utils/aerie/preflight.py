# SPDX-License-Identifier: Apache-2.0
"""What must be on a host before a release is: Python, libraries and a compiler, and the target model's files."""

from __future__ import annotations

import ctypes
import grp
import json
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.findings import Finding
from ansible.module_utils.aerie.preflight_findings import problem
from ansible.module_utils.aerie.target import Reader

_INTERPRETER_SECONDS = 20
# How every file begins that Aerie writes from a template.
_OURS = b"# Written by Aerie"
# Of an account that nobody logs in to.
_SHELL = "/usr/sbin/nologin"
# Latent attention (MLA) is what a model has whose keys and values are one compressed vector.
_LATENT = "kv_lora_rank"


@dataclass(frozen=True)
class Model:
    """The bytes of a target's weights as they lie on the host, and whether its attention is latent."""

    weights: int = 0
    latent: bool = False


def check_python(python: str, release: str) -> Iterator[Finding]:
    """Yield a problem unless ``python`` is an interpreter of ``release`` (X.Y)."""
    remedy = f"install Python {release}, or set ml_env_python or ml_env_python_archive"
    if not os.access(python, os.X_OK):
        yield problem("python", f"there is no Python at {python}", remedy)
        return
    found = _ask_python(python, "import sys; print('%d.%d' % sys.version_info[:2])")
    if found != release:
        yield problem("python", f"{python} is Python {found or '(broken)'}, but the lock is for {release}", remedy)


def check_libraries(names: Iterable[str]) -> Iterator[Finding]:
    """Yield a problem for each shared library of ``names`` that the loader does not find."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            message = f"{name} is missing, which vLLM's build for CPUs needs"
            yield problem("library", message, "install the package that has it (libnuma1)")


def check_build_tools(python: str, dev: Path = Path("/dev")) -> Iterator[Finding]:
    """Yield what a build for GPUs misses at run time: device nodes, a compiler, and the headers of ``python``."""
    for node in ("nvidia-uvm", "nvidia-uvm-tools"):
        if not (dev / node).exists():
            # The service may not gain privileges, so the setuid helper cannot make them at its start.
            yield problem("device-node", f"/dev/{node} is missing", "run `nvidia-modprobe -u -c=0` at boot")
    if not any(shutil.which(compiler) for compiler in ("gcc", "cc", "clang")):
        message = "there is no C compiler, which Triton needs when vLLM runs"
        yield problem("compiler", message, "install gcc")
    headers = _ask_python(python, "import sysconfig; print(sysconfig.get_paths()['include'])") if python else ""
    if headers and not (Path(headers) / "Python.h").exists():
        message = f"Python.h of {python} is missing, which Triton needs when vLLM runs"
        yield problem("headers", message, "install its development package")


def has_account(user: str, home: str) -> bool:
    """Say whether the service's account and group are there as Aerie makes them."""
    try:
        entry, group = pwd.getpwnam(user), grp.getgrnam(user)
    except KeyError:
        return False
    return (entry.pw_dir, entry.pw_gid, entry.pw_shell) == (home, group.gr_gid, _SHELL)


def check_account(user: str, home: str) -> Iterator[Finding]:
    """An account of the service's name with another ``home`` than Aerie gives it is somebody's."""
    found = _home(user)
    if found not in (None, home):
        message = f"vllm_service_user is {user}, an account with the home {found} that Aerie did not create"
        yield problem("account", message, "choose another name")


def _home(user: str) -> str | None:
    try:
        return pwd.getpwnam(user).pw_dir
    except KeyError:
        return None


def check_unit(root: Path, unit: Path) -> Iterator[Finding]:
    """Yield a problem if a host without a release below ``root`` has a unit that is not Aerie's where its would be."""
    try:
        text = unit.read_bytes()
    except FileNotFoundError:
        return
    if not text.startswith(_OURS) and not (root / "current").is_symlink():
        yield problem("unit", f"{unit} is not Aerie's", "stop and disable it, and move it away")


def look_at_model(path: Path, reader: Reader) -> tuple[Model, list[Finding]]:
    """Return what the target's directory says at a glance, and what keeps ``reader`` from loading it at all.

    Whether the files are whole and fit each other is for the role target_model, which reads every header.
    """
    remedy = "put the model there, or correct target_model_path"
    config = path / "config.json"
    try:
        if not path.is_dir():
            return Model(), [problem("model", f"there is no target model at {path}", remedy)]
        described = json.loads(config.read_bytes())
        shards = sorted(path.glob("*.safetensors"))
        weights = sum(file.stat().st_size for file in shards)
        closed = next(_closed(path, [config, *shards], reader), None)
    except OSError as error:
        message = f"the target model cannot be read: {error.filename or config} ({error.strerror})"
        return Model(), [problem("model", message, remedy)]
    except (ValueError, RecursionError):
        return Model(), [problem("model", f"{config} is no JSON", remedy)]
    described = described if isinstance(described, dict) else {}
    text = described.get("text_config")
    latent = bool((text if isinstance(text, dict) else described).get(_LATENT))
    message = f"the target model cannot be read by {reader.name}: {closed} is closed to it"
    return Model(weights, latent), [problem("model", message, "change its mode or owner")] if closed else []


def _closed(root: Path, files: Iterable[Path], reader: Reader) -> Iterator[Path]:
    """Yield the directories above ``root`` and the ``files`` in it whose modes keep ``reader`` out."""
    for directory in (*reversed(root.parents), root):
        if not reader.has(directory.stat(), stat.S_IXOTH):
            yield directory
    for file in files:
        if not reader.has(file.stat(), stat.S_IROTH):
            yield file


def _ask_python(python: str, code: str) -> str:
    """Return what ``python`` prints; nothing if it does not run."""
    command = [python, "-I", "-c", code]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_INTERPRETER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
