"""The native library is built once and atomically. If that fails, the reason is reported."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import ModuleType
from typing import Any

import pytest

from kvd.worker.native import activation, build

pytestmark = pytest.mark.mlx


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # `load` without its cache, which may hold the library that other tests loaded.
    monkeypatch.setattr(build, "load", build.load.__wrapped__)
    return tmp_path


def test_without_a_compiler_the_reason_names_the_package(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    status: list[str] = []

    found = activation.activate(lambda stage, _: status.append(stage))

    assert found.library is None
    assert "install" in str(found.reason)
    assert "g++" in str(found.reason)
    assert status == ["building native operations, once"]
    assert not list(empty_cache.rglob("*.so"))


def test_a_compiler_that_fails_leaves_nothing_behind(
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvd.worker")
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho 'module.cpp: error: no room' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda _: str(fake))

    with pytest.raises(build.NotBuiltError, match="error: no room"):
        build.load()
    assert not list((empty_cache / "kvd").rglob("*kvd_native*"))
    # The first load of a new user takes minutes on a busy machine, and the log gives the reason.
    assert f"once, with {fake}" in caplog.text


def _put_into_cache(content: bytes, *, digest: str | None = None) -> Path:
    path = build._path()
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(content)
    path.chmod(0o755)
    path.with_suffix(".sha256").write_text(digest or hashlib.sha256(content).hexdigest())
    return path


def test_what_a_killed_build_left_is_removed_by_the_next_one(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler is found here: the next build begins, and fails."""
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    folder = build._path().parent
    left = folder / f"{build._PREFIX}x"
    left.mkdir(parents=True)
    folder.chmod(0o700)
    (left / "half.o").touch()
    with pytest.raises(build.NotBuiltError):
        build.library()
    assert not left.exists()


def test_a_truncated_library_is_built_again(
    empty_cache: Path, library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Path(str(library.__file__)).read_bytes()
    path = _put_into_cache(content[:300_000], digest=hashlib.sha256(content).hexdigest())

    def compiled(folder: Path) -> Path:
        (folder / path.name).write_bytes(content)
        return folder / path.name

    monkeypatch.setattr(build, "_compiled", compiled)
    assert not build.is_built()
    assert build.library() == path
    assert path.read_bytes() == content
    assert build.is_built()


def test_a_file_that_is_no_library_is_reported_without_a_crash(empty_cache: Path) -> None:
    _put_into_cache(b"not a library")

    with pytest.raises(build.NotBuiltError, match="does not work"):
        build.load()


def test_a_library_that_other_users_could_have_written_is_not_loaded(empty_cache: Path) -> None:
    _put_into_cache(b"whatever").chmod(0o777)

    with pytest.raises(build.NotBuiltError, match="others can write"):
        build.load()


@pytest.mark.parametrize("home", ["/proc/nothere", "/dev/null/cache"])
def test_a_cache_that_cannot_be_written_is_reported_without_a_crash(
    home: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)

    found = activation.activate(lambda *_: None)
    assert found.library is None
    assert "XDG_CACHE_HOME" in str(found.reason)


@pytest.mark.parametrize(
    ("text", "thread_count"), [("max 100000", 1 << 16), ("200000 100000", 2), ("150000 100000", 2)]
)
def test_a_containers_quota_bounds_the_threads(
    tmp_path: Path, text: str, thread_count: int
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text + "\n")

    assert activation._quota(file) == thread_count
    assert activation._quota(tmp_path / "none") == 1 << 16


def test_a_built_library_is_not_built_again(library: ModuleType) -> None:
    assert build.is_built()
    assert build.load() is library


def test_workers_that_start_together_share_one_build(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locking: Queue[None] = Queue()
    flock = build.fcntl.flock
    both = threading.Event()
    builds = []

    def recorded(*arguments: Any) -> None:
        locking.put(None)
        flock(*arguments)

    def compiled(folder: Path) -> Path:
        builds.append(folder)
        assert both.wait(30)
        target = folder / f"{build.NAME}.so"
        target.write_bytes(b"a library")
        return target

    monkeypatch.setattr(build.fcntl, "flock", recorded)
    monkeypatch.setattr(build, "_compiled", compiled)
    with ThreadPoolExecutor(2) as workers:
        found = [workers.submit(build.library) for _ in range(2)]
        for _ in found:
            locking.get(timeout=30)
        both.set()
        assert [one.result(30) for one in found] == [build._path()] * 2
    assert len(builds) == 1
    assert build.is_built()


def test_the_name_of_the_file_depends_on_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = build.key()
    monkeypatch.setattr(build, "processor", lambda: "another one")

    assert build.key() != before


def test_the_library_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_NATIVE", "off")

    assert activation.activate(lambda *_: None) == activation.Activation(None, "switched off")
