"""Memory readings on Linux and macOS, and the default budget."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys

import pytest

from kvd.host import memory
from kvd.host.memory import darwin
from kvd.host.memory.linux import LinuxMemory
from protocol.types import HostMemory

GIB = 2**30


def machine(root, **files):
    """Return the readings of a machine with these files; ``__`` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return LinuxMemory(root)


MEMINFO = "MemTotal:  16777216 kB\nMemFree: 1 kB\nMemAvailable:  8388608 kB\nHugePages_Total: 0\n"


def test_a_machine_without_cgroup_or_psi(tmp_path):
    host = machine(tmp_path, proc__meminfo=MEMINFO).host()
    assert host == HostMemory(total=16 * GIB, available=8 * GIB)


def test_the_tightest_limit_of_a_cgroup_and_its_parents_counts(tmp_path):
    readings = machine(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="0::/user/kvd\n",
    )
    cgroup = tmp_path / "sys/fs/cgroup"
    (cgroup / "user/kvd").mkdir(parents=True)
    (cgroup / "user/kvd/memory.max").write_text("max\n")
    (cgroup / "user/memory.max").write_text(f"{4 * GIB}\n")
    (cgroup / "user/memory.current").write_text(f"{1 * GIB}\n")
    host = readings.host()
    assert (host.total, host.available) == (4 * GIB, 3 * GIB)


def test_a_container_whose_cgroup_is_mounted_as_the_root(tmp_path):
    readings = machine(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2 * GIB}\n")
    assert readings.host().total == 2 * GIB


def test_cgroup_v1(tmp_path):
    readings = machine(tmp_path, proc__meminfo=MEMINFO)
    folder = tmp_path / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    host = readings.host()
    assert (host.total, host.available) == (2 * GIB, 0)


@pytest.mark.parametrize(
    ("share", "expected"), [("0.00", "normal"), ("10.00", "warning"), ("55.10", "critical")]
)
def test_pressure_from_psi(tmp_path, share, expected):
    psi = f"some avg10={share} avg60=0.00 total=1\nfull avg10=99.00 avg60=0.00 total=1\n"
    assert machine(tmp_path, proc__pressure__memory=psi).host().pressure == expected


def test_a_footprint_is_pss_and_zero_when_the_process_is_gone(tmp_path):
    rollup = "00400000-7fff [rollup]\nRss:  900 kB\nPss:  300 kB\nPss_Dirty: 200 kB\n"
    readings = machine(tmp_path, proc__42__smaps_rollup=rollup)
    assert readings.footprint(42) == 300 * 1024
    assert readings.footprint(43) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads this machine's /proc")
def test_this_machine_and_this_process():
    readings = memory.reader()
    host = readings.host()
    assert 0 < host.available <= host.total
    assert 5_000_000 < readings.footprint(os.getpid()) < host.total


def test_the_budget_is_a_share_of_the_accelerator_where_there_is_one():
    assert memory.default_budget(HostMemory(total=100, available=1)) == 75
    host = HostMemory(total=100, available=1, accelerator_limit=40)
    assert memory.default_budget(host) == 30


class FakeLibSystem:
    """Fakes macOS's system library, which writes its answers into the caller's buffers."""

    def __init__(self, settings, footprints):
        self.settings, self.footprints = settings, footprints

    def sysctlbyname(self, name, value, length, _new, _size):
        if name.decode() not in self.settings:
            return -1
        number = self.settings[name.decode()]
        size = length._obj.value
        ctypes.memmove(value, number.to_bytes(size, "little"), size)
        return 0

    def proc_pid_rusage(self, pid, flavor, words):
        assert flavor == 4
        if pid not in self.footprints:
            return -1
        words._obj[9] = self.footprints[pid]
        return 0

    def mach_host_self(self):
        return 7

    def host_statistics64(self, host, flavor, words, count):
        assert (host, flavor) == (7, 4)
        words._obj[0], words._obj[1], words._obj[2] = 1000, 5000, 3000
        return 0


def mac(**settings):
    base = {"hw.memsize": 64 * GIB, "hw.pagesize": 16384, "iogpu.wired_limit_mb": 0}
    names = {name.replace("__", "."): number for name, number in settings.items()}
    return darwin.DarwinMemory(FakeLibSystem(base | names, {42: 123456}))


def test_a_mac_with_the_default_limit():
    host = mac().host()
    assert host.total == 64 * GIB
    assert host.available == 4000 * 16384
    assert host.accelerator_limit == 48 * GIB
    assert host.pressure == "normal"


def test_a_mac_with_a_limit_set_by_its_user_and_with_memory_pressure():
    host = mac(iogpu__wired_limit_mb=57344, kern__memorystatus_vm_pressure_level=4).host()
    assert host.accelerator_limit == 56 * GIB
    assert host.pressure == "critical"
    assert mac(kern__memorystatus_vm_pressure_level=2).host().pressure == "warning"


def test_the_default_limit_is_two_thirds_on_small_macs():
    assert darwin.recommended(16 * GIB) == int(16 * GIB * 2 / 3)
    assert darwin.recommended(36 * GIB) == 27 * GIB


def test_a_footprint_on_a_mac():
    assert mac().footprint(42) == 123456
    assert mac().footprint(43) == 0


def test_footprints_leave_out_processes_that_have_ended():
    reader = memory.reader()

    found = asyncio.run(reader.footprints([os.getpid(), 2**22 + 1]))

    assert list(found) == [os.getpid()]
    assert found[os.getpid()] > 2**20
