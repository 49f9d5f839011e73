"""Files are replaced in one rename, and new files of killed writers are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from protocol import atomic_file

_WRITER = """
import os, sys
from pathlib import Path
from protocol import atomic_file
Path.replace = lambda *_: (print("written", flush=True), sys.stdin.read())
atomic_file.write(Path(sys.argv[1]), b"half")
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def writer(path: Path) -> subprocess.Popen[bytes]:
    """Start a process that has written its new file and has not renamed it yet."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    return process


def test_a_file_is_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    atomic_file.write(path, b"new", mode=0o640)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)
    assert names(tmp_path) == ["a"]


def test_a_killed_writer_leaves_nothing_after_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with writer(path) as process:
        process.send_signal(signal.SIGKILL)
    assert len(names(tmp_path)) == 1
    atomic_file.write(path, b"new")
    assert names(tmp_path) == ["a"]


def test_the_new_file_of_a_live_writer_and_other_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "a"
    others = {".b.x.new", ".a.x.new", "a.new"}
    for name in others:
        (tmp_path / name).touch()
    with writer(path) as process:
        atomic_file.write(path, b"new")
        assert len(names(tmp_path)) == len(others) + 2
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("others", [1, 3])
def test_a_new_file_that_another_writer_took_for_stale_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Another writer looks for stale files before this one has locked its new file."""
    path, real, made = tmp_path / "a", tempfile.mkstemp, []

    def mkstemp(**options: Any) -> tuple[int, str]:
        found = real(**options)
        made.append(found[1])
        if len(made) <= others:
            atomic_file._remove_stale(tmp_path)
        return found

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    atomic_file.write(path, b"new")
    assert (path.read_bytes(), names(tmp_path)) == (b"new", ["a"])
    assert len(made) == others + 1


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        atomic_file.write(path, b"new")
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["a"])


def test_names_cannot_be_predicted(tmp_path: Path) -> None:
    """A link at a guessed name is neither followed nor removed for its target."""
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    (tmp_path / ".a.guess.kvd-new").symlink_to(target)
    atomic_file.write(tmp_path / "a", b"new")
    assert target.read_bytes() == b"kept"
