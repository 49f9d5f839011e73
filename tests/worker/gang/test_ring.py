"""How the ranks wait for each other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvd.daemon.spawn import free_addresses

pytestmark = [pytest.mark.process, pytest.mark.mlx]

RANK = """
import json, os, socket, sys
import mlx.core as mx
from kvd.worker.gang import control, ring, startup

rank, processors = int(sys.argv[1]), int(sys.argv[2])
mx.set_default_device(mx.cpu)
ring.thread_count = lambda: processors

class Peers:
    def exchange(self, name, value):
        return [value, value]

before = ring._sockets()
group = ring.join(startup.Place(rank, sys.argv[3].split(","), [], "ring"), Peers())
opened = ring._sockets() - before
sums = []
for count in (1, 100, 300_000, 3_000_000):  # the longer two are sent in both directions
    x = mx.arange(count) % 100 + rank
    sums.append(mx.array_equal(mx.distributed.all_sum(x), mx.arange(count) % 100 * 2 + 1).item())
print(json.dumps([[*{os.get_blocking(file) for file in opened}], sums]))
sys.stdout.flush()
sys.stdin.read()  # the other rank may not have everything yet
"""


@pytest.mark.parametrize(("processors", "blocking"), [(7, True), (8, False)])
def test_ranks_sleep_while_they_wait_unless_there_are_processors_to_spin_on(processors, blocking):
    addresses = ",".join(free_addresses(2))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(processors), addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        found = [json.loads(process.stdout.readline()) for process in ranks]
    finally:
        for process in ranks:
            process.communicate()
    assert [sums for _, sums in found] == [[True] * 4] * 2
    # A socket that only listened may still be open, and it blocks.
    assert all((False in states) != blocking for states, _ in found)
