# SPDX-License-Identifier: Apache-2.0
"""What a target model directory is, and whether the service could load it."""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    CheckpointError,
    cannot_read,
    read_checkpoint,
    read_json_object,
)
from ansible.module_utils.aerie.files import sha256_bytes, sha256_file
from ansible.module_utils.aerie.rope import rope_fields

# Architectures whose EAGLE-3 taps Aerie knows, and the text models that they may hold.
ARCHITECTURES = ("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM")
TEXT_MODEL_TYPES = ("kimi_k2", "deepseek_v3", "deepseek_v2")

_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "num_attention_heads")
_OPTIONAL_TEXT_FIELDS = ("kv_lora_rank", "n_routed_experts", "tie_word_embeddings")
# Any one of these holds the vocabulary.
_TOKENIZERS = ("tokenizer.json", "tiktoken.model", "tokenizer.model", "vocab.json")
_SMALL_FILES = {".json", ".py", ".jinja", ".model", ".tiktoken"}
_SMALL_NAMES = {"merges.txt", "vocab.txt"}


@dataclass(frozen=True)
class Reader:
    """The account that will read the model: its user id and groups, or None and no groups if it is still to be made."""

    name: str
    uid: int | None
    gids: frozenset[int]

    @classmethod
    def named(cls, name: str) -> Reader:
        """Look up the account ``name``; one that does not exist yet has what everybody has."""
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            return cls(name, None, frozenset())
        return cls(name, account.pw_uid, frozenset(os.getgrouplist(name, account.pw_gid)))

    def has(self, status: os.stat_result, permission: int) -> bool:
        """Tell whether the mode bits grant ``permission`` (stat.S_IROTH or S_IXOTH) to this account."""
        if self.uid == 0:
            return True
        if status.st_uid == self.uid:
            return bool(status.st_mode & permission << 6)
        if status.st_gid in self.gids:
            return bool(status.st_mode & permission << 3)
        return bool(status.st_mode & permission)


def inspect_target(root: Path, reader: Reader | None = None) -> dict[str, object]:
    """Check the model directory ``root`` and return its facts.

    The facts are path, config, architecture, model_type, text (the text model's sizes), quantization, identity,
    shards (their number) and bytes (of the weights). ``identity`` is a SHA-256 over every small file that the service
    reads (configuration, tokenizer, remote code, index) and each shard's name, size and header; it does not depend on
    where the model lies. With ``reader``, the permissions must let that account read all of it.

    Raises CheckpointError with everything that is wrong.
    """
    try:
        if not root.is_dir():
            what = "not a directory" if root.exists() else "no such directory on this host"
            raise CheckpointError([f"{root}: {what}; put the model there or correct target_model_path"])
        small = _small_files(root)
    except OSError as error:
        raise CheckpointError([cannot_read(root, error)]) from None

    problems: list[str] = []
    text = config = None
    checkpoint = None
    try:
        config = read_json_object(root / "config.json")
        text = _text_config(root / "config.json", config)
    except CheckpointError as error:
        problems += error.problems
    problems += _missing_tokenizer(root)
    problems += _missing_remote_code(root, small)
    try:
        checkpoint = read_checkpoint(root)
    except CheckpointError as error:
        problems += error.problems
    if reader is not None:
        weights = [root / name for name in checkpoint.shards] if checkpoint else sorted(root.glob("*.safetensors"))
        problems += _unreadable(reader, root, [*small, *weights])
    if problems or config is None or text is None or checkpoint is None:
        raise CheckpointError(problems)
    return _facts(root, config, text, checkpoint, small)


def describe_target(root: Path) -> dict[str, object]:
    """Return those facts of the model directory ``root`` that its config.json states; nothing else need be there.

    Raises CheckpointError if it is missing, or not that of a target that Aerie knows.
    """
    config = read_json_object(root / "config.json")
    return _description(root, config, _text_config(root / "config.json", config))


def _facts(
    root: Path, config: Mapping[str, object], text: Mapping[str, object], checkpoint: Checkpoint, small: Iterable[Path]
) -> dict[str, object]:
    return {
        **_description(root, config, text),
        "identity": _identity(small, checkpoint),
        "shards": len(checkpoint.shards),
        "bytes": checkpoint.size,
    }


def _description(root: Path, config: Mapping[str, object], text: Mapping[str, object]) -> dict[str, object]:
    quantization = text.get("quantization_config") or config.get("quantization_config")
    return {
        "path": str(root),
        "config": str(root / "config.json"),
        "architecture": _architecture(config),
        "model_type": config.get("model_type"),
        "text": {
            "model_type": text.get("model_type"),
            **{name: text[name] for name in _SIZES},
            **{name: text.get(name) for name in _OPTIONAL_TEXT_FIELDS},
            **rope_fields(text),
            "dtype": text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"),
        },
        "quantization": quantization.get("quant_method") if isinstance(quantization, dict) else None,
    }


