"""Records of tokenizers on disk: made once, checked when read, private, and never in the way."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from kvd.worker.text import tokenizer_cache as cache
from kvd.worker.text.tokenizer_record import (
    DamagedRecordError,
    Refusal,
    TokenizerRecord,
    from_bytes,
    to_bytes,
)
from kvd.worker.tools import convert_tokenizer
from protocol.worker import OVER_MEMORY_LIMIT
from tests.worker.process.peer import alive
from tests.worker.text import tokenizer_kinds

RECORD = TokenizerRecord(
    tokenizer=b"{}" * 100,
    chat_template={"default": "x"},
    special_tokens={"bos_token": "<s>"},
    special_ids=[1, 2],
    bos_id=1,
    eos_id=None,
    eos_ids=[2],
    model_max_length=None,
    splits_special=False,
    cleans_up=True,
    tool_parser="",
)


@pytest.fixture
def model(tmp_path):
    return tokenizer_kinds.write(tmp_path / "model", "bytes")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def converter(monkeypatch):
    """Return a function that replaces the converter by one that misbehaves."""

    def use(deed):
        monkeypatch.setattr(cache, "CONVERTER", "tests.worker.text.converters")
        monkeypatch.setenv("KVD_TEST_CONVERTER", deed)

    return use


def runs(model):
    with contextlib.suppress(FileNotFoundError):
        lines = (model / "runs.bin").read_text().splitlines()
        return [list(map(int, line.split())) for line in lines]
    return []


def find(model, folder, memory_bytes=0, **options):
    return cache.find(model, memory_bytes=memory_bytes, folder=folder, **options)


def mode(file):
    return stat.S_IMODE(file.stat().st_mode)


def test_the_converter_runs_once(model, folder, converter):
    ticks = []
    record = find(model, folder, tick=lambda: ticks.append(1))
    assert isinstance(record, TokenizerRecord)
    assert ticks  # the daemon hears from the worker meanwhile
    converter("crash")
    assert find(model, folder) == record
    assert runs(model) == []


def test_an_entry_is_what_was_written(model, folder):
    place = cache.place_of(model, folder)
    assert cache.read(place) is None
    for entry in (RECORD, Refusal(reason="because")):
        cache.write(place, entry)
        assert cache.read(place) == entry


def test_files_are_private(model, folder):
    before = os.umask(0)
    try:
        place = cache.place_of(model, folder)
        cache.write(place, RECORD)
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    assert mode(place.file) == 0o600
    assert [file.name for file in folder.iterdir()] == [place.file.name]


def test_a_folder_that_others_can_write_to_is_made_private(model, folder):
    folder.mkdir(parents=True)
    folder.chmod(0o775)
    cache.write(cache.place_of(model, folder), RECORD)
    assert mode(folder) == 0o700


@pytest.mark.parametrize("cut", [0, 1, 20, 40, -1])
def test_a_cut_record_is_damaged(cut):
    with pytest.raises(DamagedRecordError):
        from_bytes(to_bytes(RECORD)[:cut])


@pytest.mark.parametrize("at", [0, 17, 33, 60, -1])
def test_a_changed_byte_is_damage(at):
    data = bytearray(to_bytes(RECORD))
    data[at] ^= 1
    with pytest.raises(DamagedRecordError):
        from_bytes(bytes(data))


@pytest.mark.parametrize("content", [b"", b"rubbish", to_bytes(RECORD)[:-5]])
def test_a_damaged_entry_is_deleted_and_made_again(model, folder, converter, content):
    place = cache.place_of(model, folder)
    cache.write(place, RECORD)
    place.file.write_bytes(content)
    assert cache.read(place) is None
    assert not place.file.exists()
    place.file.write_bytes(content)
    converter("damage")
    assert find(model, folder) is None
    assert len(runs(model)) == 1
    assert isinstance(cache.read(place), Refusal)


def test_a_pipe_is_replaced(model, folder):
    """A plain open would wait for a writer."""
    place = cache.place_of(model, folder)
    os.mkfifo(place.file)
    assert cache.read(place) is None
    cache.write(place, RECORD)
    assert cache.read(place) == RECORD


def test_a_link_is_replaced(model, folder, tmp_path):
    place = cache.place_of(model, folder)
    other = tmp_path / "other"
    other.write_bytes(to_bytes(RECORD))
    place.file.symlink_to(other)
    assert cache.read(place) is None
    assert not place.file.is_symlink()
    assert other.exists()


@pytest.mark.parametrize("deed", ["crash", "damage", "nothing"])
def test_a_failure_is_remembered_for_a_day(model, folder, converter, deed):
    converter(deed)
    assert find(model, folder) is None
    assert find(model, folder) is None
    assert len(runs(model)) == 1
    file = cache.place_of(model, folder).file
    os.utime(file, (0, time.time() - 25 * 3600))
    assert find(model, folder) is None
    assert len(runs(model)) == 2


def test_a_full_disk_is_not_remembered(model, folder, monkeypatch):
    """An entry with the reason is small, so it may fit where the record does not."""
    real = subprocess.Popen

    def limited(*args, **options):
        most = (256, resource.RLIM_INFINITY)
        options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, most)
        return real(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(cache.subprocess, "Popen", limited)
        assert find(model, folder) is None
    assert list(folder.iterdir()) == []
    assert find(model, folder) is not None


def test_a_converter_that_takes_too_long_is_ended(model, folder, converter, monkeypatch):
    converter("hang")
    clock = SimpleNamespace(monotonic=lambda: 1000.0 if runs(model) else 0.0, time=time.time)
    monkeypatch.setattr(cache, "time", clock)
    assert find(model, folder) is None
    assert not alive(runs(model)[0][0])
    assert "more than 180 s" in cache.read(cache.place_of(model, folder)).reason


def test_a_cancelled_load_ends_the_converter_and_remembers_nothing(model, folder, converter):
    converter("hang")

    class CancelledError(Exception):
        pass

    def tick():
        if runs(model):
            raise CancelledError

    with pytest.raises(CancelledError):
        find(model, folder, tick=tick)
    assert not alive(runs(model)[0][0])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("room", "given"),
    [(0, cache.MIN_BYTES), (1 << 62, cache.MAX_BYTES), (10**9, 10**9)],
)
def test_the_memory_of_a_conversion_has_bounds(model, folder, converter, room, given):
    converter("nothing")
    find(model, folder, memory_bytes=room)
    assert runs(model)[0][1] == given


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
def test_a_converter_without_memory_ends_alone(model, folder, monkeypatch):
    monkeypatch.setattr(cache, "MIN_BYTES", 24 * 1024 * 1024)
    assert find(model, folder) is None
    assert isinstance(cache.read(cache.place_of(model, folder)), Refusal)


def test_without_a_limit_of_the_system_a_thread_ends_the_converter(monkeypatch):
    monkeypatch.setattr(convert_tokenizer, "_INTERVAL_S", 0)
    readings, ends = iter([10, 100, 101]), []
    convert_tokenizer.end_above(100, lambda: next(readings), ends.append)
    assert ends == [OVER_MEMORY_LIMIT]
    assert list(readings) == []


def test_a_converter_ends_with_its_worker(model, tmp_path):
    ours, held = os.pipe()
    command = [sys.executable, "-m", "kvd.worker.tools.convert_tokenizer", str(model)]
    command += [str(tmp_path / "record"), "--alive", str(ours)]
    process = subprocess.Popen(command, pass_fds=[ours])
    os.close(held)
    os.close(ours)
    assert process.wait(30) == 1
    assert not (tmp_path / "record").exists()


def test_the_key_follows_what_the_tokenizer_depends_on(model, folder, monkeypatch):
    def key():
        return cache.place_of(model, folder).file.name

    keys = [key()]
    (model / "model.safetensors").write_bytes(b"weights")
    assert key() == keys[0]
    for file in ("tokenizer.json", "chat_template.jinja", "config.json"):
        (model / file).write_text((model / file).read_text() + " ")
        keys.append(key())
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("x")
    keys.append(key())
    for changed in ("transformers", "sentencepiece"):
        monkeypatch.setattr(cache, "version", lambda name, changed=changed: str(name == changed))
        keys.append(key())

    def without_tiktoken(name):
        if name == "tiktoken":
            raise PackageNotFoundError(name)
        return "False"

    monkeypatch.setattr(cache, "version", without_tiktoken)
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_the_content_of_a_huge_file_is_not_read(model, folder, monkeypatch):
    with (model / "archive.tar").open("wb") as file:
        file.truncate(2**40)  # reading the zeros would take minutes
    key = cache.place_of(model, folder).file.name
    os.utime(model / "archive.tar", (0, 0))
    assert cache.place_of(model, folder).file.name != key


def test_two_folders_with_the_same_files_share_an_entry(model, folder, tmp_path):
    other = tokenizer_kinds.write(tmp_path / "other", "bytes")
    assert cache.place_of(model, folder).file == cache.place_of(other, folder).file


def test_the_entries_used_last_are_kept(model, folder, monkeypatch):
    monkeypatch.setattr(cache, "KEPT", 3)
    folder.mkdir(parents=True)
    places = [cache.Place(model, folder / f"{name}.tokenizer") for name in "abcd"]
    for at, place in enumerate(places):
        cache.write(place, RECORD)
        os.utime(place.file, (0, 1000 + at))
        if at == 2:
            cache.read(places[0])  # is newest now
    assert sorted(file.name[0] for file in folder.iterdir()) == ["a", "c", "d"]


def test_a_folder_that_cannot_be_used_is_no_error(model, tmp_path, converter):
    converter("crash")
    (tmp_path / "file").touch()
    assert find(model, tmp_path / "file" / "tokenizers") is None
    assert runs(model) == []


def test_a_failed_write_leaves_no_file(model, folder, monkeypatch):
    def fail(handle):
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        cache.write(cache.place_of(model, folder), RECORD)
    assert list(folder.iterdir()) == []
