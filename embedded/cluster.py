#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real hosts on one machine: systemd as PID 1, sshd, a root file system and a network address each.

A host is systemd-nspawn on an overlay of a Debian image, in a network namespace of its own that reaches the
machine's bridge and nothing else. Which hosts there are, and their addresses, is read from an Ansible inventory.

    cluster.py image                    build the Debian image unless it is there
    cluster.py up INVENTORY             boot the inventory's hosts that do not run
    cluster.py down INVENTORY           remove the inventory's hosts
    cluster.py warm INVENTORY LAYER     power the one host off and keep its /opt as image layer LAYER
    cluster.py purge                    remove every host, the images and all else that was made for them
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

STATE = Path(os.environ.get("AERIE_STATE", "/var/tmp/aerie"))
SUITE = os.environ.get("AERIE_EMBEDDED_SUITE", "bookworm")
# All that this program and prepare.py make in STATE.
OWN = ("hosts", "image", "cache", "models", "key", "key.pub", "known_hosts", "vault-password", "lock")
NSPAWN_RUNTIME = Path("/run/systemd/nspawn")
# What a minimal server has; the rest of a host is what Aerie itself puts there.
PACKAGES = (
    "systemd,systemd-sysv,dbus,libpam-systemd,openssh-server,python3,sudo,iproute2,iputils-ping,procps,"
    "ca-certificates,curl,less,libnuma1,python3-apt,haproxy,nftables,iperf3"
)
# Their packages enable them, and only the hosts of one role run them.
DISABLED_UNITS = ("haproxy.service",)
# They make no sense in a container, or only add noise and time to its boot.
MASKED_UNITS = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "systemd-timesyncd.service",
    "systemd-resolved.service",
    "systemd-networkd.service",
    "getty@tty1.service",
    "console-getty.service",
)
SSHD_CONFIG = "PermitRootLogin no\nPasswordAuthentication no\nUseDNS no\nGSSAPIAuthentication no\n"
BOOT_SECONDS = 60
# Hierarchies of version 1 in which a host with limits has a directory of its own.
LIMITING = ("cpu", "cpuacct", "blkio", "pids", "memory")
NSPAWN_REBOOT = 133  # what --keep-unit exits with when the host reboots itself


class ClusterError(Exception):
    """Something that the user can mend; the text says what and how."""


def say(text: str) -> None:
    print(f"[cluster] {text}", flush=True)


def run(*command: str, **options: object) -> str:
    """Return the output of ``command``; raise ClusterError with its error output when it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if result.returncode:
        raise ClusterError(f"{' '.join(command)} failed: {(result.stderr or result.stdout).strip()[-2000:]}")
    return str(result.stdout)


def attempt(*command: str) -> bool:
    """Run ``command`` where its failure only means that there was nothing to do."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep a second cluster.py from changing hosts or images at the same time."""
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another cluster.py to finish")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------------------------------------------------------- hosts


