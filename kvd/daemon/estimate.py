"""Estimates the memory of a model that is not loaded, from its files and without MLX.

Weights and pages are exact. The memory of the interpreter and its libraries is a measured constant.
Recurrent states are not covered.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.system import Settings
from kvd.host.memory.nvidia import has_cuda_build
from protocol import memory_bounds, model_folder
from protocol.costs import Costs, Estimate, KVCost
from protocol.errors import InvalidModel, UnknownModel
from protocol.kv import KVSpec, floors_of, schemes_of
from protocol.model_source import cached_snapshot, check_folder, is_hub_id, unknown_source
from protocol.pages import FIRST_ROWS, SLAB_PAGES, TAIL_TOKENS, LayerGeometry
from protocol.schemes import Scheme
from protocol.weights import Tensors, Weights

INTERPRETER_BYTES = 68 * 1024 * 1024
"""Python, MLX, mlx-lm's libraries and what the checks at load leave behind, measured on Linux.

A tokenizer that needs transformers takes 28 MB more. Whether it does is known at the load only.
"""
SHARED_BYTES = 39 * 1024 * 1024
"""The part of `INTERPRETER_BYTES` that is file pages, which Linux charges to processes by share."""
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Machine:
    """The properties of this machine that affect a model's memory."""

    on_cpu: bool
    native: bool
    """Whether workers use kvd's own operations."""
    prefill_chunk: int
    max_rows: int
    attention_scratch: int
    cuda: bool = False
    plain_attention: bool = False
    """Whether decode attention uses MLX's operations despite ``native``."""
    sharers: int = 0
    """Other processes that use the same libraries."""

    @property
    def native_attention(self) -> bool:
        return self.native and not self.plain_attention

    def pass_tokens(self, *, wide: bool = False) -> int:
        """Return the prompt tokens of a prefill pass, if the model supports packed passes.

        ``wide``: see `memory_bounds.pass_tokens`.
        """
        return memory_bounds.pass_tokens(self.prefill_chunk, cuda=self.cuda, wide=wide)

    @property
    def interpreter(self) -> int:
        """Bytes of a worker before it loads weights."""
        return INTERPRETER_BYTES - SHARED_BYTES + SHARED_BYTES // (1 + self.sharers)


class FileEstimate:
    """Implements `actors.ports.EstimateModel`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def __call__(self, source: str, kv: KVSpec, ranks: int = 1) -> Estimate:
        def read_files() -> Estimate:
            shared = replace(self._machine, sharers=sharers())
            return estimate(folder_of(source), kv, shared, ranks)

        return await asyncio.to_thread(read_files)


def machine(native: str, settings: Settings, attention: str = "auto") -> Machine:
    on_cpu = sys.platform != "darwin" and not has_cuda_build()
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    return Machine(
        on_cpu=on_cpu,
        cuda=not on_cpu and sys.platform != "darwin",
        native=on_cpu and native != "off" and compiler is not None,
        prefill_chunk=settings.prefill_chunk,
        max_rows=settings.max_rows,
        attention_scratch=settings.attention_scratch,
        plain_attention=attention == "reference",
    )


def estimate(folder: Path, kv: KVSpec, machine: Machine, ranks: int = 1) -> Estimate:
    """Estimate the model in a folder over this many ranks; raises `InvalidModel` if there is none.

    Costs are sums over all ranks.
    """
    config = model_folder.read_config(folder)
    tensors = model_folder.read_tensors(model_folder.weight_files(folder))
    headers = Weights.of(tensors.values())
    model_folder.check_layers(folder, config, headers)
    if ranks > 1:  # each rank uses the libraries too
        machine = replace(machine, sharers=machine.sharers + ranks - 1)
    itemsize = 4 if machine.on_cpu else None
    weights = headers.in_memory(itemsize, packed=machine.native)
    weights += (ranks - 1) * _copied(tensors).in_memory(itemsize, packed=machine.native)
    try:
        return _estimate(folder, config, weights, kv, machine, ranks)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of any settings
        raise InvalidModel(
            f"the model's config.json does not contain the sizes of keys and values ({error}); load"
            " the model first"
        ) from error


def _copied(tensors: Tensors) -> Weights:
    """Return the tensors that each rank holds whole: all but the matrices of layers."""
    return Weights.of(
        tensor
        for name, tensor in tensors.items()
        if ".layers." not in f".{name}" or tensor.is_vector
    )


def _estimate(
    folder: Path, config: dict[str, Any], weights: int, kv: KVSpec, machine: Machine, ranks: int
) -> Estimate:
    context = model_folder.context_length(config) or DEFAULT_CONTEXT
    text = config.get("text_config") or config
    itemsize = 4 if machine.on_cpu else 2
    schemes = schemes_of(kv)
    kinds, tail = _kinds(text, kv, itemsize)
    unit = next((kind.charges[0] for kind in kinds if kind.window is None), tail)
    row = tail + (-(-tail // 2) if kv.prefix_cache != 0 else 0)  # with its first checkpoint
    layers = sum(kind.layers for kind in kinds)
    # As in `Runner.pass_tokens`, except for the model's windows, which config.json may not have.
    wide = ranks > 1 and not kv.quantized_kv_start and not kv.max_kv_size
    at_once = machine.pass_tokens(wide=wide)
    parts = 0
    if not (machine.on_cpu or machine.plain_attention):
        parts = memory_bounds.parts_bytes(config, machine.max_rows, context)
    overhead = (
        machine.interpreter
        + memory_bounds.TOKENIZER_HELD * model_folder.tokenizer_bytes(folder)
        + memory_bounds.freed_bytes(
            machine.attention_scratch, on_cpu=machine.on_cpu, cuda=machine.cuda
        )
        + memory_bounds.LOOSE_BYTES
        + memory_bounds.traces_bytes(layers, native=machine.native_attention)
        + memory_bounds.step_bytes(config, at_once, machine.max_rows, on_cpu=machine.on_cpu)
        + memory_bounds.scratch_bytes(
            machine.attention_scratch, native=machine.native_attention, parts=parts
        )
    )
    token = tail // TAIL_TOKENS
    layer, chunk = token // max(1, layers), machine.prefill_chunk
    waiting = memory_bounds.waiting_bytes(token, layer, at_once, chunk)
    costs = Costs(
        weights_bytes=weights,
        base_bytes=weights + ranks * overhead + waiting,
        unit_bytes=max(1, unit),
        row_bytes=row,
        first_units=SLAB_PAGES + FIRST_ROWS * -(-row // max(1, unit)),
        step=at_once + machine.max_rows,
        levels=len(schemes),
        dense_until=kv.quantized_kv_start,
        kinds=kinds,
    )
    names = [scheme.name for scheme in schemes]
    return Estimate(costs=costs, schemes=names, context_length=context)


def sharers(proc: Path = Path("/proc")) -> int:
    """Return how many processes of this user map MLX's library; 0 without ``/proc``."""
    found = 0
    for maps in proc.glob("[0-9]*/maps"):
        try:
            found += "/libmlx" in maps.read_text("utf-8")
        except OSError:  # ended, or another user's
            continue
    return found


