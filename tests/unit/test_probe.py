# SPDX-License-Identifier: Apache-2.0
"""The one look at a host: whatever differs is a reason and says so, and nothing else is."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.aerie.drafter import content_digest
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.journal import STARTING
from ansible.module_utils.aerie.resume import UNIT
from ansible.module_utils.aerie.target import inspect_target
from certificates_made import pair
from model_files import write_kimi
from modules import run_module
from switched_host import SERVICE, Host, host_below, until

ROOT = Path(__file__).parents[2]
REQUEST = {"the lock": "1", "the drafter": "2", "vllm_service_options": "3"}
WEIGHTS = b"weights"
PATCHED = b"patched = True\n"


class Probed(Host):
    """A host on which a release with a drafter, a patched vLLM and a target serves."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(directory, capsys)
        self._reader = capsys
        self.target = write_kimi(directory / "kimi")
        self.keys_file = self.etc / "api-keys"
        self.reread = {str(self.keys_file): "digest\n"}

    def set_up(self) -> str:
        facts = [{"name": "model.safetensors", "sha256": sha256_bytes(WEIGHTS), "size": len(WEIGHTS)}]
        drafter = content_digest(facts)
        self.drafter = self.root / "store" / drafter
        self.drafter.mkdir(parents=True)
        (self.drafter / "model.safetensors").write_bytes(WEIGHTS)
        more = {
            "drafter": drafter,
            "target": inspect_target(self.target)["identity"],
            "patches": {"models/a.py": sha256_bytes(PATCHED)},
        }
        identity = self.stage("new", complete=False, more=more)
        self.package = self.releases.path(identity) / "venv/lib/python3.12/site-packages/vllm"
        (self.package / "models").mkdir(parents=True)
        (self.package / "models/a.py").write_bytes(PATCHED)
        (self.package / "models/b.py").write_text("")
        self.releases.complete(identity, REQUEST)
        self.keys_file.write_text("digest\n")
        self.serve(identity)
        return identity

    @property
    def home(self) -> Path:
        return self.releases.path(self.releases.current())

    def probe(self, check_mode: bool = False, **arguments: object) -> dict[str, Any]:
        common = {
            "root": str(self.root),
            "unit": str(self.unit),
            "settings": self.settings(),
            "reread": self.reread,
            "target": str(self.target),
            "request": REQUEST,
            "cache": str(self.root / "digests.json"),
        }
        return run_module("release_probe", {**common, **arguments}, self._reader, check_mode)


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Probed]:
    with host_below(tmp_path, capsys, monkeypatch, Probed) as made:
        yield made


def test_a_host_that_is_as_wanted(host: Probed) -> None:
    identity = host.set_up()
    before = host.tree()
    found = host.probe(check_mode=True)
    # In check mode nothing is written; otherwise what is, is a cache of digests.
    assert host.tree() == before
    assert (found["failed"], found["changed"], found["reasons"]) == (False, False, [])
    assert {name: found[name] for name in ("current", "running", "healthy", "releases", "request", "aim")} == {
        "current": identity,
        "running": identity,
        "healthy": True,
        "releases": [identity],
        "request": REQUEST,
        "aim": "",
    }
    assert found["deployments"] == [{"deployment": "first", "from": "", "to": identity, "why": ""}]
    assert host.probe()["reasons"] == []
    assert {Path(path).name for path in host.tree().keys() - before.keys()} == {"digests.json", "digests.json.lock"}
    # Weights are not read again while nobody touched them.
    digests = host.root / "digests.json"
    cache = json.loads(digests.read_text())
    (entry,) = cache.values()
    digests.write_text(json.dumps({name: {**entry, "sha256": "0" * 64} for name in cache}))
    assert [reason for reason in host.probe()["reasons"] if "drafter" in reason] != []