@dataclass(frozen=True)
class Host:
    """One host of an inventory.

    ``layers`` are image layers that it has on top of the Debian image. With ``limits`` its systemd enforces limits of
    memory, processes and CPU also where this machine has cgroups of version 1; its address filters then do not work.
    """

    name: str
    address: ipaddress.IPv4Address
    layers: tuple[str, ...]
    limits: bool = False

    @property
    def home(self) -> Path:
        return STATE / "hosts" / self.name

    @property
    def root(self) -> Path:
        return self.home / "root"

    @property
    def namespace(self) -> str:
        return f"aerie-{self.name}"

    @property
    def link(self) -> str:
        # Interface names are limited to 15 characters.
        return f"ae-{hashlib.sha256(self.name.encode()).hexdigest()[:10]}"

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"{self.address}/24", strict=False)

    @property
    def gateway(self) -> str:
        return str(self.network.network_address + 1)

    @property
    def bridge(self) -> str:
        return f"ae{int(self.network.network_address):08x}"

    def supervisor(self) -> int | None:
        """Return the process id of the host's supervisor while it runs."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = int((self.home / "pid").read_text())
            if f"supervise\0{self.name}\0" in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        return None


def read_inventory(path: Path) -> list[Host]:
    """Return the hosts that a YAML inventory declares with an ``ansible_host`` address."""
    hosts: dict[str, Host] = {}

    def visit(group: dict[str, Any], layers: tuple[str, ...]) -> None:
        layers = tuple((group.get("vars") or {}).get("embedded_layers", layers))
        for name, host_vars in (group.get("hosts") or {}).items():
            if "ansible_host" in (host_vars or {}):
                address = ipaddress.IPv4Address(host_vars["ansible_host"])
                own_layers = tuple(host_vars.get("embedded_layers", layers))
                hosts[name] = Host(name, address, own_layers, bool(host_vars.get("embedded_limits", False)))
        for child in (group.get("children") or {}).values():
            visit(child or {}, layers)

    try:
        for group in (yaml.safe_load(path.read_text()) or {}).values():
            visit(group or {}, ())
    except FileNotFoundError:
        raise ClusterError(f"{path}: no such inventory") from None
    except (OSError, AttributeError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ClusterError(f"{path} is no inventory of hosts with IPv4 addresses: {error}") from error
    by_address: dict[ipaddress.IPv4Address, Host] = {}
    for host in hosts.values():
        if (other := by_address.setdefault(host.address, host)) is not host:
            raise ClusterError(f"{path}: {other.name} and {host.name} have the same address {host.address}")
    return list(hosts.values())


# ---------------------------------------------------------------------------------------------------------------- image


def image_directory() -> Path:
    """Return where the Debian image is; another recipe is another directory."""
    recipe = json.dumps([SUITE, PACKAGES, DISABLED_UNITS, MASKED_UNITS, SSHD_CONFIG])
    return STATE / "image" / f"{SUITE}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def debian_mirror() -> str:
    """Return the mirror that this machine's own apt uses, so that a closed network needs no other."""
    if mirror := os.environ.get("AERIE_EMBEDDED_MIRROR"):
        return mirror
    listing = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(ORIGIN)", "Created-By: Packages")
    for line in sorted(set(listing.splitlines())):
        uri, _, rest = line.partition(" ")
        if "security" not in line and rest.endswith("Debian"):
            return uri
    raise ClusterError("apt knows no Debian mirror; name one: make demo AERIE_EMBEDDED_MIRROR=<url>")


def ensure_key() -> None:
    if not (STATE / "key").exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "aerie-embedded", "-f", str(STATE / "key"))


def build_image() -> Path:
    """Build the Debian image unless it is there, in a temporary directory that is renamed when it is complete."""
    image = image_directory()
    if image.exists():
        return image
    if shutil.which("mmdebstrap") is None or shutil.which("systemd-nspawn") is None:
        raise ClusterError("mmdebstrap or systemd-nspawn is missing: run `make embedded` as root")
    say(f"building the Debian {SUITE} image (about a minute)")
    image.parent.mkdir(parents=True, exist_ok=True)
    partial = image.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        "--dpkgopt=force-unsafe-io",
        '--aptopt=Acquire::Languages "none"',
        f"--include={PACKAGES}",
        SUITE,
        str(partial),
        debian_mirror(),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("I: "):
                say(line[3:].strip())
    if process.returncode:
        raise ClusterError("mmdebstrap failed:\n" + "".join(lines[-20:]))
    prepare_root(partial)
    partial.rename(image)
    return image


