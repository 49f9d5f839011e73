"""Two models and a gang on two GPUs under one daemon, and the loss of each rank.

    python -m bench.two_gpus --model FOLDER [--json FILE]

One daemon serves the model three times: on GPU 0, on GPU 1, and divided over both. All get the same
greedy requests at the same time. Then each rank of the gang gets ``SIGKILL`` during four streams.
The report has the memory of each GPU by process, how many streams have the tokens of an
undisturbed run, and the seconds from the signal to each stream's next token. Tokens of a gang and
of one GPU are not compared: their sums round differently.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import machine, publish
from kvd.bench import twin
from kvd.client import AsyncClient
from protocol.errors import NotRunning
from protocol.messages import Tokens

MODELS = {"first": {"device": 0}, "second": {"device": 1}, "both": {"ranks": 2}}
STREAMS, TOKENS, TOKENS_BEFORE_KILL = 4, 96, 8
"""Streams at once, tokens of each, and the tokens that each has at the signal."""
START_S, ANSWER_S = 240.0, 120.0
IN_TRANSIT_S = 0.25
"""Seconds after the signal in which tokens may arrive that were sent before it."""
PROMPT = "The amber falcon waits beside the river until the evening. "


async def stream(client: AsyncClient, model: str, number: int, arrivals: list[float]) -> list[int]:
    """Return the tokens of one request; note the time of each."""
    found: list[int] = []
    completion = await client.generate(
        model, f"{number}. {PROMPT}", max_tokens=TOKENS, temperature=0.0, ignore_eos=True
    )
    async for event in completion:
        if isinstance(event, Tokens):
            arrivals += [time.monotonic()] * len(event.tokens)
            found += event.tokens
    return found


async def streams(
    client: AsyncClient, model: str, killed_rank: int | None = None
) -> dict[str, Any]:
    """Run the streams of one model; ``killed_rank``: the rank that is killed meanwhile."""
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    async with asyncio.timeout(ANSWER_S), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(stream(client, model, number, arrivals[number]))
            for number in range(STREAMS)
        ]
        killed = None
        if killed_rank is not None:
            while min(map(len, arrivals)) < TOKENS_BEFORE_KILL:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            models = {one.name: one for one in (await client.status()).models}
            os.kill(models[model].ranks[killed_rank].pid, signal.SIGKILL)
            killed = time.monotonic()
    tokens = [task.result() for task in tasks]
    later = None if killed is None else [
        min(at - killed for at in some if at > killed + IN_TRANSIT_S) for some in arrivals
    ]  # fmt: skip
    return {"tokens": tokens, "next_token_s": later}


def memory_by_gpu() -> list[dict[str, Any]]:
    """Return the memory that each process has on each GPU."""
    names = query("--query-gpu=uuid,memory.used")
    rows = query("--query-compute-apps=gpu_uuid,pid,used_memory")
    return [
        {
            "gpu": number,
            "used_mib": int(used),
            "processes": [
                {"pid": int(pid), "mib": int(mib)} for gpu, pid, mib in rows if gpu == it
            ],
        }
        for number, (it, used) in enumerate(names)
    ]


def query(what: str) -> list[list[str]]:
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [[part.strip() for part in line.split(",")] for line in text.splitlines() if line]


async def measure(home: Path) -> dict[str, Any]:
    client = AsyncClient(home=str(home))
    async with asyncio.timeout(START_S):
        while True:
            try:
                await client.connect()
                break
            except NotRunning:
                await asyncio.sleep(0.2)
        began = time.monotonic()
        while True:
            models = (await client.status()).models
            if failed := [one for one in models if one.state == "failed"]:
                raise RuntimeError(f"a model failed: {failed[0]}")
            if all(one.state == "ready" for one in models):
                break
            await asyncio.sleep(0.5)
    found: dict[str, Any] = {"ready_s": round(time.monotonic() - began, 1)}
    found["pids"] = {one.name: [rank.pid for rank in one.ranks] or one.worker_pid for one in models}
    found["memory"] = memory_by_gpu()
    await asyncio.gather(
        *(streams(client, name) for name in MODELS)
    )  # first requests compile kernels
    together = await asyncio.gather(*(streams(client, name) for name in MODELS))
    wanted = {name: one["tokens"] for name, one in zip(MODELS, together, strict=True)}
    found["same_tokens_on_both_gpus"] = wanted["first"] == wanted["second"]
    found["streams"] = {name: [len(some) for some in one] for name, one in wanted.items()}
    found["kills"] = []
    for rank in (0, 1):
        one = await streams(client, "both", killed_rank=rank)
        found["kills"].append(
            {
                "rank": rank,
                "streams_with_all_tokens": sum(len(some) == TOKENS for some in one["tokens"]),
                "streams_equal_to_undisturbed": sum(
                    some == other for some, other in zip(one["tokens"], wanted["both"], strict=True)
                ),
                "next_token_s": [round(it, 2) for it in one["next_token_s"]],
            }
        )
    again = await asyncio.gather(*(streams(client, name) for name in MODELS))
    found["equal_after_kills"] = {
        name: one["tokens"] == wanted[name] for name, one in zip(MODELS, again, strict=True)
    }
    await client.close()
    return found


def write_config(home: Path, model: Path) -> None:
    """Let the daemon load the model three times, as in `MODELS`."""
    entries = [
        {"source": str(model), "alias": name, "load": "start", **about}
        for name, about in MODELS.items()
    ]
    lines = [
        "\n".join(["[[models]]", *(f"{key} = {json.dumps(value)}" for key, value in one.items())])
        for one in entries
    ]
    (home / "config.toml").write_text("\n".join([*lines, ""]))


def serve(model: Path, folder: Path) -> dict[str, Any]:
    """Start the daemon, measure, and end it."""
    home = folder / "home"
    home.mkdir(mode=0o700)
    write_config(home, model)
    command = [sys.executable, "-m", "kvd", "serve", "--home", str(home)]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            return asyncio.run(measure(home))
        except BaseException:
            print((folder / "log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            daemon.terminate()
            daemon.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvd-two-gpus-") as folder:
        twin.make(options.model.absolute(), Path(folder, "model"))
        found = serve(Path(folder, "model"), Path(folder))
    publish({"machine": machine(), **found}, options.json)


if __name__ == "__main__":
    main()
