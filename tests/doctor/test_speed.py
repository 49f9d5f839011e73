"""The comparison with mlx-lm: sizes, turns, ratios, and the cases that are refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvd import demo
from kvd.doctor import room, speed
from kvd.doctor.finding import Finding
from kvd.doctor.measurements import Cell, Samples, Speed
from kvd.doctor.scene import Scene
from kvd.doctor.side_process import opened
from kvd.doctor.speed import SIZES, Limits, Measured, Model, compare, fitted
from kvd.host.home import Home
from protocol.errors import InsufficientMemory
from protocol.types import DaemonStatus, HostMemory
from tests.process.helpers import alive, wait_for

GIB = 2**30
FAKE = "tests.doctor.fake_side"
LIMITS = Limits(
    (
        Cell(kind="prefill", rows=1, prompt=256, output=1),
        Cell(kind="decode", rows=8, prompt=256, output=8),
        Cell(kind="decode", rows=1, prompt=1024, output=8),
    ),
    rounds=3,
    measure_s=60.0,
    task_s=20.0,
)


def scene(home: Home, *, available: int = 8 * GIB, status: DaemonStatus | None = None) -> Scene:
    found = Scene(home)
    vars(found)["engine"] = {"device": "cpu"}
    vars(found)["host"] = HostMemory(total=16 * GIB, available=available)
    if status is not None:
        vars(found)["status"] = status
    return found


def status(budget: int) -> DaemonStatus:
    return DaemonStatus(
        version="0", pid=1, uptime_s=1.0, home="", state="serving", budget_bytes=budget,
        granted_bytes=0, footprint_bytes=0, models=[],
        host=HostMemory(total=16 * GIB, available=8 * GIB),
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each side writes its tasks there."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("FAKE_SIDE_LOG", str(path))
    return path


def compared(
    where: Scene, manner: str = "well", limits: Limits = LIMITS
) -> tuple[Speed | None, dict[str, Finding]]:
    """Compare two fake sides that behave in a manner; return the numbers and the findings."""
    measured, model = Measured(), Model(f"/models/{manner}", demo.path())
    steps = list(compare(where, model, limits, measured, module=FAKE))
    found = [step for step in steps if isinstance(step, Finding)]
    return measured.speed, {one.name: one for one in found}


def test_ratios_are_those_of_medians() -> None:
    cell = Cell.of(SIZES[0], [30.0, 10.0, 20.0], [5.0, 10.0, 4.0])
    assert cell.kvd == Samples([30.0, 10.0, 20.0], 20.0, 10.0, 30.0)
    assert cell.ratio == 20.0 / 5.0
    assert (cell.ratio_low, cell.ratio_high) == (1.0, 6.0)


@pytest.mark.parametrize(
    ("prompt", "output", "context", "expected"),
    [
        (256, 128, 4096, 256), (256, 128, 256, 128), (256, 1, 256, 255), (256, 128, 144, 16),
        (256, 128, 143, None), (256, 128, 100, None), (2048, 128, 2048, None),
        (2048, 128, 2176, 2048),
    ],
)  # fmt: skip
def test_prompts_fit_the_context(
    prompt: int, output: int, context: int, expected: int | None
) -> None:
    size = fitted(Cell(kind="decode", rows=1, prompt=prompt, output=output), context)
    assert (None if size is None else size.prompt) == expected


@pytest.mark.process
def test_both_sides_run_the_same_tasks_in_turn(home: Home, log: Path) -> None:
    found, findings = compared(scene(home))
    assert found is not None
    assert [cell.ratio for cell in found.cells] == pytest.approx([2.0] * 3)
    first = found.cells[0].kvd
    assert first is not None
    assert first.tok_s == pytest.approx([100 / 0.2, 100 / 0.3, 100 / 0.4])  # not the first round
    lines = log.read_text().splitlines()
    sides = [line.partition(" ")[0] for line in lines[:8]]
    assert sides == ["mlx-lm", "kvd", "kvd", "mlx-lm", "mlx-lm", "kvd", "kvd", "mlx-lm"]
    by_side = {
        name: sorted(line.partition(" ")[2] for line in lines if line.startswith(name))
        for name in ("kvd", "mlx-lm")
    }
    assert by_side["kvd"] == by_side["mlx-lm"]
    assert (found.model, found.beside_daemon) == ("a folder", False)
    assert (found.kvd.mlx_peak_bytes, found.mlx_lm.process_peak_bytes) == (7, 9)
    assert found.kvd.load_s >= found.kvd.load["python"] > 0

    reasons = {name: (one.verdict, one.observed) for name, one in findings.items()}
    assert reasons["whole layers"] == ("skip", "not used: other parts")
    assert reasons["compiled steps"] == ("warn", "not used: ValueError: no")
    assert reasons["fused attention"] == ("warn", "not used: off by 0.3")
    assert reasons["packed prefill"] == ("ok", "used")


@pytest.mark.process
def test_sizes_beyond_time_and_context_are_skipped_with_the_reason(home: Home, log: Path) -> None:
    sizes = (*LIMITS.sizes, Cell(kind="decode", rows=1, prompt=5000, output=8))
    found, findings = compared(scene(home), limits=Limits(sizes, 1, measure_s=0.0, task_s=20.0))
    assert found is not None
    assert found.cells[0].ratio is not None  # nothing predicts its time yet
    assert "s are left" in found.cells[1].skipped
    assert found.cells[3].skipped == "the model's context has 4096 tokens"
    assert findings[found.cells[3].name].verdict == "skip"


@pytest.mark.process
def test_a_task_that_takes_too_long_ends_the_measurement(home: Home, log: Path) -> None:
    found, findings = compared(
        scene(home), "hangs", Limits(LIMITS.sizes, LIMITS.rounds, LIMITS.measure_s, task_s=0.3)
    )
    assert found is not None
    assert [cell.skipped for cell in found.cells] == ["", *["mlx-lm took more than 0.3 s"] * 2]
    assert not [one for one in findings.values() if one.verdict == "fail"]


@pytest.mark.process
def test_a_side_that_dies_or_lacks_memory_is_reported(home: Home, log: Path) -> None:
    found, findings = compared(scene(home), "dies")
    assert found is None
    assert findings["speed"].verdict == "fail"
    assert "its process ended: SIGABRT; Fatal Python error: Aborted" in findings["speed"].observed

    found, findings = compared(scene(home), "ends")  # between two tasks
    assert found is None
    assert "its process ended: exit status 3" in findings["speed"].observed

    found, findings = compared(scene(home), "short")
    assert found is None
    assert findings["speed"].verdict == "warn"
    assert findings["speed"].observed == "mlx-lm: no memory left"
    assert "--model" in (findings["speed"].advice or "")


def test_without_memory_no_process_is_started(
    home: Home, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "opened", lambda *_, **__: pytest.fail("a side was started"))
    found, findings = compared(scene(home, available=GIB // 4))
    assert found is None
    assert "side by side, and 256 MiB are free" in findings["speed"].observed


def test_a_running_daemon_keeps_its_budget(home: Home) -> None:
    beside = scene(home, status=status(6 * GIB))
    assert room.available(beside) == 2 * GIB
    with pytest.raises(InsufficientMemory, match="kvctl shutdown"):
        room.find(scene(home, status=status(8 * GIB)), demo.path(), 8, 2176)
    assert room.find(beside, demo.path(), 8, 2176).kvd > GIB // 2


@pytest.mark.process
def test_a_running_daemon_is_mentioned(home: Home, log: Path) -> None:
    found, findings = compared(scene(home, status=status(GIB)))
    assert found is not None
    assert found.beside_daemon
    assert findings["machine"].verdict == "warn"
    assert "kvctl shutdown" in (findings["machine"].advice or "")


@pytest.mark.process
def test_ctrl_c_ends_the_sides(log: Path) -> None:
    side = opened("kvd", "/x", module=FAKE)
    pid = side.__enter__()._process.pid
    assert alive(pid)
    side.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not alive(pid)


_PARENT = """
import sys
from kvd.doctor.side_process import opened
with opened("kvd", "demo") as side:
    print(side._process.pid, flush=True)
    side.load(60.0)
    print("loaded", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.process
def test_a_side_does_not_outlive_a_killed_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == b"loaded\n"
        parent.send_signal(signal.SIGKILL)
    wait_for("the end of the side", lambda: not alive(pid))


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.process
def test_the_embedded_model_is_measured_on_both_sides(home: Home) -> None:
    """With the real engine and mlx-lm's own loops, in small sizes."""
    sizes = (
        Cell(kind="prefill", rows=2, prompt=70, output=1),
        Cell(kind="decode", rows=1, prompt=70, output=6),
        Cell(kind="decode", rows=3, prompt=70, output=6),
    )
    measured = Measured()
    where = Scene(home)
    vars(where)["host"] = replace(where.host, available=8 * GIB)
    limits = Limits(sizes, rounds=1, measure_s=120.0, task_s=60.0)
    steps = list(compare(where, Model("demo", demo.path()), limits, measured))
    failed = [one for one in steps if isinstance(one, Finding) and one.verdict == "fail"]
    assert not failed
    found = measured.speed
    assert found is not None
    assert all(cell.ratio for cell in found.cells)
    assert found.model == "demo"
    assert found.served.attention_path
    assert {path.name for path in found.served.paths} >= {"compiled steps", "packed prefill"}
    assert found.kvd.load.keys() >= {"python", "imports", "weights", "checking attention"}
    assert found.mlx_lm.load.keys() == {"python", "imports", "weights", "tokenizer"}
    assert found.kvd.dtype == found.mlx_lm.dtype
    assert found.kvd.mlx_peak_bytes >= found.kvd.loaded_bytes > 0
    assert found.mlx_lm.process_peak_bytes > found.mlx_lm.mlx_peak_bytes
