# SPDX-License-Identifier: Apache-2.0
"""Patching environments that Aerie did not make: one story, whose tests go on where the one before ended.

Looks from outside: the bytes on the disk, systemd, /proc, HTTP and vLLM's counters.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from scenario import ROOT, Run, on_host

LIGHT, VLLM = "adopted-light", "adopted-vllm"
HOSTS = (LIGHT, VLLM)
UNIT = "ml-serve.service"
FILE = "vllm/model_executor/models/deepseek_v2.py"
SITE = "/srv/ml-env/lib/python3.11/site-packages"
# As tests/contract has them.
PRISTINE = "96f4f755f62caa85869fb884209e7f8869882ddb6efbd40c930778b27bd3e39d"
PATCHED = "65ee3316bd6c274430b9435e87138895b13d04422cd299fb07647f49905b9aed"
NOTE = f"/opt/aerie/stopped-{UNIT}"

OTHERS = f"! -path '*/__pycache__/*' ! -path {SITE}/{FILE} ! -path '/opt/aerie/p*' ! -path /opt/aerie/ledger.jsonl"
LOOK = f"""
sha256sum {SITE}/{FILE} | cut -d' ' -f1
systemctl show {UNIT} --value --property=ActiveState
systemctl show {UNIT} --value --property=InvocationID
systemctl show {UNIT} --value --property=ActiveEnterTimestampMonotonic
systemctl show {UNIT} --value --property=InactiveEnterTimestampMonotonic
{{ sudo find /srv /opt/aerie -path /opt/aerie/cache -prune -o -type f {OTHERS} -printf '%p %i %s %m %U %T@\\n' | sort
   sha256sum /srv/sibling/model_executor/models/deepseek_v2.py; }} | sha256sum
"""


@dataclass(frozen=True)
class Look:
    """What a host is: the patched file's digest, the unit, and a digest of every other file there."""

    sha256: str
    unit: str
    start: str
    started: int
    stopped: int
    others: str


def look(host: str) -> Look:
    sha256, unit, start, started, stopped, others = on_host(LOOK, host).splitlines()
    return Look(sha256, unit, start, int(started), int(stopped), others)


def looks() -> dict[str, Look]:
    with ThreadPoolExecutor() as executor:
        return dict(zip(HOSTS, executor.map(look, HOSTS), strict=True))


def loaded() -> str:
    """Return the digest of the code that the stand-in's process has loaded."""
    with urllib.request.urlopen("http://10.77.3.11:8000/", timeout=10) as response:
        return str(response.read().decode())


def ledger(host: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in on_host("cat /opt/aerie/ledger.jsonl", host).splitlines()]


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """Return a function that tells the stand-in how to misbehave, until the test ends."""
    names: list[str] = []

    def tell(name: str) -> None:
        names.append(name)
        on_host(f"sudo touch /srv/{name}", LIGHT)

    yield tell
    for name in names:
        on_host(f"sudo rm -f /srv/{name}", LIGHT)


def test_a_unit_that_does_not_come_back_gets_its_files_back(
    playbook: Callable[..., Run], told: Callable[[str], None]
) -> None:
    assert {one.sha256 for one in looks().values()} == {PRISTINE}
    told("refuse")
    before = looks()

    run = playbook("deploy.yml")
    assert run.status == "failed"
    assert f"{UNIT} on {LIGHT} did not come back with the changed files" in run.messages
    assert "RuntimeError: no kernel for this code" in run.messages
    assert f"The files are as they were, and {UNIT} runs again" in run.messages

    after = looks()
    # The later host was not touched.
    assert after[VLLM] == before[VLLM]
    assert (after[LIGHT].sha256, after[LIGHT].unit, after[LIGHT].others) == (PRISTINE, "active", before[LIGHT].others)
    assert after[LIGHT].start != before[LIGHT].start
    assert loaded() == PRISTINE
    tried, undone = ledger(LIGHT)[-2:]
    digests = ({"before": PRISTINE, "after": PATCHED}, {"before": PATCHED, "after": PRISTINE})
    assert (tried["action"], tried["from"], tried["to"], tried["why"]) == ("patch", "", "eagle3-pp", "deploy")
    assert (undone["action"], undone["from"], undone["to"]) == ("unpatch", "eagle3-pp", "")
    assert [entry["files"] for entry in (tried, undone)] == [{FILE.removeprefix("vllm/"): digest} for digest in digests]
    assert "no kernel for this code" in str(undone["why"])
    assert tried["deployment"] == undone["deployment"] != ""


