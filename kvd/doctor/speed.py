"""The selftest's comparison with mlx-lm: both sides load one model and run the same tasks in turn.

Times are those of loops without HTTP. The sides take turns in every round, so that a machine whose
speed changes affects both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from kvd.doctor import room
from kvd.doctor.finding import REPORT, Finding, fail, ok, skip, warn
from kvd.doctor.measurements import Cell, Served, Side, Speed
from kvd.doctor.scene import Scene
from kvd.doctor.side_process import MODULE, SideProcess, TooSlow, opened
from kvd.host.units import format_bytes
from protocol.errors import InsufficientMemory, KvdError
from protocol.speed import Task
from protocol.types import DaemonStatus, FastPath

ROWS = 8
SIZES = (
    Cell(kind="prefill", rows=1, prompt=256, output=1),
    Cell(kind="prefill", rows=ROWS, prompt=256, output=1),
    Cell(kind="decode", rows=1, prompt=256, output=128),
    Cell(kind="decode", rows=ROWS, prompt=256, output=128),
    Cell(kind="prefill", rows=1, prompt=2048, output=1),
    Cell(kind="decode", rows=1, prompt=2048, output=128),
    Cell(kind="prefill", rows=ROWS, prompt=2048, output=1),
    Cell(kind="decode", rows=ROWS, prompt=2048, output=128),
)
"""Sizes in the order of measurement: short ones predict how long the next ones take."""
QUICK_SIZES = tuple(replace(size, output=min(size.output, 48)) for size in SIZES[:5])
_LEAST_PROMPT = 16
_MODERATE = 0.9
"""Ratio to mlx-lm below which a size is reported as slow."""


@dataclass(frozen=True)
class Limits:
    """Bounds of the comparison."""

    sizes: tuple[Cell, ...]
    rounds: int
    """Most rounds of a size, after one that is not counted."""
    measure_s: float
    """Seconds for all sizes. One that would not fit is skipped, or measured in fewer rounds."""
    task_s: float
    """Seconds after which a task is given up."""
    load_s: float = 600.0

    @property
    def longest(self) -> int:
        return max(size.prompt + size.output for size in self.sizes)


FULL = Limits(SIZES, rounds=5, measure_s=240.0, task_s=180.0)
QUICK = Limits(QUICK_SIZES, rounds=3, measure_s=20.0, task_s=30.0)


@dataclass(frozen=True)
class Model:
    """A model on this machine."""

    source: str
    """``demo``, an absolute folder or a Hub id."""
    folder: Path

    @property
    def public_name(self) -> str:
        """The name in the report, which contains no paths."""
        return "a folder" if self.private_paths else self.source

    @property
    def private_paths(self) -> tuple[str, ...]:
        """The paths of a folder that the user named; none of a public model."""
        if not self.source.startswith("/"):
            return ()
        return self.source, str(self.folder.absolute())


@dataclass
class Measured:
    """Where `compare` leaves its result."""

    speed: Speed | None = None


@dataclass
class _Rates:
    """Seconds per token of a task on both sides together, as the last size took them."""

    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, size: Cell, seconds: float) -> None:
        tokens = size.rows * (size.prompt + size.output)
        self.seconds[size.kind] = seconds / tokens

    def predicted(self, size: Cell) -> float:
        rate = max(self.seconds.values(), default=0.0)
        return rate * size.rows * (size.prompt + size.output)


def compare(
    scene: Scene, model: Model, limits: Limits, measured: Measured, *, module: str = MODULE
) -> Iterator[str | Finding]:
    """Measure both sides; yield progress and findings, and leave the numbers in ``measured``."""
    beside = isinstance(scene.status, DaemonStatus)
    if isinstance(scene.status, DaemonStatus):
        observed = f"a daemon with {len(scene.status.models)} models runs beside the measurement"
        yield warn("machine", observed, "`kvctl shutdown` first, if the numbers matter")
    try:
        yield from _compare(scene, model, limits, measured, module=module, beside=beside)
    except InsufficientMemory as error:
        advice = "unload models (`kvctl unload`), end other programs, or give a smaller --model"
        yield warn("speed", error.message, advice)
    except KvdError as error:
        yield fail("speed", error.message, REPORT)


def _compare(
    scene: Scene, model: Model, limits: Limits, measured: Measured, *, module: str, beside: bool
) -> Iterator[str | Finding]:
    found = room.find(scene, model.folder, ROWS, limits.longest)
    with contextlib.ExitStack() as stack:
        settings = scene.settings
        options = (
            *("--budget", str(found.kvd), "--prefill-chunk", str(settings.chunk)),
            *("--attention-scratch", str(settings.attention_scratch(found.kvd))),
        )
        yield "load, kvd"
        kvd = stack.enter_context(opened("kvd", model.source, *options, module=module))
        kvd.load(limits.load_s)
        yield "load, mlx-lm"
        mlx_lm = stack.enter_context(opened("mlx-lm", model.source, module=module))
        mlx_lm.load(limits.load_s)
        served = _served(kvd)
        yield from _load_findings(kvd, mlx_lm, served)
        cells: list[Cell] = []
        for step in _cells(kvd, mlx_lm, served, limits):
            if isinstance(step, str):
                yield step
            else:
                cells.append(step)
                yield from _cell_findings(step)
        measured.speed = Speed(
            model=model.public_name,
            beside_daemon=beside,
            served=served,
            kvd=_side(kvd),
            mlx_lm=_side(mlx_lm),
            cells=cells,
        )
        yield _memory_finding(measured.speed)


def _cells(
    kvd: SideProcess, mlx_lm: SideProcess, served: Served, limits: Limits
) -> Iterator[str | Cell]:
    end, rates, slow = time.monotonic() + limits.measure_s, _Rates(), ""
    for number, wanted in enumerate(limits.sizes):
        size = fitted(wanted, served.context_length)
        if size is None:
            why = f"the model's context has {served.context_length} tokens"
            yield replace(wanted, skipped=why)
            continue
        if slow:
            yield replace(size, skipped=slow)
            continue
        yield size.name
        predicted, left = rates.predicted(size), max(0.0, end - time.monotonic())
        if 2 * predicted > left:  # a round that does not count, and one that does
            why = f"it would take about {2 * predicted:.0f} s, and {left:.0f} s are left"
            yield replace(size, skipped=why)
            continue
        share = left / (len(limits.sizes) - number)
        try:
            yield _measured(kvd, mlx_lm, size, limits, rates, share)
        except TooSlow as error:
            slow = error.message
            yield replace(size, skipped=slow)


def fitted(size: Cell, context: int) -> Cell | None:
    """Return a size whose prompt fits the model's context; None if none does."""
    prompt = min(size.prompt, context - size.output)
    if prompt < _LEAST_PROMPT or (prompt < size.prompt and size.prompt > SIZES[0].prompt):
        return None  # a shortened long prompt would repeat a shorter size
    return replace(size, prompt=prompt)


