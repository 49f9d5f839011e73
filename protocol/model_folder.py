"""Reads a model's folder without trusting it: its configuration, its index and its headers.

Workers and the daemon's forecasts share this module. Every file must be regular and of bounded
size, so that reading it neither hangs nor takes unbounded memory. All errors are `InvalidModel` and
name the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from protocol import paths
from protocol.errors import InvalidModel
from protocol.fields import MAX_BYTES, MAX_INT
from protocol.weights import BrokenFileError, Tensors, Weights, read_header

MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_TEXT_BYTES = 64 * 1024 * 1024
"""Limit of index files, and of files that tokenizers read (the largest known: 35 MB)."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt",
)  # fmt: skip
_READ_BY_LOADERS = (
    "config.json", "generation_config.json", "hf_quant_config.json", "model*.safetensors*",
    "tokenizer*", "vocab*", "*vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json", "*.jinja", "*.model", "*.spm", "*.tiktoken",
    "*.tokenizer", "tekken.json", "bpe.codes", "dict.txt", "byte_maps.json", "emoji.json",
    "normalizer.json", "word_*.json",
)  # fmt: skip
"""Names of the files that mlx-lm and transformers' tokenizers open."""
_MAX_DIGITS = 20
"""Digits and sign of an integer of 64 bits."""
_TEMPLATES = "additional_chat_templates"
_LAYER_COUNTS = (
    "num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers",
    "num_nextn_predict_layers",
)  # fmt: skip
_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions")
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def invalid(path: Path, problem: str) -> InvalidModel:
    """Return the error for a file or folder with this problem."""
    return InvalidModel(f"{path} {problem}", path=str(path))


def check_files(folder: Path) -> None:
    """Raise `InvalidModel` for files that the loaders of models and tokenizers must not open."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                if is_read(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # a dangling link
                        _check_file(path, entry.stat())
                if entry.name == _TEMPLATES and entry.is_dir():
                    check_files(path)
    except OSError as error:
        raise invalid(folder, f"cannot be read ({error.strerror})") from error


def is_read(name: str) -> bool:
    """Return whether a loader may open a file of this name."""
    return any(fnmatchcase(name, pattern) for pattern in _READ_BY_LOADERS)


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise _not_regular(path, status)
    if path.suffix != ".safetensors" and stat.S_ISREG(status.st_mode):
        _check_size(path, status, MAX_TEXT_BYTES)


def _not_regular(path: Path, status: os.stat_result) -> InvalidModel:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
    return invalid(path, f"is {kind}; a model's files must be regular files")


def _check_size(path: Path, status: os.stat_result, limit: int) -> None:
    if status.st_size > limit:
        raise invalid(
            path, f"has {status.st_size} bytes; a file of this kind may have at most {limit}"
        )


@contextlib.contextmanager
def _open(path: Path, limit: int | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file of at most ``limit`` bytes; yield its stream and its size."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path, status)
        if limit is not None:
            _check_size(path, status, limit)
        with path.open("rb") as stream:
            yield stream, status.st_size
    except FileNotFoundError:
        raise invalid(path, "is missing") from None
    except OSError as error:
        raise invalid(path, f"cannot be read ({error.strerror})") from error


class _LargeIntegerError(ValueError):
    """An integer in JSON that messages cannot hold."""


def _integer(digits: str) -> int:
    number = int(digits) if len(digits) <= _MAX_DIGITS else MAX_BYTES + 1
    if abs(number) > MAX_BYTES:
        raise _LargeIntegerError(f"has the integer {digits:.40}, which takes more than 64 bits")
    return number


def read_object(path: Path, limit: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most ``limit`` bytes."""
    with _open(path, limit) as (stream, size):
        data = stream.read(size)
    try:
        found = json.loads(data, parse_int=_integer)
    except _LargeIntegerError as error:
        raise invalid(path, str(error)) from error
    except ValueError as error:  # JSON or UTF-8
        raise invalid(path, f"is not valid JSON ({error})") from error
    except RecursionError as error:
        raise invalid(path, "is JSON that is nested too deeply") from error
    if not isinstance(found, dict):
        raise invalid(path, "is not a JSON object")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json``; ``text_config`` in it is absent or an object."""
    path = folder / "config.json"
    config = read_object(path, MAX_CONFIG_BYTES)
    if not isinstance(config.get("text_config") or {}, dict):
        raise invalid(path, "has a text_config that is not an object")
    return config


def context_length(config: dict[str, Any]) -> int | None:
    """Return the tokens of the model's context, at most `MAX_INT`; None if they are not given."""
    sections = (config, config.get("text_config") or {})
    values = (section.get(key) for key in _CONTEXT_KEYS for section in sections)
    found = (value for value in values if type(value) is int and value > 0)  # `true` is no number
    return next((min(value, MAX_INT) for value in found), None)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that have the weights."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise invalid(folder, "has no model*.safetensors")
    return files


def check_index(folder: Path) -> None:
    """Raise `InvalidModel` if a file is missing that the index, if there is one, lists."""
    index = folder / "model.safetensors.index.json"
    if not paths.exists(index):
        return
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict):
        raise invalid(index, "has no weight_map")
    for name in sorted({str(shard) for shard in shards.values()}):
        if not paths.exists(folder / name):
            raise invalid(folder / name, "is missing, though the index lists it")


def tokenizer_bytes(folder: Path) -> int:
    """Return the size of the tokenizer's files."""
    files = [folder / name for name in TOKENIZER_FILES]
    return sum(file.stat().st_size for file in files if paths.exists(file))


def read_weights(files: Iterable[Path]) -> Weights:
    """Return the sizes of all tensors in these files."""
    return Weights.of(read_tensors(files).values())


def read_tensors(files: Iterable[Path]) -> Tensors:
    """Return all tensors in these files, by name."""
    tensors: Tensors = {}
    for file in files:
        with _open(file) as (stream, size):
            try:
                tensors |= read_header(stream, size)
            except BrokenFileError as error:
                raise invalid(file, str(error)) from error
    return tensors


def check_layers(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    """Raise `InvalidModel` if the configuration has more layers than the weights have tensors.

    Loaders build all layers of the configuration before they compare them with the weights.
    """
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _LAYER_COUNTS:
            count = section.get(key)
            if isinstance(count, int | float) and count > weights.tensors:
                raise invalid(
                    folder / "config.json",
                    f"has {key} {count}, but the weight files have only {weights.tensors} tensors",
                )
