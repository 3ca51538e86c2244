# SPDX-License-Identifier: Apache-2.0
"""What must be on a host before a release is, and the module as a whole: real programs, files and sockets."""

from __future__ import annotations

import grp
import json
import pwd
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.preflight import (
    Model,
    check_account,
    check_build_tools,
    check_libraries,
    check_python,
    check_unit,
    has_account,
    look_at_model,
)
from ansible.module_utils.aerie.target import Reader
from modules import run_module
from preflight_findings_text import messages

ANSWERS = Path(__file__).parent / "nvidia_smi"
RELEASE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# -------------------------------------------------------------------------------------------------------------- account


def test_an_account_of_others_is_not_taken_over() -> None:
    home = pwd.getpwnam("daemon").pw_dir
    assert messages(check_account("daemon", "/var/lib/vllm")) == [
        f"vllm_service_user is daemon, an account with the home {home} that Aerie did not create: choose another name"
    ]


@pytest.mark.parametrize(
    ("home", "group", "shell", "is_there"),
    [
        ("/var/lib/vllm", "vllm", "/usr/sbin/nologin", True),
        ("/var/lib/vllm", "vllm", "/bin/bash", False),
        ("/home/vllm", "vllm", "/usr/sbin/nologin", False),
        # Its own group is missing, or not its first.
        ("/var/lib/vllm", "users", "/usr/sbin/nologin", False),
        ("/var/lib/vllm", "", "/usr/sbin/nologin", False),
    ],
)
def test_an_account_that_is_not_as_aerie_makes_it_is_made(
    monkeypatch: pytest.MonkeyPatch, home: str, group: str, shell: str, is_there: bool
) -> None:
    numbers = {"vllm": 990, "users": 100}

    def group_of(name: str) -> grp.struct_group:
        if not group:
            raise KeyError(name)
        return grp.struct_group((name, "x", numbers[name], []))

    entry = pwd.struct_passwd(("vllm", "x", 990, numbers.get(group, 100), "", home, shell))
    monkeypatch.setattr(pwd, "getpwnam", lambda _: entry)
    monkeypatch.setattr(grp, "getgrnam", group_of)
    assert has_account("vllm", "/var/lib/vllm") == is_there


def test_an_account_that_is_missing_or_our_own_is_fine() -> None:
    assert messages(check_account("daemon", pwd.getpwnam("daemon").pw_dir)) == []
    assert messages(check_account("nobody-has-this-name", "/var/lib/vllm")) == []
    assert not has_account("nobody-has-this-name", "/var/lib/vllm")


# --------------------------------------------------------------------------------------------------------------- python


def messages_of(python: str, release: str) -> list[str]:
    return messages(check_python(python, release))


def test_the_right_python_is_no_problem() -> None:
    assert list(check_python(sys.executable, RELEASE)) == []


def test_another_release_of_python_is_named_with_both() -> None:
    (problem,) = messages_of(sys.executable, "3.1")
    assert problem == (
        f"{sys.executable} is Python {RELEASE}, but the lock is for 3.1: "
        "install Python 3.1, or set ml_env_python or ml_env_python_archive"
    )


def test_a_python_that_is_missing_or_broken_is_a_problem(tmp_path: Path) -> None:
    (problem,) = messages_of("/nowhere/python3.12", "3.12")
    assert problem.startswith("there is no Python at /nowhere/python3.12: install Python 3.12, or set ml_env_python")
    no_program = tmp_path / "python3.12"
    no_program.write_bytes(b"\x00not a program")
    (problem,) = messages_of(str(no_program), "3.12")
    assert problem.startswith(f"there is no Python at {no_program}: ")
    no_program.chmod(0o755)
    for broken in (no_program, program(tmp_path / "exits", "echo 3.12; exit 3"), tmp_path):
        (problem,) = messages_of(str(broken), "3.12")
        assert problem.startswith(f"{broken} is Python (broken), but the lock is for 3.12: ")


# --------------------------------------------------------------------------------------------- libraries and a compiler


def test_a_missing_library_is_named_with_its_package() -> None:
    assert messages(check_libraries(["libc.so.6", "libaerie-absent.so.9"])) == [
        "libaerie-absent.so.9 is missing, which vLLM's build for CPUs needs: install the package that has it (libnuma1)"
    ]


