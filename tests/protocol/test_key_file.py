"""The file with the key: created once, private, and never replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from protocol.key_file import UnusableKey, create_key, read_key


def test_a_key_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.key"
    old_umask = os.umask(0)
    try:
        create_key(path)
    finally:
        os.umask(old_umask)
    key = read_key(path)
    assert len(set(key)) > 16
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    create_key(path)
    assert read_key(path) == key
    create_key(tmp_path / "other.key")
    assert read_key(tmp_path / "other.key") != key
    assert {one.name for one in tmp_path.iterdir()} == {"prefixes.key", "other.key"}


def test_a_process_that_dies_while_it_creates_the_key_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, victim = tmp_path / "prefixes.key", tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.with_name("prefixes.key.part").symlink_to(victim)

    def die(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(KeyboardInterrupt):
            create_key(path)
    assert not path.exists()
    assert victim.read_bytes() == b"precious"
    create_key(path)
    assert len(read_key(path)) == 32


def test_a_link_to_a_volume_that_is_not_mounted_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.key"
    path.symlink_to(tmp_path / "volume" / "key")
    create_key(path)
    with pytest.raises(FileNotFoundError):
        read_key(path)
    (tmp_path / "volume").mkdir()
    create_key(tmp_path / "volume" / "key")
    assert len(read_key(path)) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "prefixes.key"
    create_key(path)
    path.chmod(mode)
    with pytest.raises(UnusableKey, match=f"chmod 600 {path}"):
        read_key(path)


@pytest.mark.parametrize("size", [0, 31, 4097])
def test_what_is_no_key_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "prefixes.key"
    path.touch(0o600)
    path.write_bytes(b"k" * size)
    with pytest.raises(UnusableKey, match="32 to 4096 bytes"):
        read_key(path)
    create_key(path)
    assert path.stat().st_size == size, "a file of the user is never replaced"


def test_a_pipe_or_folder_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.key"
    os.mkfifo(path, 0o600)
    with pytest.raises(UnusableKey):
        read_key(path)
    path.unlink()
    path.mkdir(0o700)
    with pytest.raises(UnusableKey):
        read_key(path)
