"""A worker's process takes no more memory than it is charged for: idle, and in every step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.host import blas
from kvd.host.environment import environment
from tests.pages import ROOT

MIB = 1 << 20
SCRATCH = 32 * MIB
"""Scratch of prefill attention. Less than usual, so that it does not hide other errors."""
_ENGINE = f"""
import json, random
from kvd.config.kv import parse_kv
from kvd.worker.process import memory
from protocol.types import Sampling
from tests.worker.core.driver import Driver

driver = Driver("demo", kv=parse_kv("k16v16"), attention_scratch={SCRATCH})
base = driver.engine._admission.budget.base_bytes
rest = memory.footprint_now()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
resident, peak = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmHWM"))
loading = rest + peak - resident
rng = random.Random(1)
for number, length in enumerate([1500, 700, 300, 200, 200, 100, 60, 3]):
    prompt = [rng.randrange(3, 4000) for _ in range(length)]
    driver.submit(str(number), prompt, Sampling(seed=number), max_tokens=60, ignore_eos=True)
most = share = 0
while driver.engine.has_work:
    driver.step()
    most = max(most, memory.footprint_now())
    share = max(share, most / driver.total)
print(json.dumps([driver.asked[0][0], loading, base, rest, most, driver.total, share]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux only")
def test_the_process_takes_no_more_memory_than_it_is_charged_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE],
        cwd=ROOT,
        env=environment(blas.choose("auto")),
        capture_output=True,
        text=True,
        check=True,
    )
    asked, loading, base, rest, most, charged, share = json.loads(done.stdout)

    assert rest <= loading < asked
    assert 50 * MIB < rest < base
    assert base < rest + SCRATCH // 4 + 160 * MIB  # the charge is not too large either
    assert rest + 30 * MIB < most  # the batch takes memory
    assert share < 1.0, (most, charged)
