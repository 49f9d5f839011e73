"""Model sources, exit codes, BLAS, log formats and NVIDIA's memory: a few tests each."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest
import structlog

from kvd.config.budget import compare_with_machine
from kvd.config.sources import absolute
from kvd.host import blas, exits, logs
from kvd.host.exits import Exit
from kvd.host.memory import default_budget, nvidia
from kvd.host.memory.linux import LinuxMemory
from protocol import errors


def test_names_and_hub_ids_stay_as_they_are(tmp_path):
    (tmp_path / "demo").mkdir()
    assert absolute("demo", tmp_path) == "demo"
    assert absolute("org/name", tmp_path) == "org/name"


def test_folders_become_absolute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    (tmp_path / "org/name").mkdir(parents=True)
    assert absolute("org/name", tmp_path) == str(tmp_path / "org/name")
    assert absolute("./demo", tmp_path) == str(tmp_path / "demo")
    assert absolute("../demo", tmp_path) == str(tmp_path.parent / "demo")
    assert absolute(".", tmp_path) == str(tmp_path)
    assert absolute("/models/x", tmp_path) == "/models/x"
    assert absolute("~/x", tmp_path) == "/home/someone/x"
    assert absolute("~no-such-user/x", tmp_path) == str(tmp_path / "~no-such-user/x")


def test_a_source_that_cannot_be_a_path_stays_as_it_is(tmp_path):
    long = "9" * 300 + "/x"
    (tmp_path / "loop").symlink_to("loop")
    assert absolute(long, tmp_path) == long
    assert absolute("loop/x", tmp_path) == "loop/x"
    assert absolute(f"./{long}", tmp_path) == str(tmp_path / long)
    assert absolute("./loop", tmp_path) == str(tmp_path / "loop")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotRunning("x"), Exit.NOT_RUNNING),
        (errors.AlreadyRunning("x"), Exit.ALREADY_RUNNING),
        (errors.ConfigError("x"), Exit.CONFIG),
        (errors.UnknownModel("x"), Exit.REFUSED),
        (errors.ContextTooLong("x"), Exit.REFUSED),
        (errors.WorkerDied("x"), Exit.RETRY),
        (errors.Draining("x"), Exit.RETRY),
        (errors.InternalError("x"), Exit.FAILED),
        (errors.InsufficientMemory("x"), Exit.FAILED),
    ],
)
def test_errors_have_exit_codes(error, code):
    assert exits.of(error) == code


def test_openblas_is_found_where_distributions_put_it(tmp_path):
    assert blas.find(tmp_path) is None
    library = tmp_path / "usr/lib/x86_64-linux-gnu/libopenblas.so.0"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    assert blas.find(tmp_path) == library


@pytest.mark.skipif(sys.platform != "linux", reason="preloading is for Linux")
def test_a_missing_blas_is_a_config_error(tmp_path):
    assert blas.choose("off") is None
    with pytest.raises(errors.ConfigError, match="no library at"):
        blas.choose(str(tmp_path / "none.so"))
    with pytest.raises(errors.ConfigError, match="no library at"):
        blas.choose("/" + "a" * 300)


@pytest.fixture
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_logs_are_json_in_the_file_and_off_a_terminal(tmp_path, capsys, restored_logging):
    logs.setup(tmp_path, "info")
    structlog.get_logger("kvd.test").info("model ready", model="demo")
    logging.getLogger("asyncio").warning("slow %s", "callback")
    structlog.get_logger("kvd.test").debug("not this one")
    try:
        int("why")
    except ValueError:
        structlog.get_logger("kvd.test").exception("went wrong")
    written = [json.loads(line) for line in (tmp_path / "kvd.log").read_text().splitlines()]
    assert [line["event"] for line in written] == ["model ready", "slow callback", "went wrong"]
    assert written[0] | {"timestamp": ""} == {
        "event": "model ready",
        "model": "demo",
        "level": "info",
        "logger": "kvd.test",
        "timestamp": "",
    }
    assert "ValueError: invalid literal" in written[2]["exception"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [json.loads(line)["event"] for line in shown.err.splitlines()] == [
        line["event"] for line in written
    ]


def test_a_log_that_cannot_be_written_is_a_config_error(tmp_path, restored_logging):
    (tmp_path / "kvd.log").mkdir()
    with pytest.raises(errors.ConfigError, match=r"cannot use .*kvd\.log") as caught:
        logs.setup(tmp_path)
    assert caught.value.detail["key"] == "home"


def test_a_terminal_gets_lines_for_people(monkeypatch, capsys, restored_logging):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    logs.setup(None)
    structlog.get_logger("kvd.test").info("model ready", model="demo", reason=None)
    line = capsys.readouterr().err
    assert re.match(r"\d\d:\d\d:\d\d \[info +\] model ready", line)
    assert "model=demo" in line
    assert "reason" not in line
    assert "\x1b" not in line


class FakeNvml:
    """NVIDIA's driver library (NVML) with devices of these sizes."""

    def __init__(self, *totals: int, failing: str = "") -> None:
        self._totals, self._failing = totals, failing

    @staticmethod
    def _id(number: int) -> bytes:
        return f"GPU-{number}b7d".encode()

    def __getattr__(self, name: str):
        def call(*arguments):
            if name == self._failing:
                return 999
            if name == "nvmlDeviceGetCount_v2":
                arguments[0]._obj.value = len(self._totals)
            if name == "nvmlDeviceGetHandleByIndex_v2":
                number, handle = arguments
                handle._obj.value = number + 1
                return 0 if number < len(self._totals) else 2
            if name == "nvmlDeviceGetHandleByUUID":
                unique_id, handle = arguments
                numbers = [n for n in range(len(self._totals)) if self._id(n) == unique_id]
                handle._obj.value = numbers[0] + 1 if numbers else None
                return 0 if numbers else 6
            if name == "nvmlDeviceGetUUID":
                handle, buffer, _ = arguments
                buffer.value = self._id(handle.value - 1)
            if name == "nvmlDeviceGetMemoryInfo":
                arguments[1]._obj.total = self._totals[arguments[0].value - 1]
            return 0

        return call


