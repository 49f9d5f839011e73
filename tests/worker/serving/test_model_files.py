"""Finding, inspecting and loading models: every kind of broken folder has a clear error."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from kvd.worker.native import build
from kvd.worker.serving import describe, model_files
from protocol import model_folder
from protocol.errors import InvalidModel, UnknownModel, UnsupportedModel
from tests.worker import tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture
def folder(tmp_path):
    return tiny_model.save(tmp_path / "tiny")


def change_config(folder, **fields):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


# Finding


def test_the_files_of_every_tokenizer_are_checked_before_they_are_read():
    package = importlib.util.find_spec("transformers")
    (root,) = package.submodule_search_locations
    names = re.compile(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", re.DOTALL)
    found = {
        name
        for file in Path(root).glob("models/*/tokenization_*.py")
        for table in names.findall(file.read_text("utf-8"))
        for name in re.findall(r':\s*"([^"]+)"', table)
    }
    assert {"tokenizer.json", "merges.txt", "spiece.model"} <= found
    assert [name for name in found if not model_folder.is_read(name)] == []


def test_a_context_that_messages_cannot_hold_is_limited(folder):
    change_config(folder, max_position_embeddings=2**62)
    model_files.inspect(folder)
    assert model_files.load(folder).context_length == 2**31 - 1


def test_the_embedded_model_is_in_the_package():
    path = model_files.resolve("demo")
    assert (path / "config.json").exists()


def test_the_path_of_a_folder_resolves_to_the_folder(folder):
    assert model_files.resolve(str(folder)) == folder


@pytest.mark.parametrize("source", ["nope", "./tiny", "../a/b", "a/b/c", "", "~/x", "a b/c"])
def test_other_names_are_unknown(source):
    with pytest.raises(UnknownModel, match="give demo, the absolute path") as caught:
        model_files.resolve(source)
    assert caught.value.detail == {"source": source}


def test_a_missing_folder_and_a_file_are_refused(folder):
    with pytest.raises(UnknownModel, match="no folder"):
        model_files.resolve(str(folder / "none"))
    with pytest.raises(InvalidModel, match="is a file"):
        model_files.resolve(str(folder / "config.json"))


def test_the_hub_without_a_network_says_what_to_do(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*_args, **_kwargs):
        raise LocalEntryNotFoundError("cannot reach\nthe Hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UnknownModel, match="check the id and the network") as caught:
        model_files.resolve("some/model")
    assert "LocalEntryNotFoundError: cannot reach the Hub;" in caught.value.message


def test_a_download_reports_progress_and_returns_its_folder(monkeypatch, folder):
    import huggingface_hub

    ticked = threading.Event()

    def download(_source, *, allow_patterns):
        assert "*.json" in allow_patterns
        assert ticked.wait(30)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_files.resolve("some/model", lambda stage, _: ticked.set()) == folder


def test_only_the_named_files_are_downloaded(monkeypatch, folder):
    import huggingface_hub

    variants = []

    def download(_source, *, allow_patterns):
        variants.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_files.resolve("some/model", files=("config.json",)) == folder
    assert variants == [["config.json"]]


@pytest.fixture
def snapshot(monkeypatch, tmp_path):
    """A model that the Hub's client has downloaded completely."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("downloaded")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs/main").write_text("abc")
    folder = tiny_model.save(repository / "snapshots" / "abc")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_a_model_in_the_cache_of_the_hub_needs_no_download(snapshot):
    assert model_files.resolve("some/model") == snapshot
    assert model_files.resolve("some/model", files=("config.json",)) == snapshot


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_incomplete_model_in_the_cache_is_downloaded(snapshot, lost):
    (snapshot / lost).unlink()
    with pytest.raises(UnknownModel, match="AssertionError: downloaded"):
        model_files.resolve("some/model")


def test_a_template_that_other_programs_did_not_download_is_downloaded(snapshot):
    """Older versions of mlx-lm download all other files. The tokenizer's own template suffices."""
    (snapshot / "chat_template.jinja").unlink()
    settings = snapshot / "tokenizer_config.json"
    for content in ({}, {"chat_template": None}):
        settings.write_text(json.dumps(content))
        with pytest.raises(UnknownModel, match="AssertionError: downloaded"):
            model_files.resolve("some/model")
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert model_files.resolve("some/model") == snapshot


