"""Building: once, whole or not at all, and a reason where it cannot be had."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from kvd.worker.native import build, choice

pytestmark = pytest.mark.mlx


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load.cache_clear()
    yield tmp_path
    build.load.cache_clear()


def test_without_a_compiler_it_says_what_to_install(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    told: list[str] = []

    found = choice.choose(lambda stage, _: told.append(stage))

    assert found.library is None
    assert "install" in str(found.reason)
    assert "g++" in str(found.reason)
    assert told == ["building native operations, once"]
    assert not list(empty_cache.rglob("*.so"))


def test_a_compiler_that_fails_leaves_nothing_behind(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho 'module.cpp: error: no room' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda _: str(fake))

    with pytest.raises(build.NotBuiltError, match="error: no room"):
        build.load()
    assert not list((empty_cache / "kvd").rglob("*kvd_native*"))


def test_a_damaged_library_is_a_reason_and_no_crash(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build._path().parent.mkdir(parents=True)
    build._path().write_bytes(b"not a library")

    with pytest.raises(build.NotBuiltError, match="does not work"):
        build.load()


def test_what_is_built_is_not_built_again(library: ModuleType) -> None:
    assert build.is_built()
    assert build.load() is library


def test_the_name_changes_with_what_the_binary_depends_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = build._key()
    monkeypatch.setattr(build, "_processor", lambda: "another one")

    assert build._key() != before


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_NATIVE", "off")

    assert choice.choose(lambda *_: None) == choice.Choice(None, "switched off")
