"""`kvctl bench`: speed of a model in the running daemon, also beside other servers.

`kvd.bench` has the traces, clients and statistics, which it shares with `bench.serve` of the
checkout. This module chooses the model, checks the memory, and shows the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich_click as click

import kvd
from kvd.bench.prompts import Prompts, words_of
from kvd.bench.report import as_json
from kvd.bench.servers import Fleet, Side
from kvd.bench.session import Outcome, Session
from kvd.bench.traces import TRACES, Trace, build
from kvd.cli import bench_page, bench_sides
from kvd.cli.bench_room import obstacles
from kvd.cli.common import CommonOptions, common_options, option, status_with
from kvd.cli.completion import model_sources
from kvd.cli.console import print_message, stderr_console, stdout_console
from kvd.cli.ranges import Number
from kvd.client import Client
from kvd.config.sources import absolute
from kvd.demo.recall import filler_sentences
from protocol.errors import (
    InsufficientMemory,
    InternalError,
    InvalidRequest,
    ModelError,
    UnknownModel,
)
from protocol.model_source import is_source, short_name, unknown_model
from protocol.types import DaemonStatus

QUICK = ("alone", "steady", "shared", "long")
FULL = ("alone", "steady", "poisson", "shared", "long", "unequal")
_QUICK_S, _FULL_S = 60.0, 1200.0
_FULL_RUNS = 3
_WORDS = 150
"""Words of the prompts: each is tokenized once, by the model's worker."""


class Chosen(NamedTuple):
    """The measured model."""

    name: str
    source: str
    loaded_here: bool
    """Whether this command loads it, and unloads it at the end."""


@click.command()
@click.argument(
    "model",
    required=False,
    metavar="[NAME|PATH|HUB_ID]",
    help="The model (default: the one that is loaded, else demo).",
    shell_complete=model_sources,
)
@click.option(
    "--against",
    metavar="SERVER",
    multiple=True,
    help="mlx-lm, llama=FILE.gguf, or a URL of OpenAI's API, http://HOST:PORT#MODEL; repeatable.",
)
@click.option(
    "--quick/--full",
    default=True,
    help="Four traces in a minute, or six traces, three times, in at most 20 minutes.",
)
@click.option(
    "--trace",
    "traces",
    type=click.Choice(list(TRACES)),
    multiple=True,
    help="Measure only this trace; repeatable.",
)
@option("--seconds", "S", "Time limit without starts and loads.", type=Number(5, 86_400))
@click.option(
    "--make-room",
    is_flag=True,
    help="Let the daemon unload other models or drop their cached prompts for it.",
)
@common_options()
def bench(
    common: CommonOptions,
    model: str | None,
    *,
    against: Sequence[str],
    quick: bool,
    traces: Sequence[str],
    seconds: float | None,
    make_room: bool,
) -> None:
    """Measure a model's speed in the running daemon and in other servers."""
    with common.connected() as client:
        bench_sides.check(against)
        status = client.status() if model is None else status_with(client, absolute(model))
        chosen = choose(status, model)
        built = [build(name, 1, 0) for name in traces or (QUICK if quick else FULL)]
        runnable, notes = _runnable(client, chosen, built, make_room=make_room)
        notes += [*_busy(status), *bench_sides.notes(against, status.host)]
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-bench-")))
            say = stack.enter_context(_progress(quiet=common.json))
            stack.enter_context(_loaded(client, chosen, say))
            prompts = _prompts(client, chosen.name)  # loads a known model that is not loaded
            status = client.status()
            source = next(one.source for one in status.models if one.name == chosen.name)
            sides = bench_sides.make(against, source, folder, runnable, status.host.available)
            ours = Side(
                bench_sides.KVD,
                about="this daemon, over its Unix socket",
                model=chosen.name,
                home=common.home or "",
                socket=common.socket,
                running=True,
                endless=False,
            )

            def session(servers: Any) -> Session:
                return Session(
                    servers,
                    prompts,
                    [trace.name for trace in runnable],
                    runs=1 if quick else _FULL_RUNS,
                    limit_s=seconds or (_QUICK_S if quick else _FULL_S),
                    say=say,
                )

            outcome = _measure([ours, *sides], folder, say, session)
        if not outcome.results:
            raise InternalError(f"nothing was measured: {'; '.join(outcome.notes)}")
        outcome.notes[:0] = notes
        result = _result(client, chosen, sides, outcome)
        common.print_data(result, bench_page.page(result, stdout_console().width))


