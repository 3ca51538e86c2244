# SPDX-License-Identifier: Apache-2.0
"""Every fault that is planted on two real hosts is named in one table of one run, and nothing on them is changed."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SCENARIO = Path(__file__).parent
ROOT = SCENARIO.parents[2]
STATE = Path(os.environ.get("AERIE_STATE", "/var/tmp/aerie"))
HOSTS = {"preflight": "10.77.6.11", "reach": "10.77.6.12"}
# What runs by itself writes there; everything else must stay as it is.
APART = "/proc /sys /run /tmp /var/log /dev"

# On the host `preflight`: what it lacks itself, with the release that it would get otherwise.
PLANT_HOST = r"""
mount -t tmpfs -o size=64M,nr_inodes=500 tmpfs /opt
mount -t tmpfs -o size=16M tmpfs /dev/shm
prlimit --pid 1 --nofile=1024:1024
systemd-run --quiet --unit=squatter python3 -m http.server 8000 --bind 0.0.0.0
chmod 0700 /srv/models/rot/target
echo 'https_proxy=http://proxy.example:3128' >> /etc/environment
ip addr add 10.77.6.13/24 dev eth0
ip addr add 10.77.6.14/24 dev eth0
install -m 0755 /dev/stdin /usr/local/bin/nvidia-smi <<'PROGRAM'
#!/bin/sh
case "$*" in
  "-q -x") cat /srv/faulty_blackwell.xml ;;
  "topo -m") cat /srv/topo_pcie.txt ;;
  *) exit 2 ;;
