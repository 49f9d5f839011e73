"""Compare kvd with other servers on this machine.

    python -m bench.serve [--model demo|FOLDER] [--traces steady long/2 …] [--sides PATTERN …]
                          [--llama LLAMA_SERVER] [--url NAME=http://host:port[#model]]
                          [--runs 3] [--seed 1] [--seconds S] [--quiet [SHARE]]
                          [--json FILE] [--plot FILE]

A *side* is one of the compared servers. All servers run all the time, but only one at a time gets
requests; the CPU time of the idle ones is measured and reported, and so is that of other programs.
The order of the sides rotates from run to run. Medians are over runs, and a ratio is the median of
the runs' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

import kvd
from bench.llama import settings
from bench.serve import float32, goals, greedy, ratios, report, sides
from bench.serve.bars import judge
from bench.serve.comparison import Comparison
from bench.serve.rounds import Round, plan
from kvd import demo
from kvd.bench import traces, twin
from kvd.bench.measure import Results, Unfair
from kvd.bench.prompts import Prompts, words_of
from kvd.bench.report import as_json, rounded
from kvd.bench.servers import Fleet, Server, Side
from kvd.demo.recall import filler_sentences
from kvd.host import blas
from kvd.host.memory import nvidia


async def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Start the servers, measure, stop them; return the results for the JSON file."""
    accelerated = sys.platform == "darwin" or nvidia.first_device() is not None
    source = demo.path() if options.model == "demo" else Path(options.model)
    if not (source / "tokenizer.json").is_file():
        raise RuntimeError(f"{source} has no tokenizer.json; --model needs a model's folder")
    check_context(options.traces, json.loads((source / "config.json").read_text()))
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        folder = Path(name)
        model = folder / "model"
        twin.make(source, model, None if accelerated else float32.convert)
        library = blas.choose("auto")
        every = sides.make(str(model), folder, library, options.url, options.prefix_cache)
        if options.llama:
            every += _llama_sides(options, source, folder)
        chosen = sides.choose(every, options.sides)
        with _cancelled_by_signals():
            async with Fleet(chosen, folder, console.print) as servers:
                comparison = Comparison(
                    servers,
                    _prompts(model),
                    seed=options.seed,
                    timeout_s=options.timeout,
                    console=console,
                    quiet_share=options.quiet,
                )
                about = _about(options, chosen, servers, accelerated=accelerated)
                await comparison.warm_up()
                about["greedy"] = await _check_greedy(servers, console)
                about["left_out"] = await _play(comparison, options, console)
    counted = [one for one in comparison.details if one["counted"]]
    for what, key in (("idle servers", "idle_servers"), ("other programs", "strangers")):
        most = about[f"most_{key}_cpu_share"] = max(one[f"{key}_cpu_share"] for one in counted)
        console.print(f"{what} took at most {most:.1%} of a core", highlight=False)
    about |= _judged(comparison.results, options, console, accelerated=accelerated)
    return {**as_json(about, comparison.results), "details": rounded(comparison.details)}


def _judged(
    results: Results, options: argparse.Namespace, console: Console, *, accelerated: bool
) -> dict[str, Any]:
    """Print and plot the results; return what follows from them."""
    limits = goals.bars(options.traces, accelerated=accelerated, llama=bool(options.llama))
    verdicts = judge(limits, ratios.with_best(results))
    report.tables(results, verdicts, console)
    if options.plot:
        report.plot(results, options.plot)
    return {
        "bars": report.bars_as_json(verdicts),
        "ratios": ratios.as_json(results),
        "best_llama": {trace: ratios.best_llama(found) for trace, found in results.items()},
        "first_runs": ratios.firsts(results),
        "played_again": ratios.again(results),
    }


async def _play(comparison: Comparison, options: argparse.Namespace, console: Console) -> list[str]:
    """Play all rounds for which there is time; return the names of those that are left out."""
    until = time.monotonic() + options.seconds
    waiting: list[Round] = list(plan(options.traces, options.runs))
    while waiting and time.monotonic() < until:
        await comparison.run(waiting.pop(0))
    left_out = [f"{one.title} {one.run + 1}" for one in waiting]
    if left_out:
        console.print(f"left out after {options.seconds:g} s: {', '.join(left_out)}")
    return left_out


