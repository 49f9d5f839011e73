"""Rows whose layers have different bits share prefixes, are preempted, and are replayed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.worker.serving import calibration
from protocol.kv import KVSpec
from protocol.types import Sampling
from protocol.worker import Report, Submit
from tests.worker import shallow
from tests.worker.core.driver import Driver
from tests.worker.core.prompts import periodic_prompt
from tests.worker.core.test_preemption import EVERYTHING, prefer
from tests.worker.core.test_replay import reports_of
from tests.worker.core.test_step_down import MIX, mixed_result
from tests.worker.process.received import Received

pytestmark = pytest.mark.mlx

PROMPT = periodic_prompt(700, 1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("calibration")
        patch.setenv(calibration.FOLDER_VARIABLE, str(folder))
        calibration.store(folder, mixed_result())
        swap = tmp_path_factory.mktemp("swap")
        driver = Driver(shallow.path(), kv=KVSpec(4, 4), swap_folder=str(swap), swap_bytes=1 << 30)
        assert driver.info.kv_mixes == {"k4v4": MIX}
        layers = driver.engine._runner.cache.stores[0].layers
        assert [layer.pools[0].scheme.name for layer in layers] == MIX
        yield driver


@pytest.fixture
def mixed(loaded: Driver) -> Iterator[Driver]:
    yield loaded
    loaded.engine._prefix_cache.tree.clear()
    loaded.outcomes.clear()
    loaded.preemptions.clear()
    loaded.engine._rates.__dict__.pop("note", None)


def test_a_prompt_that_is_cached_continues_with_the_same_tokens(mixed: Driver) -> None:
    wanted = mixed.alone(PROMPT, max_tokens=80, ignore_eos=True)
    again = mixed.alone(PROMPT, max_tokens=80, ignore_eos=True)

    assert again.cached >= 512
    assert again == wanted


@pytest.mark.parametrize("where", ["disk", "recompute"])
def test_preempted_rows_continue_with_the_same_tokens(mixed: Driver, where: str) -> None:
    wanted = mixed.alone(PROMPT, max_tokens=80, ignore_eos=True)
    prefer(mixed, where)
    mixed.submit("moved", PROMPT, max_tokens=80, ignore_eos=True)
    mixed.run(until=lambda: len(mixed.outcomes["moved"].tokens) > 9)
    mixed.reclaim("preempt", EVERYTHING)
    mixed.run()

    assert mixed.preemptions == {"moved": [where, "resumed"]}
    assert mixed.outcomes["moved"] == wanted


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_stream_continues_in_another_worker(mixed: Driver, part: float) -> None:
    warm = Sampling(temperature=0.9, seed=4)
    request = Submit(rid="a", tokens=PROMPT, sampling=warm, max_tokens=80, ignore_eos=True)
    reports: list[Report] = reports_of(mixed, [request])
    whole, received = Received(request), Received(request)
    for report in reports:
        whole.add(report)
    for report in reports[: int(part * len(reports))]:
        received.add(report)
    mixed.engine._prefix_cache.tree.clear()
    for report in reports_of(mixed, [received.resubmission()]):
        received.add(report)

    assert received.all() == whole.all()
