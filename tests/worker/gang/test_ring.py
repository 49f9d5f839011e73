"""How the ranks wait for each other, and what they add."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.ports import free_addresses

pytestmark = [pytest.mark.process, pytest.mark.mlx]

RANK = """
import json, os, socket, sys
import mlx.core as mx
from kvd.worker import lean_imports
lean_imports.install()
from kvd.worker.gang import control, ring, startup

rank, processors = int(sys.argv[1]), json.loads(sys.argv[2])
mx.set_default_device(mx.cpu)
ring.thread_count = lambda: processors[rank]

class Peers:
    def exchange(self, name, value):
        least = ring.SPIN_PROCESSORS * len(addresses)
        found = [[value[0], count < least, other] for other, count in enumerate(processors)]
        assert found[rank] == [*value]
        return found

def terms(shape):  # one array of each rank
    ranks = range(len(addresses))
    return [mx.random.normal(shape, key=mx.random.key(rank)) * 10**rank for rank in ranks]

addresses = sys.argv[3].split(",")
before = ring._sockets()
group = ring.join(startup.Place(rank, addresses, [], "ring"), Peers())
opened = ring._sockets() - before
sums = []
# MLX's ring sends the longer ones in both directions, unless they are divided.
for shape in ((), (100,), (7, 1, 900), (40, 1, 900), (2, 400, 900)):
    expected, *others = terms(shape)
    for other in others:
        expected = expected + other
    got = mx.distributed.all_sum(terms(shape)[rank], group=group)
    sums.append(got.shape == shape and mx.array_equal(got, expected).item())
whole = mx.distributed.all_sum(mx.array([2**24 + rank], mx.int32))
sums.append(whole.item() == len(addresses) * 2**24 + sum(range(len(addresses))))
print(json.dumps([[*{os.get_blocking(file) for file in opened}], sums]))
sys.stdout.flush()
sys.stdin.read()  # the other rank may not have everything yet
"""


@pytest.mark.parametrize(
    ("count", "processors", "blocking"),
    [
        (2, [7, 7], True), (2, [8, 8], False), (2, [8, 7], True),
        (3, [11] * 3, True), (3, [12] * 3, False), (3, [12, 12, 11], True),
    ],
)  # fmt: skip
def test_ranks_sleep_while_they_wait_unless_there_are_processors_to_spin_on(
    count, processors, blocking
):
    """Sums are those in the order of the ranks, to the bit, whatever their sizes."""
    addresses = ",".join(free_addresses(count))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), json.dumps(processors), addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        found = [json.loads(process.stdout.readline()) for process in ranks]
    finally:
        for process in ranks:
            process.communicate()
    assert [sums for _, sums in found] == [[True] * 6] * count
    # A socket that only listened may still be open, and it blocks.
    assert all((False in states) != blocking for states, _ in found)