def folder_of(source: str) -> Path:
    """Return a source's folder on this machine; nothing is downloaded."""
    if source == "demo":
        from kvd import demo  # noqa: PLC0415 - rarely needed

        return demo.path()
    if source.startswith("/"):
        return check_folder(Path(source))
    if not is_hub_id(source):
        raise unknown_source(source)
    if (found := cached_snapshot(source)) is None:
        raise UnknownModel(
            f"{source} is not on this machine; `kvctl load {source}` downloads it", source=source
        )
    return found


def _kinds(text: dict[str, Any], kv: KVSpec, itemsize: int) -> tuple[list[KVCost], int]:
    """Return the layers by attention kind, and the bytes of one row's tail in all of them."""
    layers = _size(text["num_hidden_layers"])
    heads = _size(text["num_attention_heads"])
    dim = _size(text.get("head_dim") or text["hidden_size"] // heads)
    kv_heads = _size(text.get("num_key_value_heads") or heads)
    geometry = LayerGeometry(kv_heads, dim, dim, itemsize)
    floors = floors_of(kv, layers)
    # One scheme for each precision level, preceded by the dense scheme if rows start dense.
    schemes = [*([Scheme(16, 16)] if kv.quantized_kv_start else []), *schemes_of(kv)]
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(_windows(text, layers)):
        by_window.setdefault(window, []).append(layer)
    kinds = []
    for window, members in by_window.items():
        by_level = [
            [
                geometry.page_bytes(scheme if (low := floors[at]) is None else scheme.at_least(low))
                for at in members
            ]
            for scheme in schemes
        ]
        kinds.append(
            KVCost(
                window=window or kv.max_kv_size,
                keep=kv.keep if window is None and kv.max_kv_size else 0,
                layers=len(members),
                page_bytes=tuple(map(sum, by_level)),
                charges=tuple(sum(sizes) + max(sizes) for sizes in by_level),
            )
        )
    return kinds, layers * geometry.dense_bytes(TAIL_TOKENS)


def _size(value: object) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{value!r:.40} is no size")
    return value


def _windows(text: dict[str, Any], layers: int) -> list[int | None]:
    """Return the window of each layer that has keys; None means full attention."""
    window = text.get("sliding_window")
    window = window if isinstance(window, int) and window > 0 else None
    types = text.get("layer_types")
    if isinstance(types, list):
        kinds = [kind for kind in types if kind in {"full_attention", "sliding_attention"}]
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if window is None or text.get("use_sliding_window") is False:
        return [None] * layers
    pattern = text.get("sliding_window_pattern")
    every = pattern if isinstance(pattern, int) and pattern > 0 else 0
    return [None if every and at % every == every - 1 else window for at in range(layers)]