esac
PROGRAM
"""
# On the host `reach`: accounts, and an address for each way to fail.
PLANT_REACH = r"""
for n in $(seq 21 39); do ip addr add 10.77.6.$n/24 dev eth0; done
login() {
  useradd --create-home --shell "$2" "$1"
  install -d -m 0700 -o "$1" -g "$1" "/home/$1/.ssh"
  install -m 0600 -o "$1" -g "$1" /home/ansible/.ssh/authorized_keys "/home/$1/.ssh/authorized_keys"
}
login asks /bin/bash
login plain /bin/bash
login homeless /bin/bash
login mute /usr/sbin/nologin
echo 'asks ALL=(ALL) ALL' > /etc/sudoers.d/asks
echo 'homeless ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/homeless
printf 'asks:%s\nplain:%s\n' "$1" "$1" | chpasswd
echo 'Defaults lecture = never' > /etc/sudoers.d/quiet
chown root:root /home/homeless
"""
PASSWORD = "open sesame"

# Each host of the inventory has one fault, or those of the machine that it is; what the table says about it.
EXPECTED: dict[str, list[str]] = {
    "preflight": [
        "/opt/aerie needs 6000 MB for a release",
        "/opt/aerie needs 80000 inodes for a release",
        "port 8000 is in use by python3",
        "/dev/shm has 16 MB free",
        "a service here gets at most 1024 open files",
        "there is no Python at /usr/bin/python3.9: install Python 3.11, or set ml_env_python",
        "the target model cannot be read by vllm: /srv/models/rot/target is closed to it",
        "https_proxy is set in /etc/environment",
        "the certificate /srv/gateway.pem ended on 2001-01-01 00:00 UTC: renew it",
        "the service is to listen on 10.77.6.99, which is no address of this host",
    ],
    "gpu": [
        "the driver is 550.54.15 and a CUDA 13 build needs 580 or newer",
        "2 GPUs are usable and tensor-parallel-size is 8",
        "GPU 0 is in use by train.py (process 99100, 90000 MiB)",
        "GPU 1 (00000000:C1:00.0) had 4 ECC errors that were not corrected",
        "the attention backend FLASHMLA does not run on NVIDIA RTX PRO 6000",
        "/dev/nvidia-uvm is missing",
        "there is no C compiler",
        "/usr/bin/python3.11 is Python 3.11, but the lock is for 3.12",
        "no NVLink joins the GPUs",
        "PCIe runs with fewer lanes than the GPU has: GPU 1 x4 of x16",
    ],
    "refused": ["nothing listens at 10.77.6.21, port 2222 (connection refused)"],
    "unknown-host-key": ["the host key of 10.77.6.22 is not known"],
    "changed-host-key": ["the host key of 10.77.6.23 has changed"],
    "wrong-key": ["10.77.6.24 refuses the login of ansible with", "preflight takes another key"],
    "wrong-user": ["10.77.6.25 refuses the login of deploy with", "preflight takes this key for the user ansible"],
    "no-key-file": ["there is no key at /nowhere/key"],
    "open-key": ["is open to others (mode 0644)", "chmod 600"],
    "locked-key": ["has a passphrase, and Ansible cannot type it"],
    "sudo-password": ["sudo asks asks for a password, and the inventory has none"],
    "sudo-wrong-password": ["sudo refuses the password of asks"],
    "sudo-denied": ["plain may not use sudo"],
    "home-not-writable": ["/home/homeless is not writable for homeless"],
    "no-shell": ["the login works, and its shell runs no commands: it says 'This account is currently not available.'"],
    "no-python": ["the host has no Python that Ansible can use"],
    "no-name": ["the name nowhere.invalid has no address"],
    "no-ssh-server": ["what listens at 10.77.6.14, port 8000 does not greet as an SSH server"],
    "nobody": ["there is no way to 10.77.6.98, port 22"],
    "jump": ["its way through nobody@[10.77.6.97] cannot be looked at more closely"],
    "inventory": ["variable 'vllm_service_prot' of preflight is unknown: did you mean 'vllm_service_port'?"],
}


def on_host(name: str, script: str, text: str = "", argument: str = "") -> str:
    """Run ``script`` as root on a host, over SSH and without Ansible; return what it prints."""
    known = f"UserKnownHostsFile={STATE}/known_hosts"
    command = f"sudo /bin/bash -euc {shlex.quote(script)} script {shlex.quote(argument)}"
    ssh = ["ssh", "-i", str(STATE / "key"), "-o", known, f"ansible@{HOSTS[name]}", command]
    return subprocess.run(ssh, input=text, capture_output=True, text=True, check=True).stdout


def snapshot(name: str) -> str:
    apart = " -o ".join(f"-path {path}" for path in APART.split())
    return on_host(name, rf"find / \( {apart} \) -prune -o -printf '%p %y %m %u %s %T@\n' | sort")


def expired_certificate() -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime.datetime(2000, 1, 1)).not_valid_after(datetime.datetime(2001, 1, 1))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def make_key(path: Path, passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plant the faults; return an inventory of hosts that have them."""
    directory = tmp_path_factory.mktemp("faults")
    for name in ("faulty_blackwell.xml", "topo_pcie.txt"):
        on_host("preflight", f"cat > /srv/{name}", (ROOT / "tests/unit/nvidia_smi" / name).read_text())
    on_host("preflight", "cat > /srv/gateway.pem", expired_certificate())
    on_host("preflight", PLANT_HOST)
    on_host("reach", PLANT_REACH, argument=PASSWORD)
    addresses = {name: f"10.77.6.{number}" for number, name in enumerate(list(EXPECTED)[2:-1], start=21)}
    addresses.update({"no-name": "nowhere.invalid", "no-ssh-server": "10.77.6.14", "nobody": "10.77.6.98"})
    key = (STATE / "known_hosts").read_text()
    (reach,) = re.findall(rf"^{re.escape(HOSTS['reach'])} (.+)$", key, re.MULTILINE)
    (preflight,) = re.findall(rf"^{re.escape(HOSTS['preflight'])} (.+)$", key, re.MULTILINE)
    known = [f"{address} {reach}" for name, address in addresses.items() if name != "unknown-host-key"]
    wrong = make_key(directory / "other")
    other = " ".join(wrong.with_suffix(".pub").read_text().split()[:2])
    known = [f"{addresses['changed-host-key']} {other}" if addresses["changed-host-key"] in x else x for x in known]
    (directory / "known_hosts").write_text("\n".join([*known, f"10.77.6.13 {preflight}", key]))
    (directory / "open").write_text((STATE / "key").read_text())
    (directory / "open").chmod(0o644)
    hosts: dict[str, dict[str, Any]] = {name: {"ansible_host": address} for name, address in addresses.items()}
    hosts["refused"]["ansible_port"] = 2222
    hosts["wrong-key"]["ansible_ssh_private_key_file"] = str(wrong)
    hosts["wrong-user"]["ansible_user"] = "deploy"
    hosts["no-key-file"]["ansible_ssh_private_key_file"] = "/nowhere/key"
    hosts["open-key"]["ansible_ssh_private_key_file"] = str(directory / "open")
    hosts["locked-key"]["ansible_ssh_private_key_file"] = str(make_key(directory / "locked", "a passphrase"))
    for host, user in {
        "sudo-password": "asks",
        "sudo-wrong-password": "asks",
        "sudo-denied": "plain",
        "home-not-writable": "homeless",
        "no-shell": "mute",
    }.items():
        hosts[host]["ansible_user"] = user
    hosts["sudo-wrong-password"]["ansible_become_password"] = "wrong"
    hosts["sudo-denied"]["ansible_become_password"] = PASSWORD
    hosts["no-python"]["ansible_python_interpreter"] = "/usr/bin/python3.5"
    hosts["no-ssh-server"].update(ansible_port=8000, ansible_timeout=3)
    hosts["gpu"] = {
        "ansible_host": "10.77.6.13",
        "ml_env_lock": "vllm-0.33.0-cu130-py312",
        "ml_env_python": "/usr/bin/python3.11",
        "vllm_service_port": 8001,
        "vllm_service_options": {"tensor-parallel-size": 8, "attention-backend": "FLASHMLA"},
    }
    hosts["preflight"] = {
        "ml_env_python": "/usr/bin/python3.9",
        "preflight_certificates": ["/srv/gateway.pem"],
        "vllm_service_host": "10.77.6.99",
        "vllm_service_prot": 8000,
    }
    for variables in hosts.values():
        variables["ansible_ssh_common_args"] = f"-o UserKnownHostsFile={directory}/known_hosts"
    hosts["jump"]["ansible_ssh_common_args"] += " -o ProxyJump=nobody@10.77.6.97"
    inventory = directory / "faults.yml"
    inventory.write_text(yaml.safe_dump({"inference": {"hosts": hosts}}))
    return inventory