def test_a_unit_of_others_is_not_for_aerie_to_replace(tmp_path: Path) -> None:
    unit = tmp_path / "vllm.service"
    assert messages(check_unit(tmp_path, unit)) == []
    unit.write_text("[Service]\nExecStart=/srv/vllm serve\n")
    assert messages(check_unit(tmp_path, unit)) == [f"{unit} is not Aerie's: stop and disable it, and move it away"]
    # One that was edited, which the switch puts right.
    (tmp_path / "current").symlink_to("releases/0")
    assert messages(check_unit(tmp_path, unit)) == []
    (tmp_path / "current").unlink()
    unit.write_text("# Written by Aerie; part of a release.\n[Service]\n")
    assert messages(check_unit(tmp_path, unit)) == []


@pytest.fixture
def gpu_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with the device nodes, a compiler, and a Python with headers."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    program(tmp_path / "bin/gcc", "")
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    program(tmp_path / "bin/python", f"echo {tmp_path / 'include'}")
    (tmp_path / "dev").mkdir()
    for node in ("nvidia-uvm", "nvidia-uvm-tools"):
        (tmp_path / "dev" / node).touch()
    return tmp_path


def tools(host: Path) -> list[str]:
    return messages(check_build_tools(str(host / "bin/python"), host / "dev"))


@pytest.mark.parametrize("node", ["nvidia-uvm", "nvidia-uvm-tools"])
def test_a_missing_device_node_is_named_with_the_command_that_makes_it(gpu_host: Path, node: str) -> None:
    assert tools(gpu_host) == []
    (gpu_host / "dev" / node).unlink()
    assert tools(gpu_host) == [f"/dev/{node} is missing: run `nvidia-modprobe -u -c=0` at boot"]


def test_triton_needs_a_compiler_and_headers(gpu_host: Path) -> None:
    (gpu_host / "bin/gcc").rename(gpu_host / "bin/clang")
    assert tools(gpu_host) == []
    (gpu_host / "bin/clang").unlink()
    (gpu_host / "include/Python.h").unlink()
    compiler, headers = tools(gpu_host)
    assert compiler == "there is no C compiler, which Triton needs when vLLM runs: install gcc"
    assert headers.startswith(f"Python.h of {gpu_host / 'bin/python'} is missing")


def test_a_python_that_does_not_run_is_not_asked_for_its_headers(gpu_host: Path) -> None:
    (gpu_host / "bin/python").unlink()
    assert tools(gpu_host) == []


# ------------------------------------------------------------------------------------------------------------ the model

# An account with no files of its own.
STRANGER = Reader("stranger", 4242, frozenset())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    # The directories above it are pytest's, and closed to others.
    path = tmp_path / "target"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"text_config": {"kv_lora_rank": 512}}))
    for number in (1, 2):
        (path / f"model-{number}.safetensors").write_bytes(bytes(1000))
    return path


ROOT = Reader("root", 0, frozenset())


def test_weights_and_attention_are_seen_at_a_glance(model: Path) -> None:
    assert look_at_model(model, ROOT) == (Model(2000, latent=True), [])
    (model / "config.json").write_text(json.dumps({"hidden_size": 64}))
    assert look_at_model(model, ROOT) == (Model(2000, latent=False), [])
    (model / "config.json").write_text("[]")
    assert look_at_model(model, ROOT) == (Model(2000, latent=False), [])


def test_a_model_that_is_missing_or_broken_is_named(model: Path) -> None:
    remedy = "put the model there, or correct target_model_path"
    assert messages(look_at_model(model / "absent", ROOT)[1]) == [
        f"there is no target model at {model / 'absent'}: {remedy}"
    ]
    (model / "config.json").write_text("{")
    assert messages(look_at_model(model, ROOT)[1]) == [f"{model / 'config.json'} is no JSON: {remedy}"]
    (model / "config.json").unlink()
    assert messages(look_at_model(model, ROOT)[1]) == [
        f"the target model cannot be read: {model / 'config.json'} (No such file or directory): {remedy}"
    ]


def test_what_the_services_account_cannot_read_is_named(model: Path) -> None:
    above = [path for path in model.parents if not STRANGER.has(path.stat(), 0o001)]
    (found,) = messages(look_at_model(model, STRANGER)[1])
    assert found == (
        f"the target model cannot be read by stranger: {above[-1] if above else model} is closed to it: "
        "change its mode or owner"
    )