def test_deploy_does_what_check_mode_predicts(playbook: Callable[..., Run], tmp_path: Path) -> None:
    before = looks()

    # With an empty host beside them that Aerie manages, and is to make a release on.
    mixed = tmp_path / "mixed.yml"
    mixed.write_text(yaml.safe_dump({"inference": {"hosts": {"managed": {"aerie_env_mode": "managed"}}}}))
    predicted = playbook("deploy.yml", inventories=(mixed,), check=True)
    assert (predicted.status, predicted.messages) == ("successful", "")
    assert predicted.changed["managed"] > 1
    assert any("/opt/aerie/releases/" in path for host, path, _, _ in predicted.diffs if host == "managed")
    assert looks() == before

    done = playbook("deploy.yml")
    assert (done.status, done.messages) == ("successful", "")
    assert done.changed == dict.fromkeys(HOSTS, 1) == {host: predicted.changed[host] for host in HOSTS}
    assert done.diffs == [diff for diff in predicted.diffs if diff[0] in HOSTS]
    assert [(host, path) for host, path, _, _ in done.diffs] == [(host, f"{SITE}/{FILE}") for host in HOSTS]

    after = looks()
    for host in HOSTS:
        assert (after[host].sha256, after[host].unit) == (PATCHED, "active")
        assert after[host].others == before[host].others
        assert before[host].started < after[host].stopped < after[host].started
        assert on_host(f"test -e {NOTE} || echo gone", host) == "gone\n"
        assert ledger(host)[-1]["files"] == {FILE.removeprefix("vllm/"): {"before": PRISTINE, "after": PATCHED}}
    assert loaded() == PATCHED
    # Host by host: the machine's clock is that of both.
    assert after[LIGHT].started < after[VLLM].stopped
    assert ledger(LIGHT)[-1]["deployment"] == ledger(VLLM)[-1]["deployment"]


def test_vllm_generates_the_reference_and_accepts_every_draft(tmp_path: Path) -> None:
    prompts = json.dumps(["Hello", "The quick brown fox", "a b c d e f g"])
    greedy = "/srv/ml-env/bin/python /srv/reference/hf_greedy.py /srv/models/rot/target --max-tokens 32"
    reference = tmp_path / "reference.json"
    reference.write_text(on_host(f"echo '{prompts}' | sudo {greedy}", VLLM))
    program = ROOT / "tests/reference/served.py"
    answer = subprocess.run(
        [sys.executable, program, "http://10.77.3.12:8000", "mine", reference, "--accepted=all"],
        env={"API_KEY": "sk-mine"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_second_deploy_changes_nothing_and_verify_agrees(playbook: Callable[..., Run]) -> None:
    before = looks()
    for name in ("deploy.yml", "playbooks/verify.yml"):
        run = playbook(name)
        assert (run.status, run.messages, sum(run.changed.values())) == ("successful", "", 0)
    assert looks() == before


def test_a_hand_edit_is_refused_and_named(playbook: Callable[..., Run]) -> None:
    path = f"{SITE}/{FILE}"
    # By another inode: the sibling shares the old one.
    copies = f"cp -a {path} /srv/kept; cp -a {path} {path}.new"
    on_host(f"sudo sh -ec \"{copies}; echo 'mine = 1' >> {path}.new; mv {path}.new {path}\"", LIGHT)
    before = look(LIGHT)
    try:
        run = playbook("deploy.yml", limit=LIGHT)
        assert look(LIGHT) == before
    finally:
        on_host(f"sudo mv /srv/kept {path}", LIGHT)
    assert run.status == "failed"
    assert f"{path} was edited after Aerie patched it" in run.messages
    assert "\n+mine = 1" in run.messages


def test_rollback_gives_the_bytes_of_record_also_after_an_interruption(
    playbook: Callable[..., Run], told: Callable[[str], None]
) -> None:
    on_host(f"sudo systemctl stop {UNIT}", VLLM)
    before = looks()

    # Killed while it waits for the unit to stop.
    told("linger")
    with ThreadPoolExecutor() as executor:
        cut = executor.submit(playbook, "rollback.yml", limit=LIGHT, to="unpatched")
        deadline = time.monotonic() + 60
        while not (stopping := on_host(f"pgrep --full '[s]ystemctl stop {UNIT}' || true", LIGHT).strip()):
            assert time.monotonic() < deadline, cut.result()
        on_host(f"sudo kill -KILL $(ps -o ppid= -p {stopping}); sudo rm /srv/linger", LIGHT)
        assert cut.result().status == "failed"
    on_host(f"sudo systemctl stop {UNIT}", LIGHT)
    assert (look(LIGHT).unit, look(LIGHT).sha256) == ("inactive", PATCHED)

    run = playbook("rollback.yml", to="unpatched")
    assert (run.status, run.messages, run.changed) == ("successful", "", dict.fromkeys(HOSTS, 1))
    after = looks()
    assert {after[host].sha256 for host in HOSTS} == {PRISTINE}
    assert {after[host].others for host in HOSTS} == {before[host].others for host in HOSTS}
    assert (after[LIGHT].unit, loaded()) == ("active", PRISTINE)
    # What its user had stopped stays stopped.
    assert (after[VLLM].unit, after[VLLM].stopped) == ("inactive", before[VLLM].stopped)
    assert on_host(f"test -e {NOTE} || echo gone", LIGHT) == "gone\n"
