"""`kvctl top`: its pages, and the command on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import msgspec
import pytest
from rich.console import Console

from kvd.cli import top_page
from kvd.cli.keyboard import parse_keys
from kvd.cli.top_page import View, spark
from kvd.host.home import Home
from protocol import messages as m
from protocol.errors import ErrorInfo
from protocol.types import ModelStatus, WorkerStats
from tests.cli.stub import MODEL, daemon_status, stub_daemon, well


def model(number, **fields):
    stats = WorkerStats(tokens_per_s=float(number), rows_running=9 - number)
    return msgspec.structs.replace(
        MODEL, name=f"model-{number}", granted_bytes=number << 20, stats=stats, **fields
    )


MANY = daemon_status(*(model(number) for number in range(10)))
BROKEN = ModelStatus(
    name="broken" * 9, source="/b", state="failed", error=ErrorInfo("model_failed", "3 [crashes]")
)


def shown(view, status, width=80, height=24):
    console = Console(width=width, height=height, file=io.StringIO(), highlight=False)
    console.print(top_page.page(view, status, width, height))
    return console.file.getvalue().splitlines()


def names(lines):
    return [line.split()[0] for line in lines if line.startswith("model-")]


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("height", [8, 24, 50])
@pytest.mark.parametrize("status", [daemon_status(), MANY, daemon_status(MODEL, BROKEN)])
def test_a_page_fits_the_screen(width, height, status):
    view = View(error="gone")
    happened = m.EventRecord(id="1", seq=1, at=0.0, kind="evict", model="x" * 200)
    view.take(status, [happened] * 30)
    for page in ("models", "model", "help"):
        view.page, view.selected = page, "demo"
        lines = shown(view, status, width, height)
        assert all(len(line) <= width for line in lines)
        if page == "models":
            assert len(lines) <= height
    assert shown(view, status, width, height)


def test_models_are_sorted_by_the_selected_column():
    view = View()
    assert names(shown(view, MANY))[:2] == ["model-9", "model-8"]
    view.press("r", MANY)
    assert names(shown(view, MANY))[:2] == ["model-0", "model-1"]
    view.press("R", MANY)
    assert names(shown(view, MANY))[0] == "model-9"
    view.press("n", MANY)
    assert names(shown(view, MANY)) == [f"model-{n}" for n in range(10)]
    for _ in top_page.SORTS:
        view.press("s", MANY)
    assert (view.sort, view.reverse) == ("n", False)


def test_the_selected_model_is_visible_and_enter_shows_its_page():
    view = View()
    for _ in range(9):
        view.press("down", MANY)
    assert view.selected == "model-1"
    assert "model-1" in names(shown(view, MANY, height=9))
    view.press("end", MANY)
    assert "model-0" in names(shown(view, MANY, height=9))
    view.press("enter", MANY)
    assert any("keys per channel" in line for line in shown(view, MANY))
    view.press("escape", MANY)
    assert names(shown(view, MANY))
    view.press("page up", MANY)
    assert view.selected == "model-9"


def test_unknown_keys_and_a_daemon_without_models_are_harmless():
    view = View()
    for key in ("x", "down", "enter", "escape", "\x00", "é"):
        view.press(key, None)
        view.press(key, daemon_status())
    assert (view.selected, view.page) == (None, "models")
    view.press("+", None)
    assert view.interval_s == 2.0
    for _ in range(9):
        view.press("-", None)
    assert view.interval_s == 0.25


def test_curves_end_with_the_newest_value_and_scale_to_the_maximum():
    assert spark([], 10) == spark([0.0, 0.0], 10) == spark([1.0], 0) == ""
    assert spark([0, 1, 50, 100], 10) == " ▁▄█"
    assert spark([100, 1, 1], 2) == "██"


def test_history_of_unloaded_models_is_dropped():
    view = View()
    view.take(MANY, [])
    view.take(daemon_status(MODEL), [])
    assert list(view.by_model) == ["demo"]
    assert list(view.total) == [45.0, MODEL.stats.tokens_per_s]


def test_escape_sequences_are_parsed_as_one_key_each():
    assert parse_keys("q\x1b[A\x1bOB \r\x1b[6~é\x1b") == [
        *("q", "up", "down", "space", "enter", "page down", "é", "escape")
    ]


class Terminal:
    """kvctl on a pseudo-terminal."""

    def __init__(self, home, *arguments, width=100, height=30):
        self.fd, inner = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(inner)
        environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvd.cli", "--home", str(home.root), *arguments],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**environment, "TERM": "xterm-256color"},
        )  # fmt: skip
        self.inner = inner
        self.text = ""

    def resize(self, width, height):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys):
        self.text = ""
        os.write(self.fd, keys.encode())

    def wait_for(self, text):
        end = time.monotonic() + 20
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} did not come: {self.text[-2000:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.text += os.read(self.fd, 65536).decode(errors="replace")

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for fd in (self.fd, self.inner):
            os.close(fd)


def test_top_handles_keys_resizes_and_a_lost_daemon(home: Home):
    hang_up = []

    def answer(request):
        if hang_up:
            yield None
        else:
            yield from well(request)

    with stub_daemon(home.socket, answer), contextlib.ExitStack() as stack:
        terminal = Terminal(home, "top", "--interval", "0.25")
        stack.callback(terminal.close)
        terminal.wait_for("\x1b[?1049h")  # the alternate screen
        terminal.wait_for("demo")
        terminal.wait_for("evict")
        terminal.press("?")
        terminal.wait_for("pause the display")
        terminal.press("\x1b")
        terminal.wait_for("GRANTED")
        terminal.text = ""
        terminal.resize(40, 12)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        terminal.wait_for("STATE")
        terminal.text = ""
        terminal.wait_for("demo")
        assert "GRANTED" not in terminal.text
        hang_up.append(True)
        terminal.wait_for("closed the")
        hang_up.clear()
        terminal.text = ""
        terminal.wait_for("tok/s")
        terminal.press("q")
        terminal.wait_for("\x1b[?1049l")
        assert terminal.process.wait(10) == 0
        assert termios.tcgetattr(terminal.inner)[3] == terminal.before[3]


def test_without_a_daemon_or_a_terminal_top_reports_an_error(home: Home):
    terminal = Terminal(home, "top")
    try:
        terminal.wait_for("no daemon answers")
        assert terminal.process.wait(10) == 3
        assert "\x1b[?1049h" not in terminal.text
    finally:
        terminal.close()
    done = subprocess.run(
        [sys.executable, "-m", "kvd.cli", "--home", str(home.root), "top"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr
