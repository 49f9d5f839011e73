"""The pages name what exists: each op, event, error, exit code and configuration key."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from kvd.cli.calibrate import calibrate
from kvd.cli.options import LEVELS, OPTIONS
from kvd.config import Config
from kvd.exits import Exit
from kvd.kv import KVText
from kvd.worker.fidelity import Floor
from protocol.errors import KvdError
from protocol.messages import Event, Request
from protocol.types import KVPart, KVSpec

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


def test_every_kv_setting_is_described_where_people_and_programs_look():
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
    parameters = inspect.signature(calibrate).parameters
    options = {name: one.default for name, one in parameters.items() if type(one.default) in NUMBER}
    assert described == options
    floor = Floor()
    assert (described["max_kl"], described["min_top1"]) == (floor.max_kl, floor.min_top1)
    for field in LEVELS:
        assert f"`{OPTIONS[field]}`" in section


def test_every_exit_code_is_described():
    table = set(re.findall(r"^\| (\d+) \|", page("operations.md"), re.MULTILINE))
    assert table == {str(int(code)) for code in Exit}


def test_every_key_of_the_configuration_is_described_with_its_default():
    for key in Config.__struct_fields__:
        (row,) = re.findall(rf"^\| `{key}` \| (.*?) \|", page("operations.md"), re.MULTILINE)
        default = getattr(Config(), key)
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert row == f"{default:g}"


@pytest.mark.parametrize("file", ["README.md", "docs", "deploy/launchd/README.md"])
def test_links_lead_somewhere(file):
    path = ROOT / file
    pages = path.glob("*.md") if path.is_dir() else [path]
    for source in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", source.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (source.parent / link).exists(), f"{source}: {link}"
