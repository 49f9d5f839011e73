"""The launchd agent: its keys and types, and the calls of a fake `launchctl` that records them.

The real one exists only on macOS, where these tests have not been run.
"""

from __future__ import annotations

import dataclasses
import os
import plistlib
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from kvd.config.config import Config
from kvd.host.home import Home
from kvd.service import installer
from kvd.service.describe import Service, describe
from kvd.service.launchd import Launchd, agent, label, parse, render
from protocol.errors import ServiceError

ROOT = Path(__file__).parent.parent.parent
SERVICE = Service(
    home=Path("/Users/YOU/.kvd"), program=("/Users/YOU/kvd/.venv/bin/kvd",), drain_s=30.0
)
ON_DEMAND = dataclasses.replace(
    SERVICE, on_demand=True, http=(("127.0.0.1", 11711),), http_socket=True
)

KEYS = {
    "Label": str,
    "ProgramArguments": [str],
    "EnvironmentVariables": {"*": str},
    "WorkingDirectory": str,
    "RunAtLoad": bool,
    "KeepAlive": {"SuccessfulExit": bool},
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "Umask": int,
    "SoftResourceLimits": {"NumberOfFiles": int},
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "Sockets": {
        "*": {
            "SockPathName": str,
            "SockPathMode": int,
            "SockNodeName": str,
            "SockServiceName": str,
            "SockType": str,
        }
    },
}
"""The keys of launchd.plist(5) in use, with their types; ``*`` is any name."""


def conform(value: object, kind: object, place: str = "") -> None:
    """Fail unless the value has the keys and types that launchd knows."""
    if isinstance(kind, dict):
        assert isinstance(value, dict), place
        for key, one in value.items():
            assert key in kind or "*" in kind, f"{place}.{key} is no key of launchd's"
            conform(one, kind.get(key, kind.get("*")), f"{place}.{key}")
    elif isinstance(kind, list):
        assert isinstance(value, list), place
        for one in value:
            conform(one, kind[0], place)
    elif isinstance(value, list):  # one name may stand for several sockets
        for one in value:
            conform(one, kind, place)
    else:
        assert type(value) is kind, place


def conform_job(job: dict[str, object]) -> None:
    sockets = job.get("Sockets", {})
    flat = {
        f"{name}{index}": one
        for name, found in sockets.items()
        for index, one in enumerate(found if isinstance(found, list) else [found])
    }
    conform({**job, **({"Sockets": flat} if flat else {})}, KEYS)


@pytest.mark.parametrize("service", [SERVICE, ON_DEMAND], ids=["session", "on demand"])
def test_keys_and_types_are_those_of_launchd(service: Service):
    conform_job(agent(service))
    assert plistlib.loads(render(service)) == agent(service)


@pytest.mark.parametrize("wrong", [{"Keepalive": True}, {"Umask": "077"}, {"ExitTimeOut": 45.0}])
def test_the_schema_finds_wrong_keys_and_types(wrong):
    with pytest.raises(AssertionError):
        conform_job(agent(SERVICE) | wrong)


def test_the_values_of_the_keys():
    job = agent(SERVICE)
    assert job["Label"] == "dev.kvd." + SERVICE.name
    assert job["ProcessType"] == "Interactive"
    assert (job["KeepAlive"], job["RunAtLoad"]) == ({"SuccessfulExit": False}, True)
    assert job["ExitTimeOut"] > SERVICE.drain_s
    assert job["Umask"] == 0o077
    paths = [job[k] for k in ("WorkingDirectory", "StandardOutPath", "StandardErrorPath")]
    assert all(path.startswith("/") for path in [*paths, job["ProgramArguments"][0]])
    assert job["ProgramArguments"][1:] == ["serve", "--home", "/Users/YOU/.kvd"]


def test_on_demand_launchd_listens_and_nothing_else_starts_it():
    job = agent(ON_DEMAND)
    # KeepAlive with SuccessfulExit would start it with the session.
    assert not {"KeepAlive", "RunAtLoad"} & job.keys()
    kvd, http = job["Sockets"]["kvd"], job["Sockets"]["http"]
    assert kvd == {"SockPathName": "/Users/YOU/.kvd/kvd.sock", "SockPathMode": 384}
    assert http[0]["SockPathName"] == "/Users/YOU/.kvd/http.sock"
    assert (http[1]["SockNodeName"], http[1]["SockServiceName"]) == ("127.0.0.1", "11711")


@pytest.mark.skipif(shutil.which("plistutil") is None, reason="needs plistutil (libplist)")
@pytest.mark.parametrize("service", [SERVICE, ON_DEMAND], ids=["session", "on demand"])
def test_another_parser_of_apples_format_reads_the_same(service: Service, tmp_path):
    text = tmp_path / "agent.plist"
    text.write_bytes(render(service))
    for source, form in ((text, "bin"), (tmp_path / "agent.bin", "xml")):
        made = tmp_path / f"agent.{form}"
        command = ["plistutil", "-i", source, "-o", made, "-f", form]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert plistlib.loads((tmp_path / "agent.xml").read_bytes()) == agent(service)


def test_the_file_of_deploy_is_what_install_would_write():
    example = dataclasses.replace(SERVICE, home=Path("/Users/YOU/.kvd"))
    text = (ROOT / "deploy/launchd/dev.kvd.kvd.plist").read_bytes()
    wanted = agent(example) | {"Label": "dev.kvd.kvd"}
    assert plistlib.loads(text) == wanted


