# SPDX-License-Identifier: Apache-2.0
"""What only running models show: the probe of tap ids, dumps of hidden states, and drafters that fit and are wrong.

Each needs starts of vLLM, so both hosts work at once. `rot` is probed. On `random` the hidden states of the deployed
target are dumped; then, with its service stopped, so that no failed switch has to start it again, it gets `rot`'s
target with drafters that accept nothing, where the drafter of that target accepts everything on `rot`.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file, save_file
from scenario import ROOT, STATE, Run, api_key, observe, on_host, run_playbook

FILE = "vllm/model_executor/models/deepseek_v2.py"
TAP_IDS = (2, 4, 6)
DRAFTER = STATE / "models" / "rot" / "drafter"
# All that Aerie and the service keep, and the contents of what is small. What changes with every switch, and what is
# named at random, is left out; so are the package cache, digests kept beside weights, and what is known about
# environments that are gone.
SNAPSHOT = """
cd /
places="opt/aerie etc/aerie etc/systemd/system tmp dev/shm var/cache/vllm var/lib/vllm"
left_out="/opt/aerie/cache/|/opt/aerie/ledger.jsonl|/opt/aerie/switch/|/opt/aerie/patched/.*json"
left_out="$left_out|/opt/aerie/store/[^/]*/[.]|pycache|systemd-private"
find $places -maxdepth 4 -printf '/%p %y %l\\n' | grep -Ev "$left_out" | sort
find $places -maxdepth 4 -type f -size -100k -exec sha256sum {} + | sed 's,  , /,' | grep -Ev "$left_out" | sort
systemctl show vllm.service --property=ActiveState,NRestarts,UnitFileState
systemctl list-units --all --plain --no-legend 'aerie*' | awk '!/watchdog/ { print $1, $3 }'
"""


@dataclass
class Measured:
    """What the playbooks did, and what was there before and after them."""

    drafter: dict[str, tuple[str, int]]
    runs: dict[str, Run] = field(default_factory=dict)
    before: dict[str, set[str]] = field(default_factory=dict)
    after: dict[str, set[str]] = field(default_factory=dict)
    switches: dict[str, dict[str, Any]] = field(default_factory=dict)
    first_entry: int = 0


def snapshot(host: str) -> set[str]:
    return set(on_host(f"sudo sh -c {shlex.quote(SNAPSHOT)}", host).splitlines())


def ledger(host: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in on_host("sudo cat /opt/aerie/ledger.jsonl", host).splitlines()]


def digests(directory: Path) -> dict[str, tuple[str, int]]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.name: (sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in paths}


def served(host: str, accepted: str) -> None:
    """Compare what a host serves with the reference that verify.yml made there with Hugging Face."""
    reference = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], f"{host}.json")
    url = {"rot": "http://10.77.1.11:8000", "random": "http://10.77.1.12:8000"}[host]
    command = [sys.executable, ROOT / "tests/reference/served.py", url, "kimi-k2.5-tiny", reference]
    subprocess.run([*map(str, command), f"--accepted={accepted}"], env={**os.environ, "API_KEY": api_key()}, check=True)


def references(directory: Path) -> None:
    """Have Hugging Face write hidden states of `random`'s target, with the right ids and with ids off by one."""
    quiet = "env HOME=/tmp/training PYTHONPYCACHEPREFIX=/tmp/training PYTHONPATH=/srv/reference HF_HUB_OFFLINE=1"
    program = "/opt/aerie/current/venv/bin/python /srv/reference/training_dump.py /srv/models/random/target"
    encoded = on_host(f"{quiet} {program} --ids 2,3,4,5,6,7 | base64; rm -rf /tmp/training", "random")
    written = load(base64.b64decode(encoded))
    for name, later in (("reference", 0), ("off_by_one", 1)):
        taps = {f"hidden_states.{id_}": written[f"hidden_states.{id_ + later}"] for id_ in TAP_IDS}
        whole = {**taps, "token_ids": written["token_ids"], "tap_ids": np.array(TAP_IDS)}
        save_file(whole, directory / f"{name}.safetensors")


def drafter_of_another_target(directory: Path) -> Path:
    """Return a drafter of the same shapes that accepts everything of the target that it is for."""
    program = [sys.executable, str(ROOT / "embedded/models.py"), str(directory), "--kind", "rot", "--seed", "1"]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    return directory / "rot" / "drafter"


def drafter_with_shifted_d2t(directory: Path) -> Path:
    """Return `rot`'s drafter with a d2t that is whole, and has each draft token stand for the one before."""
    shutil.copytree(DRAFTER, directory)
    tensors = load_file(directory / "model.safetensors")
    index = np.arange(len(tensors["d2t"]))
    tensors["d2t"] = np.roll(tensors["d2t"] + index, 1) - index
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def probe(scratch: Path, found: Measured) -> None:
    found.before["rot"] = snapshot("rot")
    found.first_entry = len(ledger("rot"))
    found.runs["probe"] = run_playbook(scratch, "playbooks/probe_taps.yml", limit="rot")
    found.after["rot"] = snapshot("rot")


