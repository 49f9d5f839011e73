"""Embeddings of Qwen3-Embedding's architecture equal a computation in plain numpy."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from protocol.embedding import EmbedOptions, vector_of
from tests.worker import tiny_model
from tests.worker.core.driver import Driver
from tests.worker.core.test_embeddings import END, embed, text_of

pytestmark = pytest.mark.mlx
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
"""Qwen3-Embedding-0.6B's with fewer and narrower layers: heads wider than their share, tied."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "Tiny-Qwen3-Embedding"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "CONFIG", tiny_model.CONFIG | SHAPE)
        tiny_model.save(folder, dtype=mx.float32)
    config = json.loads((folder / "config.json").read_text())
    assert SHAPE.items() <= config.items()
    return folder


@pytest.fixture(scope="module")
def driver(folder):
    return Driver(str(folder))


class Reference:
    """The model in numpy, from its weights alone."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights

    def vector(self, tokens: list[int]) -> np.ndarray:
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(SHAPE["num_hidden_layers"]):
            hidden = self.layer(f"model.layers.{layer}", hidden)
        last = self.norm(hidden, "model.norm")[-1]
        return last / np.linalg.norm(last)

    def layer(self, name: str, hidden: np.ndarray) -> np.ndarray:
        normed = self.norm(hidden, f"{name}.input_layernorm")
        hidden = hidden + self.attention(f"{name}.self_attn", normed)
        normed = self.norm(hidden, f"{name}.post_attention_layernorm")
        gate, up = (self.linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return hidden + self.linear(gate / (1 + np.exp(-gate)) * up, f"{name}.mlp.down_proj")

    def attention(self, name: str, hidden: np.ndarray) -> np.ndarray:
        length, width = len(hidden), SHAPE["head_dim"]
        q, k, v = (
            self.linear(hidden, f"{name}.{part}_proj").reshape(length, -1, width) for part in "qkv"
        )
        q, k = rotated(self.norm(q, f"{name}.q_norm")), rotated(self.norm(k, f"{name}.k_norm"))
        share = SHAPE["num_attention_heads"] // SHAPE["num_key_value_heads"]
        k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
        scores += np.triu(np.full((length, length), -np.inf), 1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)
        return self.linear(mixed, f"{name}.o_proj")

    def linear(self, values: np.ndarray, name: str) -> np.ndarray:
        return values @ self.weights[f"{name}.weight"].T

    def norm(self, values: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((values**2).mean(axis=-1, keepdims=True) + 1e-6)
        return values / scale * self.weights[f"{name}.weight"]


def rotated(heads: np.ndarray) -> np.ndarray:
    """Return queries or keys ``(tokens, heads, width)`` with rotary position embedding."""
    half = heads.shape[-1] // 2
    frequencies = SHAPE["rope_theta"] ** (-np.arange(half) / half)
    angles = np.outer(np.arange(len(heads)), frequencies)[:, None, :]
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


@pytest.fixture(scope="module")
def reference(folder) -> Reference:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert "lm_head.weight" not in loaded
    return Reference({name: np.array(value, np.float32) for name, value in loaded.items()})


@pytest.mark.parametrize("length", [1, 2, 65, 200])
def test_vectors_equal_plain_float32(driver: Driver, reference: Reference, length: int):
    text = [*text_of(length - 1, seed=length), END]
    found = np.array(vector_of(embed(driver, text).embedding))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, reference.vector(text), atol=1e-5)


def test_a_batch_of_unequal_lengths_equals_plain_float32(driver: Driver, reference: Reference):
    texts = [[*text_of(length, seed=length), END] for length in (3, 70, 150, 1)]
    for number, text in enumerate(texts):
        driver.submit(f"e{number}", text, embed=EmbedOptions(dimensions=32), max_tokens=1)
    driver.run()
    for number, text in enumerate(texts):
        found = np.array(vector_of(driver.outcomes.pop(f"e{number}").embedding))
        wanted = reference.vector(text)[:32]
        np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), atol=1e-5)
