"""Compares gangs with one process over many random requests, models and settings.

::

    python -m tests.worker.gang.campaign --requests 500 [--ranks 2] [--models demo llama] \\
        [--json FILE]

Both serve the same requests, in waves that start at different precision levels. In the gang, memory
is reclaimed by all methods and requests are cancelled in between. Without ``--models``: the
embedded model, unless there are three ranks (it has two heads of keys), and one model with random
weights of each architecture that mlx-lm can divide. Fails if a token differs.

Sums over ranks are rounded in another order than within one process, so a token may differ whose
draw was nearly a tie. It counts as ``rounded`` if one process draws it too once its logit, or that
of the token in its place, is changed by `NUDGE`, up or down. A tie may also be at the limit of
``top_k``: then another token is drawn because this one is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.report import machine, publish
from protocol.kv import KVSpec, schemes_of
from protocol.worker import Submit
from tests.worker.gang.gang import GangProcesses
from tests.worker.gang.models import FAMILIES, NOT_IN_THIRDS, save
from tests.worker.gang.traffic import Answer, Traffic, difference, random_request
from tests.worker.process.peer import Process

WAVE = 25
"""Requests that start at the same precision level."""
LEVELS = (0, 0, 2, 0, 1)
"""These levels, one after another."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"kv": KVSpec(v_bits=4, prefix_every=64)},
    {"kv": KVSpec(max_kv_size=256), "prefill_chunk": 64},
    {"kv": KVSpec(quantized_kv_start=128), "max_rows": 4},
    {"kv": KVSpec(k_bits=16, v_bits=16), "prefill_chunk": 128},
    {"kv": KVSpec(group_size=32, floors={0: "k16v16"})},
)
"""Settings of a load."""


NUDGE = 1e-3
"""Change of the logit of a token that only the gang drew. Logits of both differ by some 1e-5."""
MOST_ROUNDED = 1e-3
"""Part of the compared tokens that may be rounded. One of 21,000 was."""


class Single(Process):
    deadline_s = GangProcesses.deadline_s


def compare(source: str, ranks: int, count: int, seed: int, settings: dict[str, Any]) -> dict:
    """Serve the same requests by one process and by a gang; return what was compared."""
    single, gang = Single("mlx"), GangProcesses(ranks)
    try:
        single.load(source, embeddings="any", **settings)
        info = gang.load(source, ranks=ranks, embeddings="any", **settings)
        levels = len(schemes_of(settings.get("kv", KVSpec())))
        alone, together = Traffic(single), Traffic(gang, random.Random(seed), levels)
        counts: Counter[str] = Counter()
        different, rounded = [], []
        for wave, begin in enumerate(range(0, count, WAVE)):
            numbers = range(seed + begin, seed + min(begin + WAVE, count))
            requests = [random_request(random.Random(number), number) for number in numbers]
            level = min(LEVELS[wave % len(LEVELS)], levels - 1)
            expected, start = alone.run(requests, level), time.monotonic()
            found = together.run(requests, level)
            counts["seconds"] += time.monotonic() - start
            by_rid = {request.rid: request for request in requests}
            for rid, answer in found.items():
                counts.update(counted(answer, level))
                why = difference(expected[rid], answer, level)
                if why and is_rounded(single, by_rid[rid], expected[rid], answer, level):
                    rounded.append(f"{rid} at level {level}: {why}")
                elif why:
                    different.append(f"{rid} at level {level}: {why}")
    finally:
        single.close()
        gang.close()
    counts["seconds"] = round(counts["seconds"], 1)
    lists = {"different": different, "rounded": rounded}
    return {"path": [part.path for part in info.kv], **counts, **lists}


def is_rounded(
    single: Process,
    request: Submit,
    expected: Answer,
    found: Answer,
    level: int,
    nudge: float = NUDGE,
) -> bool:
    """Return whether each choice of ``found`` that differs does so after a draw near a tie."""
    different = [
        (choice, at)
        for choice, tokens in found.tokens.items()
        if (at := first_difference(expected.tokens.get(choice, []), tokens)) is not None
        and at < found.trusted(choice, level)
    ]
    return bool(different) and all(
        any(
            draws(single, request, choice, found.tokens[choice][: at + 1], {token: change}, level)
            for token in (found.tokens[choice][at], expected.tokens[choice][at])
            for change in (nudge, -nudge)
        )
        for choice, at in different
    )


