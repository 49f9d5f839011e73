"""The systemd units: verified by systemd, and run by a real manager where a test may start one."""

from __future__ import annotations

import configparser
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config.config import Config
from kvd.config.http import HttpSettings
from kvd.host.home import Home
from kvd.service import installer
from kvd.service.describe import Service, describe
from kvd.service.systemd import Systemd, units

ROOT = Path(__file__).parent.parent.parent


def written(folder: Path, service: Service) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = Systemd(service, folder).files()
    for path, content in files.items():
        path.write_bytes(content)
    return list(files)


def verified(files: list[Path], tmp_path: Path) -> tuple[int, str]:
    """Return the exit status and the output of systemd's check; it prints only problems."""
    command = ["systemd-analyze", "--user", "verify", *map(str, files)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout + done.stderr


analyzed = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)


@pytest.fixture
def strange(tmp_path) -> Home:
    """A home whose name has all characters that are special to systemd."""
    return Home(tmp_path / 'a b%h$HOME"q\\')


@analyzed
@pytest.mark.parametrize("on_demand", [False, True])
def test_systemd_finds_nothing_wrong(on_demand, home: Home, tmp_path):
    home.create()
    service = describe(home, Config(), on_demand=on_demand)
    assert verified(written(tmp_path / "u", service), tmp_path) == (0, "")


@analyzed
def test_systemd_finds_a_misspelled_key(home: Home, tmp_path):
    (file,) = written(tmp_path / "u", describe(home, Config()))
    file.write_text(file.read_text().replace("OOMPolicy", "OOMPolice"))
    assert "OOMPolice" in verified([file], tmp_path)[1]


@analyzed
@pytest.mark.parametrize("on_demand", [False, True])
def test_special_characters_in_paths_are_escaped(on_demand, strange: Home, tmp_path):
    described = describe(strange, Config(), on_demand=on_demand)
    service = dataclasses.replace(described, variables={"HF_HOME": '/a "b" 5% $c'})
    strange.create()
    assert verified(written(tmp_path / "u", service), tmp_path) == (0, "")
    command = next(line for line in units(service)[f"{service.name}.service"].splitlines()
                   if line.startswith("ExecStart="))  # fmt: skip
    assert command.endswith('a b%%h$$HOME\\"q\\\\"')
    assert 'Environment="HF_HOME=/a \\"b\\" 5%% $c"\n' in units(service)[f"{service.name}.service"]


