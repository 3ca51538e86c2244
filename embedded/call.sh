#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Send the chat completion $PROMPT to the demo and print the answer.
set -euo pipefail
cd "$(dirname "$0")/.."
inventory=inventory/local
vault=$inventory/group_vars/inference/vault.yml
fail() { printf 'make: %s\n' "$*" >&2; exit 1; }

[ -r "$vault" ] && [ -r "$ANSIBLE_VAULT_PASSWORD_FILE" ] || fail "there is no demo here: run make demo"
key=$(sed -n '/ANSIBLE_VAULT/,$p' "$vault" | tr -d ' ' | ansible-vault decrypt 2>/dev/null) ||
  fail "the demo's key cannot be decrypted: run make demo"
address=$(awk '/ansible_host:/ { print $2; exit }' "$inventory/hosts.yml")
model=$(awk '/^vllm_service_model_name:/ { print $2 }' "$inventory/group_vars/inference/service.yml")
request=$(MODEL=$model python3 -c '
import json, os
messages = [{"role": "user", "content": os.environ["PROMPT"]}]
print(json.dumps({"model": os.environ["MODEL"], "messages": messages, "max_tokens": 64, "temperature": 0}))')
# The key goes to curl through a pipe: arguments are for everyone to see.
answer=$(printf 'header = "Authorization: Bearer %s"\n' "$key" |
  curl --config - --silent --show-error --fail-with-body --max-time 120 --header 'Content-Type: application/json' \
    --data "$request" "http://$address:8000/v1/chat/completions") ||
  fail "the demo at http://$address:8000 did not answer: ${answer:-is it running? run make demo}"
python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])' <<<"$answer"