def test_each_home_has_its_own_service(home: Home, monkeypatch):
    monkeypatch.setenv("HOME", str(home.root))
    usual = describe(Home(home.root / ".kvd"), Config())
    other = describe(Home(home.root / "other"), Config())
    assert label(usual) == "dev.kvd.kvd"
    assert re.fullmatch(r"dev\.kvd\.kvd-[0-9a-f]{8}", label(other))


def test_a_longer_drain_has_a_longer_exit_timeout(home: Home):
    assert agent(describe(home, Config(drain_timeout_s=600)))["ExitTimeOut"] > 600


RUNNING = """gui/501/dev.kvd.kvd = {
\tactive count = 1
\tpath = /Users/you/Library/LaunchAgents/dev.kvd.kvd.plist
\tstate = running

\tprogram = /Users/you/kvd/.venv/bin/kvd
\tpid = 4711
\tlast exit code = (never exited)
}
"""
ENDED = "x = {\n\tstate = not running\n\tlast exit code = 5\n}\n"
LISTENS = 'x = {\n\tstate = not running\n\tsockets = {\n\t\t"kvd" = {\n\t\t}\n\t}\n}\n'


@pytest.mark.parametrize(
    ("text", "word", "pid"),
    [
        (RUNNING, "running", 4711),
        (ENDED, "failed", None),
        (ENDED.replace("5", "0"), "stopped", None),
        (LISTENS, "listening", None),
    ],
)
def test_the_output_of_launchctl_print_is_parsed(text, word, pid):
    state = parse(text)
    assert (state.status, state.pid) == (word, pid)


@pytest.fixture
def launchctl(tmp_path, monkeypatch):
    """Install a fake `launchctl`; return a function that returns its calls since the last time."""
    notes, job = tmp_path / "notes", tmp_path / "job"
    script = tmp_path / "bin" / "launchctl"
    script.parent.mkdir()
    script.write_text(
        f"""#!/bin/sh
echo "$@" >> {notes}
case "$1 $2" in
  "print gui/{os.getuid()}") ;;
  print*) test -e {job} || exit 113; printf '\\tstate = running\\n\\tpid = 7\\n' ;;
  bootstrap*) touch {job} ;;
  bootout*) test -e {job} || exit 3; rm {job} ;;
esac
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    def asked() -> list[str]:
        said = notes.read_text().splitlines() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return [line for line in said if not line.startswith("print ")]

    return asked


def test_the_life_of_a_service(launchctl, home: Home, tmp_path):
    manager = Launchd(describe(home, Config()), tmp_path / "agents")
    domain, target = f"gui/{os.getuid()}", f"gui/{os.getuid()}/{label(manager.service)}"
    assert installer.installed(manager) == []
    (file,) = installer.install(manager)
    assert plistlib.loads(file.read_bytes()) == agent(manager.service)
    assert file.stat().st_mode & 0o777 == 0o644
    boot = [f"enable {target}", f"bootstrap {domain} {file}"]
    assert launchctl() == [f"bootout {target}", *boot]
    assert manager.state().pid == 7
    assert not manager.is_on_demand()
    manager.start()
    manager.reload()
    assert launchctl() == [f"kickstart {target}", f"kill SIGHUP {target}"]
    manager.stop()
    assert manager.state().status == "stopped"
    manager.start()
    assert launchctl() == [f"bootout {target}", *boot]
    manager.restart()
    assert launchctl() == [f"bootout {target}", *boot]
    assert installer.uninstall(manager) == [file]
    assert launchctl() == [f"bootout {target}"]
    assert not file.exists()
    assert installer.uninstall(manager) == []


class Clock:
    """Replaces `time`: sleeps return at once, and the job ends at the time `ends`."""

    def __init__(self, job: Path, ends: float) -> None:
        self._job, self._ends, self._now = job, ends, 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += 10 * seconds
        if self._now >= self._ends:
            self._job.unlink(missing_ok=True)


def test_a_stop_waits_until_launchd_kills_the_daemon(launchctl, home: Home, tmp_path, monkeypatch):
    manager = Launchd(describe(home, Config(drain_timeout_s=1.0)), tmp_path / "agents")
    (tmp_path / "bin/launchctl").write_text(
        f"#!/bin/sh\ncase $1 in print) test -e {tmp_path / 'job'} || exit 113 ;; esac\n"
    )
    (tmp_path / "job").touch()
    stop_s = agent(manager.service)["ExitTimeOut"]
    monkeypatch.setattr("kvd.service.launchd.time", Clock(tmp_path / "job", stop_s + 5.0))
    manager.stop()
    assert not (tmp_path / "job").exists()

    (tmp_path / "job").touch()
    monkeypatch.setattr("kvd.service.launchd.time", Clock(tmp_path / "job", stop_s + 60.0))
    with pytest.raises(ServiceError, match="still runs"):
        manager.stop()


def test_installed_files_for_another_way_to_start_are_outdated(launchctl, home: Home, tmp_path):
    usual = Launchd(describe(home, Config()), tmp_path / "agents")
    waits = Launchd(describe(home, Config(), on_demand=True), tmp_path / "agents")
    installer.install(waits)
    assert usual.is_on_demand()
    assert installer.outdated(waits) == []
    assert installer.outdated(usual) == list(usual.files())


def test_launchds_own_error_is_shown(home: Home, tmp_path, monkeypatch):
    script = tmp_path / "launchctl"
    script.write_text("#!/bin/sh\necho 'Bootstrap failed: 5: Input/output error' >&2\nexit 5\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ServiceError, match=r"launchctl print gui/.*Bootstrap failed: 5"):
        installer.install(Launchd(describe(home, Config()), tmp_path / "agents"))
    assert not (tmp_path / "agents").exists()
