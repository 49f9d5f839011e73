"""Rows of a sampler: their edits of logits (bias, penalties, excluded end tokens) follow a numpy
reference, and their tokens do not depend on other rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvd.worker.native import build
from kvd.worker.sampling import direct_draws
from kvd.worker.sampling.direct_draws import LibraryDraws
from kvd.worker.sampling.logprobs import score
from kvd.worker.sampling.row import RowSettings
from kvd.worker.sampling.sampler import Sampler
from protocol.errors import LocalProtocolError
from protocol.fields import NO_LOGPROB
from protocol.types import Sampling
from protocol.worker import Submit

pytestmark = pytest.mark.mlx

VOCAB = 97
PROMPT = [3, 3, 5, 8]


@pytest.fixture(scope="module", params=["operations", "library"], autouse=True)
def _draws(request: pytest.FixtureRequest) -> Iterator[None]:
    """All samplers draw by operations of MLX, or all by the native library."""
    direct = None
    if request.param == "library":
        if build.compiler() is None:
            pytest.skip("no C++ compiler")
        direct = LibraryDraws(build.load())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_draws, "prepared", lambda _: direct)
        yield


def model(history: list[int], vocab: int = VOCAB) -> np.ndarray:
    """Return the logits of a model that depends on its last three tokens and their position."""
    seed = hash((len(history), *history[-3:])) & 0xFFFFFFFF
    return (np.random.default_rng(seed).normal(size=vocab) * 2).astype(np.float32)


def edited(logits: np.ndarray, one: RowSettings, prompt: list[int], made: list[int]) -> np.ndarray:
    """Apply bias, penalties and excluded tokens to the logits, token by token."""
    out = logits.astype(np.float64)
    sampling = one.sampling
    for token, value in sampling.logit_bias.items():
        out[token] += value
    for token in set(prompt) | set(made):
        factor = sampling.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token, count in Counter(made).items():
        out[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    if len(made) < one.min_tokens:
        out[list(one.ends)] = -np.inf
    return out


def run(row: RowSettings, steps: int, prompt=PROMPT, made=()):
    """Sample a row alone; return its tokens."""
    sampler = Sampler(VOCAB)
    sampler.add("row", row, prompt, made)
    tokens = list(made)
    for _ in range(steps):
        logits = mx.array(model(prompt + tokens)[None])
        draw = sampler.draw(logits, ["row"], [len(prompt) + len(tokens)])
        tokens.append(draw.read()[0].token)
    return tokens


EDITS = [
    Sampling(logit_bias={5: 3.5, 96: -100.0, 0: 100.0}),
    Sampling(repetition_penalty=1.8),
    Sampling(repetition_penalty=0.6),
    Sampling(presence_penalty=1.5),
    Sampling(frequency_penalty=0.7),
    Sampling(presence_penalty=-2.0, frequency_penalty=-0.5),
    Sampling(
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={3: 1.0, 5: -2.0},
    ),
]


@pytest.mark.parametrize("sampling", EDITS, ids=str)
@pytest.mark.parametrize("min_tokens", [0, 4])
def test_a_greedy_row_takes_the_most_likely_token_of_the_reference(sampling, min_tokens):
    row = RowSettings(sampling, ends=tuple(range(40, 97)), min_tokens=min_tokens)
    made: list[int] = []
    for token in run(row, 30):
        expected = edited(model(PROMPT + made), row, PROMPT, made)
        best = np.sort(expected)[-2:]
        assert best[1] - best[0] > 1e-5, "the reference must not be a tie"
        assert token == np.argmax(expected)
        made.append(token)
    assert len(set(made)) > 1 or 0 in sampling.logit_bias


def test_edits_change_the_tokens():
    plain = run(RowSettings(Sampling()), 30)
    for sampling in EDITS:
        assert run(RowSettings(sampling), 30) != plain
    assert set(run(RowSettings(Sampling(logit_bias={7: 100.0})), 5)) == {7}


def test_end_tokens_are_drawn_only_after_min_tokens():
    ends = tuple(range(1, VOCAB))
    for sampling in (Sampling(), Sampling(temperature=2.0, seed=1, top_k=90)):
        tokens = run(RowSettings(sampling, ends=ends, min_tokens=6), 40)
        assert tokens[:6] == [0] * 6
        assert set(tokens[6:]) != {0}


@pytest.mark.parametrize("sampling", EDITS, ids=str)
def test_a_resumed_row_continues_with_the_same_tokens(sampling):
    for one in (sampling, Sampling(**_fields(sampling) | {"temperature": 1.1, "seed": 9})):
        row = RowSettings(one, ends=(1, 2, 3), min_tokens=12)
        whole = run(row, 25)
        for cut in (0, 1, 7, 12, 20):
            assert run(row, 25 - cut, made=whole[:cut]) == whole


def _fields(sampling: Sampling) -> dict:
    return {name: getattr(sampling, name) for name in Sampling.__struct_fields__}


def test_choices_of_one_seed_differ_and_choice_0_equals_a_single_choice():
    hot = Sampling(temperature=3.0, seed=4)
    one = run(RowSettings(hot), 20)
    several = [run(RowSettings(hot, choice=choice), 20) for choice in range(4)]
    assert several[0] == one
    assert len({tuple(tokens) for tokens in several}) == 4


# -- other rows -----------------------------------------------------------------------------------

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    top_k=st.sampled_from([0, 0, 5, 80]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
)
rows = st.builds(
    RowSettings,
    samplings,
    choice=st.integers(0, 3),
    ends=st.sampled_from([(), (1, 2)]),
    min_tokens=st.integers(0, 5),
    logprobs=st.sampled_from([None, None, 0, 3]),
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


# Without shrinking, because to shrink a failure would take minutes.
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(
    row=rows,
    prompt=prompts,
    others=st.lists(
        st.tuples(rows, prompts, st.integers(0, 8), st.integers(1, 12)), min_size=1, max_size=5
    ),
    removed_at=st.none() | st.integers(1, 8),
    order=st.randoms(use_true_random=False),
    at_once=st.integers(1, 6),
)
def test_a_row_s_tokens_and_logprobs_do_not_depend_on_other_rows(
    row, prompt, others, removed_at, order, at_once
):
    """They are equal bit for bit, although step n+1 is launched before step n's tokens are read."""
    batch = PipelinedLoop(
        [(row, prompt, 0, 10, removed_at), *((*other, None) for other in others)], at_once
    )
    together = batch.run(order)
    alone = PipelinedLoop([(row, prompt, 0, 10, None)]).run(order)
    assert len(alone[0]) == 10
    assert together[0] == alone[0]


class PipelinedLoop:
    """Steps a sampler over rows ``(settings, prompt, join step, tokens, removal step)``.

    A row leaves when it has its tokens. A row with a removal step leaves at that step, and returns
    three steps later.
    """

    def __init__(self, rows, at_once=None) -> None:
        self.rows = rows
        self.sampler = Sampler(VOCAB, at_once)
        self.read = [[] for _ in rows]
        self.present = set()

    def run(self, order):
        flight = None
        for step in range(40):
            for number, (row, prompt, joins, _count, removed_at) in enumerate(self.rows):
                if step == joins:
                    self.sampler.add(number, row, prompt)
                    self.present.add(number)
                elif (
                    removed_at is not None and step == removed_at + 3 and number not in self.present
                ):
                    made = [one.token for one in self.read[number]]
                    self.sampler.add(number, row, prompt, made)
                    self.present.add(number)
            keys = order.sample(sorted(self.present), len(self.present))
            landed, flight = flight, self.launch(keys, flight)
            self.collect(landed)
            for number in sorted(self.present):
                removed_at = self.rows[number][4]
                # A removed row loses its token in flight: it returns with the tokens read so far.
                if len(self.read[number]) >= self.rows[number][3] or step == removed_at:
                    self.sampler.remove(number)
                    self.present.remove(number)
                    if step == removed_at and flight is not None:
                        flight[2].discard(number)
        return self.read

    def launch(self, keys, flight):
        if not keys:
            return None
        # A real model reads the tokens on the device; this one needs them on the host.
        histories = [self.history(key, flight) for key in keys]
        logits = mx.array(np.stack([model(history) for history in histories]))
        draw = self.sampler.draw(logits, keys, [len(history) for history in histories])
        mx.async_eval(draw.arrays())
        return keys, draw, set(keys)

    def history(self, key, flight):
        made = [one.token for one in self.read[key]]
        if flight is not None and key in flight[2]:
            made.append(flight[1].tokens[flight[0].index(key)].item())
        return [*self.rows[key][1], *made]

    def collect(self, landed):
        if landed is None:
            return
        keys, draw, wanted = landed
        for key, drawn in zip(keys, draw.read(), strict=True):
            assert drawn.trusted
            if key in wanted and len(self.read[key]) < self.rows[key][3]:
                self.read[key].append(drawn)


# -- logprobs -------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_before_edits_and_filters():
    logits = np.stack([model([row]) for row in range(5)])
    edits = Sampling(temperature=0.5, top_k=2, seed=1, logit_bias={4: 9.0}, repetition_penalty=2.0)
    sampler = Sampler(VOCAB)
    requested = [None, 0, 3, None, 20]
    for key, want in enumerate(requested):
        sampler.add(key, RowSettings(edits, logprobs=want), PROMPT)
    drawn = sampler.draw(mx.array(logits), range(5), [0] * 5).read()
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    for row, want in enumerate(requested):
        found = drawn[row].scored
        if want is None:
            assert found is None
            continue
        assert found.token == drawn[row].token
        assert found.logprob == pytest.approx(exact[row, found.token], abs=1e-5)
        best = np.argsort(-exact[row])[:want]
        assert [token for token, _ in found.top] == best.tolist()
        assert [value for _, value in found.top] == pytest.approx(exact[row, best], abs=1e-5)