def test_where_the_service_listens_is_what_its_settings_on_the_host_say(host: Probed) -> None:
    assert host.probe()["listens"] == {"address": "", "port": ""}
    host.set_up()
    variables = dict(line.split("=", 1) for line in (host.etc / "vllm.env").read_text().splitlines() if "=" in line)
    listens = {"address": variables["AERIE_HOST"], "port": variables["AERIE_PORT"]}
    assert host.probe()["listens"] == listens
    # Whatever is wanted.
    wanted = {path: text.replace("AERIE_PORT=", "AERIE_PORT=1") for path, text in host.settings().items()}
    assert wanted != host.settings()
    assert host.probe(settings=wanted)["listens"] == listens


def test_a_timer_that_runs_is_no_reason(host: Probed) -> None:
    host.set_up()
    arguments = timer("ActiveState=active\nUnitFileState=enabled\n")(host)
    assert host.probe(**arguments)["reasons"] == []


def test_a_timer_that_was_stopped_is_in_the_status(host: Probed, capsys: pytest.CaptureFixture[str]) -> None:
    identity = host.set_up()
    arguments = {"root": str(host.root), "unit": str(host.unit), "settings": [str(host.etc / "vllm.env")]}
    timer("ActiveState=inactive\nUnitFileState=enabled\n")(host)
    # This host is not to be watched.
    assert run_module("release_status", arguments, capsys)["problems"] == []
    (host.etc / "aerie-watchdog.timer").write_text("")
    found = run_module("release_status", arguments, capsys)
    assert (found["release"], found["healthy"]) == (identity, True)
    assert found["problems"] == ["aerie-watchdog.timer does not run: run deploy.yml"]


