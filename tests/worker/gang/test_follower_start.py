"""How a follower joins the others, and how its load fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvd.worker.gang import follower, records
from protocol.errors import UnsupportedModel
from protocol.worker import LoadModel
from tests.ports import free_addresses
from tests.worker.process.peer import wait_until

pytestmark = pytest.mark.mlx

JOIN = """
import sys
from pathlib import Path
from kvd.worker import lean_imports
lean_imports.install()
from kvd.worker.gang import control, ring, startup
print("joining", flush=True)
place = startup.Place(0, sys.argv[1].split(","), [], "ring")
ring.join(place, control.LeaderPeers([]))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads the table of sockets in /proc")
def test_a_rank_that_is_killed_while_it_joins_leaves_no_file(tmp_path):
    first, second = free_addresses(2)
    process = subprocess.Popen(
        [sys.executable, "-c", JOIN, f"{first},{second}"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout.readline() == "joining\n"
        wait_until(lambda: listens(first))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert [*tmp_path.iterdir()] == []


def listens(address):
    port = int(address.rpartition(":")[2])
    with Path("/proc/net/tcp").open() as table:
        rows = [line.split() for line in table][1:]
    return any(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port for row in rows)


class OnePeer:
    """A leader that sends the first record."""

    rank = 1

    def receive(self):
        load = records.Load(LoadModel(source="demo", ranks=2), "demo", 64, native=False)
        return msgspec.msgpack.encode(load)


@pytest.mark.parametrize(
    "error", [UnsupportedModel("no"), ValueError("a tensor is missing"), MemoryError("no memory")]
)
def test_a_follower_whose_load_fails_waits_for_the_leaders_report(monkeypatch, error):
    waited = []

    def fail(*_):
        raise error

    monkeypatch.setattr(follower, "load_part", fail)
    monkeypatch.setattr(follower.time, "sleep", waited.append)
    with pytest.raises(type(error)):
        follower.run(OnePeer(), None)
    assert waited == [follower.LEADER_SECONDS]
