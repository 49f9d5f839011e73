"""Names and sources of models: the errors for those that do not exist, with advice that works."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidModel, UnknownModel, UnsupportedModel
from protocol.model_source import (
    EMBEDDED,
    check_folder,
    is_hub_id,
    is_source,
    short_name,
    unknown_model,
    unknown_source,
)
from tests.cpu_time import takes_less_than


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("dmeo", "did you mean 'demo'?"),
        ("DEMO", "did you mean 'demo'?"),
        ("qwen-3-0.6b", "did you mean 'Qwen3-0.6B'?"),
        ("mlx-community/Qwen3-0.6B", "did you mean 'Qwen3-0.6B'?"),
        ("llama", "did you mean 'meta/Llama'?"),
        ("org/Phi", "`kvctl load org/Phi` loads it as Phi"),
        ("gpt-4o", "`kvctl load` adds a model"),
        ("/models/none", "`kvctl load` adds a model"),
    ],
)
def test_an_unknown_model_gets_the_closest_name_or_a_command_that_works(name, advice):
    error = unknown_model(name, ["demo", "Qwen3-0.6B"], ["meta/Llama"])
    assert error.message == (
        f"there is no model {name!r} (loaded: Qwen3-0.6B, demo; loaded by the next request:"
        f" meta/Llama); {advice}"
    )
    assert error.detail == {"model": name}


def test_without_known_models_the_embedded_one_can_be_loaded():
    error = unknown_model("demo", [], [])
    assert error.message == (
        "there is no model 'demo' (no model is known); `kvctl load demo` loads it as demo"
    )


def test_the_list_of_names_is_short():
    error = unknown_model("x", [f"m{number}" for number in range(20)], [])
    assert "m1, m10, m11, m12, m13, m14, m15 and 12 more" in error.message


def test_a_very_long_name_takes_no_time():
    def look() -> None:
        assert "did you mean" not in unknown_model("a" * 10**6, ["a" * 256] * 1000, []).message

    assert takes_less_than(1, look)


@given(st.text(max_size=300), st.lists(st.text(max_size=300)), st.lists(st.text(max_size=300)))
def test_any_names_give_an_error(name, loaded, unloaded):
    assert isinstance(unknown_model(name, loaded, unloaded), UnknownModel)
    assert isinstance(unknown_source(name), UnknownModel)


def test_an_unknown_source_gets_the_embedded_name_or_the_three_kinds_of_sources():
    assert unknown_source("dmo").message == "there is no model 'dmo'; did you mean 'demo'?"
    assert "; give demo, the absolute path" in unknown_source("qwen").message


def test_sources():
    assert all(map(is_source, [*EMBEDDED, "/models/x", "org/name"]))
    assert not any(map(is_source, ["name", "./name", "a/b/c", ""]))
    assert is_hub_id("org/name")
    assert not is_hub_id("/org/name")
    assert [short_name(source) for source in ("demo", "/m/x/", "org/name")] == ["demo", "x", "name"]


def test_a_folder_is_checked_before_its_files_are_read(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    assert check_folder(model) == model
    with pytest.raises(UnknownModel, match="there is no folder"):
        check_folder(tmp_path / "none")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / ("a" * 300), tmp_path / "loop"):
        with pytest.raises(UnknownModel, match="there is no folder"):
            check_folder(path)
    (model / "config.json").touch()
    with pytest.raises(InvalidModel, match="is a file; give the model's folder"):
        check_folder(model / "config.json")


def test_gguf_is_named_with_what_to_use_instead(tmp_path):
    weights = tmp_path / "q4.gguf"
    weights.touch()
    for path in (tmp_path, weights):
        with pytest.raises(UnsupportedModel, match=r"GGUF.*safetensors.*mlx_lm\.convert"):
            check_folder(path)
    (tmp_path / "model.safetensors").touch()  # both formats, as some repositories have
    assert check_folder(tmp_path) == tmp_path