def test_without_logprobs_nothing_is_computed():
    sampler = Sampler(VOCAB)
    sampler.add("a", RowSettings(Sampling()), [])
    draw = sampler.draw(mx.array(model([1])[None]), ["a"], [0])
    assert [part.logprobs for part in draw.parts] == [None]


def test_impossible_tokens_have_the_lowest_logprob_and_ids_stay_in_the_vocabulary():
    for vocab in (50, 30_001):
        logits = np.full((1, vocab), -np.inf, dtype=np.float32)
        logits[0, [7, 9]] = [0.0, 1.0]
        (found,) = score(mx.array(logits), mx.array([3]), top=True).read([20])
        assert found.logprob == NO_LOGPROB
        assert [token for token, _ in found.top][:2] == [9, 7]
        assert all(token < vocab and value >= NO_LOGPROB for token, value in found.top)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_are_edited_and_scored_in_float32(dtype):
    logits = mx.array(np.stack([model([1])] * 2)).astype(dtype)
    sampler = Sampler(VOCAB)
    sampler.add(0, RowSettings(EDITS[-1], logprobs=2), PROMPT)
    sampler.add(1, RowSettings(Sampling()), PROMPT)
    drawn = sampler.draw(logits, [0, 1], [0, 0]).read()
    rows = np.array(logits.astype(mx.float32))
    assert drawn[1].token == np.argmax(rows[1])
    assert drawn[0].token == np.argmax(edited(rows[0], RowSettings(EDITS[-1]), PROMPT, []))
    norm = np.log(np.exp(rows[0].astype(np.float64)).sum())
    assert drawn[0].scored.top[0][1] == pytest.approx(rows[0].max() - norm, abs=1e-5)


# -- other tests ---------------------------------------------------------------------------------


def test_a_row_with_invalid_logits_does_not_affect_others():
    logits = np.stack([model([row]) for row in range(3)])
    logits[1, 5] = np.nan
    sampler = Sampler(VOCAB)
    penalized = RowSettings(Sampling(frequency_penalty=1.0, temperature=1.0, seed=1))
    for key in range(3):
        sampler.add(key, penalized, PROMPT)
    drawn = sampler.draw(mx.array(logits), [0, 1, 2], [0] * 3).read()
    assert [one.trusted for one in drawn] == [True, False, True]
    sampler.remove(1)
    again = sampler.draw(mx.array(logits[[0, 2]]), [0, 2], [1, 1]).read()
    other = Sampler(VOCAB)
    for key in (0, 2):
        other.add(key, penalized, PROMPT, [drawn[key].token])
    assert again == other.draw(mx.array(logits[[0, 2]]), [0, 2], [1, 1]).read()


def test_a_failed_step_is_repeated_after_its_rows_are_added_again():
    sampling = Sampling(temperature=1.0, seed=3, frequency_penalty=1.0)
    row = RowSettings(sampling, ends=(1,), min_tokens=3)
    whole = run(row, 10)
    sampler = Sampler(VOCAB)
    sampler.add("row", row, PROMPT)
    tokens: list[int] = []
    for at in range(10):
        sampler.draw(mx.zeros((1, VOCAB)), ["row"], [0])  # launched, then lost
        sampler.remove("row")
        sampler.add("row", row, PROMPT, tokens)
        logits = mx.array(model(PROMPT + tokens)[None])
        draw = sampler.draw(logits, ["row"], [len(PROMPT) + at])
        tokens.append(draw.read()[0].token)
    assert tokens == whole


def test_a_row_is_added_once():
    sampler = Sampler(VOCAB)
    sampler.add("a", RowSettings(Sampling()), [])
    with pytest.raises(LocalProtocolError, match="row a is sampled already"):
        sampler.add("a", RowSettings(Sampling()), [])
    sampler.remove("a")
    sampler.add("a", RowSettings(Sampling()), [])


def test_settings_of_a_request():
    submit = Submit(rid="r", sampling=Sampling(seed=3), min_tokens=4, logprobs=2)
    assert RowSettings.of(submit, {9, 2}, 1) == RowSettings(Sampling(seed=3), 1, (2, 9), 4, 2)


def test_counts_are_updated_without_waiting():
    """A chain of draws is launched before any of them is read."""
    row = RowSettings(Sampling(frequency_penalty=2.0))
    logits = mx.array(model([1])[None])
    sampler = Sampler(VOCAB)
    sampler.add(0, row, [])
    draws = [sampler.draw(logits, [0], [step]) for step in range(6)]
    made: list[int] = []
    for draw in draws:
        expected = edited(np.array(logits[0]), row, [], made)
        made.append(draw.read()[0].token)
        assert made[-1] == np.argmax(expected)
    assert len(set(made)) > 1
