"""Reading a broken or hostile model folder raises a typed error, without hanging or large reads."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import model_folder
from protocol.errors import InvalidModel
from protocol.weights import Weights

CONFIG = {"model_type": "qwen3", "num_hidden_layers": 2}
W = {"dtype": "F16", "shape": [10, 5], "data_offsets": [0, 100]}
V = {"dtype": "F32", "shape": [25], "data_offsets": [100, 200]}


def safetensors(tensors: Any, size: int) -> bytes:
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(
        safetensors({"__metadata__": {"format": "pt"}, "w": W, "v": V}, 200)
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def read(folder: Path) -> Weights:
    model_folder.check_files(folder)
    model_folder.check_index(folder)
    config = model_folder.read_config(folder)
    found = model_folder.read_weights(model_folder.weight_files(folder))
    model_folder.check_layers(folder, config, found)
    return found


def problem(folder: Path) -> str:
    with pytest.raises(InvalidModel) as caught:
        read(folder)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_an_intact_folder(folder):
    (folder / "dangling.json").symlink_to(folder / "none")
    (folder / "linked.json").symlink_to(folder / "config.json")
    (folder / "original").mkdir()
    found = read(folder)
    assert (found.tensors, found.stored_bytes, found.half_elements) == (2, 200, 50)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        ("config.json", endless, "is a device"),
        ("config.json", a_pipe, "is a named pipe"),
        ("config.json", Path.mkdir, "is a folder"),
        ("model.safetensors", a_pipe, "is a named pipe"),
        ("model.safetensors", Path.mkdir, "is a folder"),
        ("model.safetensors.index.json", endless, "is a device"),
        ("tokenizer.json", a_pipe, "is a named pipe"),
        ("chat_template.jinja", endless, "is a device"),
        ("special_tokens_map.json", a_socket, "is a socket"),
    ],
)
def test_only_regular_files_are_read(
    folder: Path, name: str, make: Callable[[Path], None], kind: str
):
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert f"{name} {kind}" in problem(folder)


def test_a_pipe_in_the_folder_of_templates(folder):
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "tools.jinja")
    assert "tools.jinja is a named pipe" in problem(folder)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("config.json", model_folder.MAX_CONFIG_BYTES + 1),
        ("tokenizer.json", model_folder.MAX_TEXT_BYTES + 1),
        ("vocab.txt", 2**40),
    ],
)
def test_large_files_are_not_read(folder, name, size):
    with (folder / name).open("wb") as file:
        file.truncate(size)  # sparse
    assert f"{name} has {size} bytes" in problem(folder)


def test_files_that_no_loader_reads_may_be_large_or_special(folder):
    for name in ("train.jsonl", "trainer_state.json", "notes.txt"):
        with (folder / name).open("wb") as file:
            file.truncate(2**40)  # sparse
    os.mkfifo(folder / "loss.log")
    assert read(folder).tensors == 2


@pytest.mark.parametrize("number", [str(2**63), str(-(2**63)), str(2**64), "9" * 5000])
def test_an_integer_that_messages_cannot_hold(folder, number):
    (folder / "config.json").write_text(f'{{"rope": {{"window": [{number}]}}}}')
    assert "config.json has the integer" in problem(folder)


def test_the_length_of_the_context_is_a_count():
    assert model_folder.context_length({}) is None
    assert model_folder.context_length({"seq_length": -1, "n_positions": 5}) == 5
    assert model_folder.context_length({"text_config": {"seq_length": 7}}) == 7
    assert model_folder.context_length({"max_position_embeddings": 2**62}) == 2**31 - 1


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000])
def test_json_that_is_nested_deeply(folder, text):
    (folder / "config.json").write_text(text)
    assert "nested too deeply" in problem(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header = text.encode()
    content = len(header).to_bytes(8, "little") + header
    (folder / "model.safetensors").write_bytes(content)
    assert "broken header" in problem(folder)


def test_headers_that_would_take_much_memory(folder):
    header = b"{" + b",".join(b'"%d":{}' % number for number in range(20_000)) + b"}"
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "broken header (20001 objects" in problem(folder)
    with file.open("wb") as stream:
        stream.write((2**25).to_bytes(8, "little"))
        stream.truncate(2**25 + 8)
    assert "header of 33554432 bytes" in problem(folder)


@pytest.mark.parametrize(
    "tensor",
    [
        W | {"shape": [2**40, 2**40]},
        W | {"shape": [2**31, 0], "data_offsets": [0, 0]},
        W | {"shape": [-10, -5]},
        W | {"shape": [10, 6]},
        W | {"shape": [10, 5.0]},
        W | {"data_offsets": [100, 0]},
        W | {"data_offsets": [0, 2**70]},
        W | {"data_offsets": [50, 150]},
        W | {"dtype": 3},
        {},
        None,
    ],
)
def test_tensors_that_do_not_fit_the_file(folder, tensor):
    (folder / "model.safetensors").write_bytes(safetensors({"w": tensor, "v": V}, 200))
    assert "model.safetensors has a broken header" in problem(folder)


def test_a_name_in_the_index_that_is_not_a_files_name(folder):
    for name in ("a" * 5000, "\0", "../none"):
        index = {"weight_map": {"w": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "is missing, though the index lists it" in problem(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 1e9},
        {"n_layer": 3},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"num_hidden_layers": 2, "thinker": {"num_layers": 2**62}},
    ],
)
def test_more_layers_than_tensors(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    assert "the weight files have only 2 tensors" in problem(folder)


def test_a_text_config_that_is_not_an_object(folder):
    (folder / "config.json").write_text('{"text_config": 5}')
    assert "text_config that is not an object" in problem(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "I8", "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 2**65) | st.integers(0, 9), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 300), min_size=1, max_size=3) | JSON,
    },
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=4), st.integers(0, 300))
def test_any_header_gives_sizes_within_the_file_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, header: Any, size: int
):
    file = tmp_path_factory.getbasetemp() / "model.safetensors"
    file.write_bytes(safetensors(header, size))
    try:
        found = model_folder.read_weights([file])
    except InvalidModel:
        return
    assert found.stored_bytes <= size