def prepare_root(root: Path) -> None:
    """Make a fresh Debian tree bootable as a host: a login with sudo, quiet units, nothing of this machine."""
    (root / "etc/hostname").unlink(missing_ok=True)
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/machine-id").write_text("")
    (root / "var/lib/dbus/machine-id").unlink(missing_ok=True)
    (root / "etc/default/locale").touch()
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    run("chroot", str(root), "useradd", "--create-home", "--shell", "/bin/bash", "ansible")
    (root / "etc/sudoers.d/ansible").write_text("ansible ALL=(ALL) NOPASSWD:ALL\n")
    (root / "etc/sudoers.d/ansible").chmod(0o440)
    (root / "etc/ssh/sshd_config.d/aerie.conf").write_text(SSHD_CONFIG)
    run("chroot", str(root), "systemctl", "disable", *DISABLED_UNITS)
    for unit in MASKED_UNITS:
        (root / "etc/systemd/system" / unit).symlink_to("/dev/null")
    journal = root / "etc/systemd/journald.conf.d"
    journal.mkdir(parents=True)
    (journal / "aerie.conf").write_text("[Journal]\nStorage=persistent\nSystemMaxUse=64M\n")


def keep_layer(host: Host, layer: str) -> None:
    """Power ``host`` off and keep its /opt as an image layer: what it installed, later hosts find installed."""
    target = STATE / "image" / layer
    upper = host.home / "upper/opt"
    stop(host)
    if not upper.exists():
        raise ClusterError(f"{host.name} has nothing under /opt to keep")
    shutil.rmtree(target, ignore_errors=True)
    (target.parent / f"{layer}.partial").mkdir(parents=True, exist_ok=True)
    upper.rename(target.parent / f"{layer}.partial/opt")
    (target.parent / f"{layer}.partial").rename(target)
    remove(host)


# ----------------------------------------------------------------------------------------------------------------- boot


def has_cgroup_v2() -> bool:
    """Say whether this machine has cgroups of version 2 only, in which limits work in any host."""
    return Path("/sys/fs/cgroup/cgroup.controllers").exists()


def cgroup_directories(host: Host) -> list[Path]:
    if has_cgroup_v2():
        return [Path("/sys/fs/cgroup/aerie") / host.name]
    hierarchies = ["unified", "systemd", *(LIMITING if host.limits else ())]
    return [Path("/sys/fs/cgroup") / hierarchy / "aerie" / host.name for hierarchy in hierarchies]


