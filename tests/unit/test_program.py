# SPDX-License-Identifier: Apache-2.0
"""Programs that outlive the module that starts them: what is installed runs by itself, under the host's bare Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SWITCH = "ansible.module_utils.aerie.switch"
INSTALL = "import sys; from pathlib import Path; from ansible.module_utils.aerie import program; {more}"
PRINT = "print(program.install(Path(sys.argv[1])))"


def archive(directory: Path) -> Path:
    """Return an archive such as Ansible makes of a module and all that it may import."""
    path = directory / "module.zip"
    with zipfile.ZipFile(path, "w") as stream:
        for package in ("ansible", "ansible/module_utils", "ansible/module_utils/aerie"):
            stream.writestr(f"{package}/__init__.py", "")
        for source in (ROOT / "module_utils/aerie").glob("[!_]*.py"):
            stream.write(source, f"ansible/module_utils/aerie/{source.name}")
    return path


def bare_python(code: str, *arguments: str, path: Path, cwd: Path) -> str:
    """Run code with nothing to import from but ``path`` and the standard library."""
    command = [sys.executable, "-S", "-s", "-c", code, *arguments]
    environment = {"PYTHONPATH": str(path), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, cwd=cwd, text=True, check=True, stdout=subprocess.PIPE).stdout


def install(directory: Path, tools: Path, more: str = PRINT) -> Path:
    code = INSTALL.format(more=f"import {SWITCH}; {more}")
    return Path(bare_python(code, str(tools), path=archive(directory), cwd=directory).strip())


def run(home: Path, root: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the switch program as its unit does."""
    command = [sys.executable, "-S", "-s", "-m", SWITCH, str(root)]
    environment = {"PYTHONPATH": str(home), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, cwd=cwd, text=True, check=False, capture_output=True)


def test_what_is_installed_from_an_archive_runs_without_it(tmp_path: Path) -> None:
    home = install(tmp_path, tmp_path / "tools")
    (tmp_path / "module.zip").unlink()
    assert [path.name for path in (tmp_path / "tools").iterdir()] == [home.name]
    # Nothing is under way: there is nothing to do.
    ended = run(home, tmp_path / "root", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    # A switch that a reboot cut off before it had begun: there is nothing to undo.
    journal = tmp_path / "root/switch/journal.json"
    journal.parent.mkdir(parents=True)
    state = {
        "phase": "requested",
        "boot": "another",
        "deployment": "d",
        "unit": "/nowhere/vllm.service",
        "user": "no-such-user",
        "from": {"id": "a"},
        "to": {"id": "b"},
        "phases": [],
        "together": {},
    }
    journal.write_text(json.dumps(state))
    ended = run(home, tmp_path / "root", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "restored: nothing had been changed yet\n"
    assert json.loads((journal.parent / "last.json").read_text())["reason"] == "the host was rebooted while requested"
    assert not journal.exists()
    # Nothing was written beside the sources: what they are named by stays true.
    assert not list(home.rglob("__pycache__"))


def test_the_same_sources_are_installed_once(tmp_path: Path) -> None:
    homes = [install(tmp_path, tmp_path / "tools") for _ in range(2)]
    assert homes[0] == homes[1]
    assert homes[0] != install(tmp_path, tmp_path / "tools", f"import ansible.module_utils.aerie.probe; {PRINT}")
    sources = {path.relative_to(homes[0]).as_posix() for path in homes[0].rglob("*.py")}
    assert {"ansible/__init__.py", "ansible/module_utils/aerie/switch.py"} <= sources
    # What was not imported is not needed.
    assert "ansible/module_utils/aerie/probe.py" not in sources
    assert {
        path.read_text() == (ROOT / "module_utils/aerie" / path.name).read_text()
        for path in (homes[0] / "ansible/module_utils/aerie").glob("[!_]*.py")
    } == {True}


def test_an_installation_that_is_killed_leaves_nothing_that_is_taken_for_one(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    # In its last step.
    last = "event == 'os.rename' and str(arguments[0]).endswith('/tree')"
    die = f"sys.addaudithook(lambda event, arguments: {last} and os.kill(os.getpid(), signal.SIGKILL))"
    code = INSTALL.format(more=f"import os, signal, {SWITCH}; {die}; {PRINT}")
    command = [sys.executable, "-S", "-s", "-c", code, str(tools)]
    killed = subprocess.run(command, env={"PYTHONPATH": str(archive(tmp_path))}, cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tools.iterdir() if not path.name.startswith(".")] == []
    assert run(install(tmp_path, tools), tmp_path / "root", tmp_path).returncode == 0


def test_of_two_that_install_at_the_same_time_both_have_it(tmp_path: Path) -> None:
    code = INSTALL.format(more=f"import {SWITCH}; sys.stdin.read(); {PRINT}")
    command = [sys.executable, "-S", "-s", "-c", code, str(tmp_path / "tools")]
    environment = {"PYTHONPATH": str(archive(tmp_path))}
    children = [
        subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
        child.stdin = None
    homes = {child.communicate()[0] for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(homes) == 1
    assert [path.name for path in (tmp_path / "tools").iterdir()] == [Path(homes.pop().strip()).name]
