"""Compare one model over several ranks in kvd with `mlx_lm.server` under `mlx.launch`.

    python -m bench.gang [--model demo|FOLDER] [--ranks 2] [--rounds 3] [--json FILE]
    python -m bench.gang --shape qwen3-8b --prompt 16384 --scratch /dev/shm --json FILE
    python -m bench.gang --shape qwen3-32b --only "kvd, 2 ranks" --scratch /dev/shm --json FILE

All servers run at the same time, and rounds of requests alternate between them. So they share the
machine, and other programs affect all of them. With ``--prompt``, each round also has one prompt of
about this many tokens. Then nothing is asked for some seconds, and the CPU time of each process is
read. The second and third command are for two GPUs: the ranks are connected by NCCL there, and the
bars compare kvd over several ranks with kvd over one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import ClientError

from bench.bars import Bar
from bench.gpu.shapes import SHAPES
from kvd import demo
from kvd.bench import processes, twin
from kvd.bench.drivers import ALIAS
from kvd.bench.measure import Stream
from kvd.bench.servers import Fleet, Server, Side, kvd_side, mlx_lm_side
from kvd.daemon.spawn import free_addresses
from kvd.host import blas
from kvd.host.memory import nvidia

LEAST_DECODE, MOST_PREFILL = 0.9, 0.65
"""Bars for two GPUs: tokens per second, and time of a long prompt, relative to one GPU."""
PROMPT = "The amber falcon waits beside the river until the evening. "
PROMPT_TOKENS = 12
"""Tokens of this text with the embedded model's tokenizer, about."""
IDLE_S = 15.0