def test_an_interrupted_download_is_continued(snapshot):
    (snapshot.parents[1] / "blobs/4d7a.incomplete").touch()
    with pytest.raises(UnknownModel, match="AssertionError: downloaded"):
        model_files.resolve("some/model")


# Inspecting


@pytest.mark.parametrize("shards", [1, 3])
def test_memory_of_weights_from_headers(tmp_path, shards):
    folder = tiny_model.save(tmp_path / "tiny", shards=shards)
    headers = model_files.inspect(folder)
    loaded = model_files.load(folder)
    assert len(headers.weight_files) == shards
    assert headers.weights.tensors == len(tree_flatten(loaded.model.parameters()))
    assert headers.weights.stored_bytes * 2 == headers.weights_bytes == loaded.weights_bytes


def test_memory_of_packed_weights_from_headers(tmp_path):
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    folder = tiny_model.save(tmp_path / "tiny")
    headers = model_files.inspect(folder)
    loaded = model_files.load(folder, library=build.load())
    assert headers.packed_bytes < 0.55 * headers.weights_bytes
    assert headers.packed_bytes <= loaded.weights_bytes <= 1.1 * headers.packed_bytes


@pytest.mark.parametrize("exact", [True, False])
def test_reading_float32_weights_takes_no_second_copy_of_them(tmp_path, exact):
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    folder = tiny_model.save(tmp_path / "tiny")
    (path,) = model_files.inspect(folder).weight_files
    weights = mx.load(str(path))
    dtype = mx.bfloat16 if exact else mx.float32
    wide = {
        name: mx.random.normal(one.shape).astype(dtype).astype(mx.float32)
        for name, one in weights.items()
    }
    mx.eval(wide)
    mx.save_safetensors(str(path), wide, {"format": "mlx"})
    headers = model_files.inspect(folder)
    library = build.load()
    del weights, wide
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    loaded = model_files.load(folder, library=library)

    largest = headers.weights.largest_bytes
    assert mx.get_peak_memory() - before <= loaded.weights_bytes + largest


def test_headers_of_quantized_weights(tmp_path):
    folder = tiny_model.save(tmp_path / "tiny", quantized=True)
    headers = model_files.inspect(folder)
    assert headers.weights.stored_bytes < headers.weights_bytes < 2 * headers.weights.stored_bytes
    assert headers.weights_bytes == model_files.load(folder).weights_bytes


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(InvalidModel, match=r"config\.json is missing"):
        model_files.inspect(folder)


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (b"[]", "not a JSON object")],
)
def test_a_broken_config(folder, content, what):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(InvalidModel, match=what):
        model_files.inspect(folder)


@pytest.mark.parametrize("kind", ["bert_of_tomorrow", "../qwen3", "", "os.path"])
def test_an_unknown_architecture(folder, kind):
    change_config(folder, model_type=kind)
    with pytest.raises(UnsupportedModel, match="does not know the model type"):
        model_files.inspect(folder)


def test_a_config_without_architecture_or_with_own_code_is_refused(folder):
    change_config(folder, model_type=None)
    with pytest.raises(UnsupportedModel, match="no model_type"):
        model_files.inspect(folder)
    change_config(folder, model_type="qwen3", model_file="evil.py")
    with pytest.raises(UnsupportedModel, match="brings its own code"):
        model_files.inspect(folder)


def test_a_remapped_architecture_is_known(folder):
    change_config(folder, model_type="mistral")
    model_files.inspect(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidModel, match=r"has no model\*\.safetensors"):
        model_files.inspect(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1])
def test_truncated_weights(folder, keep):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(InvalidModel, match=r"model\.safetensors is truncated") as caught:
        model_files.inspect(folder)
    assert caught.value.detail == {"path": str(file)}


