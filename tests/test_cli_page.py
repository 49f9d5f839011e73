"""docs/cli.md describes every command and exit code. test_docs.py checks that it is current."""

from __future__ import annotations

import re
from pathlib import Path

from kvd.cli.app import COMMANDS
from kvd.host.exits import Exit

PAGE = (Path(__file__).parent.parent / "docs" / "cli.md").read_text(encoding="utf-8")


def test_every_command_and_exit_code_is_on_the_page():
    described = set(re.findall(r"^### kvctl ([a-z-]+)$", PAGE, re.MULTILINE))
    assert {command.name for command in COMMANDS} <= described
    codes = set(re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE))
    assert {str(int(code)) for code in Exit} == codes