def check_context(names: list[str], config: dict[str, Any]) -> None:
    """Raise ValueError for a trace with a request that is longer than the model's context."""
    context = (config.get("text_config") or config).get("max_position_embeddings", math.inf)
    for name in names:
        longest = traces.build(name, 1, 0).longest
        if longest > context:
            raise ValueError(
                f"a request of {name} has {longest} tokens, and the model's context {context};"
                f" --traces {name.partition('/')[0]}/N divides the prompts by N"
            )


def _llama_sides(options: argparse.Namespace, source: Path, folder: Path) -> list[Side]:
    from bench.llama import gguf

    settings.version(options.llama)  # fails if it does not run
    file = folder / f"{source.name}-f16.gguf"
    gguf.write(source, file)
    built = [one.build(options.seed) for one in plan(options.traces, options.runs)]
    return settings.sides(options.llama, file, built)


def _prompts(model: Path) -> Prompts:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return Prompts(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        words_of(" ".join(filler_sentences())),
    )


async def _check_greedy(servers: dict[str, Server], console: Console) -> dict[str, Any]:
    """Compare the texts of llama-servers with kvd's; return how far they agree."""
    others = [name for name in servers if name in settings.SETTINGS]
    reference = next((one for one in (sides.DENSE, sides.QUANTIZED) if one in servers), None)
    if not others or reference is None:
        return {}
    found = await greedy.check(servers, reference, others)
    for name, one in found.items():
        console.print(
            f"{name} continues like {reference}: {sum(one.equal)} of {sum(one.whole)} characters"
        )
    return {name: {"reference": reference, **asdict(one)} for name, one in found.items()}


def _about(
    options: argparse.Namespace,
    chosen: list[Side],
    servers: dict[str, Server],
    *,
    accelerated: bool,
) -> dict[str, Any]:
    library = blas.choose("auto")
    paths = {name: server.driver.path for name, server in servers.items()}
    return {
        "command": shlex.join(["python", "-m", "bench.serve", *sys.argv[1:]]),
        "model": options.model,
        "weights": "as stored" if accelerated else "float32; float16 in llama-server",
        "versions": {"kvd": kvd.__version__}
        | {name: version(name) for name in ("mlx", "mlx-lm")}
        | ({"llama-server": settings.version(options.llama)} if options.llama else {}),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "blas": str(library) if library else None,
        "sides": {side.name: side.about for side in chosen},
        "paths": {name: path for name, path in paths.items() if path},
        "memory": "resident high-water marks (VmHWM) of the processes, reset before every run;"
        " pages of files that several processes of a server share count once",
        "quiet_share": options.quiet,
    }


@contextlib.contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP cancel the task, as Ctrl-C does, so that all servers are stopped."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = (signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1, not {text!r}")
    return int(text)


def _trace(text: str) -> str:
    try:
        traces.build(text, 1, 0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="demo, or a model's folder")
    parser.add_argument(
        "--traces",
        nargs="+",
        metavar="TRACE",
        type=_trace,
        default=list(traces.DEFAULT),
        help=f"{', '.join(traces.TRACES)}; TRACE/N divides its prompts by N; one that is named"
        " again is played again (default: %(default)s)",
    )
    parser.add_argument(
        "--sides", nargs="+", default=[], metavar="PATTERN", help="compare only these servers"
    )
    parser.add_argument(
        "--llama",
        type=Path,
        metavar="LLAMA_SERVER",
        help="compare with this program, in several settings (bench/llama/build.sh)",
    )
    parser.add_argument(
        "--prefix-cache",
        type=_positive,
        metavar="BYTES",
        help="size of kvd's prefix cache (default: a quarter of its budget)",
    )
    parser.add_argument("--runs", type=_positive, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", nargs="+", default=[], help="more servers: NAME=http://host:port")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no run of a trace after that time"
    )
    parser.add_argument(
        "--quiet",
        type=float,
        nargs="?",
        const=0.2,
        metavar="SHARE",
        help="wait until other programs take less than half of this share of a core, and repeat"
        " runs during which they took more than it (default: %(const)s if given); a repeated first"
        " run is not a cold one",
    )
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for a run of a trace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser


def main() -> None:
    """Parse, compare and write."""
    options = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        result = asyncio.run(compare(options, console))
    except (RuntimeError, ValueError, Unfair) as error:
        raise SystemExit(f"error: {error}") from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
