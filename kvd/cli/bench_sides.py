"""The servers that `kvctl bench --against` names."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from kvd import demo
from kvd.bench import twin
from kvd.bench.servers import Side, llama_side, mlx_lm_side, url_side
from kvd.bench.traces import Trace
from kvd.cli import local_models
from kvd.cli.bench_room import rows
from kvd.host import blas, installed
from kvd.host.units import format_bytes
from protocol.errors import InsufficientMemory, InvalidRequest, UnknownModel
from protocol.types import HostMemory

KVD = "kvd"
MLX_LM = "mlx-lm"
_LLAMA = "llama="
_LLAMA_SERVER = "llama-server"
_URL = re.compile(r"(?:([\w.-]+)=)?(https?://\S+)")
_COPY_FACTOR = 1.25
"""Memory of a second server, as a multiple of the weights."""


def check(against: Sequence[str]) -> None:
    """Raise `InvalidRequest` for a text that names no server which runs here."""
    for text in against:
        if text == MLX_LM:
            if importlib.util.find_spec("mlx_lm") is None:
                raise _invalid(
                    "mlx-lm is missing in kvd's environment; install kvd again: "
                    + installed.find().command()
                )
        elif text.startswith(_LLAMA):
            gguf = Path(text.removeprefix(_LLAMA)).expanduser()
            if not gguf.is_file():
                raise _invalid(f"there is no file {gguf}; give the model in the GGUF format")
            if shutil.which(_LLAMA_SERVER) is None:
                raise _invalid("llama-server is not on PATH; install llama.cpp, or give a URL")
        elif text == _LLAMA.rstrip("="):
            raise _invalid("llama needs the model in the GGUF format: --against llama=FILE.gguf")
        elif _URL.fullmatch(text) is None:
            raise _invalid(
                f"cannot compare with {text[:80]!r}; give mlx-lm, llama=FILE.gguf, or a URL such as"
                " http://127.0.0.1:8000#MODEL"
            )


def notes(against: Sequence[str], host: HostMemory) -> Iterator[str]:
    """Yield what makes the comparison uneven on this machine."""
    if MLX_LM in against and host.accelerator_limit is None:
        yield (
            "mlx-lm computes 16-bit weights on a CPU many times slower than 32-bit ones;"
            " python -m bench.serve of the checkout gives both servers 32-bit weights"
        )


def make(
    against: Sequence[str], source: str, folder: Path, traces: Sequence[Trace], free_bytes: int
) -> list[Side]:
    """Return the sides.

    ``folder`` is for files of servers that are started, ``free_bytes`` the machine's memory for
    them. Raises `UnknownModel`, `InsufficientMemory` and `InvalidRequest`.
    """
    sides: list[Side] = []
    for text in against:
        if text == MLX_LM:
            sides.append(_mlx_lm(source, folder, free_bytes))
        elif text.startswith(_LLAMA):
            sides.append(_llama(Path(text.removeprefix(_LLAMA)).expanduser(), traces, free_bytes))
        elif (found := _URL.fullmatch(text)) is not None:
            sides.append(url_side(found[1] or urlsplit(found[2]).netloc, found[2]))
    names = [KVD, *(side.name for side in sides)]
    if len(set(names)) < len(names):
        raise _invalid(f"two servers have the same name ({', '.join(names)}); give NAME=URL")
    return sides


def _mlx_lm(source: str, folder: Path, free_bytes: int) -> Side:
    path = _folder_of(source)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    _check_memory(MLX_LM, weights, free_bytes)
    twin.make(path, folder / "model")
    return mlx_lm_side(MLX_LM, str(folder / "model"), blas=blas.choose("auto"))


def _llama(gguf: Path, traces: Sequence[Trace], free_bytes: int) -> Side:
    _check_memory(_LLAMA_SERVER, gguf.stat().st_size, free_bytes)
    slots = max(rows(trace)[0] for trace in traces)
    longest = max(trace.longest for trace in traces)
    program = shutil.which(_LLAMA_SERVER) or _LLAMA_SERVER
    return llama_side("llama", program, gguf.resolve(), slots=slots, context=longest + 64)


def _folder_of(source: str) -> Path:
    if source == "demo":
        return demo.path()
    if source.startswith("/"):
        return Path(source)
    for model in local_models.in_hub_cache():
        if model.source == source and model.complete:
            return model.path
    raise UnknownModel(f"mlx-lm cannot load {source!r} here: it is not on this machine")


def _check_memory(name: str, weights_bytes: int, free_bytes: int) -> None:
    """Raise `InsufficientMemory` if a second copy of the weights could make the machine swap."""
    needed = int(_COPY_FACTOR * weights_bytes)
    if needed > free_bytes:
        raise InsufficientMemory(
            f"{name} needs about {format_bytes(needed)} beside kvd's budget, and"
            f" {format_bytes(free_bytes)} of the machine's memory are free; unload models first"
        )


def _invalid(text: str) -> InvalidRequest:
    return InvalidRequest(text, field="against")
