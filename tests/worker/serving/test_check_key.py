"""Loads use the results of earlier checks only if nothing has changed that they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace as restruct

from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.core.engine import MLXEngine
from kvd.worker.native import build
from kvd.worker.serving import check_key, model_files, probe, rounding, runner, selfcheck
from protocol.kv import KVSpec
from protocol.types import ModelInfo
from protocol.worker import Grant, LoadModel

pytestmark = pytest.mark.mlx
SETTINGS = CacheSettings(schemes=(Scheme(8, 8), Scheme(4, 4)))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(check_key.VARIABLE)
    monkeypatch.setattr(check_key, "cache_folder", lambda name: tmp_path / "kvd" / name)
    return tmp_path / "kvd" / "checks"


def load(**command: Any) -> ModelInfo:
    def grant(total: int, _reason: str) -> Grant:
        return Grant(seq=1, total_bytes=total, granted=True)

    command = {"source": "demo"} | command
    return MLXEngine().load(LoadModel(**command), lambda _stage, _fraction: None, grant)


def comparable(info: ModelInfo) -> ModelInfo:
    """Return what does not depend on how much memory the test process holds."""
    return restruct(info, costs=None)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a check was repeated")

    monkeypatch.setattr(selfcheck, "_run", fail)
    monkeypatch.setattr(runner, "agree", fail)
    monkeypatch.setattr(runner, "token_floor", fail)
    for module in (probe, runner):
        monkeypatch.setattr(module, "batch_floor", fail)


def test_a_second_load_repeats_no_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load()
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    forbid(monkeypatch)
    assert comparable(load()) == comparable(first)


def test_a_first_load_measures_the_smallest_batch_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    for module in (probe, runner):
        monkeypatch.setattr(module, "batch_floor", lambda model: measured.append(model) or 4)
    load()
    assert len(measured) == 1


def test_other_settings_are_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    calls = []
    real = selfcheck._run
    monkeypatch.setattr(selfcheck, "_run", lambda *a, **k: calls.append(a) or real(*a, **k))
    load(kv=KVSpec(schemes=["k8v4"]))
    assert calls
    assert len(list(folder.iterdir())) == 2


def test_a_check_that_fails_is_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(runner, "agree", lambda *_args, **_kwargs: False)
        assert "compiled steps" not in load().attention_path
    assert "compiled steps" in load().attention_path


def test_switched_off_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(check_key.VARIABLE, "off")
    load()
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_to_is_no_error(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("")
    assert load().attention_path


def opened(**changes: Any) -> str:
    headers = model_files.inspect(model_files.resolve("demo"))
    headers = replace(headers, config=headers.config | changes.pop("config", {}))
    settings = replace(SETTINGS, **changes.pop("settings", {}))
    command = LoadModel(**({"source": "demo"} | changes))
    return check_key.open_checks(headers, command, settings, None, None)._key


def test_the_key_covers_everything_that_checks_depend_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = opened()
    assert opened() == usual
    changed = [
        opened(config={"rope_theta": 5.0}),
        opened(settings={"schemes": (Scheme(4, 4),)}),
        opened(kv=KVSpec(quantized_kv_start=64)),
        opened(attention_scratch=1 << 20),
    ]
    changes: list[tuple[Any, str, Any]] = [
        (check_key, "version", lambda name: f"{name} 99"),
        (check_key, "fingerprint", lambda _headers: b"other weights"),
        (check_key, "thread_count", lambda: 99),
        (check_key, "_sources", lambda: ["other"]),
        (build, "processor", lambda: "other"),
        (mx, "device_info", lambda: {"device_name": "other"}),
    ]
    for target, name, value in changes:
        with monkeypatch.context() as patched:
            patched.setattr(target, name, value)
            changed.append(opened())
    for name in ("KVD_ATTENTION", "KVD_BLAS_PRELOADED", "OPENBLAS_NUM_THREADS", "MLX_ENABLE_TF32"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "other")
            changed.append(opened())
    driver = folder.parent.parent / "driver"
    driver.write_text("580.95")
    with monkeypatch.context() as patched:
        patched.setattr(check_key, "_DRIVER", driver)
        changed.append(opened())
    assert len({usual, *changed}) == len(changed) + 1


def test_another_blas_at_the_same_path_is_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Debian's libopenblas.so.0 is a link, and an update replaces the file behind it."""
    library, link = tmp_path / "libopenblasp-r0.3.21.so", tmp_path / "libopenblas.so.0"
    library.write_bytes(b"old")
    link.symlink_to(library)
    monkeypatch.setenv(check_key.BLAS_VARIABLE, str(link))
    found = [opened(), opened()]
    library.write_bytes(b"newer")
    found.append(opened())
    library.rename(tmp_path / "libopenblasp-r0.3.26.so")
    link.unlink()
    link.symlink_to(tmp_path / "libopenblasp-r0.3.26.so")
    found.append(opened())
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_another_model_of_processor_with_the_same_features_is_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Machines may share a home folder."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(check_key, "_CPUINFO", file)
    found = []
    for model, speed in ((143, 2000), (143, 2100), (207, 2000)):
        file.write_text(f"processor\t: 0\nmodel\t\t: {model}\ncpu MHz\t\t: {speed}\n\n")
        found.append(opened())
    assert found[0] == found[1] != found[2]


def test_free_memory_and_mlxs_folder_do_not_matter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = opened()
    about = mx.device_info() | {"free_memory": 7}
    monkeypatch.setattr(mx, "device_info", lambda: about)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/somewhere")
    assert opened() == usual


def test_the_sources_are_found() -> None:
    found = "\n".join(check_key._sources())
    for module in (rounding, selfcheck):
        assert module.__name__.rpartition(".")[2] + ".py " in found
    assert "memory_bounds.py " in found
    assert "models/qwen3.py " in found
