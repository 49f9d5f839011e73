"""A worker's own memory limit: real processes that take memory without end."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvd.worker.process.memory_limit import MemoryLimit
from protocol.memory_bounds import MIN_TOLERANCE_BYTES, STARTING_BYTES, limit_bytes
from protocol.types import ChatMessage
from protocol.worker import OVER_MEMORY_LIMIT, LoadModel, RowTokens
from tests.worker.process.peer import Process, submit

MIB = 2**20
GIB = 2**30
SLACK = 250 * MIB
"""Growth between two readings."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA and VmHWM are Linux")


def last_held(worker: Process) -> tuple[int, str]:
    """Wait until the worker ends itself; return the MiB that it reported then, and its stderr.

    The peak that wait4 returns would include this process's memory, from before the worker's exec.
    """
    assert worker.wait() == OVER_MEMORY_LIMIT
    errors = worker.errors()
    found = re.search(r"the worker holds (\d+) MiB, above its limit", errors)
    assert found, errors
    return int(found[1]), errors


def peak_bytes(worker: Process) -> int:
    """Return the most bytes that the running worker has held since its exec."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, status
    return int(found[1]) * 1024


@pytest.fixture
def worker():
    made = Process()
    yield made
    made.close()


@pytest.mark.process
def test_a_load_without_a_grant_ends_at_the_starting_limit(worker):
    worker.send(LoadModel(source="fake:load_grow=1"))
    held_mib, errors = last_held(worker)
    assert STARTING_BYTES <= held_mib * MIB < STARTING_BYTES + SLACK
    assert "above its limit of 384 MiB (0 MiB granted): it ends itself" in errors


@pytest.mark.process
def test_a_request_that_takes_memory_without_end_ends_the_worker_above_its_grant(worker):
    worker.load(f"fake:tps=0,grow_on=poison,weights={200 * MIB},pages=16")
    worker.send(submit("a", max_tokens=3))
    worker.wait_for_end("a")
    worker.send(submit("b", prompt="some poison", max_tokens=3))
    held_mib, _ = last_held(worker)
    limit = 201 * MIB + MIN_TOLERANCE_BYTES
    assert limit <= held_mib * MIB < limit + SLACK


BOMBS = (
    "{{ 'x' * 10**10 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
)
ENDLESS = (
    "{% for i in range(90000) %}{% for j in range(90000) %}{% for k in range(90000) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
CHOICE = (
    "{% if messages[0].content == 'product' %}PRODUCT"
    "{% elif messages[0].content == 'endless' %}ENDLESS{% else %}LOOP{% endif %}"
)


@linux
@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_templates_that_take_memory_or_time_without_end_fail_only_their_requests(tmp_path):
    from tests.worker import tiny_model

    folder = tiny_model.save(tmp_path / "tiny")
    template = (
        CHOICE.replace("PRODUCT", BOMBS[0]).replace("LOOP", BOMBS[1]).replace("ENDLESS", ENDLESS)
    )
    (folder / "chat_template.jinja").write_text(template)
    worker = Process("mlx")
    try:
        worker.load(str(folder))
        worker.send(submit("running", max_tokens=400, ignore_eos=True))
        worker.wait_for(lambda: worker.of(RowTokens))
        for kind in ("product", "loop", "endless"):
            message = ChatMessage("user", kind)
            worker.send(submit(kind, prompt=None, messages=[message], max_tokens=5))
        *failed, _ = worker.wait_for_end("product", "loop", "endless", "running")
        peak = peak_bytes(worker)
    finally:
        worker.close()
    for end, took in zip(failed, ("128 MiB", "128 MiB", "5 s of CPU time"), strict=True):
        assert end.error.code == "invalid_request"
        assert f"template takes more than {took} for these messages" in end.error.message
    assert len(worker.tokens("running")) == 400
    assert peak < 600 * MIB


def run(code: str) -> str:
    prepared = (
        "from kvd.worker.process.memory_limit import MemoryLimit\n"
        "limit = MemoryLimit(enabled=True)\n"
        "limit.start()\n"
    )
    command = [sys.executable, "-c", prepared + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@linux
def test_one_allocation_far_above_the_limit_raises_a_memory_error():
    code = """
try:
    held = "x" * (8 * 2**30)
except MemoryError:
    print("refused")
held = "x" * (100 * 2**20)
print("allowed")
"""
    assert run(code) == "refused\nallowed\n"


@linux
def test_a_narrow_block_has_its_own_limit_and_a_grant_widens_the_limit():
    code = """
def outcome(nbytes):
    try:
        held = "x" * nbytes
    except MemoryError:
        return "refused"
    return "allowed"
with limit.narrow(64 * 2**20):
    print(outcome(70 * 2**20), outcome(50 * 2**20))
print(outcome(70 * 2**20))
from pathlib import Path
import resource
before = resource.getrlimit(resource.RLIMIT_DATA)[0]
limit.allow(4 * 2**30)
print((resource.getrlimit(resource.RLIMIT_DATA)[0] - before) / 2**30 > 3.5)
"""
    assert run(code) == "refused allowed\nallowed\nTrue\n"


def test_the_limit_follows_the_grant_with_a_tolerance():
    assert limit_bytes(0) == STARTING_BYTES
    assert limit_bytes(1 * GIB) == GIB + MIN_TOLERANCE_BYTES
    assert limit_bytes(64 * GIB) == 72 * GIB


def test_the_process_ends_above_the_limit_only():
    held, ends = STARTING_BYTES, []
    limit = MemoryLimit(lambda: held, ends.append)
    assert not limit.check()
    held += 1
    limit.allow(GIB)
    assert not limit.check()
    limit.allow(0)
    assert limit.check()
    assert ends == [OVER_MEMORY_LIMIT]


def test_without_being_enabled_nothing_is_limited():
    limit = MemoryLimit(lambda: 1 << 60, lambda _status: pytest.fail("ended"))
    limit.start()
    limit.allow(5)
    with limit.narrow(1):
        held = bytes(MIB)
    assert held
    assert not limit.refuses_allocations


def test_a_block_that_is_never_narrow_is_waited_for() -> None:
    """Its code may allocate in ways that end the process if they fail."""
    one, began, ended = MemoryLimit(), threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        with one.never_narrow():
            began.set()
            ended.wait(10)
            order.append("thread")

    thread = threading.Thread(target=work)
    thread.start()
    began.wait(10)
    threading.Timer(0.05, ended.set).start()
    with one.narrow(1 << 20):
        order.append("narrow")
    thread.join()
    assert order == ["thread", "narrow"]
