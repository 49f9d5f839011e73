"""Model folders that pass the inspection but fail in a real engine raise typed errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.worker.core import load_errors
from kvd.worker.process.link import Orphaned
from protocol.errors import InsufficientMemory, InvalidModel, InvalidRequest
from tests.worker import tiny_model
from tests.worker.core.driver import Driver

pytestmark = pytest.mark.mlx


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.save(tmp_path / "tiny")


def change(file: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def test_a_value_of_the_wrong_type_that_the_model_does_not_read(folder):
    change(
        folder / "config.json",
        lambda it: it.update(num_experts_per_tok="a", moe_intermediate_size="b"),
    )
    assert len(Driver(str(folder)).alone([5, 6, 7], max_tokens=3).tokens) == 3


def test_a_tokenizer_whose_library_panics_at_the_load(folder):
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    change(folder / "tokenizer.json", lambda it: it.update(normalizer=broken))
    with pytest.raises(InvalidModel, match="a tokenizer that cannot be loaded: PanicException"):
        Driver(str(folder))


def test_a_tokenizer_whose_library_panics_at_every_text(folder):
    change(
        folder / "tokenizer.json",
        lambda it: it.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
    )
    with pytest.raises(InvalidModel, match="PanicException"):
        Driver(str(folder))


def test_a_tokenizer_with_tokens_outside_the_models_vocabulary(folder):
    change(folder / "tokenizer.json", lambda it: it["model"]["vocab"].update({"!": 70_000}))
    driver = Driver(str(folder))
    with pytest.raises(InvalidRequest, match="token 70000, which is outside"):
        driver.submit("r", "a!b")
    driver.submit("r", "ab", max_tokens=2)


def test_which_errors_become_typed():
    assert load_errors.typed(InvalidModel("known"), "m") is None
    assert load_errors.typed(OSError("disk"), "m") is None
    assert load_errors.typed(RuntimeError("device lost"), "m") is None
    assert load_errors.typed(Orphaned(), "m") is None
    assert isinstance(load_errors.typed(MemoryError(), "m"), InsufficientMemory)
    assert isinstance(load_errors.typed(RecursionError("deep"), "m"), InvalidModel)
    found = load_errors.typed(KeyError("rope"), "m")
    assert isinstance(found, InvalidModel)
    assert found.message.startswith("m cannot be loaded: KeyError: 'rope';")


def test_an_allocation_that_the_workers_own_limit_refused(monkeypatch):
    monkeypatch.setattr(load_errors.limit, "_started", True)
    found = load_errors.typed(MemoryError(), "m")
    assert isinstance(found, InvalidModel)
    assert "an allocation was refused at the worker's limit of 384 MiB" in found.message
