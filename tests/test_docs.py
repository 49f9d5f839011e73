"""The pages describe every operation, event, error, exit code and configuration key."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvd.cli.calibrate import calibrate
from kvd.cli.options import LEVELS, OPTIONS
from kvd.config import config
from kvd.config.config import Config, ModelEntry
from kvd.config.http import HttpSettings
from kvd.config.kv import KVText
from kvd.host.exits import Exit
from kvd.worker.tools.fidelity import Floor
from protocol import messages
from protocol.errors import ConfigError, KvdError
from protocol.kv import KVSpec
from protocol.messages import Event, Request
from protocol.types import KVPart
from tools import docs
from tools.pages import configuration, markdown, protocol
from tools.pages.fields import fields, words

ROOT = Path(__file__).parent.parent
NUMBER = {int, float}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def codes(base: type[KvdError]) -> set[str]:
    return {base.code}.union(*(codes(sub) for sub in base.__subclasses__()))


@pytest.mark.parametrize("union", [Request, Event], ids=["requests", "events"])
def test_every_message_is_described(union):
    tags = {kind.__struct_config__.tag for kind in union.__args__}
    assert not {tag for tag in tags if f"`{tag}`" not in page("protocol.md")}


def test_every_error_is_described():
    assert not {code for code in codes(KvdError) if f"`{code}`" not in page("protocol.md")}


def test_every_field_of_a_request_is_described():
    fields = {field for kind in Request.__args__ for field in kind.__struct_fields__}
    missing = {f for f in fields - {"v", "id"} if f"`{f}`" not in page("protocol.md")}
    assert not missing


def test_every_kv_setting_is_described_for_the_cli_and_the_protocol():
    protocol, tuning = page("protocol.md"), page("tuning.md")
    for field in (*KVSpec.__struct_fields__, *KVPart.__struct_fields__):
        assert f"`{field}`" in protocol, field
    for field in (*KVText.__struct_fields__, *KVPart.__struct_fields__):
        assert f"`{field}`" in tuning, field
    rows = re.findall(r"^\| `(--[a-z-]+)` \| `([a-z_]+)` \| (.*?) \|", tuning, re.MULTILINE)
    assert {field: option for option, field, _ in rows} == OPTIONS
    for _, field, default in rows:
        value = getattr(KVText(), field)
        if isinstance(value, int):
            assert default == str(value)
        if isinstance(value, tuple):
            assert default == f"`{','.join(value)}`"


def test_the_options_of_calibrate_are_described_with_their_defaults():
    section = page("tuning.md").partition("## Calibration")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `--([a-z0-9-]+)` \| ([0-9.]+) \|", section, re.MULTILINE)
    described = {name.replace("-", "_"): float(default) for name, default in rows}
    options = {one.name: one.default for one in calibrate.params if type(one.default) in NUMBER}
    assert described == options
    floor = Floor()
    assert (described["max_kl"], described["min_top1"]) == (floor.max_kl, floor.min_top1)
    for field in LEVELS:
        assert f"`{OPTIONS[field]}`" in section


def test_every_exit_code_is_described():
    table = set(re.findall(r"^\| (\d+) \|", page("operations.md"), re.MULTILINE))
    assert table == {str(int(code)) for code in Exit}


def test_generated_parts_are_current():
    assert not docs.stale(), "run `make docs`"


def test_no_paragraph_of_a_command_is_shown_as_code():
    assert not re.findall(r"^    \S.*", page("cli.md"), re.MULTILINE)


@pytest.mark.parametrize("part", ["nothing", "settings"])
def test_a_page_without_its_parts_is_not_written(part):
    page = f"<!-- generated: {part} -->\n<!-- end -->"
    with pytest.raises(ValueError, match="generated parts"):
        markdown.filled(page, {"settings": "", "example": ""})


def test_a_stale_page_is_reported_and_then_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "PAGES", {"a.md": lambda page: f"{page}more" * (len(page) < 9)})
    (tmp_path / "a.md").write_text("what is ")
    assert docs.main(["--check"]) == 1
    assert (tmp_path / "a.md").read_text() == "what is "
    assert docs.main([]) == 0
    assert (tmp_path / "a.md").read_text() == "what is more"
    assert "is not current" in capsys.readouterr().out


STRUCTS = [section.struct for section in configuration.SECTIONS]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_setting_has_a_description(struct):
    assert not [one.name for one in fields(struct) if not one.text]


def test_every_table_of_the_configuration_has_a_section():
    tables = {type(value) for value in map(partial(getattr, Config()), Config.__struct_fields__)}
    structs = {kind for kind in tables if issubclass(kind, msgspec.Struct)}
    assert {Config, ModelEntry, KVText, *structs} == set(STRUCTS)


def test_the_example_file_has_every_key_with_its_default():
    example = configuration.parts()["example"]
    as_it_is = config.parse(example.strip("`").removeprefix("toml"))
    reported = config.parse(configuration.uncommented(example))
    (entry,) = as_it_is.models
    assert isinstance(entry, ModelEntry)
    assert msgspec.structs.replace(as_it_is, models=[]) == Config()
    (entry,) = reported.models
    examples = {"budget": "8GiB", "prefill_chunk": 256, "models": [entry]}
    http = msgspec.structs.replace(HttpSettings(), port=11711)
    assert reported == msgspec.structs.replace(Config(), http=http, **examples)
    lines = configuration.uncommented(example).splitlines()
    keys = {line.partition(" = ")[0] for line in lines if " = " in line}
    named = {one.name for struct in STRUCTS for one in fields(struct)}
    assert named - keys == {"models", "kv", "http", "watchdog", "prefix_store"}


def test_stated_bounds_are_enforced():
    """The bounds that the page states are those that the parser enforces."""
    kinds = {one.name: words(one.kind) for one in fields(Config)}
    assert kinds["max_rows"] == "integer, 1 to 512"
    assert kinds["prefill_chunk"] == "integer, 64 to 8192, a multiple of 64"
    for text in ("max_rows = 0", "max_rows = 513", "prefill_chunk = 32", "prefill_chunk = 65"):
        with pytest.raises(ConfigError):
            config.parse(text)
    assert config.parse("max_rows = 512\nprefill_chunk = 64").max_rows == 512


def test_only_the_last_answer_ends_a_request():
    assert protocol.ANSWERS.keys() == set(Request.__args__)
    for *before, last in protocol.ANSWERS.values():
        for kind, ends in ((last, True), *((one, False) for one in before)):
            assert issubclass(kind, messages._NOT_LAST) != ends, kind
    answers = {one for all_of_it in protocol.ANSWERS.values() for one in all_of_it}
    assert answers | {messages.Error} == set(Event.__args__)
