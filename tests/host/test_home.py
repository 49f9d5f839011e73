"""The daemon's home: its place, its private folders, and the length limit of socket paths."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvd.host.home import SOCKET_PATH_LIMIT, Home, check_socket_path, locate
from protocol.errors import ConfigError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_option_overrides_the_environment_which_overrides_the_default(monkeypatch):
    monkeypatch.setenv("KVD_HOME", "/from/environment")
    assert locate("/from/option").root == Path("/from/option")
    assert locate().root == Path("/from/environment")
    monkeypatch.delenv("KVD_HOME")
    assert locate().root == Path.home() / ".kvd"


def test_a_relative_home_becomes_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert locate("here").root == tmp_path / "here"


def test_all_folders_are_private_and_an_existing_root_becomes_private(home: Home):
    home.root.mkdir(mode=0o755)
    home.create()
    home.create()
    assert [mode(p) for p in (home.root, home.logs, home.cache)] == [0o700] * 3


def test_the_error_for_a_home_that_cannot_be_created_names_the_options(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="KVD_HOME or --home"):
        Home(tmp_path / "file" / "home").create()


def test_a_folder_with_unrelated_files_is_left_unchanged(home: Home):
    home.root.mkdir(mode=0o755)
    (home.root / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"thesis\.tex.*not a home of kvd.*touch") as caught:
        home.create()
    assert caught.value.detail["key"] == "home"
    assert mode(home.root) == 0o755
    assert [path.name for path in home.root.iterdir()] == ["thesis.tex"]
    home.lock.touch()
    home.create()
    assert mode(home.root) == 0o700


def test_a_configuration_may_exist_before_the_first_start(home: Home):
    (home.root / "models").mkdir(parents=True)
    home.config.write_text("")
    home.create()
    assert home.logs.is_dir()


def test_a_folder_of_another_user_is_left_unchanged(home: Home, monkeypatch):
    home.root.mkdir(mode=0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        home.create()
    assert mode(home.root) == 0o755


def test_a_tilde_with_an_unknown_user_is_an_ordinary_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert locate("~no-such-user/x").root == tmp_path / "~no-such-user/x"


def test_a_socket_path_at_the_limit_passes_and_one_byte_more_does_not():
    at_limit = Path("/" + "x" * (SOCKET_PATH_LIMIT - 1))
    assert check_socket_path(at_limit) == at_limit
    with pytest.raises(ConfigError, match="shorter KVD_HOME"):
        check_socket_path(Path(str(at_limit) + "x"))


def test_the_limit_counts_bytes_and_not_characters():
    with pytest.raises(ConfigError):
        check_socket_path(Path("/" + "ü" * (SOCKET_PATH_LIMIT // 2 + 1)))
