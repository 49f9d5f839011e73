"""Measures one side of the selftest's comparison: ``kvd.worker.selftest.speed SIDE MODEL``.

The socket with the parent is file descriptor 0 (`protocol.speed`). Two processes, one for each
side, load the same model and run the same tasks in turn. The side ``kvd`` is the engine as a worker
runs it; ``mlx-lm`` runs mlx-lm's own loops, unchanged. On CPUs both compute in float32, because MLX
emulates half precision there.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import socket
import sys
import time
from typing import Protocol

import msgspec

from kvd.worker.process import interpreter
from kvd.worker.process.orphan import die_with_parent
from kvd.worker.process.shortage import shortage_of
from kvd.worker.selftest.stages import Stages
from protocol.errors import InsufficientMemory, KvdError
from protocol.speed import Answer, Failed, Loaded, Ran, Task

FIRST_ID = 5
"""Lowest token id of prompts: ids below are often special tokens."""


class Side(Protocol):
    """A model that is loaded, and runs tasks."""

    loaded: Loaded
    vocabulary: int
    """Prompts use token ids below this number."""

    def run(self, prompts: list[list[int]], output: int) -> list[list[float]]:
        """Generate ``output`` tokens for each prompt; return each row's arrival times."""


def result(task: Task, began: float, arrivals: list[list[float]]) -> tuple[int, float]:
    """Return the tokens and seconds of a task from the monotonic times of all tokens."""
    first = max(row[0] for row in arrivals)
    if task.kind == "prefill":
        return task.rows * task.prompt, first - began
    last = min(row[-1] for row in arrivals)
    return sum(first < when <= last for row in arrivals for when in row), last - first


def prompts_of(task: Task, vocabulary: int) -> list[list[int]]:
    source = random.Random(task.seed)  # noqa: S311 - prompts need not be secret
    highest = max(FIRST_ID, vocabulary - 1)
    return [
        [source.randint(min(FIRST_ID, vocabulary - 1), highest) for _ in range(task.prompt)]
        for _ in range(task.rows)
    ]


def process_peak() -> int:
    """Return the most resident bytes that this process had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run(side: Side, task: Task) -> Ran:
    import mlx.core as mx  # noqa: PLC0415 - its import is measured as a part of the load

    prompts = prompts_of(task, side.vocabulary)
    began = time.monotonic()
    tokens, seconds = result(task, began, side.run(prompts, task.output))
    return Ran(
        tokens=tokens,
        seconds=seconds,
        mlx_peak_bytes=int(mx.get_peak_memory()),
        process_peak_bytes=process_peak(),
    )


def open_side(arguments: argparse.Namespace) -> Side:
    stages = Stages()
    if arguments.side == "kvd":
        interpreter.prepare()
        from kvd.worker.selftest.kvd_side import KvdSide  # noqa: PLC0415 - imports MLX

        limits = arguments.budget, arguments.prefill_chunk, arguments.attention_scratch
        return KvdSide(arguments.source, stages, *limits)
    from kvd.worker.selftest.mlx_lm_side import MlxLmSide  # noqa: PLC0415 - imports MLX

    return MlxLmSide(arguments.source, stages)


def main() -> None:
    parser = argparse.ArgumentParser(prog="kvd.worker.selftest.speed")
    parser.add_argument("side", choices=["kvd", "mlx-lm"])
    parser.add_argument("source", help="embedded name, absolute folder or Hub id")
    parser.add_argument("--budget", type=int, default=1 << 40, help="bytes that kvd may hold")
    parser.add_argument("--prefill-chunk", type=int, default=256, help="tokens, for kvd")
    parser.add_argument("--attention-scratch", type=int, default=1 << 28, help="bytes, for kvd")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    sock = socket.socket(fileno=0)
    die_with_parent(sock)
    with sock, sock.makefile("rwb") as stream:

        def send(answer: Answer) -> None:
            stream.write(msgspec.json.encode(answer) + b"\n")
            stream.flush()

        try:
            side = open_side(arguments)
            send(side.loaded)
            for line in stream:
                send(run(side, msgspec.json.decode(line, type=Task)))
        except Exception as error:  # noqa: BLE001 - the parent reports it
            short = isinstance(error, InsufficientMemory) or shortage_of(error) is not None
            text = error.message if isinstance(error, KvdError) else f"{type(error).__name__}: "
            text += "" if isinstance(error, KvdError) else str(error).strip()[:300]
            send(Failed(text, short))


if __name__ == "__main__":
    main()