def test_weights_with_trailing_bytes(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InvalidModel, match="longer than its header says"):
        model_files.inspect(folder)


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b'{"a": 1}', b'{"a": {"shape": 3, "dtype": "F32"}}', b"\xff\xff"]
)
def test_weights_with_a_broken_header(folder, header):
    content = len(header).to_bytes(8, "little") + header
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidModel, match="broken header"):
        model_files.inspect(folder)


def test_a_git_lfs_pointer_is_no_weights(folder):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / "model.safetensors").write_bytes(pointer)
    with pytest.raises(InvalidModel, match="truncated or no safetensors"):
        model_files.inspect(folder)


def test_a_shard_that_the_index_lists_is_missing(tmp_path):
    folder = tiny_model.save(tmp_path / "tiny", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InvalidModel, match=r"00002-of-00003\.safetensors is missing"):
        model_files.inspect(folder)


def test_a_broken_index(tmp_path):
    folder = tiny_model.save(tmp_path / "tiny", shards=2)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidModel, match="has no weight_map"):
        model_files.inspect(folder)


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidModel, match="has no tokenizer"):
        model_files.inspect(folder)


# Loading


def test_a_model_is_loaded_as_float32_on_the_cpu(folder):
    seen = []
    loaded = model_files.load(folder, lambda stage, part: seen.append((stage, part)))
    assert model_files.default_dtype() == mx.float32
    assert describe.dtype_name(loaded.model) == "float32"
    assert loaded.context_length == 1024
    assert loaded.vocab_size == 512
    assert loaded.eos_ids == {2, 7}
    assert loaded.parameters == sum(a.size for _, a in tree_flatten(loaded.model.parameters()))
    assert seen[-1] == ("weights", 1.0)
    logits = loaded.model(mx.array([[1, 2, 3]]))
    assert logits.dtype == mx.float32
    assert logits.shape == (1, 3, 512)


def test_quantized_weights_stay_quantized_with_float32_scales(tmp_path):
    loaded = model_files.load(tiny_model.save(tmp_path / "tiny", quantized=True))
    projection = loaded.model.layers[0].self_attn.q_proj
    assert projection.weight.dtype == mx.uint32
    assert projection.scales.dtype == mx.float32
    assert loaded.model(mx.array([[1]])).dtype == mx.float32
    assert describe.dtype_name(loaded.model) == "float32"
    full = model_files.load(tiny_model.save(tmp_path / "full"))
    assert loaded.parameters == full.parameters


def test_progress_while_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr(model_files, "READ_BYTES", 50_000)
    seen = []
    model_files.load(folder, lambda _stage, part: seen.append(part))
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_weights_that_do_not_fit_the_config(folder):
    change_config(folder, hidden_size=128)
    with pytest.raises(InvalidModel, match="cannot be loaded: ValueError"):
        model_files.load(folder)


def test_the_error_names_missing_weights(tmp_path):
    folder = tiny_model.save(tmp_path / "tiny")
    weights = mx.load(str(folder / "model.safetensors"))
    missing = [name for name in weights if name.startswith("model.layers.1.mlp.")]
    kept = {name: array for name, array in weights.items() if name not in missing}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    with pytest.raises(InvalidModel, match=f"Missing {len(missing)} parameters") as caught:
        model_files.load(folder)
    assert missing[0] in caught.value.message
    assert "\n" not in caught.value.message


def test_architectures_that_are_no_list(folder):
    change_config(folder, architectures=5)
    model_files.inspect(folder)


def test_a_config_without_what_the_model_needs(folder):
    change_config(folder, hidden_size=None)
    model_files.inspect(folder)
    with pytest.raises(InvalidModel, match="cannot be loaded: TypeError"):
        model_files.load(folder)


def test_a_broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidModel, match="tokenizer that cannot be loaded"):
        model_files.load(folder)


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"max_position_embeddings": None, "seq_length": 77}, 77),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 99}}, 99),
        ({"max_position_embeddings": None}, model_files.DEFAULT_CONTEXT),
    ],
)
def test_context_lengths(fields, length):
    config = tiny_model.CONFIG | fields
    assert model_files._context_length(config, object()) == length