@dataclass(frozen=True)
class Run:
    """What the preflight printed, its exit status, and all files of each host before and after it."""

    stdout: str
    returncode: int
    before: dict[str, str]
    after: dict[str, str]


@pytest.fixture(scope="module")
def run(faults: Path) -> Run:
    """Run the preflight on all hosts, as a user would."""
    before = {name: snapshot(name) for name in HOSTS}
    # Molecule's own settings are of no use to a user.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
    environment["ANSIBLE_CONFIG"] = str(ROOT / "ansible.cfg")
    # Connections that earlier runs left open would hide faults of the way there.
    environment["ANSIBLE_SSH_CONTROL_PATH_DIR"] = str(faults.parent / "cp")
    playbook = Path(sys.executable).with_name("ansible-playbook")
    command = [str(playbook), "playbooks/preflight.yml", "-i", str(SCENARIO / "inventory"), "-i", str(faults)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return Run(result.stdout, result.returncode, before, {name: snapshot(name) for name in HOSTS})


def rows(run: Run, host: str) -> str:
    """Return the lines of the tables that are about ``host``. Ansible shows a failure's message twice."""
    lines = dict.fromkeys(line.strip() for line in run.stdout.splitlines())
    return "\n".join(line for line in lines if re.match(rf"{re.escape(host)} +(problem|note) ", line))


@pytest.mark.parametrize(("host", "messages"), EXPECTED.items(), ids=EXPECTED)
def test_every_fault_is_named(run: Run, host: str, messages: list[str]) -> None:
    found = rows(run, host)
    assert [message for message in messages if message not in found] == [], run.stdout[-12000:]


def test_one_table_has_all_problems_and_stops_the_run(run: Run) -> None:
    assert run.returncode == 2
    assert run.stdout.count("Nothing was changed. Mend these and run again:") > 0
    assert " changed=0 " in run.stdout and " changed=1 " not in run.stdout
    assert " unreachable=1 " not in run.stdout
    # The host without a fault of its own is in the table of hosts, and not in that of problems.
    assert rows(run, "reach") == ""
    assert re.search(r"^reach +Debian GNU/Linux 12 .* GiB +0 +0$", run.stdout, re.MULTILINE)
    assert re.search(r"^gpu +Debian .* 2 x NVIDIA RTX PRO 6000 .*\(95 GiB\) +550.54.15 ", run.stdout, re.MULTILINE)


def test_no_fault_is_named_that_was_not_planted(run: Run) -> None:
    for host, messages in EXPECTED.items():
        if host in ("preflight", "gpu", "wrong-key", "wrong-user", "open-key"):
            continue
        assert len(rows(run, host).splitlines()) == len(messages), rows(run, host)


@pytest.mark.parametrize("host", HOSTS)
def test_nothing_is_changed(run: Run, host: str) -> None:
    before, after = (set(listing.splitlines()) for listing in (run.before[host], run.after[host]))
    assert len(before) > 5000
    assert after ^ before == set()