def draws(
    single: Process,
    request: Submit,
    choice: int,
    tokens: list[int],
    changes: dict[int, float],
    level: int,
) -> bool:
    """Return whether a choice begins with ``tokens`` if logits are changed, given by token."""
    bias = dict(request.sampling.logit_bias)
    for token, change in changes.items():
        bias[token] = bias.get(token, 0.0) + change
    nudged = replace(request, sampling=replace(request.sampling, logit_bias=bias))
    (answer,) = Traffic(single).run([nudged], level).values()
    return answer.tokens.get(choice, [])[: len(tokens)] == tokens


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the first place at which both have a token, and another one."""
    pairs = enumerate(zip(expected, found, strict=False))
    return next((at for at, (one, other) in pairs if one != other), None)


def counted(answer: Answer, level: int) -> dict[str, int]:
    return {
        "requests": 1,
        "tokens": sum(map(len, answer.tokens.values())),
        "tokens compared": sum(answer.trusted(choice, level) for choice in answer.tokens),
        "requests of several choices": len(answer.tokens) > 1,
        "requests that stepped down": answer.has_stepped_down(level),
        "requests that started at a lower level": level > 0,
        "preemptions": answer.preemptions,
        "prompts from a checkpoint": answer.reused_tokens > 0,
        "cancelled": answer.is_cancelled,
        "embeddings": bool(answer.vector),
    }


def campaign(names: list[str], ranks: int, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Compare each model with several settings; return the results by model and settings."""
    found = {}
    for number, name in enumerate(names):
        source = name if name == "demo" else str(save(folder / name, name, ranks=ranks))
        chosen = SETTINGS if name == "demo" else (SETTINGS[0], SETTINGS[1 + number % 5])
        for settings in chosen:
            share = -(-count // len(chosen))
            label = ", ".join(f"{key} {_short(value)}" for key, value in settings.items())
            label = f"{name}, {label or 'default'}"
            try:
                result = compare(source, ranks, share, seed + share * len(found), settings)
            except AssertionError as error:  # a process ended: the other models still run
                refused = "unsupported_model" in str(error)
                result = {"refused loads": refused, "different": [] if refused else [str(error)]}
            sys.stderr.write(f"{label}: {len(result['different'])} different\n")
            found[label] = result
    return found


def _short(value: Any) -> str:
    """Return a setting as text; of KV settings, only those that are not the default."""
    if not isinstance(value, KVSpec):
        return str(value)
    return json.dumps(
        {
            key: own
            for key in value.__struct_fields__
            if (own := getattr(value, key)) != getattr(KVSpec(), key)
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--ranks", type=int, default=2, choices=[2, 3])
    parser.add_argument("--requests", type=int, default=500, help="of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    thirds = [name for name in FAMILIES if name not in NOT_IN_THIRDS]
    names = given.models or (["demo", *FAMILIES] if given.ranks == 2 else thirds)
    folder = Path(tempfile.mkdtemp(prefix="kvd-gang-"))
    try:
        found = campaign(names, given.ranks, given.requests, given.seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    total: Counter[str] = Counter()
    for result in found.values():
        total.update(
            {key: value for key, value in result.items() if isinstance(value, int | float)}
        )
    different, rounded = (
        sum(len(result.get(name, ())) for result in found.values())
        for name in ("different", "rounded")
    )
    report = {
        "ranks": given.ranks,
        "seed": given.seed,
        "machine": machine(),
        "models": len(names),
        "total": {**total, "rounded": rounded, "different": different},
        "by model and settings": found,
    }
    publish(report, given.json)
    return 1 if different or rounded > MOST_ROUNDED * total["tokens compared"] else 0


if __name__ == "__main__":
    sys.exit(main())