def test_a_certificate_that_ends_soon_is_in_the_status(
    host: Probed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host.set_up()
    settings = host.etc / "vllm.env"
    settings.write_text(f"{settings.read_text()}AERIE_CERTIFICATE={tmp_path / 'vllm.pem'}\n")
    (tmp_path / "vllm.pem").write_text(pair(days=10).pem)
    arguments = {"root": str(host.root), "unit": str(host.unit), "settings": [str(settings)]}
    problems = run_module("release_status", arguments, capsys)["problems"]
    assert problems[0].startswith(f"the certificate {tmp_path / 'vllm.pem'} ends in 9 days, on ")
    # What runs does not speak TLS.
    assert problems[1:] == ["vllm.service runs with other settings: run deploy.yml"]


def test_how_long_the_last_start_took(host: Probed) -> None:
    identity = host.set_up()
    for seconds in (70.5, 68.0):
        entry = {"deployment": "d", "action": "confirm", "to": identity, "gates": [], "start_s": seconds}
        host.releases.append_to_ledger(entry)
    assert host.probe()["last_start_s"] == 68.0


def edited(path: Callable[[Probed], Path], text: str = "edited") -> Callable[[Probed], dict[str, Any]]:
    def change(host: Probed) -> dict[str, Any]:
        path(host).write_text(text)
        return {}

    return change


def given(**arguments: object) -> Callable[[Probed], dict[str, Any]]:
    return lambda host: arguments


def other_settings(host: Probed) -> dict[str, Any]:
    return {"settings": host.settings(AERIE_PORT_OF="1")}


def a_drop_in(host: Probed) -> dict[str, Any]:
    return {"settings": {**host.settings(), str(host.etc / "vllm.service.d/x.conf"): "[Service]\nLimitNOFILE=9\n"}}


def settings_written_by_hand(host: Probed) -> dict[str, Any]:
    """What runs has the settings that the file had."""
    (host.etc / "vllm.env").write_text("# edited\n")
    return {}


def settings_written_since(host: Probed) -> dict[str, Any]:
    settings = host.settings(TOY="1")
    (host.etc / "vllm.env").write_text(settings[str(host.etc / "vllm.env")])
    return {"settings": settings}


def other_key(host: Probed) -> dict[str, Any]:
    return {"reread": {str(host.keys_file): "another\n"}}


def touched(host: Probed) -> dict[str, Any]:
    os.utime(host.package / "models/b.py", (1, 1))
    return {}


def removed(host: Probed) -> dict[str, Any]:
    (host.package / "models/b.py").unlink()
    return {}


def stopped(host: Probed) -> dict[str, Any]:
    host.power_cut()
    return {}


def another_runs(host: Probed) -> dict[str, Any]:
    host.releases.activate(host.stage("other"), host.unit)
    return {}


def not_noted(host: Probed) -> dict[str, Any]:
    (host.root / "staged" / f"{host.releases.current()}.json").unlink()
    return {}


def no_drafter(host: Probed) -> dict[str, Any]:
    host.drafter.rename(host.root / "elsewhere")
    return {}


def weights(host: Probed) -> Path:
    return host.drafter / "model.safetensors"


def timer(state: str) -> Callable[[Probed], dict[str, Any]]:
    def change(host: Probed) -> dict[str, Any]:
        (host.state / "timer").write_text(state)
        return {"timers": ["aerie-watchdog.timer"]}

    return change


def certificate_with_other_line_ends(host: Probed) -> dict[str, Any]:
    """The inventory's has line feeds only."""
    host.keys_file.write_bytes(b"digest\r\n")
    return {}


def binary_file(host: Probed) -> dict[str, Any]:
    (host.home / "serve.yaml").write_bytes(b"\xff\xfe")
    return {}


def binary_settings(host: Probed) -> dict[str, Any]:
    """What runs has the settings that the file had."""
    (host.etc / "vllm.env").write_bytes(b"# \xff\n")
    return {}


def other_line_ends(host: Probed) -> dict[str, Any]:
    unit = host.home / SERVICE
    unit.write_bytes(unit.read_bytes().replace(b"\n", b"\r\n"))
    host.unit.write_bytes(unit.read_bytes())
    return {}


def added_module(host: Probed) -> dict[str, Any]:
    """On the service's PYTHONPATH, so each of its starts would run it."""
    (host.home / "lib").mkdir()
    (host.home / "lib/sitecustomize.py").write_text("")
    return {}


def added_link(host: Probed) -> dict[str, Any]:
    (host.home / "lib").symlink_to("/srv")
    return {}


def directory_beside_weights(host: Probed) -> dict[str, Any]:
    (host.drafter / "more").mkdir()
    return {}


def link_to_nothing(host: Probed) -> dict[str, Any]:
    (host.drafter / "more").symlink_to("nowhere")
    return {}


def a_secret(damage: str) -> Callable[[Probed], dict[str, Any]]:
    """The service runs with settings that name a secret, which somebody damaged."""

    def change(host: Probed) -> dict[str, Any]:
        path = host.etc / f"tls-key-{sha256_bytes(b'key')[:16]}"
        if damage != "missing":
            path.write_text(damage)
            path.chmod(0o644 if damage == "key" else 0o600)
        drop_in = host.etc / "vllm.service.d/aerie-secrets.conf"
        drop_in.parent.mkdir()
        drop_in.write_text(f"[Service]\nLoadCredential=tls-key:{path}\n")
        return {"settings": {**host.settings(), str(drop_in): drop_in.read_text()}}

    return change


def under_way(host: Probed) -> dict[str, Any]:
    host.start(host.stage("other"))
    return {"in_progress": "wait"}


# What is done, and the one reason that it gives, of which {} are names on the host.
CHANGES: dict[str, tuple[Callable[[Probed], dict[str, Any]], str]] = {
    "lock": (given(request={**REQUEST, "the lock": "9"}), "the lock changed"),
    "drafter": (given(request={**REQUEST, "the drafter": "9"}), "the drafter changed"),
    "options": (given(request={**REQUEST, "vllm_service_options": "9"}), "vllm_service_options changed"),
    "new variable": (given(request={**REQUEST, "another": "1"}), "another changed"),
    "variable that is gone": (given(request={"the lock": "1", "the drafter": "2"}), "vllm_service_options changed"),
    "target": (edited(lambda host: host.target / "tiktoken.model"), "the target at {target} is another one"),
    "target's code": (edited(lambda host: host.target / "processing_kimi.py"), "the target at {target} is another one"),
    "settings file": (settings_written_by_hand, "{etc}/vllm.env has other settings"),
    "settings since its start": (settings_written_since, "vllm.service runs with other settings"),
    "drop-in": (a_drop_in, "{etc}/vllm.service.d/x.conf has other settings"),
    "key": (other_key, "{etc}/api-keys is to be written"),
    "key file": (edited(lambda host: host.keys_file), "{etc}/api-keys is to be written"),
    "line ends": (certificate_with_other_line_ends, "{etc}/api-keys is to be written"),
    "binary settings": (binary_settings, "{etc}/vllm.env has other settings"),
    "binary file": (binary_file, "a file of {release} was edited or removed: "),
    "line ends of a file": (other_line_ends, "a file of {release} was edited or removed: "),
    "added module": (added_module, "{release}/lib/sitecustomize.py was added: remove it"),
    "added link": (added_link, "{release}/lib was added: remove it"),
    "unit": (edited(lambda host: host.unit), "{etc}/vllm.service is not the unit of release {identity}"),
    "other file": (touched, "files of {venv} were edited, added or removed"),
    "removed file": (removed, "files of {venv} were edited, added or removed"),
    "weights": (edited(weights), "a file of the drafter {drafter} was edited, added or removed: "),
    "more weights": (
        edited(lambda host: host.drafter / "more.safetensors"),
        "a file of the drafter {drafter} was edited, added or removed: ",
    ),
    "directory in the drafter": (
        directory_beside_weights,
        "a file of the drafter {drafter} was edited, added or removed: ",
    ),
    "link in the drafter": (link_to_nothing, "a file of the drafter {drafter} was edited, added or removed: "),
    "no drafter": (no_drafter, "the drafter {drafter} is missing: run deploy.yml"),
    "stopped": (stopped, "vllm.service does not run"),
    "not whole": (not_noted, "release {identity} is not wholly staged"),
    "under way": (under_way, "a switch is under way"),
    "timer": (timer("ActiveState=inactive\nUnitFileState=enabled\n"), "aerie-watchdog.timer does not run"),
    "timer until a reboot": (
        timer("ActiveState=active\nUnitFileState=disabled\n"),
        "aerie-watchdog.timer is disabled",
    ),
    "no timer": (timer(""), "aerie-watchdog.timer does not run"),
    "secret": (a_secret("missing"), "{etc}/tls-key-2c70e12b7a0646f9 cannot be read"),
    "edited secret": (a_secret("else"), "{etc}/tls-key-2c70e12b7a0646f9 was edited"),
    "open secret": (a_secret("key"), "{etc}/tls-key-2c70e12b7a0646f9 is open to others"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_the_reason(host: Probed, name: str) -> None:
    identity = host.set_up()
    # So that what is remembered does not hide what changed.
    host.probe()
    change, text = CHANGES[name]
    arguments = change(host)
    home = host.home
    names = {"target": host.target, "etc": host.etc, "venv": home / "venv", "release": home, "drafter": host.drafter}
    reasons = host.probe(**arguments)["reasons"]
    if name == "not whole":
        # Nor is known then what it was planned from.
        assert reasons[:3] == [f"{one} changed" for one in sorted(REQUEST)]
        reasons = reasons[3:]
    assert len(reasons) == 1, reasons
    assert reasons[0].startswith(text.format(**names, identity=identity))


def test_a_patched_file_that_was_edited_is_named(host: Probed) -> None:
    identity = host.set_up()
    path = host.package / "models/a.py"
    stamp = path.stat()
    path.write_bytes(PATCHED.replace(b"True", b"Fals"))
    # Although its size and time are as they were.
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert host.probe()["reasons"] == [f"{path} is not as its patch set wrote it"]
    assert identity == host.releases.current()


def test_a_file_of_the_release_that_was_edited_is_named(host: Probed) -> None:
    identity = host.set_up()
    (host.releases.path(identity) / "serve.yaml").write_text("{}")
    (reason,) = host.probe()["reasons"]
    assert reason.startswith(f"a file of {host.releases.path(identity)} was edited or removed: ")


def test_a_service_that_runs_another_release_is_named(host: Probed) -> None:
    host.set_up()
    running = host.releases.current()
    another_runs(host)
    assert f"vllm.service runs release {running}" in host.probe()["reasons"]


def test_a_service_that_does_not_answer_is_named(host: Probed) -> None:
    identity = host.stage("ill", health=503, more={"target": inspect_target(host.target)["identity"]})
    host.releases.complete(identity, REQUEST)
    host.keys_file.write_text("digest\n")
    host.serve(identity)
    found = host.probe()
    assert (found["reasons"], found["healthy"]) == (["vllm.service does not answer /health"], False)


def test_a_target_that_cannot_be_read_is_named(host: Probed) -> None:
    host.set_up()
    found = host.probe(target="/nowhere")
    assert len(found["reasons"]) == 1
    assert found["reasons"][0].startswith("the target cannot be read: /nowhere: no such directory on this host")


@pytest.mark.parametrize("check_mode", [True, False])
def test_an_empty_host(host: Probed, check_mode: bool) -> None:
    before = host.tree()
    found = host.probe(check_mode, root=str(host.root / "absent"))
    assert host.tree() == before
    assert found["reasons"] == ["no release serves here yet"]
    assert (found["current"], found["running"], found["healthy"]) == ("", "", False)
    assert (found["deployments"], found["last_start_s"], found["releases"]) == ([], None, [])


def test_a_switch_that_is_under_way_is_refused_and_said_whose(host: Probed) -> None:
    host.set_up()
    under_way(host)
    assert "is under way on this host: deployment second" in host.probe()["msg"]
    assert host.probe(in_progress="take_over")["reasons"] == ["a switch is under way"]


@pytest.mark.parametrize("aim", ["previous", "{identity}"])
def test_a_host_that_is_switched_is_not_ready_whatever_it_goes_back_to(host: Probed, aim: str) -> None:
    identity = host.set_up()
    under_way(host)
    # Its service may be healthy now, and measured: it gets no requests.
    found = host.probe(aim=aim.format(identity=identity), in_progress="wait")
    assert (found["healthy"], found["reasons"]) == (True, ["a switch is under way"])


def test_a_file_that_is_not_to_be_there_is_a_reason_only_where_it_is(host: Probed) -> None:
    host.set_up()
    rules = host.etc / "replica.nft"
    settings = {**host.settings(), str(rules): None}
    assert host.probe(settings=settings)["reasons"] == []
    rules.write_text("table inet aerie_replica\n")
    assert host.probe(settings=settings)["reasons"] == [f"{rules} has other settings"]


@pytest.mark.parametrize("begun", [True, False])
def test_a_switch_whose_program_was_stopped_comes_to_its_end(host: Probed, begun: bool) -> None:
    identity = host.set_up()
    before = host.pid()
    other = host.stage("other", silent=True)
    host.start(other)
    if begun:
        program = host.program()
        until(lambda: host.running() == other)
        program.kill()
    host.switch_unit("ActiveState=inactive")
    host.calls()
    assert "is under way" in host.probe(check_mode=True)["msg"]
    assert host.calls() == []
    assert "is under way" in host.probe()["msg"]
    assert host.calls() == [f"start --no-block {UNIT}"]
    assert host.program().wait() == 0
    found = host.probe()
    assert (found["failed"], found["reasons"], found["running"]) == (False, [], identity)
    # What had not begun did not begin.
    assert (host.pid() == before) is not begun
    end = host.journal.last()
    assert end["reason"] == (
        f"the switch program was killed while {STARTING}" if begun else "another run found that it had not begun"
    )


# ---------------------------------------------------------------------------------- what was written with DOS line ends


def test_a_certificate_with_the_inventorys_line_ends_is_as_wanted(host: Probed) -> None:
    host.set_up()
    text = "-----BEGIN CERTIFICATE-----\r\nMIIB\r\n-----END CERTIFICATE-----\r\n"
    host.keys_file.write_bytes(text.encode())
    assert host.probe(reread={str(host.keys_file): text})["reasons"] == []


def test_a_certificate_is_told_with_its_line_ends(host: Probed, tmp_path: Path) -> None:
    host.set_up()
    text = pair().pem.replace("\n", "\r\n")
    settings = host.etc / "vllm.env"
    settings.write_text(f"{settings.read_text()}AERIE_CERTIFICATE={tmp_path / 'vllm.pem'}\n")
    (tmp_path / "vllm.pem").write_bytes(text.encode())
    # The gateway's role looks for it in the inventory's, which has the same.
    assert host.probe()["certificate"] == text


# --------------------------------------------------------------------------------------------------------- the way back


def test_the_previous_release_is_what_served_before(host: Probed) -> None:
    before = host.set_up()
    after = host.stage("other")
    host.releases.activate(after, host.unit)
    entry = {"deployment": "second", "action": "activate", "from": before, "to": after, "why": "deploy"}
    host.releases.append_to_ledger(entry)
    found = host.probe(aim="previous")
    assert (found["aim"], found["aim_problems"], found["reasons"]) == (before, [], [])
    assert [(one["deployment"], one["why"]) for one in found["deployments"]] == [("second", "deploy"), ("first", "")]
    assert found["aim_changes"] == ["drafter", "name", "patches", "target", SERVICE]
    # One that was named is looked at likewise.
    assert host.probe(aim=before)["aim_problems"] == []
    # A file that was added is one that no distribution has; what else is in this environment was there before.
    (host.releases.path(before) / "venv/lib/sneaked.py").write_text("")
    (problem,) = host.probe(aim="previous")["aim_problems"]
    venv = host.releases.path(before) / "venv"
    assert problem == f"files of {venv} were edited, added or removed: {venv}/lib/sneaked.py was added"
    assert host.probe(aim="0" * 16)["aim_problems"] == [
        f"release {'0' * 16} is not on this host; these are: {', '.join(sorted([before, after]))}"
    ]


def test_before_the_first_release_there_was_none(host: Probed) -> None:
    host.set_up()
    found = host.probe(aim="previous")
    assert (found["aim"], found["deployments"][0]["from"], found["aim_problems"]) == ("", "", [])
    # One that is left alone serves: a gateway that an interrupted run had drain it may have it back.
    assert found["reasons"] == []


# -------------------------------------------------------------------------------------------------- on the control node


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_probe_action", ROOT / "plugins/action/release_probe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_content_of_directories_is_known_by_every_name_and_byte(plugin: ModuleType, tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "a/__pycache__").mkdir(parents=True)
    (code / "a/x.py").write_text("1")
    (code / "b.yml").write_text("1")
    seen = [plugin._content([str(code)], None)]

    def same() -> bool:
        found = {plugin._content([str(code)], cache) for cache in (None, tmp_path / "cache")}
        return found == {seen[-1]}

    assert same()
    os.utime(code / "a/x.py", (1, 1))
    (code / "a/__pycache__/x.pyc").write_text("")
    assert same()
    for change in (
        lambda: (code / "a/x.py").write_text("2"),
        lambda: (code / "a/x.py").rename(code / "a/y.py"),
        lambda: (code / "c").write_text(""),
        lambda: (code / "b.yml").unlink(),
    ):
        change()
        found = plugin._content([str(code)], tmp_path / "cache")
        assert found not in seen
        seen.append(found)
    # The checks that follow say what is missing, and better.
    assert str(tmp_path / "absent") in plugin._content([str(tmp_path / "absent")], None)
