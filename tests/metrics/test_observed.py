"""Metrics of a whole system on the simulated clock, where times are exact."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from actors.request_state import Stage
from kvd.metrics.histogram import Histogram
from protocol import errors, messages
from protocol.worker import RowPreempted, RowResumed
from tests.sim.fakes import SLOW, Script
from tests.sim.loop import simulated, until
from tests.sim.world import World, world


def of(w: World, model: str = "demo"):
    return w.metrics.counters.models[model]


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


def stages(w: World, model: str = "demo") -> dict[Stage, int]:
    return {
        stage: number
        for (name, stage), number in w.system.count_requests().items()
        if name == model
    }


@simulated
async def test_a_request_is_timed_from_its_arrival():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        await client.end(client.generate(max_tokens=5))
        it = of(w)
        assert (count(it.queue), count(it.first), count(it.gaps), count(it.whole)) == (1, 1, 4, 1)
        assert it.first.total == pytest.approx(1.0)
        assert it.gaps.total == pytest.approx(4.0)
        assert it.whole.total == pytest.approx(5.0)
        assert (it.prompt_tokens, it.generated, it.finished["length"]) == (5, 5, 1)
        assert it.loads == 1


@simulated
async def test_the_wait_for_a_model_is_queue_time():
    async with world({"demo": [Script(load_s=8.0)]}, load=()) as w:
        client = w.client()
        load = client.start(messages.Load, model="demo")
        await until(lambda: w.state() == "loading")
        key = client.generate(max_tokens=1)
        await until(lambda: client.events[load])
        assert stages(w) == {"waiting": 1}
        await client.end(key)
        assert of(w).queue.total == pytest.approx(8.0, abs=0.02)
        assert of(w).first.total == pytest.approx(of(w).queue.total + 0.01)


@simulated
async def test_counters_survive_a_death_and_its_cause_is_counted():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=6)
        await until(lambda: client.count(key) == 3)
        assert stages(w) == {"running": 1}
        before = of(w).worker.total.step
        w.spawn.last("demo").die(-9)
        await until(lambda: w.state() == "backoff")

        await until(lambda: stages(w) == {"paused": 1})
        assert of(w).worker.total.step == before
        assert (await client.end(key)).reason == "length"
        it = of(w)
        assert it.worker.total.step > before
        assert it.generated == 6, "tokens sent before the death are not sent again"
        assert (it.paused["restart"], it.resumed, it.restarts["killed"], it.loads) == (1, 1, 1, 2)
        assert (count(it.queue), count(it.first), count(it.gaps)) == (1, 1, 5)
        assert it.gaps.total > 5.0, "the restart is one of the gaps"
        assert it.actions["replay"] == 1


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (Script(crash_after=3, token_s=1.0), "crashed"),
        (Script(hang_at="token", token_s=1.0), "hung"),
        (Script(spawn_error=OSError("no more processes")), "not_started"),
        (Script(nonsense=True), "broke_rules"),
    ],
)
def test_causes_of_restarts(script, cause):
    @simulated
    async def scene():
        async with world({"demo": [script, SLOW]}, load=(), faults=True) as w:
            client = w.client()
            load = client.start(messages.Load, model="demo")
            await until(lambda: w.state() is not None)
            key = client.generate(max_tokens=5)
            await client.end(load)
            assert (await client.end(key)).reason == "length"
            counted = {reason: number for reason, number in of(w).restarts.items() if number}
            assert counted == {cause: 1}

    scene()


@simulated
async def test_a_preempted_request_is_counted_as_paused_and_resumed():
    async with world({"demo": [SLOW]}) as w:
        client, worker = w.client(), w.spawn.last("demo")
        key = client.generate(max_tokens=3)
        await until(lambda: client.count(key) == 1)
        worker.report(RowPreempted(rid="1.1", nbytes=7, where="disk"))
        await until(lambda: stages(w) == {"paused": 1})
        worker.report(RowResumed(rid="1.1"))
        await until(lambda: stages(w) == {"running": 1})
        await client.end(key)
        assert (of(w).paused["memory"], of(w).resumed) == (1, 1)
        assert not w.system.count_requests()


@simulated
async def test_refusals_are_counted_for_their_model_if_it_is_known():
    async with world() as w:
        client = w.client()
        with pytest.raises(errors.UnknownModel):
            await client.ask(messages.Generate, model="nobody", prompt="x")
        await client.ask(messages.Drain)
        with pytest.raises(errors.Draining):
            await client.ask(messages.Generate, model="demo", prompt="x")
        assert of(w, "").failed == {"unknown_model": 1}
        assert of(w).failed["draining"] == 1
        assert "nobody" not in await w.metrics.text()


@simulated
async def test_an_unloaded_model_keeps_its_counters_and_loses_its_gauges():
    async with world(load=("demo", "other")) as w:
        client = w.client()
        await client.end(client.generate("other", max_tokens=2))
        await client.ask(messages.Unload, model="other")
        text = await w.metrics.text()
        assert 'kvd_generation_tokens_total{model="other"} 2.0\n' in text
        shown = {
            sample.labels.get("model")
            for family in parse(text)
            if family.type == "gauge"
            for sample in family.samples
        }
        assert "demo" in shown
        assert "other" not in shown


@simulated
async def test_a_failed_load_leaves_no_series():
    error = errors.InvalidModel("config.json is missing").info()
    scripts = {"bad": [Script(load_error=error)], "big": [Script(weights=2000)]}
    async with world(scripts) as w:
        client = w.client()
        for model in ("bad", "big"):
            load = client.start(messages.Load, model=model)
            await until(lambda model=model: w.state(model) == "loading")
            assert f'model="{model}"' in await w.metrics.text()
            assert (await client.end(load)).error is not None

        text = await w.metrics.text()
        assert not {"bad", "big"} & {
            sample.labels.get("model") for family in parse(text) for sample in family.samples
        }
        assert 'kvd_governor_actions_total{kind="load_refused",model=""} 1.0' in text


@simulated
async def test_the_text_is_available_over_the_socket():
    async with world() as w:
        client = w.client()
        reply = await client.ask(messages.Metrics)
        assert 'kvd_model_state{model="demo",state="ready"} 1.0\n' in reply.text
        assert 'kvd_model_state{model="demo",state="failed"} 0.0\n' in reply.text


@simulated
async def test_models_that_were_unloaded_do_not_lengthen_the_text():
    async with world(load=()) as w:
        client = w.client()
        lengths = []
        for number in range(60):
            await client.ask(messages.Load, model="demo", alias=f"m{number}")
            await client.end(client.generate(f"m{number}", max_tokens=1))
            await client.ask(messages.Unload, model=f"m{number}")
            lengths.append(len(await w.metrics.text()))
        assert max(lengths[30:]) < 1.02 * lengths[29], "the text grows with unloaded models"
