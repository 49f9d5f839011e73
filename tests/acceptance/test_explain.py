"""The bytes that `explain` forecasts are those that real workers are granted, within 2 %."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from bench.gpu import shapes
from bench.own import daemon
from kvd.client import AsyncClient
from kvd.config.kv import parse_kv
from kvd.daemon.estimate import SHARED_BYTES
from protocol.forecast import Forecast

pytestmark = [pytest.mark.mlx, pytest.mark.process]

ROWS, PROMPT, NEW = 8, 900, 24
CLOSE = 0.02
NOISE = 12 * 2**20 + SHARED_BYTES // 2
"""Bytes by which a footprint differs from its estimate while other tests start and end processes.

Linux charges each process a share of the libraries' pages. The estimate counts the processes that
map them now, this test's own among them, so its share is at most half. The worker may be measured
when it is the only one that has read them.
"""


async def peak_of(client: AsyncClient, alias: str) -> int:
    """Run the rows at once; return the largest grant meanwhile."""
    rng = random.Random(1)
    completions = [
        await client.generate(
            alias,
            tokens=rng.choices(range(300, 4000), k=PROMPT),
            max_tokens=NEW,
            ignore_eos=True,
        )
        for _ in range(ROWS)
    ]
    over = asyncio.gather(*(one.text() for one in completions))
    peak = 0
    while not over.done():
        (model,) = (await client.status()).models
        peak = max(peak, model.granted_bytes)
        await asyncio.sleep(0.02)
    await over
    return peak


async def check(client: AsyncClient, source: str, scheme: str, lower: dict[str, int]) -> None:
    kv = parse_kv(scheme)
    asked = {"rows": ROWS, "context": PROMPT + NEW}
    estimate: Forecast = await client.explain(source, kv=kv, **asked)
    loaded = await (await client.load(source, alias="m", kv=kv)).result()
    forecast = await client.explain("m", **asked)
    granted = await peak_of(client, "m")
    reported = forecast.levels[0].total_bytes

    assert forecast.measured
    assert not estimate.measured
    assert forecast.idle_bytes == loaded.granted_bytes
    assert reported == pytest.approx(granted, rel=CLOSE)
    assert reported > 1.03 * loaded.granted_bytes, "the rows are too few to show anything"
    assert estimate.weights_bytes == forecast.weights_bytes
    rows = [one.total_bytes - forecast.base_bytes for one in forecast.levels]
    assert [one.total_bytes - estimate.base_bytes for one in estimate.levels] == rows
    assert estimate.base_bytes == pytest.approx(forecast.base_bytes, abs=NOISE, rel=CLOSE)
    # The forecast of a lower level equals the use of a model that starts there.
    if scheme in lower:
        assert reported == pytest.approx(forecast.base_bytes + lower[scheme], rel=CLOSE)
    lower |= {one.scheme: size for one, size in zip(forecast.levels, rows, strict=True)}
    await client.unload("m")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schemes"), [("demo", ("k8v8", "k4v4")), ("wide", ("k8v4",))], ids=["demo", "wide"]
)
def test_the_forecast_equals_the_grant(name: str, schemes: tuple[str, ...], tmp_path: Path) -> None:
    source = name
    if name == "wide":
        shapes.write("wide", mx.float16, tmp_path / "wide")
        source = str(tmp_path / "wide")

    async def main() -> None:
        lower: dict[str, int] = {}
        async with daemon("") as client:
            for scheme in schemes:
                await check(client, source, scheme, lower)

    asyncio.run(main())
