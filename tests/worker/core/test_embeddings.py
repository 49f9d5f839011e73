"""Embeddings equal plain float32 computation, in any batch, and are never NaN."""

from __future__ import annotations

import json
import random

import mlx.core as mx
import pytest

from kvd.worker.core import out_of_memory
from kvd.worker.text.end_tokens import end_tokens
from protocol.embedding import EmbedOptions, vector_of
from protocol.errors import ContextTooLong, InvalidRequest
from protocol.kv import KVSpec
from tests.worker import tiny_model
from tests.worker.core.driver import Driver
from tests.worker.core.faults import memory_runs_out

pytestmark = pytest.mark.mlx
END = 2
"""First end token of the tiny model."""
TOLERANCE = 1e-2
"""Largest distance of vectors of length 1, with keys and values in 8 bits; 1e-5 without."""


def save(folder, pooling: dict[str, bool] | None = None, modules: list[str] | None = None):
    """Write a tiny model; ``pooling``: the contents of its 1_Pooling/config.json."""
    tiny_model.save(folder, dtype=mx.float32)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        rows = [{"type": f"sentence_transformers.models.{one}", "path": ""} for one in modules]
        (folder / "modules.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "tiny", {"pooling_mode_lasttoken": True})


@pytest.fixture(scope="module")
def driver(folder):
    return Driver(str(folder))


def text_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(length)]


def expected(driver: Driver, tokens: list[int], pooling: str = "last_token") -> mx.array:
    """Return the vector by plain computation without a cache, in float32."""
    inner = driver.engine._runner.model.model
    hidden = inner(mx.array([tokens]))[0]
    pooled = {"last_token": hidden[-1], "mean": hidden.mean(axis=0), "cls": hidden[0]}[pooling]
    vector = pooled / mx.linalg.norm(pooled)
    assert mx.isfinite(vector).all()
    return vector


def distance(outcome, vector: mx.array) -> float:
    found = mx.array(vector_of(outcome.embedding))
    assert mx.isfinite(found).all()
    assert abs(mx.linalg.norm(found).item() - 1) < 1e-5
    return mx.linalg.norm(found - vector).item()


def embed(driver: Driver, tokens: list[int], **options):
    driver.submit("one", tokens, embed=EmbedOptions(**options), max_tokens=1)
    driver.run()
    return driver.outcomes.pop("one")


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 255, 256, 257, 600])
def test_equal_to_plain_computation(driver: Driver, length: int):
    text = [*text_of(length - 1), END]
    outcome = embed(driver, text)
    assert (outcome.reason, outcome.tokens) == ("stop", [])
    assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (length, 0)
    assert distance(outcome, expected(driver, text)) < (1e-5 if length <= 256 else TOLERANCE)


def test_rows_of_unequal_lengths_that_join_at_any_time_equal_rows_alone(driver: Driver):
    """Beside a stream, whose tokens stay what they are without embeddings."""
    lengths = [1, 900, 63, 65, 3, 64, 500, 127, 128, 129, 2, 300]
    texts = [[*text_of(length - 1, seed), END] for seed, length in enumerate(lengths)]
    alone = [embed(driver, text).embedding for text in texts]
    story = driver.alone(text_of(40), max_tokens=60, ignore_eos=True)
    driver.submit("story", text_of(40), max_tokens=60, ignore_eos=True)
    for number, text in enumerate(texts):
        driver.submit(f"e{number}", text, embed=EmbedOptions(), max_tokens=1)
        if number % 3 == 2:
            driver.step()
    driver.run()
    assert driver.outcomes.pop("story") == story
    together = [driver.outcomes.pop(f"e{number}").embedding for number in range(len(texts))]
    assert together == alone
    for text, outcome in zip(texts, together, strict=True):
        vector = mx.array(vector_of(outcome))
        assert mx.linalg.norm(vector - expected(driver, text)).item() < TOLERANCE


