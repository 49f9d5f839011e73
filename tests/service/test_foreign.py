"""Files at the paths of the service that belong to another program or home."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from kvd.config.config import Config
from kvd.host.home import Home
from kvd.service import installer
from kvd.service.describe import describe
from kvd.service.installer import Manager
from kvd.service.launchd import Launchd
from kvd.service.systemd import Systemd
from protocol.errors import ServiceError

UNIT = b"[Service]\nExecStart=/usr/bin/something else\n"
AGENT = b'<plist version="1.0"><dict><key>Label</key><string>dev.kvd.kvd</string></dict></plist>\n'
COMPLIANT = f"""#!/bin/sh
# Every command succeeds, and launchd never has a job.
test "$1" = print && test "$2" != gui/{os.getuid()} && exit 113
exit 0
"""


@pytest.fixture(params=["systemd", "launchd"])
def manager(request, home: Home, tmp_path, monkeypatch) -> Manager:
    (tmp_path / "bin").mkdir()
    for name in ("systemctl", "launchctl"):
        script = tmp_path / "bin" / name
        script.write_text(COMPLIANT)
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    home.create()
    (tmp_path / "u").mkdir()
    service = describe(home, Config())
    if request.param == "systemd":
        return Systemd(service, tmp_path / "u")
    return Launchd(service, tmp_path / "u")


def place_of(manager: Manager) -> Path:
    (path,) = manager.files()
    return path


def of_another_home(manager: Manager) -> bytes:
    (content,) = manager.files().values()
    home = str(manager.service.home).encode()
    return content.replace(home, home + b"2")


@pytest.fixture(params=["something else", "another home", "no text"])
def theirs(request, manager: Manager) -> bytes:
    if request.param == "no text":
        return b"\xff\xfe\x00"
    if request.param == "another home":
        return of_another_home(manager)
    return UNIT if manager.name == "systemd" else AGENT


def test_foreign_files_are_neither_replaced_nor_deleted(manager: Manager, theirs: bytes):
    path = place_of(manager)
    path.write_bytes(theirs)
    for act in (installer.install, installer.uninstall):
        with pytest.raises(ServiceError, match=r"does not belong to this home's service.*--force"):
            act(manager)
        assert path.read_bytes() == theirs
    assert installer.foreign(manager) == [path]
    assert (installer.installed(manager), installer.outdated(manager)) == ([], [])
    assert list(path.parent.iterdir()) == [path]


def test_force_replaces_foreign_files(manager: Manager, theirs: bytes):
    path = place_of(manager)
    path.write_bytes(theirs)
    assert installer.install(manager, force=True) == [path]
    assert installer.foreign(manager) == []
    assert installer.uninstall(manager) == [path]
    assert not path.exists()


@pytest.mark.parametrize("target", ["/dev/null", "mine"])
@pytest.mark.parametrize("force", [False, True])
def test_a_link_is_neither_replaced_nor_deleted(manager: Manager, target, force):
    path = place_of(manager)
    path.with_name("mine").write_bytes(manager.files()[path])
    path.symlink_to(target)
    with pytest.raises(ServiceError, match=f"is a link to {target}"):
        installer.install(manager, force=force)
    with pytest.raises(ServiceError, match=f"is a link to {target}"):
        installer.uninstall(manager)
    assert str(path.readlink()) == target


def test_a_file_of_another_installation_of_kvd_is_replaced(manager: Manager):
    path = place_of(manager)
    older = dataclasses.replace(manager.service, program=("/old/bin/kvd",), drain_s=1.0)
    path.write_bytes(*dataclasses.replace(manager, service=older).files().values())
    assert installer.outdated(manager) == [path]
    assert installer.install(manager) == [path]
    assert installer.outdated(manager) == []


@pytest.mark.parametrize("name", ['a b%h$HOME"q\\', "%%$$", "plain"])
def test_the_files_of_any_home_are_recognized(name, tmp_path, manager: Manager):
    service = dataclasses.replace(manager.service, home=tmp_path / name)
    same = dataclasses.replace(manager, service=service)
    path = place_of(same)
    path.write_bytes(same.files()[path])
    assert installer.installed(same) == [path]


def test_an_uninstall_keeps_foreign_sockets(home: Home, tmp_path, manager):
    if manager.name == "launchd":
        pytest.skip("launchd has one file")
    socket = place_of(manager).with_suffix(".socket")
    socket.write_text("[Socket]\nListenStream=/run/other\n")
    assert not manager.is_on_demand()
    installer.install(manager)
    installer.uninstall(manager)
    assert list(socket.parent.iterdir()) == [socket]


def test_a_failed_write_leaves_no_temporary_file(manager: Manager):
    path = place_of(manager)
    path.mkdir()
    with pytest.raises(ServiceError, match="cannot write"):
        installer.install(manager, force=True)
    assert list(path.parent.iterdir()) == [path]
