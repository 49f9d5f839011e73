"""Worker tools that need no daemon: run in a process of their own, with a worker's environment.

A tool's last line on stdout is one JSON object, which may be ``{"error": …}``; what libraries print
before it is passed over. Its progress is on stderr, in lines such as ``3/10 k8v8, 4096 tokens``:
the third of ten steps has begun.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import msgspec
from rich.progress import BarColumn, Progress, TextColumn

from kvd.cli.common import stderr_console
from kvd.host import blas
from kvd.host.environment import environment
from protocol.errors import ErrorInfo, InternalError, from_info


def run_tool(module: str, arguments: list[str], *, quiet: bool) -> dict[str, Any]:
    """Run a module as a tool and return what it prints; show its progress to a person.

    Raises the tool's typed error, `InternalError` if it dies.
    """
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(blas.choose("auto")),
        encoding="utf-8",
    )
    last: list[str] = []
    follower = threading.Thread(target=_follow, args=(process, last, quiet), daemon=True)
    with process:
        follower.start()
        try:
            assert process.stdout is not None
            out = process.stdout.read()
            process.wait()
        finally:
            process.kill()
            follower.join()
    try:
        result = msgspec.json.decode(out.rstrip().rpartition("\n")[2], type=dict[str, Any])
    except msgspec.DecodeError:
        said = last[-1] if last else f"exit status {process.returncode}"
        raise InternalError(f"the measuring ended early: {said}") from None
    if "error" in result:
        raise from_info(msgspec.convert(result["error"], ErrorInfo))
    return result


def _follow(process: subprocess.Popen[str], last: list[str], quiet: bool) -> None:
    """Show how far it is, and keep the last line that says something."""
    assert process.stderr is not None
    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"))
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("starting", total=None)
        for line in process.stderr:
            last[:] = [line.strip()] if line.strip() else last
            counted, _, text = line.strip().partition(" ")
            done, _, total = counted.partition("/")
            if done.isdigit() and total.isdigit():
                progress.update(task, description=text, completed=int(done) - 1, total=int(total))
