# SPDX-License-Identifier: Apache-2.0
"""Programs of this package that outlive the module that starts them, such as the switch of a release."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from ansible.module_utils.aerie.files import sha256_bytes, sync_directory, write_atomically

_PACKAGE = "ansible.module_utils.aerie"
_DIGEST_LENGTH = 16
_INSTALLED_LATELY_S = 24 * 3600


def loaded_sources() -> dict[str, bytes]:
    """Return the sources of this package's modules that this process has imported, by their path in a package tree."""
    found = {"ansible/__init__.py": b"", "ansible/module_utils/__init__.py": b""}
    for name, module in sorted(sys.modules.items()):
        if name == _PACKAGE:
            found["ansible/module_utils/aerie/__init__.py"] = _source(module)
        elif name.startswith(f"{_PACKAGE}."):
            found[f"{name.replace('.', '/')}.py"] = _source(module)
    return found


def home_of(tools: Path) -> Path:
    """Return the directory that ``install`` makes or finds."""
    texts = (path.encode() + b"\0" + text + b"\0" for path, text in sorted(loaded_sources().items()))
    return tools / f"aerie-{sha256_bytes(b''.join(texts))[:_DIGEST_LENGTH]}"


def install(tools: Path) -> Path:
    """Write the loaded modules of this package below ``tools``; return the directory to have on PYTHONPATH.

    Its name is the digest of what is in it, so a program that runs keeps the files that it was started from. An Ansible
    module carries all that it imports: what it has loaded is what its program needs.
    """
    sources = loaded_sources()
    home = home_of(tools)
    if home.is_dir():
        return home
    tools.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".aerie-", dir=tools) as temporary:
        tree = Path(temporary) / "tree"
        for path, text in sources.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            # Synced: after a power cut the program is to be there, for it undoes what was cut off.
            write_atomically(tree / path, text)
        try:
            tree.rename(home)
        except OSError:
            # Another run was faster, with the same files.
            if not home.is_dir():
                raise
    sync_directory(tools)
    return home


def unused(tools: Path, units: Path) -> list[Path]:
    """Return the directories below ``tools`` that no unit in ``units`` names; one of today may be about to be named."""
    since = time.time() - _INSTALLED_LATELY_S
    texts = [path.read_text(errors="replace") for path in units.glob("aerie-*.service")]
    homes = sorted(home for home in tools.glob("aerie-*") if home.stat().st_mtime < since)
    return [home for home in homes if not any(str(home) in text for text in texts)]


def _source(module: ModuleType) -> bytes:
    loader = module.__loader__
    text = loader.get_source(module.__name__) if loader is not None and hasattr(loader, "get_source") else None
    return (text or "").encode()
