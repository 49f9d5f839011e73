"""Models with windows and recurrent states continue from files as they would from memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker import tiny_model
from tests.worker.core.driver import Driver
from tests.worker.core.prompts import prompt_of
from tests.worker.core.segments import KV, Clock, Engine, Store, alone

pytestmark = pytest.mark.mlx

PARTS = [[3 + token % 500 for token in prompt_of(length, length)] for length in (700, 640, 300)]
STORED = (512, 1280)
"""Tokens at which the first two prompts leave their last checkpoints."""


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text", "mamba2", "baichuan_m1"])
def test_another_engine_continues_from_files(name: str, tmp_path: Path) -> None:
    """The second file has what the first one lacks, and all states at its own end."""
    folder = str(tiny_model.save_zoo(tmp_path / name, name, max_position_embeddings=4096))
    store = Store(tmp_path / "segments")
    store.folder.mkdir()
    first = Engine(store, clock=Clock(), source=folder)
    prompt: list[int] = []
    for part in PARTS[:2]:
        prompt = prompt + part
        first.alone(prompt, max_tokens=2)
        first.write_all()
    segments = sorted(store.segments.values(), key=lambda one: one.tokens)
    assert tuple(one.tokens for one in segments) == STORED
    assert segments[1].base == segments[0].key

    plain = Driver(folder, kv=KV)
    second = Engine(store, clock=Clock(), source=folder)
    for text, cached in (
        (prompt + PARTS[2], STORED[1]),
        (PARTS[0] + PARTS[2], STORED[0]),
    ):
        second.forget()
        found = alone(second, text)
        assert found == alone(plain, text)
        assert found.cached == cached
    assert [one.tokens for one in store.used] == list(reversed(STORED))
    assert not store.damaged
