"""Compares a gang with one process over many random requests, and kills ranks at random moments.

::

    python -m tests.worker.gang.campaign --requests 500 --kills 50 [--ranks 2] [--source demo]

Prints one line of JSON. It fails if a token differs, or if a process remains.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time

from protocol.gang import PEER_LOST
from protocol.tools import Grammar
from protocol.types import Sampling
from protocol.worker import LoadModel, Reclaim, Reclaimed, RowPreempted, RowTokens, Submit
from tests.worker.gang.gang import GangProcesses, tokens_of
from tests.worker.process.peer import Process, alive

AT_ONCE = 12
METHODS = ("spare", "prefixes", "preempt")
"""Methods of reclaims that change no token."""


class Single(Process):
    deadline_s = GangProcesses.deadline_s


def random_request(chance: random.Random, number: int) -> Submit:
    """Return a request with random settings; many share the beginning of their prompts."""
    shared = [7 + 3 * place % 900 for place in range(chance.choice([0, 64, 256, 320]))]
    own = [chance.randrange(5, 1000) for _ in range(chance.choice([1, 3, 40, 130]))]
    sampling = Sampling(
        temperature=chance.choice([0.0, 0.7, 1.0]),
        top_p=chance.choice([1.0, 0.9]),
        top_k=chance.choice([0, 20]),
        repetition_penalty=chance.choice([1.0, 1.2]),
        seed=number,
    )
    grammar = Grammar("regex", "[a-d]{2,12}") if chance.random() < 0.1 else None
    return Submit(
        rid=f"r{number}",
        tokens=shared + own,
        sampling=sampling,
        max_tokens=chance.choice([1, 2, 8, 20, 70]),
        n=chance.choice([1, 1, 1, 2, 3]),
        ignore_eos=chance.random() < 0.8,
        grammar=grammar,
        priority=chance.choice([0, 0, 1]),
        logprobs=chance.choice([None, None, 0, 2]),
        prompt_logprobs=0 if chance.random() < 0.1 else None,
    )


def serve(worker, requests: list[Submit], chance: random.Random, *, disturbed: bool) -> dict:
    """Return the tokens and the end of each request; ``disturbed``: reclaim memory in between."""
    found, waiting = {}, list(reversed(requests))
    running: set[str] = set()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            request = waiting.pop()
            running.add(request.rid)
            worker.send(request)
        if disturbed and chance.random() < 0.3:
            before, method = len(worker.of(Reclaimed)), chance.choice(METHODS)
            worker.send(Reclaim(seq=9, method=method, wanted_bytes=1 << chance.randrange(20, 31)))
            worker.wait_for(lambda before=before: len(worker.of(Reclaimed)) > before)
        worker.wait_for(lambda: {end.rid for end in worker.ends()} & running)
        for end in worker.ends():
            if end.rid in running:
                running.discard(end.rid)
                reason = getattr(end, "reason", None) or end.error.code
                found[end.rid] = (tokens_of(worker, end.rid), reason)
        worker._ends.clear()
    return found


def compare(source: str, ranks: int, count: int, seed: int) -> dict:
    """Serve the same requests by one process and by a gang; return what was compared."""
    requests = [random_request(random.Random(seed + number), number) for number in range(count)]
    single, gang = Single("mlx"), GangProcesses(ranks)
    try:
        single.load(source)
        gang.load(source, ranks=ranks)
        expected = serve(single, requests, random.Random(seed), disturbed=False)
        start = time.monotonic()
        found = serve(gang, requests, random.Random(seed), disturbed=True)
        seconds = time.monotonic() - start
        different = [rid for rid, answer in expected.items() if found[rid] != answer]
        counts = {"reclaims": len(gang.of(Reclaimed)), "preemptions": len(gang.of(RowPreempted))}
    finally:
        single.close()
        gang.close()
    tokens = sum(len(one) for answer, _ in found.values() for one in answer.values())
    return {
        "requests": count,
        "tokens": tokens,
        "different": different,
        "seconds": round(seconds, 1),
        **counts,
    }


def kill(source: str, ranks: int, count: int, seed: int) -> dict:
    """Kill or stop a random rank at random moments; return how long the others lived."""
    chance, lived = random.Random(seed), []
    for number in range(count):
        gang = GangProcesses(ranks)
        try:
            gang.send(LoadModel(source=source, ranks=ranks))
            for index in range(4):
                gang.send(random_request(random.Random(seed + number), index))
            wait_for_moment(gang, chance)
            rank = chance.randrange(ranks)
            if chance.random() < 0.5:
                gang.signal(rank, signal.SIGSTOP)
            gang.signal(rank, signal.SIGKILL)
            start = time.monotonic()
            statuses = gang.wait()
            lived.append(time.monotonic() - start)
            assert statuses[rank] == -signal.SIGKILL, statuses
            assert {one for at, one in enumerate(statuses) if at != rank} <= {0, PEER_LOST}
            assert not any(alive(process.pid) for process in gang.processes)
        finally:
            gang.close()
    lived.sort()
    return {
        "kills": count,
        "others ended within s": {
            "median": round(lived[len(lived) // 2], 3),
            "most": round(lived[-1], 3),
        },
    }


def wait_for_moment(gang: GangProcesses, chance: random.Random) -> None:
    """Read reports until a random number of them, or tokens, has arrived."""
    if chance.random() < 0.5:
        reports = chance.randrange(2, 8)
        gang.wait_for(lambda: len(gang.reports) >= reports)
    else:
        steps = chance.randrange(1, 30)
        gang.wait_for(lambda: len(gang.of(RowTokens)) >= steps or len(gang.ends()) == 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="demo", help="model to load")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    result = {"source": given.source, "ranks": given.ranks, "seed": given.seed}
    if given.requests:
        result |= compare(given.source, given.ranks, given.requests, given.seed)
    if given.kills:
        result |= kill(given.source, given.ranks, given.kills, given.seed)
    print(json.dumps(result))  # noqa: T201 - the result
    assert not result.get("different"), "tokens differ from those of one process"


if __name__ == "__main__":
    main()