def parsed(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read_string(text)
    return parser


def test_the_values_of_the_keys(home: Home):
    service = describe(home, Config(drain_timeout_s=100.5))
    unit = parsed(units(service)[f"{service.name}.service"])
    wanted = {
        "Type": "notify",
        "Restart": "on-failure",
        "KillMode": "mixed",
        "UMask": "0077",
        "OOMPolicy": "continue",
        "TimeoutStopSec": "116",
        "RestartPreventExitStatus": "2 4 5",
    }
    assert {key: unit["Service"][key] for key in wanted} == wanted
    assert unit["Install"]["WantedBy"] == "default.target"


def test_on_demand_only_the_sockets_are_started_by_the_session(home: Home):
    service = describe(home, Config(), on_demand=True)
    found = {name: parsed(text) for name, text in units(service).items()}
    name = service.name
    assert list(found) == [f"{name}.service", f"{name}.socket", f"{name}-http.socket"]
    assert "Install" not in found[f"{name}.service"]
    assert found[f"{name}.service"]["Service"]["Sockets"] == f"{name}.socket {name}-http.socket"
    socket = found[f"{name}.socket"]["Socket"]
    assert (socket["ListenStream"], socket["SocketMode"]) == (str(home.socket), "0600")
    assert (socket["FileDescriptorName"], socket["Service"]) == ("kvd", f"{name}.service")
    text = units(service)[f"{name}-http.socket"]
    assert f"ListenStream={home.http_socket}\nListenStream=127.0.0.1:11711\n" in text


@pytest.mark.parametrize(
    ("http", "listens"),
    [
        (HttpSettings(enabled=False), []),
        (HttpSettings(tcp=False), ["http.sock"]),
        (HttpSettings(port=0), ["http.sock"]),
        (HttpSettings(host="::1", port=80), ["http.sock", "[::1]:80"]),
        (HttpSettings(host="127.0.0.2"), ["http.sock", "127.0.0.2:11711"]),
    ],
)
def test_the_http_sockets_are_those_of_the_configuration(http, listens, home: Home):
    service = describe(home, Config(http=http), on_demand=True)
    text = units(service).get(f"{service.name}-http.socket", "")
    found = [line for line in text.splitlines() if line.startswith("ListenStream=")]
    assert [line.removeprefix(f"ListenStream={home.root}/") for line in found] == [
        one if one.startswith("http.") else f"ListenStream={one}" for one in listens
    ]


def test_the_files_of_deploy_are_what_install_would_write():
    folder = ROOT / "deploy/systemd"
    example = Service(
        home=Path("/home/you/.kvd"),
        program=("/home/you/kvd/.venv/bin/kvd",),
        on_demand=True,
        http=(("127.0.0.1", 11711),),
        http_socket=True,
    )
    for on_demand, place in ((False, folder), (True, folder / "on-demand")):
        wanted = units(dataclasses.replace(example, on_demand=on_demand))
        named = {name.replace(example.name, "kvd"): text.replace(example.name, "kvd")
                 for name, text in wanted.items()}  # fmt: skip
        found = {one.name: one.read_text() for one in place.glob("kvd*")}
        assert found == named


def test_installed_files_for_another_way_to_start_are_outdated(home: Home, tmp_path):
    waits = describe(home, Config(), on_demand=True)
    files = written(tmp_path / "u", waits)
    usual = Systemd(dataclasses.replace(waits, on_demand=False), tmp_path / "u")
    assert usual.is_on_demand()
    assert usual.stale() == files[1:]
    assert installer.outdated(usual) == files
    assert installer.outdated(Systemd(waits, tmp_path / "u")) == []


# -- a real manager -------------------------------------------------------------------------------

APART = """
own={root}/cg
before=$(sed -n 's/^0:://p' /proc/self/cgroup)
test -n "$before" && mkdir $own && mount -t cgroup2 none $own || exit 77
mkdir $own/kvd-test-$$ && echo $$ > $own/kvd-test-$$/cgroup.procs || exit 77
unshare --mount --cgroup sh {root}/alone "$@"
status=$?
echo $$ > "$own$before/cgroup.procs"
find $own/kvd-test-$$ -depth -type d -exec rmdir {{}} \\;
exit $status
"""
"""Script that runs `ALONE` in a new cgroup, which looks like the root cgroup from inside.

A manager moves all processes of its root cgroup. Without this script, it would move those of the
whole machine.
"""
ALONE = """
umount {root}/cg || exit 77
mount -t tmpfs none /run && mkdir -p /run/systemd/system /run/u && chmod 700 /run/u || exit 77
mount -t tmpfs none /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup || exit 77
test "$(sed -n 's/^0:://p' /proc/self/cgroup)" = / || exit 77
for pid in $(cat /sys/fs/cgroup/cgroup.procs); do
  test $pid = 1 && exit 77  # not a separate cgroup
done
unset DBUS_SESSION_BUS_ADDRESS INVOCATION_ID NOTIFY_SOCKET
export XDG_RUNTIME_DIR=/run/u
{systemd} --user >{root}/systemd.log 2>&1 &
manager=$!
for _ in $(seq 100); do
  systemctl --user show-environment >/dev/null 2>&1 && break
  kill -0 $manager 2>/dev/null || exit 77
  sleep 0.05
done
# A manager that answers may still not be allowed to run anything.
systemd-run --user --quiet --wait true >/dev/null 2>&1 || exit 77
"$@"
status=$?
kill $manager; wait $manager
exit $status
"""
"""Script that runs a user manager in separate namespaces. Exits with 77 if that is not allowed."""
STORY = """
set -e
kvctl() {{ {python} -m kvd.cli --json "$@"; }}
say() {{ echo "== $1"; }}
wants() {{ (cd {root}/.config/systemd/user; ls -d *.wants/* | sed 's/^/"/; s/$/"/'); }}
main() {{ systemctl --user show -p MainPID --value {unit}.service; }}
say install; kvctl service install; kvctl service status
say reload; echo 'max_rows = 4' >> {root}/.kvd/config.toml; kvctl service reload
say crash; before=$(main); kill -9 $before
until test "$(main)" != 0 && test "$(main)" != $before; do sleep 0.1; done
systemctl --user start {unit}.service  # waits until it is ready
kvctl service status
say wanted; wants
say demand; kvctl service install --on-demand; kvctl service status
say waits; wants
say first; kvctl status; kvctl service status
say stop; kvctl service stop
say again; kvctl service install
say back; wants
say failed; systemctl --user stop kvd.service; echo 'max_rows = "x"' > {root}/.kvd/config.toml
systemctl --user start kvd.service || kvctl service status || true
say uninstall; kvctl service uninstall
say left; ls {root}/.config/systemd/user | sed 's/^/"/; s/$/"/'
systemctl --user list-units --all --plain --no-legend '{unit}*' | sed 's/.*/"&"/'
"""


def cgroup_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


@pytest.fixture
def story(tmp_path, home: Home):
    """Return the output of each step of `STORY`, the life of a service."""
    systemd = next((p for p in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd")
                    if Path(p).exists()), None)  # fmt: skip
    if systemd is None or shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("needs systemd, and root to run a separate manager")
    root = home.root
    root.mkdir()
    (root / ".kvd").mkdir(mode=0o700)
    (root / ".kvd/config.toml").write_text("http = {tcp = false}\n")
    (root / "apart").write_text(APART.format(root=root))
    (root / "alone").write_text(ALONE.format(systemd=systemd, root=root))
    (root / "story").write_text(STORY.format(python=sys.executable, root=root, unit="kvd"))
    command = ["unshare", "--mount", "--propagation", "private", "sh", root / "apart"]
    places = {pid: cgroup_of(pid) for pid in (1, os.getpid(), os.getppid())}
    environment = {k: v for k, v in os.environ.items() if k not in {"KVD_HOME", "XDG_CONFIG_HOME"}}
    done = subprocess.run(
        [*command, "bash", root / "story"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
        env=environment | {"HOME": str(root), "PYTHONPATH": str(ROOT)},
    )
    assert {pid: cgroup_of(pid) for pid in places} == places, "the manager moved others' processes"
    if done.returncode == 77:
        pytest.skip("this machine does not allow a separate manager")
    assert done.returncode == 0, done.stdout + done.stderr
    reported = {}
    for part in done.stdout.split("== ")[1:]:
        name, *lines = part.splitlines()
        reported[name] = [json.loads(line) for line in lines]
    return reported


@pytest.mark.process
@pytest.mark.slow
def test_a_real_systemd_runs_the_service(story, home: Home):
    def state(step: str) -> str:
        return story[step][-1]["state"]

    assert state("install") == "running"
    assert story["install"][-1]["outdated"] == []
    assert story["reload"][-1]["config_pending"] == ["max_rows"]
    assert (state("crash"), story["crash"][-1]["answers"]) == ("running", True)
    assert story["crash"][-1]["pid"] != story["install"][-1]["pid"]
    assert story["crash"][-1]["config_pending"] == []
    assert story["wanted"] == story["back"] == ["default.target.wants/kvd.service"]
    assert state("demand") == "listening"
    assert story["waits"] == [
        "sockets.target.wants/kvd-http.socket",
        "sockets.target.wants/kvd.socket",
    ]
    kvctl, service = story["first"]
    assert (service["state"], service["pid"]) == ("running", kvctl["pid"])
    assert state("stop") == "stopped"
    assert state("failed") == "failed"
    assert len(story["uninstall"][0]["files"]) == 1
    assert story["left"] == []