def choose(status: DaemonStatus, model: str | None) -> Chosen:
    """Return the model to measure; raises `UnknownModel`."""
    ready = {one.name: one.source for one in status.models if one.state == "ready"}
    if model is None and len(ready) > 1:
        raise UnknownModel(f"several models are loaded; name one of {', '.join(ready)}")
    name = model or next(iter(ready), None) or next((one.name for one in status.models), "demo")
    if name in ready:
        return Chosen(name, ready[name], loaded_here=False)
    source = absolute(name)
    for one in status.models:
        if name == one.name:
            raise UnknownModel(f"{name} is {one.state}; wait until it is ready", model=name)
    if name in status.unloaded:
        return Chosen(name, name, loaded_here=False)
    if not is_source(source):
        raise unknown_model(name, ready, status.unloaded)
    return Chosen(f"bench-{short_name(source)}"[:64], source, loaded_here=True)


def _runnable(
    client: Client, chosen: Chosen, traces: Sequence[Trace], *, make_room: bool
) -> tuple[list[Trace], list[str]]:
    """Return the traces that fit, and a note for each other one.

    Raises `InsufficientMemory` if none fits.
    """
    asked = chosen.source if chosen.loaded_here else chosen.name
    try:
        found = obstacles(
            traces,
            lambda rows, context: client.explain(asked, rows=rows, context=context),
            make_room=make_room,
        )
    except ModelError as error:
        unknown = (
            f"kvd cannot forecast its memory ({error.message}), so it may have taken some from"
        )
        return list(traces), [f"{unknown} other models"]
    notes = [f"{name} is left out: {reason}" for name, reason in found.items()]
    runnable = [trace for trace in traces if trace.name not in found]
    if not runnable:
        raise InsufficientMemory(f"no trace can run. {'; '.join(notes)}")
    return runnable, notes


def _busy(status: DaemonStatus) -> list[str]:
    running = sum(one.requests for one in status.models)
    if not running:
        return []
    return [f"{running} other requests ran at the start, so all numbers are lower than alone"]


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is done now, on stderr of a terminal."""
    console = stderr_console()
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as shown:
        yield lambda text: shown.update(text.replace("[", r"\["))


@contextlib.contextmanager
def _loaded(client: Client, chosen: Chosen, say: Callable[[str], None]) -> Iterator[None]:
    """Load the model if this command has to, and unload it at the end."""
    if not chosen.loaded_here:
        yield
        return
    say(f"loading {chosen.source}")
    client.load(chosen.source, alias=chosen.name).result  # noqa: B018 - waits
    try:
        yield
    finally:
        client.unload(chosen.name, force=True)
        print_message("unloaded {} again", chosen.source)


def _prompts(client: Client, model: str) -> Prompts:
    """Return prompts of random words, measured with the model's own tokenizer."""

    def tokens(text: str) -> list[int]:
        return client.tokenize(model, text).tokens

    # What is before every text, such as a token that begins the text, is no part of a word.
    pairs = zip(tokens(" one"), tokens(" two"), strict=False)
    added = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    words = words_of(" ".join(filler_sentences()))
    return Prompts(lambda text: tokens(text)[added:], words[:: len(words) // _WORDS], exact=False)


def _measure(
    sides: list[Side],
    folder: Path,
    say: Callable[[str], None],
    session: Callable[[Any], Session],
) -> Outcome:
    async def run() -> Outcome:
        async with Fleet(sides, folder, say) as servers:
            return await session(servers).run()

    try:
        return asyncio.run(run())
    except RuntimeError as error:  # a server that does not start or answer
        raise InvalidRequest(str(error), field="against") from None


def _result(
    client: Client, chosen: Chosen, sides: Sequence[Side], outcome: Outcome
) -> dict[str, Any]:
    loaded = {one.name: one for one in client.status().models}
    info = loaded[chosen.name].info if chosen.name in loaded else None
    about = {
        "model": chosen.name,
        "source": chosen.source,
        "kv_scheme": info.kv_scheme if info else "",
        "attention_path": info.attention_path if info else "",
        "kvd": kvd.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "servers": {
            bench_sides.KVD: "this daemon, over its Unix socket",
            **{side.name: side.about for side in sides},
        },
        "notes": outcome.notes,
        "stopped": [list(pair) for pair in sorted(outcome.stopped)],
    }
    return as_json(about, outcome.results)
