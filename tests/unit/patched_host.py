# SPDX-License-Identifier: Apache-2.0
"""An environment with the toy package and its store, patched as the module does it; and ways to make that go wrong."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import toy_vllm
from ansible.module_utils.aerie.edits import apply_edits
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patcher import Patcher, Work
from ansible.module_utils.aerie.patchset import APPLIES, FilePlan, SetPlan, make_plan
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import Package, package_of_directory

Plan = dict[str, Any]
# In the order in which a run writes them.
PATHS = (toy_vllm.INTERFACES, toy_vllm.MODEL)
PRISTINE = {path: toy_vllm.files()[path] for path in PATHS}


class Host:
    """One environment with its store."""

    def __init__(self, folder: Path, package_dir: Path | None = None) -> None:
        self.package_dir = package_dir or toy_vllm.environment(folder, toy_vllm.files())
        self.store = folder / "store"

    def work(self, plan: Plan | None) -> Work:
        """Return what a run to apply ``plan``, or to undo for None, has to do."""
        package = package_of_directory(self.package_dir)
        patcher = Patcher(self.package_dir, self.store)
        return patcher.present(package, plan) if plan else patcher.absent(package)

    def run(self, plan: Plan | None) -> bool:
        """Apply ``plan``, or undo for None; return whether something changed."""
        work = self.work(plan)
        Patcher(self.package_dir, self.store).write(work, package_of_directory(self.package_dir))
        return work.changed

    def refusal(self, plan: Plan | None) -> str:
        """Return why a run is refused."""
        try:
            self.run(plan)
        except Refusal as refusal:
            return str(refusal)
        raise AssertionError("nothing was refused")

    def bytes(self) -> dict[str, bytes]:
        return {path: (self.package_dir / path).read_bytes() for path in PATHS}

    def everything(self) -> set[str]:
        return {str(path.relative_to(self.package_dir)) for path in self.package_dir.rglob("*")}


def plan_of(package: Package | None = None, **changes: Any) -> Plan:  # noqa: ANN401 - entries of a patch set
    """Return the plan of the toy patch set, with ``changes``, for ``package`` or the toy release as it is."""
    files = toy_vllm.files()
    package = package or Package("vllm", "0.33.0", {}, files.__getitem__)
    patch_set = toy_vllm.patch_set(**changes)
    name = patch_set["name"]
    planned = [
        FilePlan(path, package.read(path), apply_edits(path, package.read(path), name, entry["edits"]))
        for entry in patch_set["files"]
        for path in (entry["path"],)
    ]
    return make_plan(package, [SetPlan(name, APPLIES, "the toy needs it", planned)])


def patched(plan: Plan) -> dict[str, str]:
    """Return the sha256 of every patched file."""
    return {file["path"]: file["patched_sha256"] for file in plan["files"]}


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {path: sha256_bytes(data) for path, data in files.items()}


def start(action: Callable[[], object]) -> tuple[int, int]:
    """Run ``action`` in a forked process; return its id, and where its traceback comes out."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    try:
        action()
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)


def finish(child: int, reader: int) -> int:
    """Wait for a process of ``start`` and return its exit status; what it raised is raised here."""
    with open(reader, encoding="utf-8") as stream:
        raised = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert not raised, raised
    return status


def in_child(action: Callable[[], object]) -> None:
    """Run ``action`` in a process of its own: this one is untouched by what it sets up."""
    assert finish(*start(action)) == 0


_WRITING = {"close", "fchmod", "fchown", "flock", "fsync", "mkdir", "open", "replace", "rename", "setxattr", "unlink"}
_WRITING |= {"flush", "write"}


def signalled_at(step: int, number: signal.Signals, action: Callable[[], object]) -> None:
    """Run ``action``; before its ``step``-th call that works on files this process gets the signal ``number``."""
    seen = 0

    def profile(_frame: FrameType, event: str, function: object) -> None:
        nonlocal seen
        if event == "c_call" and getattr(function, "__name__", "") in _WRITING:
            seen += 1
            if seen == step:
                os.kill(os.getpid(), number)

    sys.setprofile(profile)
    action()
    sys.setprofile(None)


def killed_at(step: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a process that is killed before its ``step``-th call on files; tell whether there was one."""
    status = finish(*start(lambda: signalled_at(step, signal.SIGKILL, action)))
    assert status in (0, -signal.SIGKILL)
    return status == -signal.SIGKILL


_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_CAPABILITY_VERSION_3 = 0x20080522


def own_mounts() -> None:
    """Give this process mounts of its own. Without root that takes a user namespace, in which it may mount."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def drop_capabilities() -> None:
    """Make this process one that permissions hold for, even when it is root's."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
