"""A gang on GPUs: divided layers as blocks of kernels, chosen alike by all ranks.

Tests run without a GPU: plain operations of MLX replace the kernels in each rank, which are
processes that are connected by sockets.
"""

from __future__ import annotations

import pytest

from tests.breadth import part_of
from tests.worker.gang.gang import GangProcesses
from tests.worker.gang.models import save
from tests.worker.gang.test_gang import Single, pair, run

pytestmark = [pytest.mark.process, pytest.mark.mlx]
PROGRAM = """
import os
os.environ["KVD_NATIVE"] = "off"
from kvd.worker.gpu import joined_linear, products
from kvd.worker.serving import kernel_choice, kernel_timing, model_files
from tests.worker.attention.stand_in import StandIn
from tests.worker.gpu import plain_products

def join(model, checks):
    joined_linear.join(model, plain_products.multiply)
    return True

class Kernels(StandIn):
    pass

kernels = Kernels()
kernel_timing.KEYS = 128
products.multiply = plain_products.multiply
products.multiply_gated = plain_products.multiply_gated
model_files._join = join
kernel_choice.find_kernels = lambda: kernels.backend()
"""
WRONG = "kernels.error = 0.5"
BROKEN = """
def fail(self, given):
    raise RuntimeError("no such device")
Kernels.decode_attention = fail
"""


def served(source, ranks, programs):
    """Return how a gang serves a model, and its tokens."""
    gang = GangProcesses(ranks, programs=programs)
    try:
        info = gang.load(source, ranks=ranks)
        paths = {path.name: path for path in info.paths}
        first = pair("first ", 12)
        return info, paths, run(gang, first, pair("later ", 6))
    finally:
        gang.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with biases, and the tokens of one process."""
    folder = tmp_path_factory.mktemp("kernels") / "model"
    source = str(save(folder, "qwen2", intermediate_size=192))
    single = Single("mlx")
    try:
        single.load(source)
        return source, run(single, pair("first ", 12), pair("later ", 6))
    finally:
        single.close()


def test_divided_layers_run_as_kernels(model):
    source, expected = model
    info, paths, found = served(source, 2, dict.fromkeys(range(2), PROGRAM))
    assert found == expected
    assert paths["fused attention"].used
    assert paths["whole layers"].used
    assert info.fused.layers == info.layers


@pytest.mark.parametrize(
    ("change", "reason", "rank"),
    part_of(
        [
            (WRONG, "logits", 0),
            (WRONG, "logits", 1),
            (BROKEN, "no such device", 0),
            (BROKEN, "no such device", 1),
        ],
        3,
    ),
    ids=str,
)
def test_kernels_that_fail_on_one_rank_are_used_on_none(model, rank, change, reason):
    source, expected = model
    programs = dict.fromkeys(range(2), PROGRAM) | {rank: PROGRAM + change}
    _, paths, found = served(source, 2, programs)
    assert found == expected
    assert not paths["fused attention"].used
    assert not paths["whole layers"].used
    assert reason in paths["fused attention"].reason
