# SPDX-License-Identifier: Apache-2.0
"""Print what a vLLM release's own parser makes of configuration files for `vllm serve --config`.

    venv/bin/python parse_serve_config.py FILE...

Run it with the Python of the release in question. It prints one line of JSON for each file: the parsed value of every
option that the file sets, and of every other option that then differs from its default, by the names in the parser's
namespace. Where the release refuses a file it says why and exits with status 2, as `vllm serve` does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


def serve_parser() -> argparse.ArgumentParser:
    """Return the parser of vLLM's command, whose outer part reads the configuration file."""
    serve = importlib.import_module("vllm.entrypoints.cli.serve")
    parser: argparse.ArgumentParser = serve.FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(subparsers)
    return parser


def destinations(names: Iterable[str], parser: argparse.ArgumentParser) -> set[str]:
    """Return where the parser puts the options ``names``, which are written without the leading dashes."""
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    options = subparsers.choices["serve"]._option_string_actions
    found = {name: options.get(f"--{name.replace('_', '-')}") for name in names}
    if unknown := [name for name, action in found.items() if action is None]:
        # argparse completes an abbreviated name; a release with one more option would refuse it as ambiguous.
        parser.error(f"not the whole name of an option: {', '.join(unknown)}")
    return {action.dest for action in found.values() if action}


def parse(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the options that ``path`` sets, parsed, and the others that are no longer what they are without it."""
    parsed = vars(parser.parse_args(["serve", "--config", str(path)]))
    defaults = vars(parser.parse_args(["serve"]))
    named = destinations(yaml.safe_load(path.read_text()), parser)
    return {name: value for name, value in parsed.items() if name in named or value != defaults[name]}


def plain(value: object) -> object:
    """Reduce a configuration object to the fields that were set, and anything else that JSON lacks to text."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        untouched = type(value)()
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return {name: content for name, content in fields.items() if content != getattr(untouched, name, None)}
    return str(value)


def main(paths: list[Path]) -> None:
    # vLLM logs to the standard output.
    with contextlib.redirect_stdout(sys.stderr):
        parser = serve_parser()
        results = [parse(path, parser) for path in paths]
    for result in results:
        print(json.dumps(result, default=plain, sort_keys=True))


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
