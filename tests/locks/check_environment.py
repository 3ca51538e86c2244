# SPDX-License-Identifier: Apache-2.0
"""Check an installed environment: no two distributions fight over a file, and what serves EAGLE-3 imports.

usage: check_environment.py VENV      prints the problems; exit status 1 if there are any

Imports run in the environment's own Python; no GPU is needed. They take a minute or two.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path

# Modules of vLLM that a served target with an EAGLE-3 drafter needs: the runners, the targets, the drafters.
REQUIRED = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.kimi_k25",
    "vllm.model_executor.models.llama_eagle3",
)
# The same, for modules that older releases do not have.
WHERE_PRESENT = (
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.deepseek_eagle3",
)

# Sets the importer's lines apart from what imported modules print.
MARK = "does not import: "
# Runs in the environment: one process, since importing torch and vLLM for each module would take minutes.
IMPORTER = f"""
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print("{MARK}" + name + ": " + type(error).__name__ + ": " + " ".join(str(error).split()), flush=True)
"""


def site_packages(venv: Path) -> Path:
    """Return the one site-packages folder of a virtual environment; ValueError if there is not one."""
    found = sorted(venv.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise ValueError(f"{venv} is not a virtual environment: {len(found)} lib/python3.*/site-packages; name one")
    return found[0]


def recorded_files(site: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (distribution, path below site-packages, recorded hash) for every line of every RECORD."""
    for record in sorted(site.glob("*.dist-info/RECORD")):
        with record.open(newline="") as lines:
            for path, digest, _size in csv.reader(lines):
                yield record.parent.name.removesuffix(".dist-info"), normpath(path), digest


def ownership_problems(site: Path) -> list[str]:
    """Return one sentence per group of distributions that bring different bytes for one path.

    A file that is the same in all of them is no problem: NVIDIA's CUDA 12 wheels each bring the same empty
    nvidia/__init__.py.
    """
    owners: dict[str, list[str]] = defaultdict(list)
    digests: dict[str, set[str]] = defaultdict(set)
    for distribution, path, digest in recorded_files(site):
        owners[path].append(distribution)
        digests[path].add(digest)
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sorted(owners):
        if len(owners[path]) > 1 and len(digests[path]) > 1:
            groups[tuple(owners[path])].append(path)
    return [
        f"{' and '.join(names)} differ in a file that each owns: {paths[0]} (of {len(paths)}); "
        "constrain or exclude one of them beside the lock"
        for names, paths in sorted(groups.items())
    ]


def import_problems(venv: Path, site: Path) -> list[str]:
    """Return one sentence per module of vLLM that does not import."""
    present = [name for name in WHERE_PRESENT if site.joinpath(*name.split(".")).with_suffix(".py").exists()]
    command = [str(venv / "bin/python"), "-c", IMPORTER, *REQUIRED, *present]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    problems = [line for line in result.stdout.splitlines() if line.startswith(MARK)]
    if result.returncode:
        problems.append(f"importing vLLM ended {command[0]} with status {result.returncode}; run it by hand")
    return problems


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: check_environment.py VENV", file=sys.stderr)
        return 2
    venv = Path(arguments[0])
    try:
        site = site_packages(venv)
    except ValueError as error:
        print(error)
        return 1
    problems = ownership_problems(site) + import_problems(venv, site)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