def _architecture(config: Mapping[str, object]) -> str | None:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    return None


def _text_config(path: Path, config: Mapping[str, object]) -> dict[str, object]:
    """Return the text model's part of ``config``: text_config in a multimodal model, the whole of it otherwise."""
    nested = config.get("text_config")
    text = dict(nested) if isinstance(nested, dict) else dict(config)
    problems: list[str] = []
    architecture = _architecture(config)
    if architecture not in ARCHITECTURES:
        problems.append(f"{path}: architecture {architecture} is none of {', '.join(ARCHITECTURES)}")
    elif text.get("model_type") not in TEXT_MODEL_TYPES:
        known = ", ".join(TEXT_MODEL_TYPES)
        problems.append(f"{path}: the text model's model_type {text.get('model_type')} is none of {known}")
    for name in _SIZES:
        value = text.get(name)
        if type(value) is not int or value < 1:
            problems.append(f"{path}: the text model's {name} is {value!r}, expected a positive integer")
    if problems:
        raise CheckpointError(problems)
    return text


def _small_files(root: Path) -> list[Path]:
    return sorted(
        path
        for path in root.iterdir()
        if not path.name.startswith(".")
        and (path.suffix in _SMALL_FILES or path.name in _SMALL_NAMES)
        and not path.is_dir()
    )


def _missing_tokenizer(root: Path) -> list[str]:
    problems = []
    if not any((root / name).exists() for name in _TOKENIZERS):
        problems.append(f"{root}: none of {', '.join(_TOKENIZERS)} is there; fetch the tokenizer with the model")
    if not (root / "tokenizer_config.json").exists():
        problems.append(f"{root / 'tokenizer_config.json'}: missing; fetch the tokenizer with the model")
    return problems


def _missing_remote_code(root: Path, small: Iterable[Path]) -> list[str]:
    """Name the Python files that an ``auto_map`` expects beside it and that are not there."""
    problems = []
    for path in small:
        if path.suffix != ".json" or path.name == INDEX_NAME:
            continue
        try:
            auto_map = read_json_object(path).get("auto_map")
        except CheckpointError:
            # config.json is reported by its own check, and other JSON files are lists or belong to other tools.
            continue
        for module in sorted(set(_local_modules(auto_map))):
            if not (root / f"{module}.py").exists():
                problems.append(
                    f"{root / module}.py: missing, but auto_map in {path} names it; fetch it with the model"
                )
    return problems


def _local_modules(auto_map: object) -> Iterator[str]:
    """Yield the modules that an auto_map takes from the model's own directory (``repo--module.Class`` is elsewhere)."""
    references = auto_map.values() if isinstance(auto_map, dict) else ()
    for reference in references:
        for name in reference if isinstance(reference, list) else [reference]:
            if isinstance(name, str) and "--" not in name and "." in name:
                yield name.rpartition(".")[0].replace(".", "/")


def _unreadable(reader: Reader, root: Path, files: Iterable[Path]) -> list[str]:
    """Name what keeps ``reader`` from ``files``: directories that it cannot enter, files that it cannot read."""
    who = f"user {reader.name}"
    if reader.uid is None:
        who += " (still to be made, so what everybody may do counts)"
    present = [path for path in files if path.exists()]
    problems = [
        f"{directory}: {who} may not enter it ({_mode(directory)}); chmod o+x {directory}"
        for directory in _directories([root / "config.json", *present])
        if not reader.has(directory.stat(), stat.S_IXOTH)
    ]
    problems += [
        f"{path}: {who} may not read it ({_mode(path)}); chmod o+r {path}"
        for path in [root, *present]
        if not reader.has(path.stat(), stat.S_IROTH)
    ]
    return problems


def _directories(files: Iterable[Path]) -> list[Path]:
    """Return every directory on the way to ``files``, both by name and where links lead."""
    parents: set[Path] = set()
    for path in files:
        parents.update(path.absolute().parents, path.resolve().parents)
    return sorted(parents)


def _mode(path: Path) -> str:
    status = path.stat()
    return f"{stat.filemode(status.st_mode)} {_owner(status.st_uid)}:{_group(status.st_gid)}"


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _identity(small: Iterable[Path], checkpoint: Checkpoint) -> str:
    manifest = {
        "files": {path.name: sha256_file(path) for path in small},
        "shards": {name: [header.size, header.sha256] for name, header in checkpoint.shards.items()},
    }
    return sha256_bytes(json.dumps(manifest, sort_keys=True).encode("utf-8"))