# --------------------------------------------------------------------------------------------------------------- module


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def preflight(root: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:  # noqa: ANN401
    arguments = {
        "root": str(root),
        "disk_mb": 1,
        "python": sys.executable,
        "python_release": RELEASE,
        "port": free_port(),
        **options,
    }
    result = run_module("preflight", arguments, capsys)
    assert (result["failed"], result["changed"]) == (False, False)
    return result


def problems(result: dict[str, Any]) -> list[str]:
    return [finding["message"] for finding in result["findings"] if finding["severity"] == "error"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# What this machine itself lacks is its own affair.
OWN = ("/dev/", "systemd", "libnuma", "the host has", "a service here", "/dev/shm")


def test_a_host_for_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = preflight(tmp_path, capsys, address="127.0.0.1")
    assert [problem for problem in problems(result) if not problem.startswith(OWN)] == []
    assert result["facts"]["memory_mb"] > 0 and result["facts"]["disk_mb"] > 0
    assert (result["facts"]["gpus"], result["facts"]["driver"], result["gpu_memory_mb"]) == ([], "", 0)


def fake_nvidia_smi(directory: Path, answer: str, capability: str = "exit 2", topology: str = "exit 2") -> None:
    program(
        directory / "nvidia-smi",
        f'case "$*" in\n"-q -x") /bin/cat {ANSWERS / answer};;\n'
        f'--query-gpu*) {capability};;\n"topo -m") {topology};;\nesac',
    )


def test_all_problems_are_reported_at_once(
    tmp_path: Path,
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_nvidia_smi(tmp_path / "bin", "h100.xml")
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    program(tmp_path / "bin/journalctl", f'echo "{xid}"')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    result = preflight(
        tmp_path,
        capsys,
        disk_mb=1 << 40,
        platform="manylinux_2_99_x86_64",
        python="/nowhere/python3.12",
        python_release="3.12",
        port=listener.getsockname()[1],
        address="192.0.2.1",
        model=str(tmp_path / "model"),
        cuda="13.0",
        gpus=8,
        certificates=[str(tmp_path / "gateway.pem")],
    )
    found = [problem for problem in problems(result) if not problem.startswith(OWN)]
    assert [" ".join(problem.split()[:4]).replace(str(tmp_path), "TMP") for problem in found] == [
        "there is no target",
        "there is no Python",
        f"TMP needs {1 << 40} MB",
        f"port {listener.getsockname()[1]} is in",
        "the service is to",
        "glibc is " + problems(result)[5].split()[2] + " (" + problems(result)[5].split("(")[1].split()[0],
        "the driver is 550.54.15",
        "2 GPUs are usable",
        "the kernel log has",
        "there is no C",
        "the certificate TMP/gateway.pem cannot",
    ]
    assert result["facts"]["driver"] == "550.54.15" and result["gpu_memory_mb"] == 2 * 81559


def test_latent_attention_is_checked_with_what_the_driver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvidia_smi(tmp_path / "bin", "h200.xml", "printf '12.0\\n12.0\\n12.0\\n12.0\\n'")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    options: dict[str, Any] = {"cuda": "13.0", "gpus": 4, "model": str(model), "attention_backend": "flashmla"}
    wanted = "the attention backend FLASHMLA does not run on NVIDIA H200 (compute capability 12.0)"
    assert wanted in problems(preflight(tmp_path, capsys, **options))
    assert wanted not in problems(preflight(tmp_path, capsys, latent_attention=False, **options))


@pytest.mark.parametrize("answer", [b"", b"\xff\xfe not text", b"No devices were found\n"])
def test_an_nvidia_smi_that_answers_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    (tmp_path / "answer").write_bytes(answer)
    program(tmp_path / "bin/nvidia-smi", f"/bin/cat {tmp_path / 'answer'}; exit 6")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = problems(preflight(tmp_path, capsys, cuda="13.0", python=""))
    assert len([problem for problem in found if "nvidia-smi does not answer" in problem or "no GPU" in problem]) == 1


def test_a_host_without_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = problems(preflight(tmp_path, capsys, cuda="12.8", python=""))
    assert "nvidia-smi does not answer (it says: No such file or directory)" in found


def test_another_release_from_a_lock_needs_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"disk_mb": 1 << 40, "lock_sha256": "ab" * 32}
    (problem,) = [text for text in problems(preflight(tmp_path, capsys, **options)) if "for a release" in text]
    assert problem.startswith(f"{tmp_path} needs {1 << 40} MB")
    record = tmp_path / "releases/1/venv/aerie.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"lock_sha256": "ab" * 32}))
    assert [text for text in problems(preflight(tmp_path, capsys, **options)) if "for a release" in text] == []