def dump_and_deploy(scratch: Path, found: Measured) -> None:
    references(scratch)
    wrong = {
        "another target's": drafter_of_another_target(scratch / "other"),
        "shifted d2t": drafter_with_shifted_d2t(scratch / "shifted"),
    }
    found.before["random"] = snapshot("random")
    found.runs["dump"] = run_playbook(
        scratch,
        "playbooks/dump_hidden_states.yml",
        limit="random",
        dump_reference=str(scratch / "reference.safetensors"),
        dump_deployed=str(scratch / "deployed.safetensors"),
    )
    found.after["random"] = snapshot("random")
    served("random", "none")
    on_host("sudo systemctl stop vllm.service", "random")
    for name, drafter in wrong.items():
        found.runs[name] = run_playbook(
            scratch,
            "deploy.yml",
            limit="random",
            target_model_path="/srv/models/rot/target",
            drafter_path=str(drafter),
            hidden_states_live="enforce",
            # The classes are those that were checked when the scenario was deployed.
            hidden_states_numeric="off",
        )
        found.switches[name] = json.loads(on_host("sudo cat /opt/aerie/switch/last.json", "random"))
    on_host("sudo systemctl start --no-block vllm.service", "random")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def measured(directory: Path) -> Measured:
    found = Measured(digests(DRAFTER))
    with ThreadPoolExecutor(2) as pool:
        for work in [pool.submit(part, directory, found) for part in (probe, dump_and_deploy)]:
            work.result()
    return found


def test_the_probe_recommends_the_right_ids(measured: Measured) -> None:
    run = measured.runs["probe"]
    assert (run.status, run.messages) == ("successful", "")
    table = {line[:7]: line.split() for line in run.said.splitlines() if line[:7] in ("1, 3, 5", "2, 4, 6", "3, 5, 7")}
    assert table["2, 4, 6"][-5:] == ["1.00", "1.00", "1.00", table["2, 4, 6"][-2], "passed"]
    for ids in ("1, 3, 5", "3, 5, 7"):
        assert table[ids][-5:] == ["0.00", "0.00", "0.00", table[ids][-2], "failed"]
    assert all(int(cells[-2]) > 100 for cells in table.values())
    assert run.said.rstrip().endswith("Keep the tap ids 2, 4, 6.")


def test_the_probe_puts_everything_back(measured: Measured) -> None:
    assert measured.after["rot"] ^ measured.before["rot"] == set()
    assert digests(DRAFTER) == measured.drafter
    entries = ledger("rot")
    release = observe(FILE)["environments"][0].split("/")[-2]
    assert entries[0]["to"] == release
    probed = [(entry["action"], entry["from"], entry["to"]) for entry in entries[measured.first_entry :]]
    lower, upper = probed[0][2], probed[2][2]
    assert probed == [
        ("activate", release, lower),
        ("restore", lower, release),
        ("activate", release, upper),
        ("restore", upper, release),
    ]
    assert len({release, lower, upper}) == 3
    assert "Using auxiliary layers from speculative config: (2, 4, 6)" in observe(FILE)["journal"]
    served("rot", "all")


def test_a_dump_of_the_deployed_target_matches_hugging_face(measured: Measured) -> None:
    run = measured.runs["dump"]
    assert (run.status, run.messages) == ("successful", "")
    assert "random: matches: 3 of 3 taps hold the stream that their id names" in run.said
    assert measured.after["random"] ^ measured.before["random"] == set()


@pytest.mark.usefixtures("measured")
def test_a_reference_whose_ids_are_off_by_one_is_named(directory: Path) -> None:
    files = {"reference": f"{directory}/off_by_one.safetensors", "deployed": f"{directory}/deployed.safetensors"}
    module = json.dumps({"level": "dump", "mode": "advisory", **files})
    command = ["ansible", "localhost", "--module-name", "hidden_state_check", "--args", module]
    form = {**os.environ, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    said = subprocess.run(command, cwd=ROOT, env=form, capture_output=True, text=True, check=True).stdout
    result = json.loads(said.partition("=>")[2])
    assert (result["verdict"], result["fault"]) == ("failed", "off by -1 layer")
    assert [tap["best"]["layer"] for tap in result["taps"]] == [1, 3, 5]


@pytest.mark.parametrize("drafter", ["another target's", "shifted d2t"])
def test_a_drafter_that_fits_and_is_wrong_fails_at_the_live_gate(measured: Measured, drafter: str) -> None:
    run, switch = measured.runs[drafter], measured.switches[drafter]
    assert run.status == "failed"
    assert "failed at the gate `live`" in run.messages
    assert "check for another target's drafter, random weights or a wrong d2t" in run.messages
    assert "is current and stopped, as before" in run.messages
    health, live = switch["gates"]
    assert (health["gate"], health["verdict"]) == ("health", "passed")
    assert (live["gate"], live["verdict"], live["reason"]) == ("live", "failed", "below_threshold")
    assert live["per_position"][0] < 0.02
    # The same target and prompts, with the drafter that is its own.
    (own,) = [gate for gate in ledger("rot")[1]["gates"] if gate["gate"] == "live"]
    assert (own["verdict"], own["per_position"]) == ("passed", [1.0, 1.0, 1.0])


def test_random_weights_fail_at_the_live_gate_that_is_advisory_there() -> None:
    confirmed = next(entry for entry in ledger("random") if entry["action"] == "confirm")
    (live,) = [gate for gate in confirmed["gates"] if gate["gate"] == "live"]
    assert (live["mode"], live["verdict"], live["reason"]) == ("advisory", "failed", "below_threshold")
    assert "random weights" in live["message"]


def test_the_probe_refuses_what_would_win_over_its_own_drafters(playbook: Callable[..., Run]) -> None:
    run = playbook("playbooks/probe_taps.yml", limit="rot", drafter_tap_dialect="vllm")
    assert "drafter_path and drafter_tap_dialect of the command line would win" in run.messages
    assert sum(run.changed.values()) == 0