def _measured(
    kvd: SideProcess,
    mlx_lm: SideProcess,
    size: Cell,
    limits: Limits,
    rates: _Rates,
    most_s: float,
) -> Cell:
    """Run a size in rounds until its rounds or ``most_s`` are used up, at least in one."""
    end = time.monotonic() + most_s
    found: dict[str, list[float]] = {kvd.name: [], mlx_lm.name: []}
    seconds = 0.0
    """Duration of the previous round."""
    for number in range(1 + limits.rounds):
        began = time.monotonic()
        if number > 1 and began + seconds > end:
            break
        for side in (kvd, mlx_lm) if number % 2 else (mlx_lm, kvd):
            task = Task(
                kind=size.kind, rows=size.rows, prompt=size.prompt, output=size.output, seed=number
            )
            ran = side.run(task, limits.task_s)
            if number:
                found[side.name].append(ran.tokens / ran.seconds)
        seconds = time.monotonic() - began
    rates.note(size, seconds)
    return Cell.of(size, found[kvd.name], found[mlx_lm.name])


def _served(kvd: SideProcess) -> Served:
    info = kvd.loaded.info
    assert info is not None, "kvd reports its model's info"
    return Served(
        architecture=info.architecture,
        parameters=info.parameters,
        layers=info.layers,
        context_length=info.context_length,
        kv_scheme=info.kv_scheme,
        attention_path=info.attention_path,
        attention_error=info.attention_error,
        device=info.device,
        fused=info.fused,
        paths=info.paths,
    )


def _side(side: SideProcess) -> Side:
    parts = side.loaded.seconds
    return Side(
        load_s=side.load_s,
        load={"python": max(0.0, side.load_s - sum(parts.values())), **parts},
        dtype=side.loaded.dtype,
        loaded_bytes=side.loaded.active_bytes,
        mlx_peak_bytes=side.mlx_peak_bytes,
        process_peak_bytes=side.process_peak_bytes,
    )


def _load_findings(kvd: SideProcess, mlx_lm: SideProcess, served: Served) -> Iterator[Finding]:
    parts = sorted(_side(kvd).load.items(), key=lambda part: -part[1])[:3]
    longest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts)
    observed = f"kvd {kvd.load_s:.1f} s ({longest}); mlx-lm {mlx_lm.load_s:.1f} s"
    yield ok("load", observed, kvd_s=kvd.load_s, mlx_lm_s=mlx_lm.load_s)
    observed = f"{served.attention_path}; error {served.attention_error:.1g}"
    yield ok("attention", observed, error=served.attention_error)
    for path in served.paths:
        if path.used:
            yield ok(path.name, "used")
        elif _is_unexpected(path):
            yield warn(path.name, f"not used: {path.reason}", REPORT, cause=path.cause)
        else:
            yield skip(path.name, f"not used: {path.reason}", cause=path.cause)


def _is_unexpected(path: FastPath) -> bool:
    """Return whether a path should be used on each machine and for each model of its kind.

    Results of other paths differ for some models; kernels are right everywhere.
    """
    kernels = path.name == "fused attention"
    return path.cause in {"error", "speed"} or (kernels and path.cause == "results")


def _cell_findings(cell: Cell) -> Iterator[Finding]:
    """Yield what is unusual about a size; the table and the report have the numbers of all."""
    if cell.ratio is None:
        yield skip(cell.name, cell.skipped)
    elif cell.ratio < _MODERATE:
        observed = f"{cell.ratio:.2f} times as fast as mlx-lm"
        yield warn(cell.name, observed, REPORT, ratio=cell.ratio)


def _memory_finding(speed: Speed) -> Finding:
    kvd, mlx_lm = speed.kvd, speed.mlx_lm
    observed = (
        f"arrays: kvd {format_bytes(kvd.mlx_peak_bytes)}, mlx-lm "
        f"{format_bytes(mlx_lm.mlx_peak_bytes)}; processes: "
        f"{format_bytes(kvd.process_peak_bytes)}, {format_bytes(mlx_lm.process_peak_bytes)}"
    )
    numbers = {
        "kvd_bytes": kvd.mlx_peak_bytes,
        "mlx_lm_bytes": mlx_lm.mlx_peak_bytes,
        "kvd_process_bytes": kvd.process_peak_bytes,
        "mlx_lm_process_bytes": mlx_lm.process_peak_bytes,
    }
    return ok("peak memory", observed, **numbers)
