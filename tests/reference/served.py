#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask a served model for tokens, and compare them and its counters with what they must be.

    served.py URL MODEL REFERENCE --accepted all|none      (the API key in the environment variable API_KEY)

REFERENCE is hf_greedy.py's answer. Sends each of its prompts at temperature 0, reads the counters of speculative
decoding before and after, and exits with 1, naming the difference, unless every token equals the reference's and the
drafter's tokens were all accepted, or none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total\{[^}]*\} ([0-9.e+]+)$", re.M)


def fetch(url: str, body: object = None, key: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def counters(url: str) -> dict[str, float]:
    return {name: float(value) for name, value in COUNTER.findall(fetch(f"{url}/metrics")[1])}


def wanted_acceptance(wanted: str, accepted: float, drafted: float) -> bool:
    # A drafter with random weights guesses right once in a while.
    return accepted == drafted if wanted == "all" else accepted <= 0.02 * drafted


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("reference", type=Path)
    parser.add_argument("--accepted", choices=("all", "none"), required=True)
    options = parser.parse_args()
    key = os.environ["API_KEY"]
    problems = []

    for path, body in (("/v1/models", None), ("/v1/chat/completions", {"model": options.model, "messages": []})):
        status, _ = fetch(options.url + path, body)
        if status != 401:
            problems.append(f"{path} answers {status} without a key, not 401")

    before = counters(options.url)
    for entry in json.loads(options.reference.read_text())["prompts"]:
        wanted = entry["token_ids"]
        request = {
            "model": options.model,
            "prompt": entry["prompt_token_ids"],
            "max_tokens": len(wanted),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, text = fetch(f"{options.url}/v1/completions", request, key)
        got = json.loads(text)["choices"][0]["token_ids"] if status == 200 else text
        if got != wanted:
            problems.append(f"prompt {entry['prompt_token_ids'][:8]}...: served {got}, the reference is {wanted}")
    moved = {name: value - before.get(name, 0) for name, value in counters(options.url).items()}

    if not moved.get("draft_tokens"):
        problems.append(f"the counters of speculative decoding did not move: {moved}")
    elif not wanted_acceptance(options.accepted, moved["accepted_tokens"], moved["draft_tokens"]):
        problems.append(f"{moved['accepted_tokens']:.0f} of {moved['draft_tokens']:.0f} draft tokens were accepted")
    print(json.dumps(moved))
    return problems


if __name__ == "__main__":
    sys.exit("\n".join(main()) or 0)
