"""Every model of the zoo is a useful reference: its logits vary and depend on far context.

Runs on mlx-lm's own caches only; other tests run these models with kvd.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from kvd.worker.serving.split_head import SplitHead
from tests.worker.architectures.entry import Entry
from tests.worker.architectures.reference import TOKENS, difference, parts, run, tokens
from tests.worker.architectures.zoo import NOT_RUNNABLE, PART, ZOO, build, leaves

pytestmark = pytest.mark.mlx

LENGTHS = (1, 70, 247)
"""The longest, with the three tokens read one by one, exceeds every window and chunk."""


@dataclass(frozen=True)
class Case:
    entry: Entry
    model: nn.Module
    logits: dict[int, mx.array]
    """By length; read in chunks, and the last three tokens one by one."""
    at_once: mx.array
    """The longest sequence's. The others are its beginnings."""


@pytest.fixture(scope="module", params=PART)
def case(request) -> Case:
    model, _ = build(request.param)
    ids = tokens(250)
    logits = {n: run(model, ids[: n + 3]) for n in LENGTHS}
    return Case(ZOO[request.param], model, logits, read_at_once(model, ids))


def read_at_once(model: nn.Module, ids: mx.array) -> mx.array:
    return run(model, ids, chunk=None, decoded=0)


def test_every_model_file_of_mlx_lm_is_in_one_table():
    spec = importlib.util.find_spec("mlx_lm.models")
    files = Path(spec.submodule_search_locations[0]).glob("*.py")
    defines = re.compile(r"^class Model\(|^from \.\w+ import .*\bModel\b", re.MULTILINE)
    models = {file.stem for file in files if defines.search(file.read_text())}
    assert models == ZOO.keys() | NOT_RUNNABLE.keys()
    assert not ZOO.keys() & NOT_RUNNABLE.keys()


def test_logits_are_finite_and_not_constant(case):
    for logits in case.logits.values():
        assert mx.isfinite(logits).all().item()
        spread = mx.std(logits, axis=-1) / mx.abs(logits).max(axis=-1)
        assert spread.min().item() > 0.05


def test_chunks_and_single_tokens_give_what_all_at_once_gives(case):
    for length, logits in case.logits.items():
        assert difference(logits, case.at_once[: length + 3]) < case.entry.chunked


def test_the_last_logits_depend_on_a_far_token(case):
    ids, reach = tokens(250), case.entry.reach
    ids[247 - reach] = (ids[247 - reach] + 17) % TOKENS
    last = read_at_once(case.model, ids)[-1]
    assert difference(last, case.at_once[-1]) > 2e-3


def test_every_array_of_every_cache_affects_the_logits(case):
    ids = tokens(301)[None]
    cache = make_prompt_cache(case.model)
    case.model(ids[:, :300], cache=cache)
    expected = case.model(ids[:, 300:], cache=copy.deepcopy(cache))[0, -1]
    places = set(range(sum(len(parts(layer)) for layer in cache)))
    assert places
    for place in places:
        changed = copy.deepcopy(cache)
        _clear(changed, place)
        got = case.model(ids[:, 300:], cache=changed)[0, -1]
        assert (difference(got, expected) > 2e-3) != (place in case.entry.unread), place


def _clear(cache, place):
    owner, key = [part for layer in cache for part in parts(layer)][place]
    if isinstance(owner, list):
        owner[key] = mx.zeros_like(owner[key])
    else:
        setattr(owner, key, mx.zeros_like(getattr(owner, key)))


WHOLE_HEADS = {"gemma3n", "gpt_neox", "lille-130m"}
"""Models whose inner part computes the logits."""


def test_hidden_states_and_the_head_give_the_models_logits(case, request):
    head, ids = SplitHead(case.model), tokens(41)[None]
    if request.node.callspec.params["case"] in WHOLE_HEADS:
        with pytest.raises(ValueError, match="computes logits"):
            head.hidden(ids, make_prompt_cache(case.model))
        return
    hidden = head.hidden(ids, make_prompt_cache(case.model))
    got = mx.concatenate([head.logits(hidden[:, :9]), head.logits(hidden[:, 9:])], axis=1)
    expected = case.model(ids, cache=make_prompt_cache(case.model))
    assert got.shape == expected.shape
    assert difference(got, expected) < 1e-5


WINDOWS = {
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "loop_window_size",
    "attention_chunk_size",
}


@pytest.mark.parametrize("name", [n for n in PART if "_window" in str(ZOO[n].config)])
def test_a_window_one_token_wider_gives_different_logits(name):
    model, config = build(name)
    wider, _ = build(name, config=_wider(config))
    ids = tokens(250)
    assert difference(run(wider, ids)[-1], run(model, ids)[-1]) > 5e-4


def _wider(config):
    return {
        key: _wider(value) if isinstance(value, dict) else value + 1 if key in WINDOWS else value
        for key, value in config.items()
    }


def test_rounding_errors_of_the_embeddings_are_not_amplified(case):
    parts = [part for _, part in case.model.named_modules() if isinstance(part, nn.Embedding)]
    table = max(parts, key=lambda part: part.weight.size)
    weight = table.weight
    noise = mx.random.normal(weight.shape, key=mx.random.key(7))
    table.weight = weight * (1 + 1e-6 * noise)
    nudged = read_at_once(case.model, tokens(250))
    table.weight = weight
    assert difference(nudged, case.at_once) < 1e-4


def test_the_caches_are_described(case):
    described = leaves(case.model)
    assert described
    assert all("Cache" in text for text in described)


def test_a_model_is_the_same_whatever_other_random_numbers_were_drawn():
    mx.random.seed(1)
    first = dict(tree_flatten(build("qwen2")[0].parameters()))
    mx.random.seed(2)
    second = dict(tree_flatten(build("qwen2")[0].parameters()))
    assert any(path.endswith(".bias") for path in first)
    assert all(mx.array_equal(one, second[path]) for path, one in first.items())
