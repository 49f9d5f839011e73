"""The checks of `kvctl doctor`, on machines with and without faults: verdicts and advice."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import kvd
from kvd.demo import path
from kvd.doctor import installation, journal, limits, place, running
from kvd.doctor.engine import ask
from kvd.doctor.examination import CHECKS, examine
from kvd.doctor.finding import Finding, Section, worst
from kvd.doctor.scene import Scene
from kvd.host import installed, listen, memory
from kvd.host.home import Home
from protocol.errors import InternalError
from protocol.types import HostMemory
from tests.process.helpers import Daemon, wait_for, write_config

CPU = {"mlx": "0.32.4", "device": "cpu", "name": "x", "memory_bytes": 0, "recommended_bytes": 0,
       "error": 0.0, "blas": None, "native_built": False, "compiler": "/usr/bin/g++",
       "device_info": {}, "blas_core": None}  # fmt: skip
METAL = CPU | {"device": "metal", "name": "Apple M4", "recommended_bytes": 12 * 2**30}


def scene(home: Home, engine=CPU, **how) -> Scene:
    found = Scene(home, **{"platform": "linux", **how})
    vars(found)["engine"] = engine
    return found


def examined(finding: Finding) -> tuple[str, str]:
    """Return the verdict and the advice; only problems have advice, and each must have it."""
    assert (finding.advice is not None) == (finding.verdict in {"warn", "fail"})
    return finding.verdict, finding.advice or ""


@pytest.fixture
def made(home: Home) -> Home:
    home.create()
    return home


# -- installation ---------------------------------------------------------------------------------


def test_a_machine_without_openblas(home: Home, tmp_path):
    found = installation.openblas(scene(home, root=tmp_path))
    assert "6 to 80 times slower" in found.observed
    assert examined(found) == ("warn", "Debian: apt install libopenblas0-pthread")


def test_openblas_that_is_installed(home: Home, tmp_path):
    library = tmp_path / "usr/lib/x86_64-linux-gnu/libopenblas.so.0"
    library.parent.mkdir(parents=True)
    library.touch()
    found = installation.openblas(scene(home, CPU | {"blas": str(library)}, root=tmp_path))
    assert (found.verdict, found.observed) == ("ok", f"workers preload {library}")


@pytest.mark.parametrize(("text", "verdict"), [('blas = "off"', "warn"), ('blas = "/no"', "fail")])
def test_openblas_that_the_configuration_disables_or_misses(made: Home, text, verdict, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    made.config.write_text(text)
    assert examined(installation.openblas(scene(made)))[0] == verdict


def test_accelerators_do_not_need_openblas(home: Home):
    assert installation.openblas(scene(home, METAL)).verdict == "skip"


def test_the_pinned_versions_are_installed():
    assert installation.pins("linux").keys() == {"mlx", "mlx-lm", "nanobind"}
    assert installation.pins("darwin").keys() == {"mlx", "mlx-lm"}
    assert installation.versions(Scene(Home(Path("/x")))).verdict == "ok"


def test_a_version_other_than_the_pinned_one(home: Home, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    found = installation.versions(scene(home))
    assert "mlx is 0.1, but kvd" in found.observed
    assert examined(found) == ("fail", installed.find().command())


@pytest.mark.parametrize(
    ("engine", "platform", "verdict", "observed"),
    [
        (METAL, "darwin", "ok", "computes on metal (Apple M4)"),
        (CPU, "linux", "ok", "computes on cpu"),
        (CPU, "darwin", "fail", "there is no Metal"),
        (CPU | {"error": 0.2}, "linux", "fail", "a matrix product is off by 0.2"),
        (CPU | {"error": float("nan")}, "linux", "fail", "a matrix product is off by nan"),
        (InternalError("SIGSEGV"), "linux", "fail", "MLX does not run: SIGSEGV"),
    ],
)
def test_the_device_that_computes(engine, platform, verdict, observed, home: Home):
    found = installation.device(scene(home, engine, platform=platform))
    assert observed in found.observed
    assert examined(found)[0] == verdict


def test_a_worker_process_describes_the_engine():
    found = ask()
    assert isinstance(found, dict), found
    assert found.keys() == CPU.keys()
    assert found["error"] < 1e-4


def test_a_worker_that_does_not_answer(monkeypatch):
    monkeypatch.setattr("kvd.doctor.engine._MODULE", "kvd.nothing")
    error = ask()
    assert isinstance(error, InternalError)
    assert "No module named kvd.nothing" in error.message


@pytest.mark.parametrize(
    ("engine", "verdict", "advice"),
    [
        (CPU | {"native_built": True}, "ok", ""),
        (CPU, "ok", ""),
        (CPU | {"compiler": None}, "warn", "Debian: apt install g++"),
        (METAL, "skip", ""),
    ],
)
def test_native_operations(engine, verdict, advice, home: Home):
    assert examined(installation.native(scene(home, engine))) == (verdict, advice)


def with_host(subject: Scene, **how) -> Scene:
    given = {"total": 16 * 2**30, "available": 8 * 2**30, "accelerator_limit": None,
             "pressure": "normal"} | how  # fmt: skip
    vars(subject)["host"] = HostMemory(**given)
    return subject


@pytest.mark.parametrize(("calculated", "verdict"), [(12 * 2**30, "ok"), (10 * 2**30, "warn")])
def test_metals_limit_is_compared_with_kvds_calculation(calculated, verdict, home: Home):
    subject = with_host(scene(home, METAL, platform="darwin"), accelerator_limit=calculated)
    found = installation.wired_limit(subject)
    assert examined(found)[0] == verdict
    assert found.numbers["recommended_bytes"] == 12 * 2**30


# -- the machine ----------------------------------------------------------------------------------


def test_a_budget_beyond_the_machine(made: Home):
    made.config.write_text('budget = "64GiB"')
    found = limits.host_memory(with_host(scene(made)))
    assert examined(found) == ("fail", "set budget to at most 12.0 GiB")


def test_a_gpu_of_unknown_memory_is_reported_until_the_budget_is_set(made: Home):
    hidden = {"accelerator_hidden": True}
    found = limits.host_memory(with_host(scene(made), **hidden))
    assert examined(found) == ("warn", "set budget to what models may use of the GPU's memory")
    made.config.write_text('budget = "3GiB"')
    assert limits.host_memory(with_host(scene(made), **hidden)).verdict == "ok"


def test_pressure_is_reported(home: Home):
    assert examined(limits.host_memory(with_host(scene(home), pressure="critical")))[0] == "warn"
    assert limits.host_memory(with_host(scene(home))).verdict == "ok"


@pytest.mark.parametrize(
    ("hard", "verdict", "most"),
    [
        (64, "fail", 64),
        (512, "warn", 512),
        (1 << 20, "ok", 8192),
        (resource.RLIM_INFINITY, "ok", 8192),
    ],
)
def test_open_files(hard, verdict, most, home: Home, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))  # soft and hard limit
    found = limits.open_files(scene(home))
    assert (examined(found)[0], found.numbers["most"]) == (verdict, most)


def test_a_limit_of_the_cgroup(home: Home, tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 33554432 kB\n")
    found = limits.cgroup(with_host(scene(home, root=tmp_path)))
    assert found.observed.startswith("16.0 GiB of the machine's 32.0 GiB")


def test_a_disk_that_is_full(home: Home, monkeypatch):
    full = type("usage", (), {"free": 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    assert examined(limits.disk(scene(home)))[0] == "warn"


def test_models_of_the_hub_are_counted(home: Home, tmp_path):
    (tmp_path / "models--a--b").mkdir()
    found = limits.hub_cache(scene(home, environment={"HF_HUB_CACHE": str(tmp_path)}))
    assert (found.verdict, found.numbers["models"]) == ("ok", 1)


# -- the home -------------------------------------------------------------------------------------


def test_a_home_that_does_not_exist_yet_is_no_fault(home: Home):
    subject = scene(home)
    found = [place.folder(subject), place.configuration(subject), place.lock(subject)]
    found += [*place.sockets(subject), journal.records(subject), place.log(subject)]
    assert {one.verdict for one in found} == {"ok"}


def test_a_home_that_others_can_read(made: Home):
    made.root.chmod(0o755)
    assert examined(place.folder(scene(made))) == (
        "warn", f"chmod 700 {made.root}, or start the daemon, which does the same")  # fmt: skip


def test_a_bad_configuration_names_its_key_and_place(made: Home):
    made.config.write_text("bugdet = 1")
    found = place.configuration(scene(made))
    assert "did you mean budget?" in found.observed
    verdict, advice = examined(found)
    assert verdict == "fail"
    assert advice.startswith(f"correct 'bugdet' in {made.config}")


def test_models_that_cannot_be_loaded(made: Home):
    (made.root / "empty").mkdir()
    made.config.write_text('models = ["demo", "./gone", "org/name", "nope", "./empty"]')
    faults = place.models(scene(made))
    assert [examined(one) for one in faults] == [("fail", f"correct models in {made.config}")] * 3
    assert [(one.name, one.observed.partition(";")[0]) for one in faults] == [
        ("models[1]", f"there is no folder {made.root}/gone"),
        ("models[3]", "there is no model 'nope'"),
        ("models[4]", f"{made.root}/empty has no model*.safetensors"),
    ]


def test_models_that_can_be_loaded(made: Home):
    made.config.write_text(f'models = ["demo", "org/name", {{source="{path()}", alias="same"}}]')
    found = place.models(scene(made))
    assert found.verdict == "ok"
    assert found.observed == "3 in the configuration, of which the Hub has 1"
    made.config.write_text("bugdet = 1")
    assert place.models(scene(made)).verdict == "skip"


def test_broken_folders_of_the_models_folder_are_reported(made: Home):
    assert examined(place.models_folder(scene(made)))[0] == "ok"
    (made.root / "models" / "half").mkdir(parents=True)
    shutil.copytree(path(), made.root / "models" / "whole")
    found = place.models_folder(scene(made))
    assert examined(found) == ("warn", f"complete or remove it in {made.root / 'models'}")
    assert "half: " in found.observed
    assert "has no model*.safetensors" in found.observed
    assert "whole" not in found.observed
    made.config.write_text('models_dir = ""')
    assert place.models_folder(scene(made)).verdict == "ok"


def test_a_configuration_that_others_can_write(made: Home):
    made.config.write_text("")
    made.config.chmod(0o666)
    assert examined(place.configuration(scene(made))) == ("fail", f"chmod 600 {made.config}")


def test_a_stale_socket(made: Home):
    listen.bind(made.socket).close()
    found, other = place.sockets(scene(made))
    assert "stale: the daemon that created it is dead (Connection refused)" in found.observed
    assert examined(found) == ("warn", "nothing to do: the next start of the daemon replaces it")
    assert other.verdict == "ok"


def test_a_live_socket(made: Home):
    with listen.bind(made.socket):
        assert place.sockets(scene(made))[0].verdict == "ok"
        made.socket.chmod(0o666)
        assert examined(place.sockets(scene(made))[0]) == ("warn", f"chmod 600 {made.socket}")


def test_a_daemon_whose_socket_is_gone_or_dead(made: Home):
    with listen.hold_lock(made):
        assert "was deleted, so no client can connect" in place.sockets(scene(made))[0].observed
        listen.bind(made.socket).close()
        found = place.sockets(scene(made))[0]
        assert examined(found)[0] == "fail"
        assert "though a daemon runs" in found.observed
        assert place.lock(scene(made)).observed.startswith("held by the daemon, pid ")
    assert place.lock(scene(made)).observed == "free: no daemon runs here"


def test_a_file_in_the_sockets_place(made: Home):
    made.socket.touch()
    assert examined(place.sockets(scene(made))[0]) == ("fail", "move it away")


def test_a_path_too_long_for_a_socket(tmp_path):
    home = Home(tmp_path / ("x" * 120))
    assert examined(place.sockets(scene(home))[0]) == ("fail", "choose a shorter KVD_HOME")


# -- the daemon -----------------------------------------------------------------------------------


def test_no_daemon_runs(made: Home):
    (found,) = running.daemon(scene(made))
    assert found.verdict == "skip"


def test_a_daemon_that_does_not_answer(made: Home):
    with listen.hold_lock(made):
        (found,) = running.daemon(scene(made))
    assert examined(found)[0] == "fail"


def test_another_program_has_the_port(made: Home, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        made.config.write_text(f"[http]\nport = {port}\n")
        found = running.http_port(scene(made))
        assert "another program uses the port" in found.observed
        assert examined(found)[0] == "fail"  # as the start does
        monkeypatch.setattr("kvd.http.listeners.DEFAULT_PORT", port)
        made.config.write_text("")
        found = running.http_port(scene(made))
        assert "another program uses the port" in found.observed
        verdict, advice = examined(found)
        assert (verdict, "KVD_PORT" in advice) == ("warn", True)
    made.config.write_text(f"[http]\nport = {port}\n")
    assert running.http_port(scene(made)).verdict == "ok"
    made.config.write_text("[http]\ntcp = false\n")
    assert running.http_port(scene(made)).verdict == "skip"


def test_variables_count_as_for_the_next_start_unless_a_daemon_runs(made: Home):
    made.config.write_text('budget = "1GiB"\n[http]\nport = 1\n')
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        variables = {"KVD_PORT": str(other.getsockname()[1]), "KVD_BUDGET": "900TiB"}
        found = running.http_port(scene(made, environment=variables))
    assert "another program uses the port" in found.observed
    assert examined(found) == ("fail", "correct KVD_PORT")
    found = limits.host_memory(scene(made, environment=variables))
    assert found.numbers["budget_bytes"] == 900 * 2**40
    running_daemon = scene(made, environment=variables)
    vars(running_daemon)["status"] = InternalError("a daemon with variables of its own")
    found = limits.host_memory(running_daemon)
    assert found.numbers["budget_bytes"] == 2**30


def test_a_variable_with_which_the_daemon_does_not_start(made: Home):
    variables = {"KVD_PORT": "70000", "KVD_BUDGET": "3"}
    found = place.environment(scene(made, environment=variables))
    assert [examined(one)[0] for one in found] == ["fail", "fail"]
    assert [one.observed.split(" ")[:2] for one in found] == [
        ["KVD_PORT:", "70000"],
        ["KVD_BUDGET:", "3"],
    ]
    assert place.environment(scene(made, environment={"KVD_PORT": "tcp://10.0.0.7:1"})) == []


@pytest.mark.parametrize("runs", [False, True])
def test_an_address_that_others_can_reach_without_keys(made: Home, runs):
    made.config.write_text('[http]\nhost = "0.0.0.0"\nport = 0\n')
    with listen.hold_lock(made) if runs else contextlib.nullcontext():
        found = running.http_port(scene(made))
    verdict, advice = examined(found)
    assert (verdict, advice) == ("fail", f"correct [http] in {made.config}")
    assert "other machines can reach" in found.observed
    assert "kvctl key new NAME --save" in found.observed


# -- all checks -----------------------------------------------------------------------------------


def test_an_exception_in_a_check_is_reported_and_the_other_checks_run(home: Home, monkeypatch):
    def broken(_scene):
        raise RuntimeError("no such file")

    monkeypatch.setitem(CHECKS, "Machine", (broken, limits.open_files))
    sections = {one.title: one.findings for one in examine(scene(home))}
    assert [one.name for one in sections["Machine"]] == ["broken", "open files"]
    assert "RuntimeError: no such file" in sections["Machine"][0].observed
    assert list(sections) == list(CHECKS)


def test_the_worst_verdict_counts():
    assert worst([]) == worst([Section("x", [Finding("a", "skip", "")])]) == "ok"
    assert worst([Section("x", [Finding("a", "ok", ""), Finding("b", "warn", "")])]) == "warn"


def doctor(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd.cli", "--home", str(home.root), "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_the_command(made: Home):
    listen.bind(made.socket).close()
    made.config.write_text("[http]\nprot = 1\n")
    done = doctor(made)
    assert done.returncode == 1
    assert f"kvd {kvd.__version__} on " in done.stdout
    assert "fail config" in done.stdout
    assert "did you mean" in done.stdout
    assert "warn socket" in done.stdout
    assert "→ nothing to do: the next start of the daemon replaces it" in done.stdout
    assert "1 failed" in done.stderr


@pytest.mark.process
def test_the_command_as_json(made: Home):
    made.config.write_text("[http]\nport = 0\n")
    done = doctor(made, "--json")
    found = json.loads(done.stdout)
    assert found["verdict"] in {"ok", "warn"}, found
    assert done.returncode == 0
    names = [one["name"] for section in found["sections"] for one in section["findings"]]
    assert len(names) == len(set(names))
    assert {"python", "device", "memory", "config", "socket", "daemon"} <= set(names)


def test_memory_is_read_as_the_daemon_reads_it(home: Home):
    assert scene(home).host.total == memory.reader().host().total


@pytest.mark.process
def test_a_running_daemon_and_the_problems_that_it_reports(home: Home):
    daemon = Daemon(write_config(home, "http = {enabled = false}"), "--fake").start()
    try:
        (found,) = running.daemon(scene(home))
        assert found.verdict == "ok"
        assert found.observed.startswith(f"pid {daemon.pid} answers, version {kvd.__version__}")
        home.config.write_text("http = {enabled = false}\nmax_rows = 3")
        reload(daemon, 1)
        assert examined(running.daemon(scene(home))[1]) == ("warn", "restart the daemon")
        home.config.write_text("http = {enabled = false}\nbudget = '900TiB'")
        reload(daemon, 2)
        assert examined(running.daemon(scene(home))[1])[0] == "warn"
        assert "budget of 900.0 TiB is more" in running.daemon(scene(home))[1].observed
        home.config.write_text("max_rows = -1")
        reload(daemon, 3)
        refused = running.daemon(scene(home))[2]
        assert (refused.name, examined(refused)[0]) == ("reload", "fail")
        assert "max_rows" in refused.observed
    finally:
        daemon.end()


def reload(daemon: Daemon, count: int) -> None:
    daemon.signal(signal.SIGHUP)
    with daemon.client() as client:
        wait_for("the configuration is read", lambda: client.status().config_reloads == count)
