"""docs/cli.md is what the commands say of themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvd.cli.app import COMMANDS
from kvd.host.exits import Exit

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def test_the_page_is_current():
    done = subprocess.run(
        [sys.executable, "tools/cli_page.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_command_and_exit_code_is_on_it():
    described = set(re.findall(r"^### kvctl ([a-z-]+)$", PAGE, re.MULTILINE))
    assert {one.name for one in COMMANDS} <= described
    codes = set(re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE))
    assert {str(int(code)) for code in Exit} == codes
