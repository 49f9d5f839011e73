"""Draws screenshots of `kvctl`: ``python tools/screenshots.py [FOLDER]`` (default: docs/img).

Starts a daemon with the embedded model and clients that send requests, runs kvctl in a terminal
(tmux) and draws its screen. Takes about a minute; the numbers differ between runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from kvd.client import Client
from protocol.errors import KvdError

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
WAIT_S = 120.0
THEME = TerminalTheme(
    (30, 30, 38),
    (205, 214, 224),
    [
        *[(69, 71, 90), (237, 119, 140), (146, 214, 139), (238, 201, 120)],
        *[(126, 170, 245), (214, 160, 230), (120, 205, 210), (186, 194, 222)],
    ],
    [
        *[(98, 102, 128), (243, 139, 168), (166, 227, 161), (249, 226, 175)],
        *[(137, 180, 250), (245, 194, 231), (148, 226, 213), (220, 226, 240)],
    ],
)
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: FONTS; font-size: {char_height}px; \
line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-family: FONTS; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
""".replace("FONTS", FONTS)
"""Rich's own template loads a font from the network; this one uses local fonts."""


class Terminal:
    """A tmux terminal with a shell."""

    def __init__(self, home: Path, columns: int, rows: int) -> None:
        self._columns = columns
        self._server = f"kvd-shots-{os.getpid()}"
        environment = {**os.environ, "KVD_HOME": str(home), "PS1": "$ ", "TERM": "xterm-256color"}
        environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
        environment.pop("COLUMNS", None)
        environment.pop("LINES", None)
        size = ["-x", str(columns), "-y", str(rows)]
        shell = ["sh", "-i"]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, *shell, env=environment)
        self._tmux("set", "-g", "status", "off")
        self.wait_for("$")

    def _tmux(self, *arguments: str, **options: Any) -> str:
        command = ["tmux", "-L", self._server, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout

    def type(self, text: str, *keys: str) -> None:
        """Type a text, then press keys by their tmux names."""
        self._tmux("send-keys", "-l", text)
        if keys:
            self._tmux("send-keys", *keys)

    def screen(self, *, colors: bool = False) -> str:
        """Return the screen without the empty lines at its end."""
        return self._tmux("capture-pane", "-p", *(["-e"] if colors else [])).rstrip("\n ")

    def wait_for(self, pattern: str) -> None:
        wait_for(f"{pattern!r} on the screen", lambda: re.search(pattern, self.screen()))

    def draw(self, path: Path, title: str) -> None:
        """Write the screen as an SVG."""
        # A line may continue the previous line's colors, so all lines share one decoder.
        lines = list(AnsiDecoder().decode(self.screen(colors=True)))
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - os.devnull is a string
            console = Console(record=True, width=self._columns, file=nowhere)
            for line in lines:
                console.print(line, no_wrap=True, overflow="crop", highlight=False)
        svg = console.export_svg(title=title, theme=THEME, code_format=SVG, unique_id=path.stem)
        path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
        print(f"{path}: {len(lines)} lines")

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._tmux("kill-server")


def wait_for(what: str, condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; raises `TimeoutError`."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {WAIT_S:g} s: {what}")
        time.sleep(0.1)


@contextlib.contextmanager
def daemon(home: Path) -> Iterator[Client]:
    """Serve the embedded model under three names, with different schemes."""
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text(
        "[http]\nenabled = false\n"
        '[[models]]\nsource = "demo"\nalias = "assistant"\npinned = true\n'
        '[[models]]\nsource = "demo"\nalias = "coder"\n'
        '[[models]]\nsource = "demo"\nalias = "notes"\nkv = "k8v4"\n'
    )
    command = [sys.executable, "-m", "kvd", "serve", "--home", str(home)]
    with (home.parent / "out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_for("the daemon answers", lambda: _answers(home))
        with Client(home=home) as client:
            wait_for("the models are ready", lambda: _states(client) == ["ready"] * 3)
            yield client
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.terminate()  # a second signal does not wait for running requests
        process.wait(30)


def _answers(home: Path) -> bool:
    try:
        with Client(home=home) as client:
            return bool(client.hello().pid)
    except KvdError:
        return False


def _states(client: Client) -> list[str]:
    return [model.state for model in client.status().models]


class Load(threading.Thread):
    """Sends one request after another to a model until the daemon stops."""

    def __init__(self, home: Path, model: str, number: int, words: int) -> None:
        super().__init__(daemon=True)
        self._home, self._model, self._number, self._words = home, model, number, words

    def run(self) -> None:
        prompt = (
            f"Chapter {self._number}. " + "The keeper of the lamp wrote it down. " * self._words
        )
        with contextlib.suppress(KvdError), Client(home=self._home) as client:
            for seed in range(10_000):
                options: Any = {"max_tokens": 600, "temperature": 1.0, "seed": seed}
                _ = client.generate(self._model, prompt, ignore_eos=True, **options).text


def main() -> int:
    """Draw all screenshots."""
    if shutil.which("tmux") is None:
        print("tools/screenshots.py needs tmux", file=sys.stderr)
        return 2
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "img"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        home = Path(folder) / "kvd"
        with daemon(home) as client, contextlib.ExitStack() as stack:
            chat(home, target, stack)
            for model, rows, words in (("assistant", 5, 120), ("coder", 3, 200), ("notes", 2, 60)):
                for number in range(rows):
                    Load(home, model, number, words).start()
            wait_for("rows run", lambda: _rows(client) >= 8)
            granted = client.status().granted_bytes
            client.configure(budget_bytes=int(granted * 0.97))
            wait_for("pages step down", lambda: _mixed(client))
            wait_for("grants fit the lowered budget", lambda: _fits(client))
            watch(home, target, stack)
    return 0


def _rows(client: Client) -> int:
    return sum(model.stats.rows_running for model in client.status().models)


def _fits(client: Client) -> bool:
    status = client.status()
    return status.granted_bytes <= status.budget_bytes


def _mixed(client: Client) -> bool:
    by_model = [model.stats.memory.kv_levels for model in client.status().models]
    return any(sum(levels[1:]) for levels in by_model)


def chat(home: Path, target: Path, stack: contextlib.ExitStack) -> None:
    """Draw a conversation."""
    terminal = Terminal(home, 80, 16)
    stack.callback(terminal.close)
    terminal.type("clear; kvctl chat assistant --temperature 0", "Enter")
    terminal.wait_for("lists commands")
    for question in ("Hello there!", "What can you do?"):
        before = terminal.screen().count("›")  # noqa: RUF001 - kvctl's prompt
        terminal.type(question, "Enter")
        wait_for("a reply", lambda n=before: terminal.screen().count("›") > n)  # noqa: RUF001
    terminal.type("/stats", "Enter")
    terminal.wait_for("reply \\d+ tokens")
    terminal.draw(target / "chat.svg", "kvctl chat")
    terminal.close()


def watch(home: Path, target: Path, stack: contextlib.ExitStack) -> None:
    """Draw `kvctl status` and `kvctl top` of a busy daemon."""
    terminal = Terminal(home, 100, 26)
    stack.callback(terminal.close)
    terminal.type("clear; kvctl status", "Enter")
    terminal.wait_for("notes[^$]*\\$")
    terminal.draw(target / "status.svg", "kvctl status")
    terminal.type("clear; kvctl top", "Enter")
    terminal.wait_for("q quit")
    time.sleep(25)  # fills the curves
    terminal.type("", "Down")
    time.sleep(1)
    terminal.draw(target / "top.svg", "kvctl top")


if __name__ == "__main__":
    sys.exit(main())
