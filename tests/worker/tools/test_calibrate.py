"""Calibration results: measured by the process, stored in the home, applied at load."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import msgspec
import pytest

from kvd import demo
from kvd.host.home import Home
from kvd.worker.artifacts import modules
from kvd.worker.cache.scheme import Scheme
from kvd.worker.native import activation
from kvd.worker.serving import calibration, kernel_choice, kernel_timing, model_files, seam
from kvd.worker.serving.calibration import (
    CalibrationResult,
    LayerLoss,
    MeasuredLevel,
    apply_floor,
    content_key,
    find,
    mixes_of,
    store,
)
from kvd.worker.serving.kernel_timing import Times
from kvd.worker.tools import calibrate, fidelity, sensitivity
from kvd.worker.tools.fidelity import Floor
from kvd.worker.tools.partial_losses import PartialLosses
from protocol.errors import InvalidRequest
from protocol.kv import KVSpec
from tests.worker import shallow, tiny_model
from tests.worker.core.driver import Driver
from tests.worker.serving.test_kernel_plan import Ahead, Requests

pytestmark = pytest.mark.mlx

K8V8, K8V4, K4V4 = Scheme(8, 8), Scheme(8, 4), Scheme(4, 4)


@pytest.fixture
def tiny(tmp_path):
    return tiny_model.save(tmp_path / "tiny")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "calibration"
    monkeypatch.setenv(calibration.FOLDER_VARIABLE, str(place))
    return place


def result_with(path, lowest: str) -> CalibrationResult:
    return CalibrationResult(
        key=content_key(model_files.inspect(path)), model=str(path), lowest=lowest, max_kl=0.02,
        min_top1=0.95, levels=[], prompts=1, tokens=400,
        date="2025-01-01T00:00:00+00:00", device="cpu",
        versions=calibration.versions(),
    )  # fmt: skip


# What a result changes.


@pytest.mark.parametrize(
    ("lowest", "schemes", "left"),
    [
        ("k4v4", [K8V8, K8V4, K4V4], [K8V8, K8V4, K4V4]),
        ("k8v4", [K8V8, K8V4, K4V4], [K8V8, K8V4]),
        ("k8v8", [K8V8, K8V4, K4V4], [K8V8]),
        ("k16v16", [K8V8, K8V4, K4V4], [Scheme(16, 16)]),
        ("k8v4", [K4V4], [K8V4]),
        ("k8v4", [Scheme(6, 6), K4V4, Scheme(2, 2)], [Scheme(8, 6), K8V4]),
        ("k4v4g32", [K8V8, K4V4], [K8V8, Scheme(4, 4, 32, 32)]),
        ("k4v4", [K8V8, Scheme(4, 4, 32, 32)], [K8V8, Scheme(4, 4, 32, 32)]),
    ],
)
def test_nothing_stays_below_the_lowest_level(tiny, lowest, schemes, left):
    assert apply_floor(schemes, result_with(tiny, lowest)) == left
    assert apply_floor(schemes, None) == schemes


def test_a_load_applies_and_reports_the_result(tiny, folder):
    assert Driver(str(tiny)).info.kv_schemes == ["k8v8", "k8v4", "k4v4"]
    store(folder, result_with(tiny, "k8v4"))

    cut = Driver(str(tiny))
    assert cut.info.kv_schemes == ["k8v8", "k8v4"]
    assert cut.info.kv_calibrated == "k8v4"
    levels = cut.engine._runner.cache.stores[0].layers[0].pools
    assert [level.scheme.name for level in levels] == ["k8v8", "k8v4"]
    lifted = Driver(str(tiny), kv=KVSpec(4, 4)).info
    assert (lifted.kv_scheme, lifted.kv_schemes) == ("k8v4", ["k8v4"])
    assert {part.scheme for part in lifted.kv} == {"k8v4"}

    store(folder, result_with(tiny, "k16v16"))
    dense = Driver(str(tiny)).info
    assert (dense.kv_schemes, dense.kv_layout) == (["k16v16"], "not quantized")


def with_mixes(result: CalibrationResult, mixes: dict[str, list[str]]) -> CalibrationResult:
    numbers = {"allowed": True, "kl": 0.0, "top1": 1.0, "perplexity_change": 0.0, "positions": 1}
    levels = [MeasuredLevel(scheme=name, mix=mix, **numbers) for name, mix in mixes.items()]
    return msgspec.structs.replace(result, levels=levels)


def test_bits_by_layer_never_exceed_those_of_the_level_above(tiny):
    mixes = {"k8v4": ["k8v4", "k6v6"], "k4v4": ["k8v2", "k3v4"]}
    result = with_mixes(result_with(tiny, "k4v4"), mixes)
    mixed = {name: tuple(map(Scheme.parse, mix)) for name, mix in mixes.items()}
    expected = (None, mixed["k8v4"], mixed["k4v4"])
    assert mixes_of([K8V8, K8V4, K4V4], result, 2) == expected
    # In another list of levels, the level above has fewer bits than the mix.
    assert mixes_of([Scheme(6, 6), K4V4], result, 2) == (None, (Scheme(6, 2), Scheme(3, 4)))
    assert mixes_of([K8V8, Scheme(6, 4)], result, 2) == (None, None)
    assert mixes_of([K8V8, K8V4], None, 2) == (None, None)


def test_bits_for_another_number_of_layers_are_ignored_and_logged(tiny, caplog):
    result = with_mixes(result_with(tiny, "k4v4"), {"k4v4": ["k8v2", "k3v4"]})
    with caplog.at_level(logging.WARNING):
        assert mixes_of([K8V8, K4V4], result, 3) == (None, None)
    assert "ignoring the calibration's bits by layer: the model has 3 layers" in caplog.text


def test_a_load_applies_and_reports_bits_by_layer(tiny, folder):
    mix = ["k8v3", "k4v5"]
    store(folder, with_mixes(result_with(tiny, "k4v4"), {"k4v4": mix}))
    driver = Driver(str(tiny))
    assert driver.info.kv_schemes == ["k8v8", "k8v4", "k4v4"]
    bounded = ["k8v3", "k4v4"]  # the level above has fewer bits for the second layer's values
    assert driver.info.kv_mixes == {"k4v4": bounded}
    pools = [layer.pools[-1] for layer in driver.engine._runner.cache.stores[0].layers]
    assert [pool.scheme.name for pool in pools] == bounded


# The model that a result belongs to.


def test_another_model_has_no_result_even_with_the_same_shapes(tiny, tmp_path, folder):
    other = tiny_model.save(tmp_path / "other")
    # So far its files are copies.
    assert content_key(model_files.inspect(other)) == content_key(model_files.inspect(tiny))
    file = other / "model.safetensors"
    weights, metadata = mx.load(str(file), return_metadata=True)
    name = max(weights)
    weights[name] = weights[name] + 1
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, metadata=metadata)
    store(folder, result_with(tiny, "k8v8"))

    assert find(model_files.inspect(tiny)).lowest == "k8v8"
    assert find(model_files.inspect(other)) is None


def test_another_configuration_is_another_model(tiny, folder):
    store(folder, result_with(tiny, "k8v8"))
    config = json.loads((tiny / "config.json").read_text()) | {"rope_theta": 5000.0}
    (tiny / "config.json").write_text(json.dumps(config))
    assert find(model_files.inspect(tiny)) is None


def test_without_a_stored_result_or_a_folder_there_is_none(tiny, folder, monkeypatch):
    assert find(model_files.inspect(tiny)) is None
    store(folder, result_with(tiny, "k8v8"))
    monkeypatch.delenv(calibration.FOLDER_VARIABLE)
    assert find(model_files.inspect(tiny)) is None


# Storage.


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'"lowest"'],
)
def test_a_damaged_file_is_ignored_and_logged(tiny, folder, caplog, text):
    store(folder, result_with(tiny, "k8v8")).write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert find(model_files.inspect(tiny)) is None
    assert "ignoring the calibration" in caplog.text


def test_a_file_without_a_scheme_or_with_another_key_is_ignored(tiny, folder, caplog):
    result = result_with(tiny, "k8v8")
    file = store(folder, result)
    for change in ({"lowest": "k9v9"}, {"key": "0" * 32}):
        file.write_bytes(msgspec.json.encode(msgspec.to_builtins(result) | change))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert find(model_files.inspect(tiny)) is None
        assert "ignoring the calibration" in caplog.text


@pytest.mark.parametrize("name", ["kvd", "mlx-lm"])
def test_a_result_of_another_version_is_ignored_and_logged(tiny, folder, caplog, name):
    result = result_with(tiny, "k8v4")
    older = result.versions | {name: "0.0.1"}
    store(folder, msgspec.structs.replace(result, versions=older))
    with caplog.at_level(logging.WARNING):
        assert find(model_files.inspect(tiny)) is None
    assert f"measured with {name} 0.0.1 instead of {result.versions[name]}" in caplog.text
    assert "run kvctl calibrate again" in caplog.text
    store(folder, msgspec.structs.replace(result, versions=result.versions | {"mlx": "0.0.1"}))
    assert find(model_files.inspect(tiny)) is not None


def test_a_new_result_replaces_the_old_one_unless_writing_fails(tiny, folder, monkeypatch):
    store(folder, result_with(tiny, "k8v8"))
    file = store(folder, result_with(tiny, "k8v4"))
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)

    def full(_handle):
        raise OSError("no space")

    monkeypatch.setattr(calibration.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        store(folder, result_with(tiny, "k4v4"))
    assert find(model_files.inspect(tiny)).lowest == "k8v4"
    assert list(folder.iterdir()) == [file]


# Measuring.


def pretend_to_measure(monkeypatch, agreement):
    def measure(runners, prompts, **_):
        read = list(prompts)
        return [agreement for one in runners for _ in range(one.cache.levels if read else 0)]

    monkeypatch.setattr(calibrate.fidelity, "measure", measure)


@pytest.mark.slow
@pytest.mark.process
def test_the_process_stores_what_it_prints(tmp_path, folder):
    schemes = "k8v8,k4v4,k2v2"
    command = [sys.executable, "-m", "kvd.worker.tools", "calibrate", "demo", "--schemes", schemes]
    place = ["--home", str(tmp_path), "--prompts", "1", "--tokens", "420"]
    done = subprocess.run([*command, *place], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert done.stderr.splitlines()[-1] == "5/5 text 1 of 1"
    assert [one["scheme"] for one in printed["levels"]] == schemes.split(",")
    assert printed["levels"][0]["allowed"]
    assert not printed["levels"][2]["allowed"]
    assert 0 < printed["levels"][0]["kl"] < printed["levels"][2]["kl"]
    assert printed["lowest"] in {"k8v8", "k4v4"}
    # One layer is delicate: with more bits there and fewer elsewhere, the same size costs less.
    assert printed["levels"][0]["mix"] == []
    middle = printed["levels"][1]
    assert middle["kl"] < middle["uniform_kl"] / 2
    assert [loss["layer"] for loss in printed["losses"]] == [*range(6)]
    assert [loss["estimated"] for loss in printed["losses"]] == [True] * 3 + [False] * 3
    assert not list(Home(tmp_path).calibration.glob("*.partial"))
    found = find(model_files.inspect(demo.path()), Home(tmp_path).calibration)
    assert printed == json.loads(msgspec.json.encode(found)) | {"file": printed["file"]}


def test_an_interrupted_calibration_continues_with_the_next_layer(monkeypatch, tmp_path):
    pretend_to_measure(monkeypatch, fidelity.Agreement(10, 0.001, 0.99, 1.0, 1.1))
    measured: list[int] = []
    measure_layer = sensitivity.measure_layer

    def interrupted(runner, layer, prompts):
        if layer == 4 and measured.count(3) == 1:
            measured.append(-1)
            raise KeyboardInterrupt
        measured.append(layer)
        return measure_layer(runner, layer, prompts)

    monkeypatch.setattr(calibrate.sensitivity, "measure_layer", interrupted)

    def run(tokens: int = 400) -> None:
        partial = PartialLosses(tmp_path)
        calibrate.calibrate(
            "demo", [K8V8, K4V4], Floor(), lambda *_: None, count=1, tokens=tokens, partial=partial
        )

    with pytest.raises(KeyboardInterrupt):
        run()
    (file,) = tmp_path.glob("*.partial")
    assert file.stat().st_mode & 0o777 == 0o600
    kept = file.read_bytes()
    measured[:] = [3, 3]
    run()
    assert measured == [3, 3, 4, 5]
    assert not file.exists()

    # Other texts, or a damaged file, begin again.
    file.write_bytes(kept)
    run(tokens=420)
    file.write_bytes(b"{")
    run()
    assert measured[4:] == [3, 4, 5] * 2


@pytest.mark.slow
def test_kernels_are_requested_ahead_and_decode_all_levels_in_one_step(monkeypatch):
    ahead, kept = Ahead(), []
    ahead.keep = lambda: kept.append(True)
    monkeypatch.setattr(modules, "_current", ahead)
    times = Times(fused_s=1e-3, reference_s=None, keys=64)
    monkeypatch.setattr(kernel_timing, "compare", lambda *_: times)
    requests = Requests(ahead)
    monkeypatch.setattr(kernel_choice, "find_kernels", requests.backend)
    launched: list[int] = []
    measure = fidelity.measure

    def counted(*given, **how):
        before = requests.attended
        found = measure(*given, **({"decoded": 8} | how))
        launched.append(requests.attended - before)
        return found

    monkeypatch.setattr(calibrate.fidelity, "measure", counted)
    schemes = [K8V8, K8V4, K4V4]
    place, report = shallow.path(), lambda *_: None
    found = calibrate.calibrate(place, schemes, Floor(), report, count=1, tokens=420)
    assert requests.late
    # The load does not know the schemes with which single layers are measured. What packs their
    # pages is compiled when it first runs, in a fraction of a second each.
    assert {one for one in requests.late if "'pack'" not in one} <= requests.early
    # Layers are measured without decoding. Then each token is a step of the levels with one scheme
    # in all layers, and one of the levels with a mix.
    assert [bool(level.mix) for level in found.levels] == [False, True, True]
    assert launched == [0, 0, 2 * 8 * 3]
    assert kept


def test_plain_operations_measure_what_the_native_library_measures(monkeypatch):
    seam.install()

    def measured() -> tuple[bool, dict[int, float]]:
        library = activation.activate(lambda *_: None).library
        found = model_files.load(demo.path(), library=library)
        runner = fidelity.serve(found.model, [K4V4], library=library)
        prompts = fidelity.texts(found.tokenizer, count=1, tokens=400)
        return library is None, sensitivity.measure_layer(runner, 4, prompts).keys

    is_plain, native = measured()
    if is_plain:
        pytest.skip("the native library is not used here")
    monkeypatch.setenv("KVD_NATIVE", "off")
    assert measured() == (True, pytest.approx(native, rel=0.01))


def test_a_short_end_of_a_text_is_not_measured_in_layers():
    def cut(length: int) -> int:
        return len(sensitivity._without_short_end(range(length)))

    chunk = fidelity.CHUNK
    assert [cut(4 * chunk + 1 + rest) - 4 * chunk - 1 for rest in (0, 1, 63, 64)] == [0, 0, 0, 64]
    assert cut(chunk + 4) == chunk + 4  # only its end attends to a page


def test_the_layers_estimated_to_lose_most_are_measured():
    def loss(layer: int, keys: float, values: float) -> LayerLoss:
        return LayerLoss(layer=layer, keys={3: keys}, values={3: values}, estimated=True)

    estimates = {0: loss(0, 1, 2), 2: loss(2, 5, 0), 5: loss(5, 1, 1), 6: loss(6, 0, 4)}
    assert sensitivity.delicate([0, 2, 5, 6], estimates) == [2, 6]
    assert sensitivity.delicate([0, 1, 2, 5], estimates) == [0, 1, 2]  # 1 has no estimate
    assert sensitivity.delicate([0, 1, 2], {}) == [0, 1, 2]
    assert sensitivity.delicate([0], estimates) == [0]


def test_a_model_that_cannot_be_estimated_is_measured_in_all_layers(monkeypatch, caplog):
    seam.install()
    loaded = model_files.load(demo.path())
    found = sensitivity.estimate(loaded)
    assert sensitivity.delicate(range(6), found) == [3, 4, 5]
    assert all(loss.estimated for loss in found.values())

    monkeypatch.setattr(sensitivity, "_PROBE_MEMORY", 1)
    with caplog.at_level(logging.INFO):
        assert sensitivity.estimate(loaded) == {}
    assert "all layers are measured, because they cannot be estimated: it needs" in caplog.text


def test_a_model_that_does_not_tolerate_the_top_level_stays_dense(monkeypatch, tmp_path):
    pretend_to_measure(monkeypatch, fidelity.Agreement(10, float("nan"), 0.99, 1.0, 1.1))
    stages: list[str] = []
    report = lambda text, _total=None, /: stages.append(text)  # noqa: E731
    found = calibrate.calibrate("demo", [K8V8], Floor(), report, count=1, tokens=400)
    assert found.lowest == "k16v16"
    assert (found.levels[0].kl, found.levels[0].allowed) == (None, False)
    assert stages == ["weights", *(f"layer {n} of 3" for n in range(1, 4)), "text 1 of 1"]
    store(tmp_path, found)
    assert find(model_files.inspect(demo.path()), tmp_path) == found


@pytest.mark.parametrize(("tokens", "why"), [(100, "facts take"), (430, "longer prompts")])
def test_texts_that_are_too_short_are_refused(monkeypatch, tokens, why):
    cut = [list(range(300, 400))]
    if tokens > 400:
        monkeypatch.setattr(calibrate.fidelity, "texts", lambda *_, **__: cut)
    with pytest.raises(InvalidRequest, match=f"^tokens: .*{why}") as caught:
        calibrate.calibrate("demo", [K8V8], Floor(), lambda *_: None, count=1, tokens=tokens)
    assert caught.value.detail == {"field": "tokens"}


def test_an_error_of_measuring_is_not_reported_as_short_prompts(monkeypatch):
    def broken(*_, **__):
        raise ValueError("shapes do not match")

    monkeypatch.setattr(calibrate.fidelity, "measure", broken)
    with pytest.raises(ValueError, match=r"^shapes do not match"):
        calibrate.calibrate("demo", [K8V8], Floor(), lambda *_: None, count=1, tokens=400)


@pytest.mark.parametrize(
    "wrong",
    [["--max-kl=nan"], ["--max-kl=-1"], ["--min-top1=95"], ["--prompts=0"], ["--schemes=k9v9"]],
)
def test_wrong_options_are_refused_before_anything_is_loaded(monkeypatch, capsys, tmp_path, wrong):
    place = ["--home", str(tmp_path), "--schemes", "k8v8"]
    monkeypatch.setattr(sys, "argv", ["calibrate", "demo", *place, *wrong])
    monkeypatch.setattr(calibrate.model_files, "load", None)
    with pytest.raises(SystemExit) as ended:
        calibrate.main()
    assert ended.value.code == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "invalid_request"
    assert not list(tmp_path.iterdir())


# The user's own text.


def letters(text: str) -> list[int]:
    return [1, *map(ord, text)]


def test_own_texts_are_spread_over_the_file(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("".join(chr(0x100 + number) for number in range(100)))
    tokenizer = SimpleNamespace(encode=letters, bos_token_id=1)
    prompts = fidelity.OwnText.read(file).prompts(tokenizer, count=3, tokens=41)
    assert [one[0] for one in prompts] == [1, 1, 1]
    assert [[id_ - 0x100 for id_ in one[1:]] for one in prompts] == [
        list(range(first, first + 40)) for first in (0, 30, 60)
    ]
    [whole] = fidelity.OwnText.read(file).prompts(tokenizer, count=1, tokens=101)
    assert len(whole) == 101
    short = fidelity.OwnText.read(file).prompts(tokenizer, count=4, tokens=100)
    assert [one[1] - 0x100 for one in short] == [0, 1]  # no prompt is measured twice


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("abc", encoding="utf-8-sig")
    tokenizer = SimpleNamespace(encode=lambda text: list(map(ord, text)))
    assert fidelity.OwnText.read(file).prompts(tokenizer, count=1, tokens=3) == [
        list(map(ord, "abc"))
    ]


def test_a_pipe_is_refused_without_opening_it(tmp_path):
    pipe = tmp_path / "own"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="own is not a regular file"):
        fidelity.OwnText.read(pipe)


def test_a_text_that_cannot_be_read_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate.model_files, "inspect", pytest.fail)
    with pytest.raises(InvalidRequest, match=r"text: cannot read .*none\.txt"):
        calibrate.calibrate("demo", [K8V8], Floor(), lambda *_: None, text=tmp_path / "none.txt")


def test_the_name_of_a_text_is_valid_text():
    assert fidelity.readable_name(Path(os.fsdecode(b"own\xff"))) == "own\N{REPLACEMENT CHARACTER}"


def test_a_character_at_the_end_of_what_is_read_may_be_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "TEXT_BYTES", 9)
    file = tmp_path / "own.txt"
    file.write_text("\u20ac" * 2 + "ab\u00e9" + "c")
    tokenizer = SimpleNamespace(encode=lambda text: list(map(ord, text)))
    assert fidelity.OwnText.read(file).prompts(tokenizer, count=1, tokens=4) == [
        [0x20AC, 0x20AC, ord("a"), ord("b")]
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00", r"is not UTF-8 text \(byte 0\)"),
        ("text".encode("utf-16-le"), "is not UTF-8 text .it contains null characters"),
        (b"a few words", "has .* tokens, and a text needs 200; give a longer file or fewer"),
        (None, "cannot read .*: No such file"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path, content, reason):
    file = tmp_path / "own.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        calibrate.calibrate(
            "demo", [K8V8], Floor(), lambda *_: None, count=1, tokens=200, text=file
        )
    assert caught.value.detail["field"] == "text"


def test_losses_of_other_texts_of_the_same_length_are_not_continued(tmp_path):
    partial = PartialLosses(tmp_path)
    partial.write("key", [[1, 2, 3]], {})
    loss = LayerLoss(layer=0, keys={4: 1.0}, values={4: 1.0})
    partial.write("key", [[1, 2, 3]], {0: loss})
    assert partial.read("key", [[1, 2, 3]]) == {0: loss}
    assert partial.read("key", [[1, 2, 4]]) == {}


def test_a_calibration_measures_the_given_text(tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "texts", pytest.fail)
    file = tmp_path / "own.txt"
    file.write_text((demo.path() / "config.json").read_text() * 8)
    found = calibrate.calibrate(
        "demo", [K8V8], Floor(), lambda *_: None, count=1, tokens=300, text=file
    )
    assert (found.text, found.tokens) == (str(file), 300)
    assert found.levels[0].kl is not None
