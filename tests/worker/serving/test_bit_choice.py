"""Which bits layers get at a load: a calibration, the probe's estimates, or one scheme for all."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest

from kvd import demo
from kvd.host.home import Home
from kvd.worker.cache.scheme import Scheme
from kvd.worker.serving import bit_choice, bit_probe, calibration, loading, model_files, seam
from kvd.worker.serving.bit_choice import (
    LayerBits,
    ProbeFile,
    ProbeResult,
    Probing,
    choose_bits,
    text_ids,
)
from kvd.worker.serving.bit_probe import NoEstimateError, SideCosts
from kvd.worker.text.fast_tokenizer import FastWrapper
from kvd.worker.tools import convert_tokenizer
from protocol.kv import KVSpec
from tests.worker import tiny_model
from tests.worker.core.driver import Driver
from tests.worker.tools.test_calibrate import result_with, with_mixes

pytestmark = pytest.mark.mlx

K8V8, K8V4, K4V4 = Scheme(8, 8), Scheme(8, 4), Scheme(4, 4)
SCHEMES = [K8V8, K8V4, K4V4]


def costs(layer: int, keys: float, values: float, *, heads: int = 2) -> SideCosts:
    return SideCosts(
        layer=layer, kind="full", key_elements=64 * heads, value_elements=64 * heads, keys=keys,
        values=values,
    )  # fmt: skip


PROBED = ProbeResult(
    key="k", version="0", layers=[costs(0, 1e-4, 1e-4), costs(1, 1.0, 1e-3)], keys_fit=True
)
PENDING = ProbeResult(key="k", version="0", keys_fit=True, problem="not yet")


def choose(schemes=SCHEMES, *, mode="auto", calibrated=None, probed=PROBED):
    return choose_bits(schemes, 2, mode=mode, calibrated=calibrated, probed=probed)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "calibration"
    monkeypatch.setenv(calibration.FOLDER_VARIABLE, str(place))
    return place


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    seam.install()
    return tiny_model.save(tmp_path_factory.mktemp("models") / "tiny")


def size(mix: tuple[Scheme, ...]) -> int:
    return sum(scheme.k_bits + scheme.v_bits for scheme in mix)


def test_the_delicate_side_gets_more_bits_at_the_same_size():
    found = choose()
    top, middle, low = found.mixes
    assert top is None
    assert size(middle) == 24
    assert size(low) == 16
    assert (middle[1].k_bits, low[1].k_bits) == (8, max(scheme.k_bits for scheme in low))
    assert min(scheme.k_bits for scheme in low) == 3
    assert found.info.source == "probe"


def test_a_calibration_decides_before_the_probe(tmp_path):
    path = tiny_model.save(tmp_path / "tiny")
    mix = ["k6v4", "k3v3"]
    found = choose(calibrated=with_mixes(result_with(path, "k4v4"), {"k4v4": mix}))
    assert [one.name for one in found.mixes[2]] == mix
    assert (found.info.source, found.info.reason) == ("calibration", "measured on 2025-01-01")


def test_without_estimates_keys_get_the_bits_of_values():
    found = choose(probed=PENDING)
    assert found.mixes == (None, None, (Scheme(5, 3), Scheme(5, 3)))
    assert (found.info.source, found.info.reason) == ("uniform", "not yet")
    # Not where that would be larger, or more than the level above has.
    larger = msgspec.structs.replace(PENDING, keys_fit=False)
    assert choose(probed=larger).mixes == (None, None, None)
    assert choose([Scheme(4, 8), K4V4], probed=PENDING).mixes == (None, None)
    groups = choose([Scheme(4, 4, 32, 32)], probed=PENDING).mixes[0]
    assert groups == (Scheme(5, 3, 32, 32),) * 2


def test_it_can_be_switched_off():
    found = choose(mode="off")
    assert found.mixes == (None, None, None)
    assert (found.info.source, found.info.reason) == ("uniform", "switched off")


def test_on_metal_only_the_widths_with_known_speed_are_used(monkeypatch):
    monkeypatch.setattr(bit_choice, "on_cpu", lambda: False)
    assert choose().mixes[2] is not None  # CUDA
    monkeypatch.setattr(bit_choice.mx.metal, "is_available", lambda: True)
    top, middle, low = choose().mixes
    assert {scheme.k_bits for scheme in middle} | {scheme.v_bits for scheme in middle} <= {4, 8}
    assert middle[1].k_bits == 8
    assert (top, low) == (None, None)  # with 4 as the least, 4 is all that fits
    assert choose(probed=PENDING).mixes == (None, None, None)


# The kept result.


def test_a_damaged_file_or_one_of_another_model_or_version_is_ignored(folder, caplog):
    file = ProbeFile(folder, "abc")
    assert file.read() is None
    mine = ProbeResult(key="abc", version=bit_choice.VERSION, layers=PROBED.layers)
    file.write(mine)
    assert file.read() == mine
    assert file.path.stat().st_mode & 0o777 == 0o600
    of_kvd_alone = {"version": bit_choice.kvd.__version__}  # another mlx-lm may have other caches
    for change in ({"key": "other"}, {"version": "another"}, of_kvd_alone):
        file.write(msgspec.structs.replace(mine, **change))
        assert file.read() is None
    with caplog.at_level(logging.WARNING):
        file.path.write_bytes(b"{")
        assert file.read() is None
    assert "ignoring the estimates" in caplog.text


def test_a_folder_that_cannot_be_written_is_logged(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        ProbeFile(tmp_path / "file", "abc").write(PROBED)
    assert "are not kept" in caplog.text


# Loads.


def test_an_idle_worker_estimates_and_the_next_load_uses_it(tiny, folder):
    first = Driver(str(tiny), kv=KVSpec(8, 8))
    # A load of this tiny model is too short for all units.
    assert first.info.kv_bits.reason == bit_choice.PENDING
    assert list(first.info.kv_mixes) == ["k4v4"]
    assert first.engine.has_work
    first.submit("r", [5] * 200, max_tokens=3, ignore_eos=True)
    left = first.engine._idle_work.probing._probe.units
    while first.engine._batch.requests:
        first.engine.step()
    assert first.engine._idle_work.probing._probe.units >= left - 1  # requests come first
    while first.engine.has_work:
        first.engine.step()
    (file,) = folder.iterdir()
    assert file.suffix == ".probe"

    second = Driver(str(tiny), kv=KVSpec(8, 8))
    assert second.info.kv_bits.source == "probe"
    assert not second.engine.has_work
    pools = [layer.pools for layer in second.engine._runner.cache.stores[0].layers]
    low = tuple(levels[-1].scheme for levels in pools)
    assert size(low) == 16
    assert second.info.kv_mixes.get("k4v4", ["k4v4", "k4v4"]) == [one.name for one in low]
    off = Driver(str(tiny), kv=KVSpec(8, 8), bits_by_layer="off")
    assert (off.info.kv_bits.source, off.info.kv_mixes) == ("uniform", {})


def test_memory_that_the_rest_of_a_probe_holds_is_charged(tiny, folder, monkeypatch):
    monkeypatch.setattr(loading, "base_bytes", lambda *_: 1 << 30)
    driver = Driver(str(tiny), kv=KVSpec(8, 8))
    probing = driver.engine._idle_work.probing
    charged = driver.engine._admission.budget.base_bytes - (1 << 30)
    assert charged == probing.held_bytes > 0
    assert Driver(str(tiny), bits_by_layer="off").engine._admission.budget.base_bytes == 1 << 30


def bits_of(tiny, schemes=SCHEMES, *, ranks: int = 1) -> LayerBits:
    headers = model_files.inspect(tiny)
    return LayerBits(schemes, 2, headers, mode="auto", calibrated=None, ranks=ranks)


def test_a_model_over_several_ranks_is_not_probed(tiny, folder):
    bits = bits_of(tiny, ranks=2)
    assert not bits.unknown
    assert bits.choice.mixes == (None, None, None)
    assert bits.choice.info.reason == "not estimated for a model over several ranks"


def test_a_load_with_time_estimates_at_once(tiny, folder):
    bits = bits_of(tiny)
    assert (bits.unknown, bits.choice.mixes) == (True, (None, None, None))
    bits.probe(model_files.load(tiny), 1 << 28, 600)
    assert (bits.unknown, bits.rest, bits.choice.info.source) == (False, None, "probe")
    again = bits_of(tiny)
    assert (again.unknown, again.choice) == (False, bits.choice)
    # Other levels have the same estimates.
    assert bits_of(tiny, [K8V8]).choice.mixes == (None,)


def test_a_probe_stops_before_it_would_take_too_long(tiny, folder):
    probing = Probing(model_files.load(tiny), ProbeFile(folder, "abc"), 1 << 28)
    now = iter(range(1000))
    probing.run(19.0, lambda: float(next(now)))  # each unit takes a second
    done = probing._probe.units
    assert probing.has_work
    probing.run(0.0)
    assert probing._probe.units == done - 1


@pytest.mark.parametrize(
    ("error", "kept", "problem"),
    [
        (NoEstimateError("no gradient"), True, "no gradient"),
        (NoEstimateError("not now", lasting=False), False, "not now"),
        (MemoryError(), False, "the memory did not suffice for an estimate"),
    ],
)
def test_a_failed_probe_leaves_one_scheme_for_all(tiny, folder, monkeypatch, error, kept, problem):
    def fail(_self):
        raise error

    monkeypatch.setattr(bit_probe.BitProbe, "_draw_unit", fail)
    probing = Probing(model_files.load(tiny), ProbeFile(folder, "abc"), 1 << 28)
    probing.run(600)
    assert not probing.has_work
    assert probing.found.problem == problem
    assert choose(probed=probing.found).mixes[2] == (Scheme(5, 3), Scheme(5, 3))
    assert (ProbeFile(folder, "abc").read() is not None) == kept


def ended_during_a_probe(tiny, number):
    """Return the status of a process that gets a signal during a unit of the probe."""
    program = (
        "import os, sys; from pathlib import Path\n"
        "from kvd.worker.serving import bit_choice, bit_probe, model_files, seam\n"
        "seam.install()\n"
        f"bit_probe.BitProbe._draw_unit = lambda _self: os.kill(os.getpid(), {int(number)})\n"
        "tiny = Path(sys.argv[1])\n"
        "file = bit_choice.ProbeFile.of(model_files.inspect(tiny))\n"
        "bit_choice.Probing(model_files.load(tiny), file, 1 << 28).run(600)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tiny)], timeout=120, check=False)
    return ended.returncode


def test_a_load_after_a_killed_probe_skips_it_for_a_day(tiny, folder, caplog):
    """The next process would be killed too, for the same reason."""
    assert ended_during_a_probe(tiny, signal.SIGKILL) == -signal.SIGKILL
    (mark,) = folder.iterdir()

    with caplog.at_level(logging.WARNING):
        bits = bits_of(tiny)
    assert not bits.unknown
    assert bits.choice.info.reason == bit_choice.KILLED
    assert bit_choice.KILLED in caplog.text
    assert bits.choice.mixes == (None, None, None)

    day_ago = mark.stat().st_mtime - bit_choice.RETRY_SECONDS
    os.utime(mark, (day_ago, day_ago))
    again = bits_of(tiny)
    assert again.unknown
    again.probe(model_files.load(tiny), 1 << 28, 600)
    assert again.choice.info.source == "probe"
    assert not mark.exists()


def test_a_load_after_an_unload_during_the_probe_runs_it(tiny, folder):
    """A worker that loads is ended by SIGTERM, because it reads no command."""
    assert ended_during_a_probe(tiny, signal.SIGTERM) == -signal.SIGTERM
    assert not [*folder.iterdir()]
    assert bits_of(tiny).unknown


def test_a_mark_is_kept_in_any_thread_and_leaves_the_handler_of_signals(folder):
    before = signal.getsignal(signal.SIGTERM)
    file = ProbeFile(folder, "abc")

    def mark():
        with file.marked():
            return [*folder.iterdir()]

    with ThreadPoolExecutor() as pool:
        assert mark() == pool.submit(mark).result() == [folder / "abc.probing"]
    assert not [*folder.iterdir()]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_mark_of_other_versions_is_ignored(folder):
    file = ProbeFile(folder, "abc")
    with file.marked():
        (mark,) = folder.iterdir()
        content = mark.read_bytes()
    assert not [*folder.iterdir()]
    mark.write_bytes(content)
    assert file.was_killed()
    mark.write_bytes(b"kvd 0")
    assert not file.was_killed()


def test_a_probe_that_runs_in_another_process_was_not_killed(tiny, folder, caplog):
    """A model can be loaded under a second name while the first one's worker is idle."""
    program = (
        "import sys; from pathlib import Path\n"
        "from kvd.worker.serving import bit_choice, model_files\n"
        "file = bit_choice.ProbeFile.of(model_files.inspect(Path(sys.argv[1])))\n"
        "with file.marked():\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tiny)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        try:
            assert other.stdout.readline()
            (mark,) = folder.iterdir()
            assert bits_of(tiny).unknown
            file = ProbeFile.of(model_files.inspect(tiny))
            with file.marked():  # the other process's mark stays
                pass
            assert mark.exists()
        finally:
            other.kill()
    assert not caplog.records
    assert bits_of(tiny).choice.info.reason == bit_choice.KILLED


def test_a_model_whose_tokenizer_cannot_encode_gets_arbitrary_tokens(tiny):
    def fail(_text):
        raise RuntimeError("no")

    broken = SimpleNamespace(tokenizer=SimpleNamespace(encode=fail), vocab_size=50)
    ids = text_ids(broken)
    assert len(ids) == bit_probe.TOKENS
    assert {*ids} <= {*range(50)}
    assert len({*ids}) > 10


def test_a_tokenizer_without_transformers_encodes_the_text_of_the_probe():
    slow = convert_tokenizer.load_with_transformers(demo.path())
    record = convert_tokenizer.convert(demo.path())
    found = [
        text_ids(SimpleNamespace(tokenizer=one, vocab_size=len(slow)))
        for one in (slow, FastWrapper(record))
    ]
    assert found[0] == found[1]
    arbitrary = text_ids(SimpleNamespace(tokenizer=None, vocab_size=len(slow)))
    assert found[0] != arbitrary


def test_the_result_lies_in_the_home_s_folder(tmp_path, tiny, monkeypatch):
    place = Home(tmp_path).calibration
    monkeypatch.setenv(calibration.FOLDER_VARIABLE, str(place))
    file = ProbeFile.of(model_files.inspect(tiny))
    assert file.path.parent == place
    monkeypatch.delenv(calibration.FOLDER_VARIABLE)
    assert ProbeFile.of(model_files.inspect(tiny)) is None


def test_a_calibration_gives_only_widths_that_the_device_reads_fast(monkeypatch):
    monkeypatch.setattr(bit_choice, "on_cpu", lambda: True)
    assert set(bit_choice.fast_widths(calibrated=True)) - set(bit_choice.fast_widths()) == {2}
    monkeypatch.setattr(bit_choice, "on_cpu", lambda: False)
    monkeypatch.setattr(bit_choice.mx.metal, "is_available", lambda: True)
    assert bit_choice.fast_widths(calibrated=True) == bit_choice.fast_widths() == (4, 8)
