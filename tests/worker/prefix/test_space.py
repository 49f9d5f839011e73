"""Spaces: equal for what computes the same, different for everything that segments depend on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as restruct

from kvd import demo
from kvd.worker.cache.attention_kind import FULL
from kvd.worker.cache.layout import Access
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.native import build
from kvd.worker.prefix import space
from kvd.worker.prefix.space import SPACE_BYTES, describe, space_of
from kvd.worker.serving import model_files
from kvd.worker.serving.fingerprint import FINGERPRINT_BYTES, fingerprint
from protocol import segment_file
from protocol.kv import KVSpec
from protocol.types import ModelInfo
from protocol.worker import LoadModel
from tests.worker import tiny_model
from tests.worker.core.driver import Driver

pytestmark = pytest.mark.mlx

Loaded = tuple[bytes, ModelCache, ModelInfo, LoadModel]
COMMAND = LoadModel(source="demo", kv=KVSpec())


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    driver = Driver("demo")
    headers = model_files.inspect(Path(demo.path()))
    return fingerprint(headers), driver.engine._runner.cache, driver.info, COMMAND


def test_two_loads_of_one_model_have_one_space(loaded: Loaded) -> None:
    weights, _, _, command = loaded
    again = Driver("demo")
    assert len(space_of(*loaded)) == SPACE_BYTES
    assert space_of(weights, again.engine._runner.cache, again.info, command) == space_of(*loaded)


def of_layout(change: Callable[[CacheSettings], CacheSettings]) -> Callable[[Loaded], Loaded]:
    def apply(loaded: Loaded) -> Loaded:
        weights, cache, info, command = loaded
        changed = ModelCache(cache.layout, change(cache.settings), access=cache.access)
        return weights, changed, info, command

    return apply


def of_info(**changes: str) -> Callable[[Loaded], Loaded]:
    return lambda loaded: (loaded[0], loaded[1], restruct(loaded[2], **changes), loaded[3])


def first_layer_dense(layers: int) -> list[Scheme | None]:
    return [Scheme(16, 16), *[None] * (layers - 1)]


first_layer_lower = (Scheme(8, 4), *[Scheme(8, 8)] * 5)

CHANGES: dict[str, Callable[[Loaded], Loaded]] = {
    "weights": lambda it: (bytes(FINGERPRINT_BYTES), *it[1:]),
    "prefill chunk": lambda it: (*it[:3], restruct(it[3], prefill_chunk=it[3].prefill_chunk * 2)),
    "scheme": of_layout(lambda it: replace(it, schemes=(Scheme(8, 4), Scheme(4, 4)))),
    "group": of_layout(lambda it: replace(it, schemes=(Scheme(8, 8, 32, 32),))),
    "floor": of_layout(lambda it: replace(it, floors=first_layer_dense)),
    "bits by layer": of_layout(lambda it: replace(it, mixes=(first_layer_lower,))),
    "dense start": of_layout(lambda it: replace(it, quantized_start=300)),
    "length of the dense start": of_layout(lambda it: replace(it, quantized_start=301)),
    "limit of tokens": of_layout(lambda it: replace(it, max_size=512)),
    "other limit of tokens": of_layout(lambda it: replace(it, max_size=513)),
    "kept tokens": of_layout(lambda it: replace(it, max_size=512, keep=4)),
    "scratch": of_layout(lambda it: replace(it, scratch=it.scratch // 2)),
    "access": lambda it: (
        it[0],
        ModelCache(it[1].layout, it[1].settings, access={FULL: Access.RECTANGLES}),
        *it[2:],
    ),
    "attention path": of_info(attention_path="reference, gathered pages"),
    "native operations": of_info(native="switched off"),
    "dtype": of_info(dtype="bfloat16"),
    "device": of_info(device="Apple M4 Max"),
    "BLAS": of_info(blas="/usr/lib/libblis.so.4"),
    "nothing": lambda it: it,
}


def test_every_change_gives_another_space(loaded: Loaded) -> None:
    spaces = {name: space_of(*change(loaded)) for name, change in CHANGES.items()}
    assert len(set(spaces.values())) == len(CHANGES), spaces


@pytest.mark.parametrize("package", ["mlx", "mlx-lm"])
def test_other_versions_have_other_spaces(loaded: Loaded, package: str, monkeypatch) -> None:
    before = space_of(*loaded)
    version = space.version
    monkeypatch.setattr(space, "version", lambda name: version(name) + ".1" * (name == package))
    assert space_of(*loaded) != before


def test_another_build_of_kvd_has_another_space(loaded: Loaded, monkeypatch) -> None:
    before = space_of(*loaded)
    with monkeypatch.context() as patch:
        patch.setattr(segment_file, "VERSION", segment_file.VERSION + 1)
        assert space_of(*loaded) != before
    with monkeypatch.context() as patch:
        patch.setenv("OPENBLAS_CORETYPE", "Haswell-like")
        assert space_of(*loaded) != before
    weights, cache, info, command = loaded
    info = restruct(info, native="on", device="cpu")
    before = space_of(weights, cache, info, command)
    monkeypatch.setattr(build, "key", lambda: "other sources")
    assert space_of(weights, cache, info, command) != before


def test_what_no_segment_shows_is_left_out(loaded: Loaded) -> None:
    weights, cache, info, command = loaded
    lower = replace(cache.settings, schemes=(*cache.settings.schemes, Scheme(2, 2)))
    changed = ModelCache(cache.layout, lower, access=cache.access)
    other = restruct(
        command, source="/models/copy", max_rows=3, max_context=1000, swap_folder="/tmp/swap",
        kv=restruct(command.kv, prefix_cache=1, prefix_every=0),
    )  # fmt: skip
    renamed = restruct(info, context_length=1000, kv_schemes=["k8v8"], attention_error=0.1)
    assert space_of(weights, changed, renamed, other) == space_of(*loaded)


def test_the_description_names_what_is_in_use(loaded: Loaded) -> None:
    found = describe(*loaded)
    assert found["prefill_chunk"] == COMMAND.prefill_chunk
    packings = {str(layer["packings"]) for one in found["stores"] for layer in one["layers"]}
    assert packings == {"[[(8, 64, False), (8, 64, True)]]"}
    json.dumps(found)


# The fingerprint of a model's folder.


def save(folder: Path) -> Path:
    tiny_model.save(folder)
    return folder


def of(folder: Path) -> bytes:
    return fingerprint(model_files.inspect(folder))


def test_names_and_places_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    folder = save(tmp_path / "one")
    before = of(folder)
    assert len(before) == FINGERPRINT_BYTES
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(dict(reversed(config.items())), indent=7)
    (folder / "config.json").write_text(text)
    moved = folder.rename(tmp_path / "two")
    (moved / "model.safetensors").rename(moved / "model-00001-of-00001.safetensors")
    assert of(moved) == before


def test_every_setting_of_the_configuration_counts(tmp_path: Path) -> None:
    headers = model_files.inspect(save(tmp_path / "tiny"))
    configs = [headers.config]
    configs += [headers.config | {name: "other"} for name in headers.config]
    configs += [{**headers.config, "further": None}]
    found = {fingerprint(replace(headers, config=config)) for config in configs}
    assert len(found) == len(configs)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_change_in_any_tensor_counts(place: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny")
    before, file = of(folder), folder / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    tensors = json.loads(whole[8 : 8 + length])
    tensors.pop("__metadata__", None)
    assert any(stop - start > 12288 for start, stop in offsets(tensors))
    for start, stop in offsets(tensors):
        at = 8 + length + {"first": start, "middle": (start + stop) // 2, "last": stop - 1}[place]
        changed = bytearray(whole)
        changed[at] ^= 1
        file.write_bytes(changed)
        assert of(folder) != before
    file.write_bytes(whole)
    assert of(folder) == before


def offsets(tensors: dict[str, dict[str, list[int]]]) -> list[list[int]]:
    return [tensor["data_offsets"] for tensor in tensors.values()]


def test_swapped_tensors_of_one_shape_count(tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny")
    before, file = of(folder), folder / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    tensors = json.loads(whole[8 : 8 + length])
    names = [name for name in tensors if name.endswith("q_proj.weight")]
    one, two = names[:2]
    tensors[one], tensors[two] = tensors[two], tensors[one]
    header = json.dumps(tensors, separators=(",", ":")).encode().ljust(length)
    assert len(header) == length
    file.write_bytes(whole[:8] + header + whole[8 + length :])
    assert of(folder) != before
