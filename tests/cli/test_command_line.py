"""kvctl's command line: common options, bounds of numbers, help, and what a start imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from kvd.cli.app import app
from kvd.client.options import RANGES
from kvd.config.kv import KVText
from kvd.host.home import Home
from protocol.policy import ModelPolicy
from tests.cli.stub import stub_daemon, well


@pytest.mark.parametrize("order", ["before", "after"])
def test_common_options_work_before_and_after_the_command(kvctl, home: Home, order, monkeypatch):
    monkeypatch.setenv("KVD_HOME", "/nowhere")
    place = ["--socket", str(home.socket), "--json"]
    arguments = [*place, "status"] if order == "before" else ["status", *place]
    with stub_daemon(home.socket, well):
        code, out, _ = kvctl(*arguments, at_home=False)
    assert code == 0
    assert json.loads(out)["state"] == "serving"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "demo", "--ctx", "64x"), "'64x' is not a number of tokens"),
        (("explain", "demo", "--ctx", "0"), "0 is not in the range x>=1"),
        (("bench-kv", "--lengths", "1k,two"), "'two' is not a number of tokens"),
        (("explain", "demo", "--rows", "x"), "'x' is not a valid integer range"),
        (("explain", "demo", "--rows", "-1"), "-1 is not in the range 0<=x<=65536"),
        (("explain", "demo", "--rows", "99999999"), "is not in the range 0<=x<=65536"),
        (("status", "--interval", "nan"), "'nan' is not a valid number of seconds"),
        (("status", "--interval", "x"), "'x' is not a valid number of seconds"),
        (("status", "--interval", "0"), "0.0 is not in the range x>=0.1"),
        (("status", "--watch", "--interval", "inf"), "inf is too large; the maximum is 31536000"),
        (("logs", "-n", "9" * 12), "999999999999 is too large"),
        (("generate", "demo", "Hi", "--temperature", "warm"), "'warm' is not a valid float"),
    ],
)
def test_numbers_of_the_command_line_are_checked(kvctl, arguments, message):
    code, out, err = kvctl(*arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def options_of(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Parameter]]:
    context = click.Context(command, resilient_parsing=True)
    names = command.list_commands(context) if isinstance(command, click.Group) else ()
    for name in names:
        yield from options_of(command.get_command(context, name), f"{path} {name}")
    yield from ((f"{path} {option.opts[0]}", option) for option in command.params)


def test_every_number_of_the_command_line_is_bounded():
    """By the option itself, or because its value is checked as a field of the protocol."""
    checked = {*RANGES, "stop_tokens", *ModelPolicy.__struct_fields__, "idle_ttl"}
    checked |= {f"kv_{field}" for field in KVText.__struct_fields__}
    numeric = 0
    for path, option in options_of(app):
        if not isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
            continue
        numeric += 1
        if option.name in checked:
            continue
        highest = getattr(option.type, "max", None)
        assert highest is not None, f"{path} has no upper bound"
        assert highest < float("inf"), path
        if isinstance(option.type, click.types.FloatParamType):
            with pytest.raises(click.BadParameter):
                option.type.convert("nan", option, None)
    assert numeric > 20


def test_a_short_command_imports_neither_asyncio_nor_pydantic_nor_the_engine():
    program = (
        "import sys; sys.argv = ['kvctl', '--home', '/tmp/nowhere', 'status', '--json']\n"
        "from kvd.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert ended.code == 3, ended.code\n"
        "print([m for m in ('asyncio', 'pydantic', 'mlx', 'rich.live', 'actors', 'protocol.worker',"
        " 'kvd.cli.chat', 'kvd.config.config') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_has_help(kvctl):
    for command in ("status", "load", "unload", "generate", "chat", "drain", "shutdown"):
        code, out, _ = kvctl(command, "--help")
        assert code == 0
        assert "--home" in out
        assert "--json" in out


def test_kvctl_imports_neither_mlx_nor_the_daemon():
    code = (
        "import sys, kvd.cli;"
        "bad = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'structlog', 'actors', 'kvd.worker'};"
        "sys.exit(', '.join(sorted(bad & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_shows_flags_and_arguments_as_they_are_written(kvctl):
    pages = {name: kvctl(*name.split(), "--help")[1] for name in ("", "unload", "generate", "load")}
    for page in pages.values():
        assert "<bool>" not in page
        assert "{" not in page
    assert "unload [OPTIONS] MODEL" in pages["unload"]
    assert "generate [OPTIONS] MODEL PROMPT" in pages["generate"]


def test_help_shows_no_limits_that_only_keep_numbers_representable():
    ranges = {
        path: option.type._describe_range()
        for path, option in options_of(app)
        if isinstance(option.type, click.IntRange | click.FloatRange)
    }
    assert ranges[" generate --max-tokens"] == ""
    assert ranges[" explain --ctx"] == "x>=1"
    assert ranges[" status --interval"] == "x>=0.1"
    assert not [one for one in ranges.values() if re.search(r"\d{7}", one)]
