"""Finds the lowest precision level that a model tolerates: ``kvd.worker.tools calibrate SOURCE``.

Stores the result in the home (`kvd.worker.serving.calibration`) and prints it as one JSON object.
Progress goes to stderr. The process requests no memory from the daemon.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial as partial_of
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from kvd.host.home import Home
from kvd.worker.artifacts import modules
from kvd.worker.cache.scheme import Scheme
from kvd.worker.native import activation
from kvd.worker.process import interpreter
from kvd.worker.serving import (
    bit_choice,
    bit_mix,
    calibration,
    kernel_choice,
    model_files,
    seam,
)
from kvd.worker.serving.calibration import DENSE, CalibrationResult, LayerLoss, MeasuredLevel
from kvd.worker.serving.model_files import LoadedModel
from kvd.worker.serving.runner import Runner
from kvd.worker.tools import fidelity, sensitivity
from kvd.worker.tools.fidelity import Agreement, Floor, TooShortError
from kvd.worker.tools.output import Report, print_result, progress
from kvd.worker.tools.partial_losses import PartialLosses
from protocol.errors import ConfigError, InvalidRequest

LAYER_PROMPTS = 2
"""Number of texts on which single layers are measured, at most."""


def calibrate(
    source: str,
    schemes: Sequence[Scheme],
    floor: Floor,
    report: Report,
    *,
    count: int = 4,
    tokens: int = 1024,
    text: Path | None = None,
    partial: PartialLosses | None = None,
) -> CalibrationResult:
    """Load a model, choose bits by layer for each precision level, measure them; return the result.

    ``schemes``: from the top level down. A level keeps its scheme in all layers where a mix of the
    same size is no better. Measures with ``count`` prompts of about ``tokens`` tokens each, cut to
    the model's context. They are from the file ``text``, or kvd's recall tasks. ``partial``:
    measured layers of an interrupted run, and where to store them. Raises the `KvdError` of a model
    that cannot be loaded, `UnsupportedModel` for one that has no quantized keys and values, and
    `InvalidRequest` for texts that are too short.
    """
    # Before models are imported, as in a worker. Plain operations would take three times as long.
    modules.activate(lambda *_: None)
    try:
        own = None if text is None else fidelity.OwnText.read(text)
    except ValueError as error:
        raise InvalidRequest(f"text: {error}", field="text") from error
    library = activation.activate(lambda stage, _: report(stage)).library
    kernels = None if kernel_choice.plain_only() else kernel_choice.find_kernels()
    seam.install()
    report("weights")
    headers = model_files.inspect(model_files.resolve(source))
    loaded = model_files.load(headers.path, library=library)
    prompts = _prompts(loaded, own, count, tokens)
    key = calibration.content_key(headers)
    try:
        serve = partial_of(fidelity.serve, loaded.model, library=library, kernels=kernels)
        losses, levels = _measured(loaded, serve, key, schemes, prompts, partial, report)
    except TooShortError as error:
        raise InvalidRequest(f"tokens: {error}", field="tokens") from error
    if (kept := modules.current()) is not None:
        kept.keep()
    lowest = fidelity.lowest_level([level.used for level in levels], floor)
    return CalibrationResult(
        key=key,
        model=source,
        lowest=(DENSE if lowest is None else schemes[lowest]).name,
        max_kl=floor.max_kl,
        min_top1=floor.min_top1,
        levels=[_level_result(level, floor) for level in levels],
        losses=losses,
        text="" if own is None else own.name,
        prompts=len(prompts),
        tokens=max(map(len, prompts)),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=mx.default_device().type.name,
        versions=calibration.versions(),
    )


def _prompts(
    loaded: LoadedModel, own: fidelity.OwnText | None, count: int, tokens: int
) -> list[list[int]]:
    context = loaded.context_length
    size = min(tokens, context)
    field = "tokens" if own is None else "text"
    try:
        if own is None:
            prompts = fidelity.texts(loaded.tokenizer, count=count, tokens=size)
        else:
            prompts = own.prompts(loaded.tokenizer, count=count, tokens=size)
    except ValueError as error:  # such as too few tokens for the prompt's facts
        raise InvalidRequest(f"{field}: {error}", field=field) from error
    return [prompt[:context] for prompt in prompts]


@dataclass(frozen=True)
class _Level:
    """A precision level: its scheme in all layers, and a mix of the same size if there is one."""

    scheme: Scheme
    uniform: Agreement
    mix: tuple[Scheme, ...] | None
    mixed: Agreement | None
    """None if there is no mix."""

    @property
    def better_mix(self) -> Agreement | None:
        """What the mix measured, if that is better than one scheme in all layers."""
        is_better = self.mixed is not None and self.mixed.kl < self.uniform.kl
        return self.mixed if is_better else None

    @property
    def used(self) -> Agreement:
        return self.better_mix or self.uniform


def _measured(
    loaded: LoadedModel,
    serve: Callable[..., Runner],
    key: str,
    schemes: Sequence[Scheme],
    prompts: list[list[int]],
    partial: PartialLosses | None,
    report: Report,
) -> tuple[list[LayerLoss], list[_Level]]:
    """Measure delicate layers, choose the mixes, and measure the levels with and without them."""
    estimates = sensitivity.estimate(loaded)
    runner = serve(schemes)
    layout = runner.cache.layout
    losses = {} if partial is None else partial.read(key, prompts)
    layers = sensitivity.layers_of(layout)
    delicate = sensitivity.delicate(layers, estimates)
    for number, layer in enumerate(delicate, 1):
        report(f"layer {number} of {len(delicate)}", 1 + len(delicate) + len(prompts))
        if layer not in losses:
            losses[layer] = sensitivity.measure_layer(runner, layer, prompts[:LAYER_PROMPTS])
            if partial is not None:
                partial.write(key, prompts, losses)
    losses = estimates | losses
    found = [losses[layer] for layer in layers]
    sides = list(sensitivity.sides_of(layout, found))
    widths = bit_choice.fast_widths(calibrated=True)
    mixes = bit_mix.mix_bits(sides, len(layout.entries), schemes, widths)
    mixed = [number for number, mix in enumerate(mixes) if mix is not None]
    runners = [runner]
    if mixed:
        runners.append(serve([schemes[one] for one in mixed], [mixes[one] for one in mixed]))
    agreements = fidelity.measure(runners, _counted(prompts, report))
    if partial is not None:
        partial.drop(key)
    better = dict(zip(mixed, agreements[len(schemes) :], strict=True))
    levels = zip(schemes, agreements, mixes, strict=False)
    return found, [_Level(*level, better.get(number)) for number, level in enumerate(levels)]


def _counted(prompts: list[list[int]], report: Report) -> Iterator[list[int]]:
    for number, prompt in enumerate(prompts, 1):
        report(f"text {number} of {len(prompts)}")
        yield prompt


def _level_result(level: _Level, floor: Floor) -> MeasuredLevel:
    found = level.used
    mix = () if level.better_mix is None else level.mix or ()
    return MeasuredLevel(
        scheme=level.scheme.name,
        mix=[scheme.name for scheme in mix],
        uniform_kl=_finite(level.uniform.kl),
        allowed=floor.allows(found),
        kl=_finite(found.kl),
        top1=_finite(found.top1),
        perplexity_change=_finite(found.perplexity_change),
        positions=found.positions,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _arguments() -> argparse.Namespace:
    floor = Floor()
    parser = argparse.ArgumentParser(
        prog="kvd.worker.tools calibrate",
        description="Measures which precision levels a model tolerates.",
    )
    parser.add_argument("source")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--schemes", required=True, help="schemes from the top, comma-separated")
    parser.add_argument("--max-kl", type=float, default=floor.max_kl)
    parser.add_argument("--min-top1", type=float, default=floor.min_top1)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--text", type=Path, help="a text file to measure on")
    return parser.parse_args()


def _checked_floor(arguments: argparse.Namespace) -> Floor:
    if not 0 <= arguments.max_kl < math.inf:
        raise InvalidRequest("max_kl must be 0 or more", field="max_kl")
    if not 0 <= arguments.min_top1 <= 1:
        raise InvalidRequest("min_top1 is a share, from 0 to 1", field="min_top1")
    for field in ("prompts", "tokens"):
        if getattr(arguments, field) < 1:
            raise InvalidRequest(f"{field} must be at least 1", field=field)
    return Floor(arguments.max_kl, arguments.min_top1)


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    floor = _checked_floor(arguments)
    try:
        schemes = [Scheme.parse(name) for name in arguments.schemes.split(",")]
    except ValueError as error:
        raise InvalidRequest(f"schemes: {error}", field="schemes") from error
    count, tokens = arguments.prompts, arguments.tokens
    folder = Home(arguments.home).calibration
    result = calibrate(
        arguments.source,
        schemes,
        floor,
        progress(1 + count),
        count=count,
        tokens=tokens,
        text=arguments.text,
        partial=PartialLosses(folder),
    )
    try:
        file = calibration.store(folder, result)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", key="home") from error
    fields: dict[str, Any] = msgspec.to_builtins(result)
    return fields | {"file": str(file)}


def main() -> None:
    interpreter.launch_directly()
    print_result(lambda: _run(_arguments()))
