#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Have what this machine needs.
#   setup.sh control   the control environment in .venv, from requirements/test.txt
#   setup.sh cluster   the system packages for the embedded hosts (root, apt)
#   setup.sh down      remove the embedded hosts and all that was made for them
#   setup.sh lock      resolve the control environment again
set -euo pipefail
cd "$(dirname "$0")/.."
# The Makefile puts .venv first, which is what is made anew here.
PATH=${PATH//"$PWD/.venv/bin:"/}
state=${AERIE_STATE:-/var/tmp/aerie}
needed_mb=14000

say() { printf '[setup] %s\n' "$*"; }
fail() { printf 'make: %s\n' "$*" >&2; exit 1; }

need_root() {
  [ "$(id -u)" = 0 ] || fail "the embedded hosts need root: run it as root, or with sudo"
}

need_apt() {
  command -v apt-get >/dev/null || fail "this needs apt-get (Debian or Ubuntu); on another system, install $* yourself"
}

# Install the Debian packages among the arguments that are not there.
install_packages() {
  local missing=() package
  for package in "$@"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || fail "${missing[*]} must be installed, which needs root: install it, or run this as root"
  need_apt "${missing[@]}"
  say "installing ${missing[*]}"
  if ! { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "apt-get could not install ${missing[*]}: is there a network, and does apt have a mirror?"
  fi
}

control() {
  command -v python3 >/dev/null || fail "there is no python3: Aerie needs Python 3.11 or newer"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "python3 is $(python3 --version): Aerie needs Python 3.11 or newer"
  # Debian's python3 cannot make environments until its venv package is there.
  python3 -c 'import ensurepip' 2>/dev/null || install_packages python3-venv
  command -v ssh >/dev/null || install_packages openssh-client
  say "making the control environment in .venv (ansible, test tools)"
  rm -rf .venv
  python3 -m venv .venv
  .venv/bin/python -m pip install -q --disable-pip-version-check --require-hashes --only-binary :all: -r requirements/uv.txt 2>"$log" || {
    tail -n 5 "$log" >&2
    fail "pip could not install uv: is there a network, and does pip have an index?"
  }
  # uv does not read pip's configuration.
  local index
  index=${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}
  [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
  say "installing requirements/test.txt"
  .venv/bin/uv pip sync -q --python .venv --require-hashes requirements/test.txt ||
    fail "uv could not install requirements/test.txt: is there a network?"
  cp requirements/test.txt .venv/requirements.txt
}

cluster() {
  need_root
  local directory free_mb
  mkdir -p "$state"
  free_mb=$(($(df --output=avail -m "$state" | tail -n 1)))
  # The layer with the environment is the large part, and the last.
  compgen -G "$state/image/*.lock" >/dev/null || [ "$free_mb" -ge "$needed_mb" ] ||
    fail "$state needs $needed_mb MB and its file system has $free_mb MB free: make room, or set AERIE_STATE to another directory"
  install_packages mmdebstrap systemd-container iproute2 openssh-client procps curl ca-certificates
}

down() {
  need_root
  [ -x .venv/bin/python ] || control
  .venv/bin/python embedded/cluster.py purge
  rm -f inventory/local/group_vars/inference/vault.yml
}

lock() {
  local compile=(.venv/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate)
  "${compile[@]}" requirements/test.in -o requirements/test.txt
  "${compile[@]}" requirements/control.in -c requirements/test.txt -o requirements/control.txt
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"${1:?usage: setup.sh control|cluster|down|lock}"
