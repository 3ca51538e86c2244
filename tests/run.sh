#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests, cheapest first.
#   run.sh [--all]          lint, unit, contract and the Molecule scenarios; --all adds what takes long
#   run.sh lint|unit|contract|scenarios|locks
#   run.sh scenario NAME    one Molecule scenario
set -euo pipefail
cd "$(dirname "$0")/.."
export MOLECULE_GLOB='tests/molecule/*/molecule.yml'

# What failed is said again at the very end: a scenario's last words are those of the removal of its hosts.
failures=$(mktemp)
trap 'cat "$failures"; rm -f "$failures"' EXIT

say() { printf '\n=== %s (%s s)\n' "$*" "$SECONDS"; }

lint() {
  say "lint"
  ruff check .
  ruff format --check .
  mypy module_utils library plugins embedded tests tools
  yamllint --strict .
  ansible-lint
  local playbook
  for playbook in deploy.yml rollback.yml playbooks/*.yml; do
    ansible-playbook --syntax-check -i inventory/local "$playbook" >/dev/null
  done
}

unit() {
  say "unit tests"
  pytest tests/unit
}

contract() {
  say "contract tests on released wheels"
  pytest tests/contract
}

# Run two functions side by side, each of which takes a core at most; show afterwards what the first one printed.
beside() {
  local log first second status=0
  log=$(mktemp)
  # A job in the background does not hear Ctrl-C.
  trap 'trap - TERM; kill 0' INT TERM
  "$1" >"$log" 2>&1 &
  first=$!
  # Here a failure ends the function, which it would not do in a condition.
  "$2" &
  second=$!
  wait "$second" || status=$?
  wait "$first" || status=$?
  cat "$log"
  rm -f "$log"
  return "$status"
}

checks() { unit; contract; }

scenario() {
  say "Molecule scenario $1"
  python embedded/prepare.py
  # Hosts of a run that was killed.
  molecule destroy --scenario-name "$1" >/dev/null 2>&1 || true
  local log
  log=$(mktemp)
  if ! molecule test --scenario-name "$1" 2>&1 | tee "$log"; then
    say "scenario $1 failed"
    sed -i 's/\x1b\[[0-9;]*m//g' "$log"
    {
      echo "Scenario $1:"
      { grep -E '^[^A-Za-z]*(FAILED|ERROR|fatal:)' "$log" || true; grep -E '^[^A-Za-z]*E   ' "$log" || true; } | cut -c1-300 | tail -n 30
    } >>"$failures"
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

scenarios() {
  if [ "$(id -u)" != 0 ]; then
    say "LEFT OUT: the Molecule scenarios, which boot hosts and need root"
    [ -n "${SKIP_CLUSTER:-}" ] || { echo "Run as root, or set SKIP_CLUSTER=1 to be content without them." >&2; return 1; }
    return 0
  fi
  embedded/setup.sh cluster
  python embedded/prepare.py
  beside other_half one_half
  # These count seconds under load, each of them with both cores.
  each service rolling
}

each() { local name; for name; do scenario "$name"; done; }
# Both take about as long.
one_half() { each default gateway preflight adopted; }
other_half() { each stages interrupted multi_host_rolling multi_host; }

# Install each lock for GPUs once: 10 GB of disk at a time, and 10 minutes.
locks() (
  local name
  mkdir -p "${AERIE_STATE:-/var/tmp/aerie}"
  environment=$(mktemp -d -p "${AERIE_STATE:-/var/tmp/aerie}" locks.XXXXXX)
  trap 'rm -rf "$environment"' EXIT
  for name in vllm-0.33.0-cu130-py312-ray vllm-0.17.1-cu128-py312; do
    say "lock $name"
    uv venv -q --clear --python 3.12 --no-python-downloads "$environment/venv"
    uv pip sync --python "$environment/venv" --cache-dir "$environment/cache" --require-hashes "requirements/$name.txt"
    python tests/locks/check_environment.py "$environment/venv"
  done
  rm -rf "$environment"
)

case ${1:-} in
  "") beside lint checks; scenarios ;;
  --all) export STAGES_COMPILED=1 INTERRUPTED_ALL=1; beside lint checks; scenarios; locks ;;
  scenario) scenario "${2:?which scenario?}" ;;
  *) "$1" ;;
esac
say "passed: ${*:-all}"