@pytest.fixture
def cuda_build(monkeypatch, tmp_path):
    """MLX's CUDA build is installed; return the path of the first device's file."""
    monkeypatch.setattr(nvidia, "has_cuda_build", lambda: True)
    monkeypatch.setattr(nvidia, "_DEVICE_FILE", tmp_path / "nvidia0")
    return tmp_path / "nvidia0"


def test_nvidias_memory_counts_only_with_mlx_for_cuda(monkeypatch, cuda_build):
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: FakeNvml(141 * 2**30))
    assert nvidia.first_device() == nvidia.Device(141 * 2**30)
    monkeypatch.setattr(nvidia, "has_cuda_build", lambda: False)
    assert nvidia.first_device() is None


@pytest.mark.parametrize("failing", ["library", "nvmlInit_v2"])
def test_without_nvml_the_devices_file_shows_whether_there_is_one(monkeypatch, cuda_build, failing):
    def load(name):
        if failing == "library":
            raise OSError(name)
        return FakeNvml(1, failing=failing)

    monkeypatch.setattr(nvidia.ctypes, "CDLL", load)
    assert nvidia.first_device() is None
    cuda_build.touch()
    assert nvidia.first_device() == nvidia.Device(None)


def test_without_a_device_there_is_no_accelerator(monkeypatch, cuda_build):
    nvml = FakeNvml(1, failing="nvmlDeviceGetHandleByIndex_v2")
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: nvml)
    assert nvidia.first_device() is None


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, [("0", 10), ("1", 20), ("2", 30)]),
        ("2, 0", [("2", 30), ("0", 10)]),
        ("GPU-1b7d", [("GPU-1b7d", 20)]),
        ("GPU-2,GPU-1b", [("GPU-2", 30), ("GPU-1b", 20)]),
        ("GPU-7,GPU-1b", []),
        ("-1", []),
        ("1,7,0", [("1", 20)]),
        ("", []),
    ],
)
def test_devices_are_those_that_the_process_may_use(monkeypatch, cuda_build, allowed, expected):
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: FakeNvml(10, 20, 30))
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert [(it.name, it.total_bytes) for it in nvidia.devices()] == expected
    reader = LinuxMemory()
    assert reader.devices == [name for name, _ in expected]
    assert reader.host().accelerator_limit == min((size for _, size in expected), default=None)
    assert reader.host().devices == max(1, len(expected))


def test_a_default_budget_for_a_device_of_unknown_memory_is_a_problem(monkeypatch, cuda_build):
    nvml = FakeNvml(1, failing="nvmlDeviceGetMemoryInfo")
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: nvml)
    reader = LinuxMemory()
    host = reader.host()
    assert (host.accelerator_limit, reader.separate) == (None, False)
    (problem,) = compare_with_machine(default_budget(host), host)
    assert problem.key == "budget"
    assert "does not report the memory of the GPU" in problem.observed
    assert compare_with_machine(2**30, host) == []
    assert [one.key for one in compare_with_machine(2 * host.total, host)] == ["budget"]

    monkeypatch.setattr(nvidia, "has_cuda_build", lambda: False)
    host = LinuxMemory().host()
    assert compare_with_machine(default_budget(host), host) == []