def test_an_embedding_leaves_nothing_in_the_prefix_cache_and_takes_nothing_from_it(driver: Driver):
    text = text_of(700, seed=77)
    before = driver.engine.stats().prefix.checkpoints
    first = embed(driver, text)
    assert driver.engine.stats().prefix.checkpoints == before
    driver.alone(text + text_of(9), max_tokens=1)  # leaves a checkpoint in the text
    assert driver.engine.stats().prefix.checkpoints > before
    assert embed(driver, text).embedding == first.embedding


def test_a_preempted_embedding_is_the_same(folder):
    driver = Driver(str(folder), prefill_chunk=64)
    text = text_of(400, seed=5)
    first = embed(driver, text)
    driver.submit("one", text, embed=EmbedOptions(), max_tokens=1)
    driver.step()
    assert 0 < driver.engine._scheduler.find("one").prefilled < 400
    driver.preempt("one")
    driver.step()
    driver.requeue("one")
    driver.run()
    assert driver.outcomes["one"].embedding == first.embedding


def test_dimensions_cut_the_vector_and_normalize_it_again(driver: Driver):
    text = text_of(20)
    whole = vector_of(embed(driver, text).embedding)
    cut = mx.array(vector_of(embed(driver, text, dimensions=10).embedding))
    wanted = mx.array(whole[:10])
    assert cut.shape == (10,)
    assert mx.allclose(cut, wanted / mx.linalg.norm(wanted), atol=1e-6).item()
    with pytest.raises(InvalidRequest, match="dimensions is 65; the model's vectors have 64"):
        embed(driver, text, dimensions=65)


def test_the_end_token_is_appended_once(driver: Driver):
    text = text_of(20)
    outcome = embed(driver, text)
    assert outcome.usage.prompt_tokens == 21
    assert outcome.embedding == embed(driver, [*text, END]).embedding
    assert distance(outcome, expected(driver, [*text, END])) < 1e-5


