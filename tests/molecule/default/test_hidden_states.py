# SPDX-License-Identifier: Apache-2.0
"""Negative controls on the engine's own classes: what a tampered patch gives the drafter has the right name.

On the host, beside the running service: vLLM is linked file by file into another directory, with one file changed, and
the numeric check that the deploy shipped looks at that.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from scenario import ROOT, on_host

PYTHON = "/opt/aerie/current/venv/bin/python"
FILE = "vllm/model_executor/models/deepseek_v2.py"
CAPTURE = "aux_hidden_state = hidden_states + residual"
# Name that the check must give -> the model, what is replaced in the patched file, and by what.
TAMPERED = {
    "matches": ("deepseek", "", ""),
    "residual missing": ("kimi", CAPTURE, "aux_hidden_state = hidden_states"),
    "normalised stream": (
        "deepseek",
        CAPTURE,
        f"{CAPTURE}; aux_hidden_state = layer.input_layernorm(aux_hidden_state)",
    ),
    "off by -1 layer": ("kimi", "if idx in self.aux_hidden_state_layers", "if idx + 1 in self.aux_hidden_state_layers"),
    "taps permuted": ("deepseek", "append(aux_hidden_state)", "insert(0, aux_hidden_state)"),
}
# Makes every variant and checks two at a time.
PROGRAM = """
import glob, json, os, pathlib, subprocess, sys
from concurrent.futures import ThreadPoolExecutor

variants, python, file = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
(site,) = glob.glob(os.path.realpath(python[: -len("/bin/python")]) + "/lib/python3*/site-packages")
home = glob.glob("/opt/aerie/tools/aerie-*/ansible/module_utils/aerie/numeric_check.py")[-1].split("/ansible/")[0]

def check(item):
    number, (model, old, new) = item
    folder = pathlib.Path(f"/srv/tampered/{number}")
    folder.mkdir(parents=True)
    subprocess.run(["cp", "-as", site + "/vllm", folder], check=True)
    text = pathlib.Path(site, file).read_text()
    assert old in text
    (folder / file).unlink()
    (folder / file).write_text(text.replace(old, new, 1))
    command = ["runuser", "-u", "vllm", "--", "env", "PYTHONPATH=%s:%s" % (folder, home), python, "-m"]
    command += ["ansible.module_utils.aerie.numeric_check", "--layers", "8", "--ids", "2,4,6", "--models", model]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/").stdout)

with ThreadPoolExecutor(2) as pool:
    print(json.dumps(list(pool.map(check, enumerate(variants)))))
"""
SERVICE = "systemctl show vllm.service --property=MainPID,NRestarts,ActiveState"


def run_on_host(program: str, *arguments: str) -> str:
    encoded = base64.b64encode(program.encode()).decode()
    quoted = " ".join(map(shlex.quote, arguments))
    return on_host(f"sudo sh -c {shlex.quote(f'echo {encoded} | base64 -d | python3 - {quoted}')}")


@pytest.fixture
def untouched_service() -> Iterator[None]:
    before = on_host(SERVICE)
    yield
    on_host("sudo rm -rf /srv/tampered /srv/dumps")
    assert on_host(SERVICE) == before


@pytest.mark.usefixtures("untouched_service")
def test_a_tampered_patch_is_named() -> None:
    results = json.loads(run_on_host(PROGRAM, json.dumps(list(TAMPERED.values())), PYTHON, FILE))
    assert [result["fault"] for result in results] == list(TAMPERED), [result["message"] for result in results]
    assert [result["verdict"] for result in results] == ["passed", *["failed"] * 4]
    assert {tap["best"]["form"] for tap in results[1]["taps"]} == {"update"}
    assert max(tap["max_abs_error"] for tap in results[0]["taps"]) < 1e-5
    assert min(tap["max_abs_error"] for result in results[1:4] for tap in result["taps"]) > 1e-2


@pytest.mark.usefixtures("untouched_service")
def test_faults_in_dumps_of_hugging_face_are_named() -> None:
    encoded = base64.b64encode(Path(ROOT, "tools/dump_hidden_states.py").read_bytes()).decode()
    on_host(
        "sudo sh -ec '"
        "home=$(ls -d /opt/aerie/tools/aerie-*/ansible/module_utils/aerie/numeric_check.py | tail -1);"
        "home=${home%/ansible/*};"
        "mkdir -p /srv/dumps/tools; ln -s $home /srv/dumps/home;"
        "ln -s $home/ansible/module_utils /srv/dumps/module_utils;"
        f"echo {encoded} | base64 -d > /srv/dumps/tools/dump_hidden_states.py'"
    )
    path = "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/srv/dumps/home:/srv/dumps/tools"
    found = json.loads(on_host(f"sudo env {path} {PYTHON} /srv/reference/dumps.py 2>/dev/null"))
    assert list(found) == ["small float32", "small bfloat16", "large float32", "large bfloat16"]
    for kind, faults in found.items():
        quantised = {fault: faults.pop(fault) for fault in ("quantised to 8 bits", "quantised to 4 bits")}
        assert {fault: named for fault, (named, _, _) in faults.items()} == {fault: fault for fault in faults}
        assert [fault for fault, (_, verdict, _) in faults.items() if verdict != "failed"] == ["matches"]
        assert faults["matches"][2] < (0.003 if "bfloat16" in kind else 1e-6)
        named, verdict, noise = quantised["quantised to 4 bits"]
        assert (named, verdict, 0.02 < noise < 0.3) == ("noise of quantisation", "passed", True)
        assert quantised["quantised to 8 bits"][:2] == ["matches", "passed"]
