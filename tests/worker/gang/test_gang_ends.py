"""No rank of a gang outlives another one, and none computes something else than the leader."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from protocol.gang import DIVERGED, PEER_LOST
from protocol.types import Sampling
from protocol.worker import LoadFailed, LoadModel, Progress, RowTokens, Started
from tests.worker.gang.gang import GangProcesses
from tests.worker.gang.models import save
from tests.worker.process.peer import submit

pytestmark = [pytest.mark.process, pytest.mark.mlx]
LONG = submit(
    "a", prompt=None, tokens=list(range(5, 205)), max_tokens=400, ignore_eos=True,
    sampling=Sampling(temperature=0.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


@pytest.fixture
def start():
    made = []

    def gang(*arguments, **options):
        made.append(GangProcesses(*arguments, **options))
        return made[-1]

    yield gang
    for one in made:
        one.close()


def wait_for_stage(gang, stage):
    gang.wait_for(lambda: stage in [report.stage for report in gang.of(Progress)])


STAGES = {
    "loading": lambda gang: wait_for_stage(gang, "weights"),
    "checking": lambda gang: wait_for_stage(gang, "checking attention"),
    "running": lambda gang: gang.wait_for(lambda: len(gang.of(RowTokens)) > 3),
}


def reach(gang, stage, source="demo"):
    gang.send(LoadModel(source=source, ranks=2), LONG)
    STAGES[stage](gang)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_ends_the_other(start, tiny, rank, stage):
    gang = start()
    reach(gang, stage, tiny if stage == "running" else "demo")
    gang.signal(rank, signal.SIGKILL)
    expected = [PEER_LOST, PEER_LOST]
    expected[rank] = -signal.SIGKILL
    assert gang.wait() == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_can_be_killed_while_the_other_waits_in_a_collective(start, tiny, rank):
    gang = start()
    reach(gang, "running", tiny)
    gang.signal(rank, signal.SIGSTOP)
    gang.signal(rank, signal.SIGKILL)
    expected = [PEER_LOST, PEER_LOST]
    expected[rank] = -signal.SIGKILL
    assert gang.wait() == expected


def test_the_end_of_the_daemon_ends_all_ranks(start, tiny):
    gang = start()
    reach(gang, "running", tiny)
    for link in gang.links:
        link.close()
    assert set(gang.wait()) <= {0, PEER_LOST}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_of_the_fake_engine_end_alike(start, rank):
    gang = start(3, "fake")
    gang.load("fake:tps=0", ranks=3)
    gang.signal(rank, signal.SIGKILL)
    expected = [PEER_LOST] * 3
    expected[rank] = -signal.SIGKILL
    assert gang.wait() == expected


SWAPPED_PAGES = """
from kvd.worker.gang import follower, records
apply, seen = follower.Follower.apply, []

def other(self, numbered):
    if isinstance(numbered.record, records.Decode):
        seen.append(numbered)
        if len(seen) == 4:
            (store,) = self._cache.stores
            store.rows[0].pages.reverse()
            store.tables.invalidate()
    apply(self, numbered)

follower.Follower.apply = other
"""


def test_another_order_of_pages_ends_the_gang_before_a_token_is_wrong(start, tiny):
    gang = start(programs={1: SWAPPED_PAGES})
    gang.send(LoadModel(source=tiny, ranks=2), LONG)
    gang.read_all()
    assert gang.wait() == [PEER_LOST, DIVERGED]
    assert len(gang.tokens("a")) <= 3
    assert "places in the cache differ from the leader's" in gang.errors()[1]


FAILED_STEP = """
from kvd.worker.gang import follower
from kvd.worker.process.shortage import Shortage

def short(self, record):
    raise Shortage("[malloc] Unable to allocate 4096 bytes.")

follower.Follower._decode = short
"""


def test_a_shortage_on_one_rank_ends_the_gang(start, tiny):
    gang = start(programs={1: FAILED_STEP})
    gang.send(LoadModel(source=tiny, ranks=2), LONG)
    gang.read_all()
    assert gang.wait() == [PEER_LOST, 1]
    assert "Unable to allocate 4096 bytes" in gang.errors()[1]


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "why"),
    [
        ("qwen3", {}, 3, "n_heads is 4, which is no multiple of 3"),
        ("qwen3", {"intermediate_size": 97}, 2, "cannot be divided among 2 ranks"),
        ("step3p5", {"num_attention_groups": 1}, 2, "num_kv_heads is 1, which is no multiple of 2"),
        ("gemma", {}, 2, "mlx-lm has no tensor parallel form of this architecture"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(start, tmp_path, name, changes, ranks, why):
    gang = start(ranks)
    gang.send(LoadModel(source=str(save(tmp_path / name, name, **changes)), ranks=ranks))
    (failed,) = gang.wait_for(lambda: gang.of(LoadFailed))
    assert failed.error.code == "unsupported_model"
    assert why in failed.error.message
    assert gang.wait() == [0, *[PEER_LOST] * (ranks - 1)]


CUDA_DEVICE = """
import mlx.core as mx
mx.cuda.is_available = lambda: True
"""


def test_a_rank_without_a_cuda_device_ends_the_gang_at_once(start):
    gang = start(programs={0: CUDA_DEVICE})
    gang.read_all()
    statuses = gang.wait()
    assert set(statuses) <= {1, PEER_LOST}
    assert "connect by nccl, ring" in gang.errors()[statuses.index(1)]


ONE_CUDA_DEVICE = (
    CUDA_DEVICE
    + """
mx.device_info = lambda: {"uuid": "GPU-1"}
"""
)


def test_ranks_that_share_a_cuda_device_end_at_once(start):
    gang = start(programs={0: ONE_CUDA_DEVICE, 1: ONE_CUDA_DEVICE})
    gang.read_all()
    statuses = gang.wait()
    assert set(statuses) <= {1, PEER_LOST}
    assert "(devices: 1)" in gang.errors()[statuses.index(1)]


NEVER_JOINS = """
import threading
import mlx.core as mx
mx.distributed.init = lambda **_: threading.Event().wait()
"""


def test_a_stranger_in_place_of_a_rank_ends_the_start(start):
    """The daemon then starts the ranks again, with other ports (tests/process/test_gangs.py)."""
    gang = start(programs={1: NEVER_JOINS})
    leader, follower = (place(address) for address in gang.addresses)
    with socket.create_server(follower) as server, connected(leader) as left:
        right, _ = server.accept()
        with right:
            for one in (left, right):
                one.sendall(bytes(1 << 12))
            assert gang.wait() == [1, PEER_LOST]
    assert "another program connected to this rank's port" in gang.errors()[0]


def place(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


def connected(address):
    """Return a connection to a rank once it listens."""
    end = time.monotonic() + GangProcesses.deadline_s
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            assert time.monotonic() < end, "no rank listens"
            time.sleep(0.01)


def test_no_port_is_open_once_the_ranks_have_joined(start):
    gang = start()
    gang.wait_for(lambda: gang.of(Started))
    for address in gang.addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place(address))


def test_every_rank_reports_its_start(start):
    gang = start(2)
    gang.wait_for(lambda: gang.of(Started))
    assert gang.of(Started)[0].pid == gang.processes[0].pid
