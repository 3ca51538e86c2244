# SPDX-License-Identifier: Apache-2.0
"""A model directory as it lies on disk: its JSON files, and the headers of its safetensors shards."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.safetensors_header import Header, SafetensorsError, Tensor, read_header

INDEX_NAME = "model.safetensors.index.json"

_SHARD_OF = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
_PROBLEMS_IN_A_SENTENCE = 5


class CheckpointError(Exception):
    """Everything that was found wrong with a model directory, one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(summarise(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a model directory.

    ``shards`` maps a file's name to its checked header, ``tensors`` a tensor's name to the file that holds it;
    ``indexed`` says whether an index decided that.
    """

    root: Path
    shards: Mapping[str, Header]
    tensors: Mapping[str, str]
    indexed: bool = False

    @property
    def size(self) -> int:
        """Bytes of all shards together."""
        return sum(header.size for header in self.shards.values())

    def tensor(self, name: str) -> Tensor | None:
        """Return the entry of the tensor ``name``, or None if the checkpoint has no such tensor."""
        shard = self.tensors.get(name)
        return None if shard is None else self.shards[shard].tensors[name]

    def file_of(self, name: str) -> Path:
        """Return the file that holds the tensor ``name``."""
        return self.shards[self.tensors[name]].path


def summarise(problems: Sequence[str]) -> str:
    """Join ``problems`` into one message that stays readable when there are many."""
    shown = list(problems[:_PROBLEMS_IN_A_SENTENCE])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return "; ".join(shown)


def cannot_read(path: Path, error: OSError) -> str:
    """Say that ``path`` could not be read, and why, without an errno."""
    return f"{path}: cannot be read ({error.strerror or error})"


def read_json_object(path: Path) -> dict[str, object]:
    """Return the JSON object in the file at ``path``.

    Raises CheckpointError if it is missing or something else, or has numbers that are not finite: JSON has none, but
    Python writes and reads them, and no size or factor of a model is one.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError([f"{path}: missing"]) from None
    except OSError as error:
        raise CheckpointError([cannot_read(path, error)]) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError([f"{path}: not JSON ({error})"]) from None
    if not isinstance(document, dict):
        raise CheckpointError([f"{path}: not a JSON object"])
    problems = [f"{path}: {name} is {value}, expected a finite number" for name, value in _not_finite(document)]
    if problems:
        raise CheckpointError(problems)
    return document


def _not_finite(document: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each number that no float holds, such as ``rope_scaling.factor`` and ``-inf``."""
    # A list and no recursion: a file may be nested as deeply as the parser bears.
    rest: list[tuple[str, object]] = list(document.items())
    while rest:
        name, value = rest.pop()
        if isinstance(value, dict):
            rest += [(f"{name}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            rest += [(f"{name}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, float) and not abs(value) <= sys.float_info.max:
            yield name, str(value)
        elif isinstance(value, int) and abs(value) > sys.float_info.max:
            yield name, f"an integer of {value.bit_length()} bits"


def read_checkpoint(root: Path, ignored: Iterable[str] = ()) -> Checkpoint:
    """Read the headers of the weights in the directory ``root``.

    With an index, its shards are the weights; without one, every ``*.safetensors`` file that is not ``ignored``.
    Raises CheckpointError with all that is wrong: missing, truncated and damaged shards, and tensors that the index
    places in a shard that does not hold them.
    """
    index = root / INDEX_NAME
    if index.exists():
        return _read_indexed(root, index)
    left_out = set(ignored)
    names = sorted(path.name for path in root.glob("*.safetensors") if path.name not in left_out)
    if not names:
        raise CheckpointError([f"{root}: no {INDEX_NAME} and no *.safetensors file; {_no_weights_remedy(root)}"])
    problems = _missing_from_series(root, names)
    shards = _read_shards(root, names, problems)
    tensors = _locate(shards, problems)
    if problems:
        raise CheckpointError(problems)
    return Checkpoint(root, shards, tensors)


def read_single(path: Path) -> Checkpoint:
    """Read the header of the one file ``path`` as a whole checkpoint, whatever lies beside it.

    Raises CheckpointError if it cannot be read, or is by its name one of several parts.
    """
    problems = _missing_from_series(path.parent, [path.name])
    if problems:
        raise CheckpointError([f"{path}: one of several files that make a model; name the directory {path.parent}"])
    shards = _read_shards(path.parent, [path.name], problems)
    if problems:
        raise CheckpointError(problems)
    return Checkpoint(path.parent, shards, _locate(shards, problems))


def _read_indexed(root: Path, index: Path) -> Checkpoint:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError([f"{index}: no weight_map; fetch the file again"])
    placement: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                [f"{index}: {tensor} is placed in {shard!r}, which is not a safetensors file beside it"]
            )
        placement[tensor] = shard
    problems: list[str] = []
    present: list[str] = []
    for shard in sorted(set(placement.values())):
        if (root / shard).exists():
            present.append(shard)
        else:
            held = sum(1 for place in placement.values() if place == shard)
            problems.append(f"{root / shard}: missing, but {index} places {held} tensors in it; fetch it again")
    shards = _read_shards(root, present, problems)
    problems += _misplaced(index, placement, shards)
    if problems:
        raise CheckpointError(problems)
    return Checkpoint(root, shards, placement, indexed=True)


def _read_shards(root: Path, names: Iterable[str], problems: list[str]) -> dict[str, Header]:
    """Return the headers that can be read; add a sentence to ``problems`` for each that cannot."""
    shards: dict[str, Header] = {}
    for name in names:
        try:
            shards[name] = read_header(root / name)
        except SafetensorsError as error:
            problems.append(f"{error}; fetch the file again")
        except OSError as error:
            problems.append(cannot_read(root / name, error))
    return shards


def _locate(shards: Mapping[str, Header], problems: list[str]) -> dict[str, str]:
    placement: dict[str, str] = {}
    for shard, header in shards.items():
        for tensor in header.tensors:
            if tensor in placement:
                other = shards[placement[tensor]].path
                problems.append(f"{header.path}: {tensor} is also in {other}; remove the file that is not the model's")
                break
            placement[tensor] = shard
    return placement


def _misplaced(index: Path, placement: Mapping[str, str], shards: Mapping[str, Header]) -> list[str]:
    """Name, for each readable shard, the tensors that the index expects there in vain: one of them, and how many."""
    absent: dict[str, list[str]] = {}
    for tensor, shard in placement.items():
        if shard in shards and tensor not in shards[shard].tensors:
            absent.setdefault(shard, []).append(tensor)
    problems = []
    for shard, tensors in sorted(absent.items()):
        first = min(tensors)
        actual = [name for name, header in shards.items() if first in header.tensors]
        where = f"is in {actual[0]}" if actual else "is in none of the shards"
        others = f" (and {len(tensors) - 1} more)" if len(tensors) > 1 else ""
        problems.append(
            f"{index}: places {first}{others} in {shard}, but it {where}; fetch index and shards of one revision"
        )
    return problems


def _missing_from_series(root: Path, names: Iterable[str]) -> list[str]:
    """Name the parts of a ``stem-00001-of-00003`` series that are not there."""
    series: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _SHARD_OF.fullmatch(name)
        if match:
            series.setdefault((match["stem"], match["total"]), set()).add(int(match["number"]))
    problems = []
    for (stem, total), numbers in sorted(series.items()):
        for number in sorted(set(range(1, int(total) + 1)) - numbers):
            part = root / f"{stem}-{number:0{len(total)}}-of-{total}.safetensors"
            problems.append(f"{part}: missing, though other parts of the series are there; fetch it again")
    return problems


def _no_weights_remedy(root: Path) -> str:
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.gguf") for path in root.glob(pattern))
    if other:
        return f"{other[0]} is not read here: convert the weights to safetensors"
    return "name the directory that holds the weights"