def connect_network(host: Host) -> None:
    """Give ``host`` a namespace with one link to the bridge of its network, and no way beyond it."""
    bridges = {entry["ifname"]: entry for entry in json.loads(run("ip", "-j", "addr"))}
    for name, entry in bridges.items():
        for info in entry["addr_info"]:
            if name != host.bridge and info["family"] == "inet" and ipaddress.ip_address(info["local"]) in host.network:
                raise ClusterError(
                    f"{host.network} is in use by this machine's interface {name} ({info['local']}); "
                    "choose other addresses in the inventory"
                )
    if host.bridge not in bridges:
        run("ip", "link", "add", host.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{host.gateway}/24", "dev", host.bridge)
    run("ip", "link", "set", host.bridge, "up")
    run("ip", "netns", "add", host.namespace)
    run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    run("ip", "link", "set", host.link, "master", host.bridge, "up")
    run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    run("ip", "-n", host.namespace, "link", "set", "lo", "up")
    run("ip", "-n", host.namespace, "link", "set", "eth0", "up")
    run("ip", "-n", host.namespace, "route", "add", "default", "via", host.gateway)


def mount_root(host: Host, image: Path) -> None:
    layers = [STATE / "image" / layer for layer in reversed(host.layers)]
    for layer in layers:
        if not layer.exists():
            raise ClusterError(f"the image layer {layer.name} of host {host.name} is not built: run `make embedded`")
    for directory in ("upper", "work", "root"):
        (host.home / directory).mkdir(parents=True)
    lower = ":".join(str(path) for path in [*layers, image])
    # metacopy: a hard link to a file of the image copies its inode up, not its bytes.
    options = f"lowerdir={lower},upperdir={host.home / 'upper'},workdir={host.home / 'work'},metacopy=on"
    run("mount", "-t", "overlay", "overlay", "-o", options, str(host.root))


def personalise(host: Host) -> None:
    """Write what distinguishes ``host``: its name, its SSH host key (known here before the first login), its login."""
    etc = host.root / "etc"
    (etc / "hostname").write_text(f"{host.name}\n")
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n::1 localhost ip6-localhost\n")
    (etc / "resolv.conf").write_text("")  # no DNS: each look-up by sudo or sshd would wait for 10 s otherwise
    key = etc / "ssh/ssh_host_ed25519_key"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{host.name}", "-f", str(key))
    public = key.with_suffix(".pub").read_text().split()
    forget_key(host)
    with (STATE / "known_hosts").open("a") as stream:
        stream.write(f"{host.address} {public[0]} {public[1]}\n")
    ssh = host.root / "home/ansible/.ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(STATE / "key.pub", ssh / "authorized_keys")
    run("chroot", str(host.root), "chown", "-R", "ansible:ansible", "/home/ansible/.ssh")
    if (models := STATE / "models").exists():
        shutil.copytree(models, host.root / "srv/models")


def start(host: Host, image: Path) -> None:
    """Create ``host`` from nothing and start its supervisor."""
    remove(host)
    host.home.mkdir(parents=True)
    (host.home / "address").write_text(str(host.address))
    connect_network(host)
    mount_root(host, image)
    personalise(host)
    for directory in cgroup_directories(host):
        directory.mkdir(parents=True, exist_ok=True)
    with (host.home / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "supervise", host.name, "limits" if host.limits else ""],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (host.home / "pid").write_text(str(process.pid))
    # The kernel shows a new program's command line a moment after it started.
    while host.supervisor() is None and process.poll() is None:
        time.sleep(0.01)


def supervise(name: str, option: str) -> int:
    """Run one host's systemd-nspawn until it powers off, through its reboots. Runs as a process of its own."""
    host = Host(name, ipaddress.IPv4Address("0.0.0.0"), (), option == "limits")
    delegated = host.limits and not has_cgroup_v2()
    for directory in cgroup_directories(host):
        (directory / "cgroup.procs").write_text(str(os.getpid()))
    command = [
        "systemd-nspawn",
        *(["--kill-signal=SIGRTMIN+3"] if delegated else ["--boot"]),
        f"--directory={host.root}",
        f"--machine={name}",
        "--register=no",
        "--keep-unit",
        "--link-journal=no",
        "--resolv-conf=off",
        "--timezone=off",
        f"--network-namespace-path=/run/netns/{host.namespace}",
        "--capability=CAP_NET_ADMIN,CAP_BPF,CAP_PERFMON",
        "--system-call-filter=bpf",
        "--console=pipe",
    ]
    environment = dict(os.environ, SYSTEMD_NSPAWN_API_VFS_WRITABLE="network")
    if delegated:
        # nspawn mounts these read-only; whoever is PID 1 may change that.
        writable = f"for name in {' '.join(LIMITING)}; do mount -o remount,bind,rw /sys/fs/cgroup/$name; done"
        command += ["/bin/sh", "-c", f"{writable}; exec /lib/systemd/systemd"]
    else:
        environment["SYSTEMD_NSPAWN_UNIFIED_HIERARCHY"] = "1"
    while True:
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as nspawn:
            signal.signal(signal.SIGTERM, lambda *_: nspawn.terminate())
            status = nspawn.wait()
        if status != NSPAWN_REBOOT:
            return status


def await_ssh(host: Host) -> None:
    """Return once the host's sshd greets."""
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline:
        if host.supervisor() is None:
            raise ClusterError(f"{host.name} died at boot:\n{(host.home / 'log').read_text()[-2000:]}")
        with contextlib.suppress(OSError), socket.create_connection((str(host.address), 22), timeout=1) as connection:
            connection.settimeout(1)
            if connection.recv(16).startswith(b"SSH-2.0"):
                return
        time.sleep(0.1)
    raise ClusterError(f"{host.name} has no sshd after {BOOT_SECONDS} s; see {host.home / 'log'}")


# --------------------------------------------------------------------------------------------------------------- remove


def stop(host: Host) -> None:
    """Power ``host`` off, by force if it takes longer than 10 s."""
    pid = host.supervisor()
    if pid is None:
        return
    for signum, seconds in ((signal.SIGTERM, 10), (signal.SIGTERM, 2), (signal.SIGKILL, 2)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if host.supervisor() is None:
                return
            time.sleep(0.05)


def forget_key(host: Host) -> None:
    known = STATE / "known_hosts"
    if known.exists():
        lines = [line for line in known.read_text().splitlines() if not line.startswith(f"{host.address} ")]
        known.write_text("".join(f"{line}\n" for line in lines))


def remove(host: Host) -> None:
    """Remove all that ``start`` made, however far it got and whatever a killed run left."""
    stop(host)
    for directory in cgroup_directories(host):
        kill = directory / "cgroup.kill"
        if kill.exists():
            kill.write_text("1")
        for path in sorted(directory.rglob("*"), reverse=True) if directory.exists() else []:
            if path.is_dir():
                with contextlib.suppress(OSError):
                    path.rmdir()
        with contextlib.suppress(OSError):
            directory.rmdir()
            directory.parent.rmdir()
    if host.root.is_mount() and not attempt("umount", str(host.root)):
        run("umount", "--lazy", str(host.root))
    attempt("ip", "netns", "del", host.namespace)
    attempt("ip", "link", "del", host.link)
    forget_key(host)
    if host.home.exists():
        run("rm", "-rf", "--one-file-system", str(host.home))
    if not attempt("ip", "link", "show", host.bridge):
        return
    if not json.loads(run("ip", "-j", "link", "show", "master", host.bridge) or "[]"):
        run("ip", "link", "del", host.bridge)


# ------------------------------------------------------------------------------------------------------------- commands


def up(inventory: Path) -> None:
    hosts = read_inventory(inventory)
    # Where /run is no tmpfs, nspawn's own mounts below it need one.
    NSPAWN_RUNTIME.mkdir(parents=True, exist_ok=True)
    if not NSPAWN_RUNTIME.is_mount():
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(NSPAWN_RUNTIME))
    with locked():
        ensure_key()
        image = build_image()
        missing = [host for host in hosts if host.supervisor() is None]
        for host in missing:
            start(host, image)
        for host in missing:
            await_ssh(host)
            say(f"{host.name} is up at {host.address}")
    if not missing:
        say(f"{', '.join(host.name for host in hosts)}: running already")


def down(inventory: Path) -> None:
    with locked():
        remove_all(read_inventory(inventory))


def remove_all(hosts: Sequence[Host]) -> None:
    """Remove ``hosts``; they power off side by side, since each may take a while."""
    if running := [host.name for host in hosts if host.supervisor()]:
        say(f"powering off {', '.join(running)}")
    with ThreadPoolExecutor() as executor:
        list(executor.map(stop, hosts))
    for host in hosts:
        remove(host)
        say(f"{host.name} is removed")


def warm(inventory: Path, layer: str) -> None:
    (host,) = read_inventory(inventory)
    with locked():
        keep_layer(host, layer)
        say(f"image layer {layer} is built")


def purge() -> None:
    with locked():
        homes = (STATE / "hosts").glob("*")
        remove_all([Host(home.name, ipaddress.IPv4Address((home / "address").read_text()), ()) for home in homes])
        say(f"removing what is in {STATE}")
        for name in OWN:
            run("rm", "-rf", "--one-file-system", str(STATE / name))
    attempt("umount", str(NSPAWN_RUNTIME))
    # What else is there is not ours.
    with contextlib.suppress(OSError):
        STATE.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("image", "up", "down", "warm", "purge", "supervise"))
    parser.add_argument("argument", nargs="?", default="")
    parser.add_argument("layer", nargs="?", default="")
    options = parser.parse_args()
    if options.command == "supervise":
        return supervise(options.argument, options.layer)
    if os.geteuid() != 0:
        raise ClusterError("the embedded hosts need root: run it as root or with sudo")
    if options.command == "image":
        with locked():
            build_image()
    elif options.command == "up":
        up(Path(options.argument))
    elif options.command == "down":
        down(Path(options.argument))
    elif options.command == "warm":
        warm(Path(options.argument), options.layer)
    else:
        purge()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"cluster.py: {error}")