def test_a_tokenizer_that_appends_its_own_end_token_decides_which_one():
    class Appends:
        """Qwen3-Embedding appends <|endoftext|>, while its end of turn is another token."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [7, 5, 99] if add_special_tokens else [7, 5]

    assert end_tokens(Appends()) == [99]


def test_texts_that_do_not_fit_the_context_are_refused(driver: Driver):
    assert embed(driver, [*text_of(1021), END]).reason == "stop"
    with pytest.raises(ContextTooLong, match=r"1023 tokens with its end token; .* most 1022"):
        embed(driver, text_of(1022))


@pytest.mark.parametrize(
    ("key", "pooling"), [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last_token")]
)
def test_the_pooling_is_that_of_the_models_files(tmp_path, key: str, pooling: str):
    """The wrong pooling for a model gives vectors that look right and match nothing."""
    modules = ["Transformer", "Pooling", "Normalize"]
    folder = save(tmp_path / "tiny", None, modules)
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"type": f"sentence_transformers.models.{kind}", "path": path}
                for kind, path in zip(modules, ["", "1_Pooling", "2_Normalize"], strict=True)
            ]
        )
    )
    modes = {f"pooling_mode_{one}": one == key for one in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"dim": 64} | modes))
    driver = Driver(str(folder), kv=KVSpec(k_bits=16, v_bits=16), prefill_chunk=64)
    text = [*text_of(149), END] if pooling == "last_token" else text_of(150)
    outcome = embed(driver, text)
    assert driver.info.embedding.pooling == pooling
    assert outcome.usage.prompt_tokens == 150
    assert distance(outcome, expected(driver, text, pooling)) < 1e-5


def test_an_embedding_is_never_nan(folder):
    driver = Driver(str(folder))
    norm = driver.engine._runner.model.model.norm
    for bad in (mx.nan, mx.inf, 0.0):
        norm.weight = mx.full(norm.weight.shape, bad)
        outcome = embed(driver, text_of(9))
        assert outcome.error.code == "numerical_error"
        assert outcome.embedding is None


def test_a_chat_model_is_refused_with_the_reason_unless_the_operator_allows_it(tmp_path):
    folder = save(tmp_path / "tiny")
    driver = Driver(str(folder))
    assert driver.info.embedding is None
    with pytest.raises(InvalidRequest, match=r'not trained for embeddings.*embeddings = "any"'):
        embed(driver, text_of(3))
    allowed = Driver(str(folder), embeddings="any")
    text = [*text_of(9), END]
    assert distance(embed(allowed, text), expected(allowed, text)) < 1e-5


def test_a_model_is_an_embedding_model_by_its_name(tmp_path):
    driver = Driver(str(save(tmp_path / "Tiny-Embedding-4bit")))
    assert driver.info.embedding.pooling == "last_token"
    other = Driver(str(save(tmp_path / "embeddings" / "Tiny-Chat")))
    assert other.info.embedding is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"modules": ["Transformer", "Pooling", "Dense"]}, "needs the module 'Dense'"),
        ({"pooling": {"pooling_mode_weightedmean_tokens": True}}, "pooling is pooling_mode_weig"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, files, reason: str):
    driver = Driver(str(save(tmp_path / "tiny-embed", **files)))
    with pytest.raises(InvalidRequest, match=reason):
        embed(driver, text_of(3))
    driver.outcomes.clear()
    assert driver.alone(text_of(3), max_tokens=2).error is None


def test_a_model_that_attends_in_both_directions_is_refused(tmp_path):
    folder = save(tmp_path / "tiny-embed", {"pooling_mode_lasttoken": True})
    config = json.loads((folder / "config.json").read_text())
    config["use_bidirectional_attention"] = True
    (folder / "config.json").write_text(json.dumps(config))
    driver = Driver(str(folder))
    with pytest.raises(InvalidRequest, match="attends to later tokens"):
        embed(driver, text_of(3))


def mean_pooled(tmp_path, **load) -> Driver:
    folder = save(tmp_path / "tiny", {"pooling_mode_mean_tokens": True})
    return Driver(str(folder), kv=KVSpec(k_bits=16, v_bits=16), prefill_chunk=64, **load)


def test_a_step_without_memory_counts_no_chunk_twice(tmp_path):
    """Whatever evaluation fails for good: the step is rolled back, and its chunks run again."""
    driver = mean_pooled(tmp_path)
    texts = {f"e{number}": text_of(150 + 7 * number, number) for number in range(2)}
    texts["long"] = text_of(700, 5)  # its second pass has several chunks

    def serve() -> dict[str, bytes]:
        for rid, text in texts.items():
            driver.submit(rid, text, embed=EmbedOptions(), max_tokens=1)
        driver.run()
        found, driver.outcomes = driver.outcomes, {}
        assert {rid: outcome.error for rid, outcome in found.items()} == dict.fromkeys(texts)
        return {rid: vector_of(outcome.embedding) for rid, outcome in found.items()}

    wanted = serve()
    with memory_runs_out(lambda _: False) as counted:
        assert serve() == wanted
    for rid, text in texts.items():
        plain = expected(driver, text, "mean")
        assert mx.linalg.norm(mx.array(wanted[rid]) - plain).item() < 1e-5
    assert counted.count > 10
    for first in range(1, counted.count - 2):
        driver.engine._out_of_memory.calm_steps = out_of_memory.CALM_STEPS
        with memory_runs_out(lambda number, first=first: first <= number < first + 3) as failing:
            found = serve()
        assert failing.failed == 3, first
        for rid, vector in found.items():
            assert vector == pytest.approx(wanted[rid], abs=1e-6), (first, rid)


def test_short_texts_share_a_pass(folder):
    driver = Driver(str(folder))
    assert driver.engine._runner.packs
    texts = [text_of(9, seed) for seed in range(16)]
    for number, text in enumerate(texts):
        driver.submit(f"e{number}", text, embed=EmbedOptions(), max_tokens=1)
    before = driver.engine.stats().step
    driver.run(until=lambda: all(outcome.over for outcome in driver.outcomes.values()))
    assert driver.engine.stats().step - before <= 2
    assert all(driver.outcomes[f"e{number}"].embedding for number in range(16))