def sides(model: str, ranks: int, folder: Path) -> list[Side]:
    """Return both servers with one rank and with ``ranks``."""
    homes = {count: folder / f"home{count}" for count in (1, ranks)}
    gang = homes[ranks]
    gang.mkdir(mode=0o700)
    entry = {"source": model, "alias": ALIAS, "load": "start", "ranks": ranks}
    lines = [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    (gang / "config.toml").write_text("\n".join(["[[models]]", *lines, ""]))
    alone = mlx_lm_side("mlx-lm", model, blas=blas.choose("auto"))
    return [
        kvd_side("kvd", "k8v8", model, homes[1]),
        kvd_side(f"kvd, {ranks} ranks", "k8v8", model, gang),
        alone,
        launched(mlx_lm_side(f"mlx-lm, {ranks} ranks", model, blas=blas.choose("auto")), ranks),
    ]


def launched(side: Side, ranks: int) -> Side:
    """Return an `mlx_lm.server` that `mlx.launch` starts over several ranks."""
    backend = "nccl" if nvidia.has_cuda_build() else "ring"
    programs = Path(sys.executable).parent
    port = free_addresses(1)[0].rpartition(":")[2]
    command = [str(programs / "mlx.launch"), "-n", str(ranks), "--backend", backend]
    command += ["--starting-port", port] if backend == "ring" else []
    for name, value in side.environment.items():
        command += ["--env", f"{name}={value}"]
    command += ["--", str(programs / "mlx_lm.server"), *side.command[4:]]
    return replace(side, command=tuple(command), environment={})


async def ask(server: Server, streams: int, tokens: int) -> dict[str, float]:
    """Run requests at once; return their tokens per second, and CPU seconds per 1000 tokens."""
    before = sum(one.cpu_s for one in processes.read(server.pids()))
    found = [Stream() for _ in range(streams)]
    start = time.perf_counter()
    async with asyncio.timeout(300):
        await asyncio.gather(
            *(
                server.driver.ask(f"{number}. {PROMPT}", tokens, stream)
                for number, stream in enumerate(found)
            )
        )
    seconds = time.perf_counter() - start
    used = sum(one.cpu_s for one in processes.read(server.pids())) - before
    count = sum(stream.output_tokens for stream in found)
    if count != streams * tokens:
        raise RuntimeError(f"{server.side.name} made {count} tokens, not {streams * tokens}")
    return {"tokens/s": count / seconds, "CPU s per 1000 tokens": 1000 * used / count}


async def prefill(server: Server, number: int, tokens: int) -> dict[str, float]:
    """Return the seconds until the first token after a new prompt of about ``tokens`` tokens."""
    stream = Stream()
    text = f"{number}. " + PROMPT * (tokens // PROMPT_TOKENS)
    start = time.perf_counter()
    async with asyncio.timeout(600):
        await server.driver.ask(text, 1, stream)
    return {"prefill s": time.perf_counter() - start, "prompt tokens": stream.prompt_tokens}


def bars(servers: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Return the bars of kvd over two ranks relative to one; none unless both were measured."""
    one, gang = servers.get("kvd"), servers.get(f"kvd, {ranks} ranks")
    if one is None or gang is None or ranks != 2:
        return []
    decode = gang["tokens/s"] / one["tokens/s"]
    found = [Bar("decode relative to one rank", decode, LEAST_DECODE, at_least=True)]
    if "prefill s" in one:
        share = gang["prefill s"] / one["prefill s"]
        found.append(Bar("prefill relative to one rank", share, MOST_PREFILL))
    return [bar.as_dict() for bar in found]


async def idle(servers: dict[str, Server]) -> dict[str, list[float]]:
    """Return the share of a core that each process of each server uses without requests."""
    await asyncio.sleep(2)  # the last requests have left their batches
    pids = {name: server.pids() for name, server in servers.items()}
    before = {one.pid: one.cpu_s for own in pids.values() for one in processes.read(own)}
    start = time.perf_counter()
    await asyncio.sleep(IDLE_S)
    seconds = time.perf_counter() - start
    return {
        name: [
            round((one.cpu_s - before[one.pid]) / seconds, 4)
            for one in processes.read(own)
            if one.pid in before
        ]
        for name, own in pids.items()
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start all servers, alternate between them, and return medians over the rounds.

    Another server than kvd's that fails is left out from then on; its entry has the error.
    """
    found: dict[str, list[dict[str, float]]] = {}
    failed: dict[str, Any] = {}
    chosen = sides(str(folder / "model"), options.ranks, folder)
    chosen = [side for side in chosen if options.only is None or side.name in options.only]
    async with Fleet(chosen, folder, lambda line: print(line, flush=True)) as servers:
        for number in range(options.rounds + 1):
            for name, server in list(servers.items()):
                try:
                    one = await play(server, number, options)
                except (RuntimeError, TimeoutError, ClientError) as error:
                    if name.startswith("kvd"):
                        raise
                    failed[name] = {"failed": str(error) or repr(error)}
                    found.pop(name, None)
                    del servers[name]
                    print(f"{name} failed and is left out: {error}", flush=True)
                    continue
                print(f"round {number}, {name}: {one['tokens/s']:.1f} tokens/s", flush=True)
                if number:  # the first one compiles, and fills caches
                    found.setdefault(name, []).append(one)
        shares = await idle(servers)
    return failed | {
        name: {
            **{key: round(statistics.median(one[key] for one in each), 2) for key in each[0]},
            "rounds, tokens/s": [round(one["tokens/s"], 1) for one in each],
            "rounds, prefill s": [round(one["prefill s"], 3) for one in each if "prefill s" in one],
            "idle, cores by process": shares[name],
        }
        for name, each in found.items()
    }


async def play(server: Server, number: int, options: argparse.Namespace) -> dict[str, float]:
    """Return what one server measured in a round."""
    one = await ask(server, options.streams, options.tokens)
    if options.prompt:
        one |= await prefill(server, number, options.prompt)
    return one


def write_in_process(shape: str, folder: Path) -> None:
    """Write random weights in a process of its own, which gives its device memory back."""
    script = (
        "import sys, pathlib, mlx.core as mx; from bench.gpu import shapes;"
        " shapes.write(sys.argv[1], mx.bfloat16, pathlib.Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", script, shape, str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shape", choices=SHAPES, help="random weights in place of a model")
    parser.add_argument(
        "--only", nargs="+", help="names of the servers, such as 'kvd, 2 ranks'; default: all"
    )
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a long prompt")
    parser.add_argument("--scratch", type=Path, help="where weights are written")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=options.scratch))
    source = demo.path() if options.model == "demo" else Path(options.model).absolute()
    try:
        if options.shape:
            source = folder / "weights"
            write_in_process(options.shape, source)
        twin.make(source, folder / "model")
        result = asyncio.run(measure(options, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    given = {key: value for key, value in vars(options).items() if key not in {"json", "scratch"}}
    report = {**given, "servers": result, "bars": bars(result, options.ranks)}
    text = json.dumps(report, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
