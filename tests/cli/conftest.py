"""A fixture that runs `kvctl` in the test's process."""

from __future__ import annotations

import io
import sys

import pytest

from kvd import cli
from kvd.host.home import Home


@pytest.fixture
def kvctl(monkeypatch, capsys, home: Home):
    """Return a function that runs kvctl here and returns its exit code, stdout and stderr."""

    def run(*arguments, stdin="", at_home=True):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        place = ["--home", str(home.root)] if at_home else []
        monkeypatch.setattr(sys, "argv", ["kvctl", *place, *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run
