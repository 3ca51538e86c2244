#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests, cheapest first.
#   run.sh [--all]          lint, unit, contract and the Molecule scenarios; --all adds the long ones
#   run.sh lint|unit|contract|scenarios
#   run.sh scenario NAME    one Molecule scenario
set -euo pipefail
cd "$(dirname "$0")/.."
export MOLECULE_GLOB='tests/molecule/*/molecule.yml'

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

scenario() {
  say "Molecule scenario $1"
  python embedded/prepare.py
  # Hosts of a run that was killed.
  molecule destroy --scenario-name "$1" >/dev/null 2>&1 || true
  molecule test --scenario-name "$1"
}

scenarios() {
  if [ "$(id -u)" != 0 ]; then
    say "LEFT OUT: the Molecule scenarios, which boot hosts and need root"
    [ -n "${SKIP_CLUSTER:-}" ] || { echo "Run as root, or set SKIP_CLUSTER=1 to be content without them." >&2; return 1; }
    return 0
  fi
  embedded/setup.sh cluster
  local name
  for name in default; do scenario "$name"; done
}

case ${1:-} in
  "" | --all) lint; unit; contract; scenarios ;;
  scenario) scenario "${2:?which scenario?}" ;;
  *) "$1" ;;
esac
say "passed: ${*:-all}"
