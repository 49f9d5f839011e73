"""Commands and options that pages show exist. Links lead to existing files and headings."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from kvd.__main__ import app as kvd_app
from kvd.cli.app import app as kvctl_app
from kvd.config import config
from tests.pages import BLOCK, ROOT, anchors, blocks, commands_of, links

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "deploy").glob("*/README.md"),
        ROOT / "bench/results/README.md",
        ROOT / "kvd/demo/MODEL_CARD.md",
    ]
)
SHELL = {"sh", "bash"}
APPS: dict[str, Any] = {"kvctl": kvctl_app, "kvd": kvd_app}
SEPARATORS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def shell_commands(page: Path) -> list[str]:
    """Return the commands in a page's blocks of shell."""
    text = page.read_text(encoding="utf-8")
    shell = [block for language, block in blocks(text) if language in SHELL]
    return [command for block in shell for command in commands_of(block)]


def invocations(command: str) -> list[list[str]]:
    """Return the programs that a command line starts, with their arguments."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in SEPARATORS:
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


def check(words: list[str]) -> None:
    """Raise unless this is a command of kvctl or kvd, with options that it accepts."""
    command = APPS[words[0]]
    context = click.Context(command, info_name=words[0])
    left = words[1:]
    while True:
        parser = command.make_parser(context)
        _, left, _ = parser.parse_args(args=list(left))
        if not left or not hasattr(command, "get_command"):
            return
        inner = command.get_command(context, left[0])
        assert inner is not None, f"{words[0]} has no command {left[0]!r}"
        context = click.Context(inner, info_name=left[0], parent=context)
        command, left = inner, left[1:]


def test_unknown_commands_and_options_are_detected():
    check(["kvctl", "--json", "config", "set", "budget", "8GiB", "--save"])
    check(["kvctl", "explain", "MODEL", "--ctx", "16000", "--rows", "8"])
    for words in (
        ["kvctl", "explode"],
        ["kvctl", "explain", "--nonsense"],
        ["kvctl", "config", "sett"],
        ["kvd", "serve", "--daemonize"],
    ):
        with pytest.raises((AssertionError, click.UsageError)):
            check(words)


@pages
def test_commands_in_blocks_exist(page: Path):
    for command in shell_commands(page):
        subprocess.run(["bash", "-n", "-c", command], check=True)
        for words in invocations(command):
            name = Path(words[0]).name
            if name in APPS:
                check([name, *words[1:]])
            elif words[0] == "make":
                target = re.sub(r"^test-\w+$", "test-%", words[1])
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            elif words[:2] == ["python", "-m"]:
                assert importlib.util.find_spec(words[2]) is not None, words
            elif words[0] == "python":
                assert (ROOT / words[1]).exists(), words


INLINE = re.compile(r"`((?:kvctl|kvd) [a-z-][^`]*)`")
OPEN = re.compile(r"[…\[\]|]|\.\.\.|->")
"""Placeholders and alternatives. A command that contains one cannot be parsed."""


@pages
def test_commands_in_sentences_exist(page: Path):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for command in INLINE.findall(text):
        plain = " ".join(command.split())
        if not OPEN.search(plain):
            check(shlex.split(plain))


@pages
def test_targets_of_links_exist(page: Path):
    for path, anchor in links(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert target.is_relative_to(ROOT), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path}#{anchor}"


@pages
def test_examples_of_the_configuration_are_valid(page: Path):
    for language, text in blocks(page.read_text(encoding="utf-8")):
        if language == "toml":
            assert tomllib.loads(text) is not None
            config.parse(text, str(page))


def test_every_page_can_be_reached_from_the_readme():
    seen, due = set(), [ROOT / "README.md"]
    while due:
        page = due.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        due += [
            (page.parent / path).resolve()
            for path, _ in links(page.read_text(encoding="utf-8"))
            if path
        ]
    assert set(PAGES) - seen <= {ROOT / "bench/results/README.md"}
