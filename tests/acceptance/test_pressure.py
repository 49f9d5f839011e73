"""Streams of two models with a third of the memory that they need, on real workers.

A small version of `bench/pressure`. The streams run without pressure and then under it. Streams
that ran at one lower precision level run again on models that start at that level.
"""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("mlx.core")

from bench.own import daemon
from bench.pressure.play import CONFIG, Outcome, serve
from bench.pressure.streams import Stream, make
from kvd.client import AsyncClient
from protocol.kv import SCHEMES, KVSpec
from tests.worker import shallow

pytestmark = [pytest.mark.mlx, pytest.mark.process]

MODELS = ["a", "b"]


async def load(client: AsyncClient, alias: str, scheme: str = SCHEMES[0]) -> None:
    kv = KVSpec(k_bits=int(scheme[1]), v_bits=int(scheme[3]), prefix_cache=0)
    await (await client.load(shallow.path(), alias=alias, kv=kv)).result()


async def on_lower_levels(streams: list[Stream], pressed: list[Outcome]) -> dict[int, list[int]]:
    """Return the right tokens of the streams that ran at one lower level only.

    They come from models that start at that level. A new daemon loads them, because for some
    seconds after pressure rows start at a lower level.
    """
    right = {}
    async with daemon(CONFIG) as client:
        for level in range(1, len(SCHEMES)):
            some = [number for number, one in enumerate(pressed) if one.levels == [level]]
            if some:
                await load(client, SCHEMES[level], SCHEMES[level])
                asked = [Stream(**vars(streams[n]) | {"model": SCHEMES[level]}) for n in some]
                outcomes, _ = await serve(client, asked)
                assert {tuple(one.levels) for one in outcomes} == {(0,)}
                right |= {n: one.tokens for n, one in zip(some, outcomes, strict=True)}
    return right


async def main() -> None:
    streams = make(MODELS, 16, prompt=400, completion=50, seed=3)
    async with daemon(CONFIG) as client:
        for alias in MODELS:
            await load(client, alias)
        free, calm = await serve(client, streams)
        status = await client.status()
        bases = sum(model.stats.reclaimable.base for model in status.models)
        demand = max(one.granted for one in calm.kinds) - bases
        budget = bases + demand // 3
        await client.configure(budget_bytes=budget)
        while (await client.configure()).granted_bytes > budget:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.02)
        pressed, watch = await serve(client, streams)
        events = [event async for event in client.events()]
        violations = (await client.status()).violations
    right = dict(enumerate(one.tokens for one in free))
    right |= await on_lower_levels(streams, pressed)

    assert [one.error for one in free + pressed] == [""] * 32
    assert {one.reason for one in pressed} == {"length"}
    assert [len(one.tokens) for one in pressed] == [one.max_tokens for one in streams]
    same = [n for n, one in enumerate(pressed) if len(one.levels) == 1]
    assert len(same) > 4
    assert all(pressed[n].tokens == right[n] for n in same)
    assert {one.levels[0] for one in free} == {0}
    assert any(one.levels != [0] for one in pressed), "all streams ran at level 0"
    assert any(event.kind in {"reclaim_precision", "start_level"} for event in events)
    assert violations == 0
    assert max(one.granted for one in watch.kinds) <= budget
    assert max(one.footprint for one in watch.samples) <= 1.03 * budget


@pytest.mark.slow
def test_streams_under_pressure_finish_with_the_same_tokens():
    asyncio.run(main())
