"""Measuring levels for calibration, and the lowest allowed level."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvd import demo
from kvd.worker.cache.scheme import Scheme
from kvd.worker.serving import model_files, seam
from kvd.worker.tools import fidelity
from kvd.worker.tools.fidelity import (
    Agreement,
    Floor,
    Tally,
    TooShortError,
    lowest_level,
)
from protocol.errors import UnsupportedModel
from tests.worker import shallow
from tests.worker.architectures.zoo import build

pytestmark = pytest.mark.mlx

SCHEMES = [Scheme(8, 8), Scheme(8, 4), Scheme(4, 4), Scheme(2, 2)]
DECODED = 70
"""Last tokens of a prompt that are decoded: a page becomes full meanwhile."""


def levels(*kls: float, top1: float = 1.0) -> list[Agreement]:
    return [Agreement(100, kl, top1, 2.0, 2.0 + kl) for kl in kls]


def test_the_lowest_level_that_keeps_the_floor():
    floor = Floor(max_kl=0.01, min_top1=0.95)
    assert lowest_level(levels(0.001, 0.002, 0.009, 0.1), floor) == 2
    assert lowest_level(levels(0.001, 0.002), floor) == 1
    assert lowest_level(levels(0.02, 0.001), floor) is None
    assert lowest_level(levels(0.001, top1=0.9), floor) is None
    assert lowest_level([], floor) is None


def test_no_level_below_one_that_fails_is_allowed():
    assert lowest_level(levels(0.001, 0.5, 0.001), Floor()) == 0


def test_a_level_whose_kl_is_nan_is_not_allowed():
    assert lowest_level(levels(math.nan), Floor()) is None


def test_perplexity_change_is_relative():
    assert Agreement(1, 0.0, 1.0, 2.0, 2.0 + math.log(1.5)).perplexity_change == pytest.approx(0.5)


def test_agreement_over_no_positions_is_an_error():
    with pytest.raises(TooShortError, match="longer prompts"):
        Tally().agreement()


@pytest.mark.slow
def test_each_level_is_worse_than_the_one_above():
    seam.install()
    loaded = model_files.load(demo.path())
    prompts = fidelity.texts(loaded.tokenizer, count=1, tokens=512)

    served = fidelity.serve(loaded.model, SCHEMES)
    measured = fidelity.measure([served], prompts, decoded=DECODED)

    kls = [agreement.kl for agreement in measured]
    assert all(math.isfinite(kl) for kl in kls)
    assert 0 < kls[0] < kls[1] < kls[2] < kls[3]
    assert kls[0] < 1e-3
    assert measured[0].top1 > measured[3].top1
    assert lowest_level(measured, Floor(max_kl=(kls[1] + kls[2]) / 2, min_top1=0)) == 1
    # The first chunk of a prompt sees no quantized page; the rest counts once.
    assert measured[0].positions == sum(len(p) - 1 - 256 for p in prompts)


@pytest.mark.slow
def test_levels_are_measured_together_as_they_are_alone():
    seam.install()
    loaded = model_files.load(Path(shallow.path()))
    prompts = fidelity.texts(loaded.tokenizer, count=1, tokens=450)
    pair = fidelity.measure([fidelity.serve(loaded.model, SCHEMES[1:3])], prompts, decoded=DECODED)
    alone = [fidelity.serve(loaded.model, [scheme]) for scheme in SCHEMES[1:3]]
    assert fidelity.measure(alone, prompts, decoded=DECODED) == pair


@pytest.mark.parametrize(
    ("name", "why"), [("deepseek_v41", "dense caches .*LayerCache"), ("mamba", "recurrent states")]
)
def test_a_model_without_quantized_keys_is_refused(name, why):
    model, _ = build(name)
    with pytest.raises(UnsupportedModel, match=f"{why}.*nothing to calibrate"):
        fidelity.serve(model, SCHEMES[:1])


def test_short_prompts_are_refused():
    seam.install()
    loaded = model_files.load(demo.path())
    with pytest.raises(TooShortError, match="longer prompts"):
        fidelity.measure([fidelity.serve(loaded.model, SCHEMES[:1])], [list(range(300, 400))])
