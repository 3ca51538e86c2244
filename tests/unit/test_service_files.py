# SPDX-License-Identifier: Apache-2.0
"""Files with secrets are their owner's alone, and the module tells nothing of them."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import credentials
from ansible.module_utils.aerie.files import sha256_bytes
from modules import run_module

GROUP = grp.getgrgid(os.getegid()).gr_name
TEXT = "-----BEGIN PRIVATE KEY-----\nbody of the key\n-----END PRIVATE KEY-----\n"


def call(capsys: pytest.CaptureFixture[str], path: Path, check_mode: bool = False) -> dict[str, Any]:
    result = run_module("service_files", {"secrets": {str(path): TEXT}, "group": GROUP}, capsys, check_mode)
    assert "body of the key" not in str(result)
    return result


def reread(capsys: pytest.CaptureFixture[str], path: Path, check_mode: bool = False, **other: str) -> dict[str, Any]:
    arguments = {"reread": {str(path): "digest 1\n"}, "group": GROUP, **other}
    return run_module("service_files", arguments, capsys, check_mode)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_written_for_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secrets" / "tls-key-1"
    predicted = call(capsys, path, check_mode=True)
    assert (predicted["changed"], predicted["written"], path.parent.exists()) == (True, [str(path)], False)
    assert call(capsys, path) == {**predicted, "invocation": predicted["invocation"]}
    assert (path.read_text(), mode(path), mode(path.parent)) == (TEXT, 0o600, 0o700)
    assert list(path.parent.iterdir()) == [path]
    again = call(capsys, path)
    assert (again["changed"], again["written"]) == (False, [])


@pytest.mark.parametrize("damage", ["edited", "open"])
def test_a_secret_that_was_damaged_is_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    path = tmp_path / "token-1"
    call(capsys, path)
    if damage == "edited":
        path.write_text("x")
    else:
        path.chmod(0o644)
    assert call(capsys, path)["changed"]
    assert (path.read_text(), mode(path)) == (TEXT, 0o600)


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    result = call(capsys, tmp_path / "file/token-1")
    assert result["failed"]
    assert result["msg"].startswith(f"{tmp_path / 'file'} cannot be written: ")


def test_what_is_read_again_is_for_the_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "aerie" / "api-keys"
    predicted = reread(capsys, path, check_mode=True)
    assert (predicted["changed"], predicted["written"], path.parent.exists()) == (True, [str(path)], False)
    written = reread(capsys, path)
    assert (written["changed"], written["written"]) == (True, [str(path)])
    assert "diff" not in written and "digest 1" not in str(written)
    assert (path.read_text(), mode(path), path.group()) == ("digest 1\n", 0o640, GROUP)
    assert mode(path.parent) & 0o077 == 0o055
    assert list(path.parent.iterdir()) == [path]
    assert reread(capsys, path)["written"] == []


@pytest.mark.parametrize("damage", ["edited", "mode", "group"])
def test_what_is_read_again_is_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    path = tmp_path / "api-keys"
    reread(capsys, path)
    before = path.stat().st_ino
    if damage == "edited":
        path.write_text("x")
    elif damage == "mode":
        path.chmod(0o644)
    elif os.geteuid() == 0:
        os.chown(path, 0, 1)
    else:
        pytest.skip("only root gives files to another group")
    assert reread(capsys, path, check_mode=True)["changed"]
    assert reread(capsys, path)["changed"]
    assert (path.read_text(), mode(path), path.group()) == ("digest 1\n", 0o640, GROUP)
    # A service that has it open reads the old one to its end.
    assert path.stat().st_ino != before


@pytest.mark.parametrize("kind", ["secrets", "reread"])
def test_a_directory_that_is_open_to_others_than_it_should_is_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "aerie" / "file"
    arguments = {kind: {str(path): TEXT}, "group": GROUP}
    run_module("service_files", arguments, capsys)
    wanted, other = (0o700, 0o755) if kind == "secrets" else (0o755, 0o700)
    assert mode(path.parent) == wanted
    path.parent.chmod(other)
    assert run_module("service_files", arguments, capsys, check_mode=True)["changed"]
    assert mode(path.parent) == other
    mended = run_module("service_files", arguments, capsys)
    assert (mended["changed"], mended["written"], mode(path.parent)) == (True, [], wanted)
    assert not run_module("service_files", arguments, capsys)["changed"]


def test_a_group_that_is_not_there_yet_is_predicted_and_otherwise_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "api-keys"
    assert reread(capsys, path, check_mode=True, group="no-such-group")["written"] == [str(path)]
    assert reread(capsys, path, group="no-such-group")["msg"] == "there is no group no-such-group: create it first"
    assert not path.exists()


# --- The files that settings name


def stored(directory: Path, name: str, text: str) -> Path:
    path = directory / f"{name}-{sha256_bytes(text.encode())[:16]}"
    path.write_text(text)
    path.chmod(0o600)
    return path


def settings_for(*paths: Path) -> dict[str, str]:
    lines = "".join(f"LoadCredential=name-{number}:{path}\n" for number, path in enumerate(paths))
    return {"/etc/x.conf": f"# LoadCredential=no:/line-0123456789abcdef of it\n[Service]\n{lines}"}


def test_a_secret_that_is_as_it_was_written_has_no_fault(tmp_path: Path) -> None:
    settings = settings_for(stored(tmp_path, "tls-key", TEXT), stored(tmp_path, "hub-token", "hf"))
    assert list(credentials.faults(settings)) == []
    # A certificate is no secret.
    assert list(credentials.faults({"a.env": "AERIE_CERTIFICATE=/nowhere/certificate-0123456789abcdef.pem\n"})) == []


def test_a_secret_that_is_not_as_it_was_written_has_one(tmp_path: Path) -> None:
    edited, opened, gone = (stored(tmp_path, name, name) for name in ("edited", "opened", "gone"))
    edited.write_text("else")
    opened.chmod(0o640)
    gone.unlink()
    assert list(credentials.faults(settings_for(edited, opened, gone))) == [
        f"{edited} was edited",
        f"{opened} is open to others",
        f"{gone} cannot be read (No such file or directory)",
    ]


def test_what_settings_name_no_more_is_removed(tmp_path: Path) -> None:
    kept, old = stored(tmp_path, "tls-key", "kept"), stored(tmp_path, "tls-key", "old")
    certificate = tmp_path / "certificate-0123456789abcdef.pem"
    certificate.write_text("")
    before = {**settings_for(kept, old), "a.env": f"AERIE_CERTIFICATE={certificate}\n", "absent": None}
    for _ in range(2):
        credentials.forget(before, settings_for(kept))
        assert list(tmp_path.iterdir()) == [kept]
    credentials.forget({}, settings_for(kept))
    assert kept.exists()
