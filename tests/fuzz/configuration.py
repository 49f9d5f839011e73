"""`config.toml` through the real loader: a valid configuration, or a `ConfigError`."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import tomlkit
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvd.config import config, settings
from kvd.config.config import Config, ModelEntry
from kvd.config.http import HttpSettings
from kvd.config.reload import by_name, known_model
from kvd.http.errors import Refusal
from kvd.http.guard import Guard
from protocol.errors import MAX_TEXT, ConfigError
from tests.fuzz.mutations import edited_bytes, edited_tree, either
from tests.fuzz.target import Check, Target

_NAMES = [*Config.__struct_fields__, *HttpSettings.__struct_fields__, *ModelEntry.__struct_fields__]


@st.composite
def _edited_toml(draw: DrawFn, seeds: list[bytes]) -> bytes:
    tree = edited_tree(draw, tomllib.loads(draw(st.sampled_from(seeds)).decode()), _NAMES)
    try:
        return tomlkit.dumps(tree).encode()
    except (ValueError, TypeError, RecursionError, AttributeError):  # None, or not a table
        return repr(tree).encode(errors="replace")


class Configuration(Target):
    name = "config"
    examples = 120

    def inputs(self) -> SearchStrategy[bytes]:
        seeds = self.seeds()
        valid = [seed for seed in seeds if _is_toml(seed)]
        return either(_edited_toml(valid), edited_bytes(seeds, [name.encode() for name in _NAMES]))

    @contextmanager
    def checking(self) -> Iterator[Check]:
        with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
            file = Path(folder) / "config.toml"

            def check(data: bytes) -> None:
                file.write_bytes(data)
                _check(file)

            yield check


def _is_toml(seed: bytes) -> bool:
    try:
        tomllib.loads(seed.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _check(file: Path) -> None:
    try:
        loaded = config.load(file)
    except ConfigError as error:
        _check_error(error, file)
        return
    shown = settings.flat(loaded)
    msgspec.json.encode([shown, settings.table(loaded, file)])
    for key in settings.keys_in(file.read_text()) & shown.keys():
        settings.default_of(key)
        try:
            assert settings.flat(settings.with_value(loaded, key, shown[key])) == shown
        except ConfigError as error:
            raise AssertionError(f"a value that the file may have is refused: {error}") from error
    for entry in by_name(loaded).values():
        known_model(entry, file.parent)
    try:
        Guard(loaded.http).check_host("localhost")
        Guard(loaded.http).check_origin("http://evil.example", "localhost")
        Guard(loaded.http).check_key("Bearer x")
    except Refusal:
        pass


def _check_error(error: ConfigError, file: Path) -> None:
    assert 0 < len(error.message) <= MAX_TEXT
    assert "key" in error.detail
    msgspec.json.encode(error.info())
    assert settings.table(Config(), file)  # `kvctl config` shows the running values
