# SPDX-License-Identifier: Apache-2.0
# `make` alone lists the targets.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

# Without root, a directory that root's runs do not own.
STATE := $(or $(AERIE_STATE),/var/tmp/aerie$(shell [ "$$(id -u)" = 0 ] || echo "-$$(id -un)"))
BIN := .venv/bin
PYTHON := $(BIN)/python
DEMO := inventory/local
SCENARIO ?= default
# As it was typed, dollar signs and all.
PROMPT ?= Hello
override PROMPT := $(value PROMPT)
export PROMPT

export AERIE_STATE := $(STATE)
export AERIE_CACHE := $(STATE)/cache
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# The one vault of this repository is the demo's; `make demo` writes its password.
demo: export ANSIBLE_VAULT_PASSWORD_FILE := $(STATE)/vault-password
demo-call: export ANSIBLE_VAULT_PASSWORD_FILE := $(STATE)/vault-password

.PHONY: help setup embedded demo demo-call demo-down test test-all lint unit contract scenarios test-scenario support doctor proof-interface bench lock

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup: .venv/requirements.txt ## Have the control environment in .venv

# Another lock or another Python is another environment.
.venv/requirements.txt: requirements/test.txt requirements/uv.txt embedded/setup.sh
	@embedded/setup.sh control

embedded: setup ## Have the embedded hosts' image, environment and models
	@embedded/setup.sh cluster
	@$(PYTHON) embedded/prepare.py

demo: embedded ## Boot two hosts on this machine and deploy onto them
	@$(PYTHON) embedded/cluster.py up $(DEMO)/hosts.yml
	@echo "ANSIBLE_VAULT_PASSWORD_FILE=$$ANSIBLE_VAULT_PASSWORD_FILE ansible-playbook deploy.yml -i $(DEMO)"
	@ansible-playbook deploy.yml -i $(DEMO)
	@echo 'Ask it something: make demo-call PROMPT="..."    Remove it: make demo-down'

demo-call: ## Send one chat completion to the demo: make demo-call PROMPT="..."
	@embedded/call.sh

demo-down: ## Remove all that the demo made outside this checkout
	@embedded/setup.sh down

test: setup ## Run every test but the long ones
	@tests/run.sh

test-all: setup ## Run every test
	@tests/run.sh --all

lint: setup ## Check style and types
	@tests/run.sh lint

unit: setup ## Run the unit tests
	@tests/run.sh unit

contract: setup ## Run the tests on released wheels
	@tests/run.sh contract

scenarios: setup ## Run the Molecule scenarios
	@tests/run.sh scenarios

test-scenario: setup ## Run one Molecule scenario: make test-scenario SCENARIO=default
	@tests/run.sh scenario $(SCENARIO)

support: setup ## Say what Aerie does with a release: make support VLLM=0.33.0 [OUT=dir]
	@$(PYTHON) tools/support.py $(or $(VLLM),$(error say which: make support VLLM=x.y.z)) $(if $(OUT),--out $(OUT))

# ARGS: more of the service's options; `.venv/bin/python tools/doctor.py --help` lists them.
doctor: setup ## Check a drafter: make doctor DRAFTER=dir TARGET=dir VLLM=0.33.0 [FORMAT=json] [DIALECT=vllm] [ARGS='--model-runner v1']
	@$(PYTHON) tools/doctor.py "$(or $(DRAFTER),$(error say which: DRAFTER=dir TARGET=dir VLLM=x.y.z))" "$(or $(TARGET),$(error say which: TARGET=dir))" "$(or $(VLLM),$(error say which: VLLM=x.y.z))" --format $(or $(FORMAT),text) --dialect $(or $(DIALECT),auto) $(ARGS)

# PYTHON312: a Python 3.12 that uv does not find by itself.
proof-interface: setup ## Prove eagle3-interface on the real vLLM 0.17.1 (8 GB, 10 minutes)
	@$(PYTHON) tests/proofs/interface.py --write $(if $(PYTHON312),--python $(PYTHON312))

bench: embedded ## Measure what a run costs, one `name value` line each
	@$(PYTHON) tests/bench/bench.py

lock: setup ## Resolve the control environment's requirements again
	@embedded/setup.sh lock
