"""Finds the lowest precision level that a model tolerates: ``kvd.worker.tools.calibrate SOURCE``.

Stores the result in the home (`kvd.worker.serving.calibration`) and prints it as one JSON object.
Progress goes to stderr. The process requests no memory from the daemon.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

import kvd
from kvd.host.home import Home
from kvd.worker.cache.scheme import Scheme
from kvd.worker.serving import calibration, model_files, seam
from kvd.worker.serving.calibration import DENSE, CalibrationResult, MeasuredLevel
from kvd.worker.tools import fidelity
from kvd.worker.tools.fidelity import Floor, LevelAgreement, TooShortError
from kvd.worker.tools.output import Report, print_result, progress
from protocol.errors import ConfigError, InvalidRequest


def calibrate(
    source: str,
    schemes: Sequence[Scheme],
    floor: Floor,
    report: Report,
    *,
    count: int = 4,
    tokens: int = 1024,
) -> CalibrationResult:
    """Load a model, measure one precision level per scheme, and return the result.

    ``schemes``: from the top level down. Measures with ``count`` prompts of about ``tokens`` tokens
    each, cut to the model's context. Raises the `KvdError` of a model that cannot be loaded,
    `UnsupportedModel` for one that has no quantized keys and values, and `InvalidRequest` for
    prompts that are too short.
    """
    seam.install()
    report("weights")
    headers = model_files.inspect(model_files.resolve(source))
    loaded = model_files.load(headers.path)
    context = loaded.context_length
    try:
        prompts = fidelity.texts(loaded.tokenizer, count=count, tokens=min(tokens, context))
    except ValueError as error:  # too few tokens for the prompt's facts
        raise InvalidRequest(f"tokens: {error}", field="tokens") from error
    prompts = [prompt[:context] for prompt in prompts]
    try:
        measured = fidelity.measure(loaded.model, _counted(prompts, report), schemes)
    except TooShortError as error:
        raise InvalidRequest(f"tokens: {error}", field="tokens") from error
    lowest = fidelity.lowest_level(measured, floor)
    return CalibrationResult(
        key=calibration.content_key(headers),
        model=source,
        lowest=(DENSE if lowest is None else schemes[lowest]).name,
        max_kl=floor.max_kl,
        min_top1=floor.min_top1,
        levels=[_level_result(level, floor) for level in measured],
        prompts=len(prompts),
        tokens=max(map(len, prompts)),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=mx.default_device().type.name,
        versions={"kvd": kvd.__version__, "mlx": version("mlx"), "mlx-lm": version("mlx-lm")},
    )


def _counted(prompts: list[list[int]], report: Report) -> Iterator[list[int]]:
    for number, prompt in enumerate(prompts, 1):
        report(f"prompt {number}, {len(prompt)} tokens")
        yield prompt


def _level_result(level: LevelAgreement, floor: Floor) -> MeasuredLevel:
    found = level.agreement
    return MeasuredLevel(
        scheme=level.scheme.name,
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
        prog="kvd.worker.tools.calibrate",
        description="Measures which precision levels a model tolerates.",
    )
    parser.add_argument("source")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--schemes", required=True, help="schemes from the top, comma-separated")
    parser.add_argument("--max-kl", type=float, default=floor.max_kl)
    parser.add_argument("--min-top1", type=float, default=floor.min_top1)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    return parser.parse_args()


def _checked_floor(arguments: argparse.Namespace) -> Floor:
    if not 0 <= arguments.max_kl < math.inf:
        raise InvalidRequest("max_kl must be 0 or more", field="max_kl")
    if not 0 <= arguments.min_top1 <= 1:
        raise InvalidRequest("min_top1 is a share, from 0 to 1", field="min_top1")
    if arguments.prompts < 1:
        raise InvalidRequest("prompts must be at least 1", field="prompts")
    return Floor(arguments.max_kl, arguments.min_top1)


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    floor = _checked_floor(arguments)
    try:
        schemes = [Scheme.parse(name) for name in arguments.schemes.split(",")]
    except ValueError as error:
        raise InvalidRequest(f"schemes: {error}", field="schemes") from error
    count, tokens = arguments.prompts, arguments.tokens
    report = progress(1 + count)
    result = calibrate(arguments.source, schemes, floor, report, count=count, tokens=tokens)
    folder = Home(arguments.home).calibration
    try:
        file = calibration.store(folder, result)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", key="home") from error
    fields: dict[str, Any] = msgspec.to_builtins(result)
    return fields | {"file": str(file)}


def main() -> None:
    print_result(lambda: _run(_arguments()))


if __name__ == "__main__":
    main()
