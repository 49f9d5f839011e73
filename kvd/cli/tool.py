"""Runs worker tools that need no daemon, each in a process with a worker's environment.

A tool's last line on stdout is one JSON object, which may be ``{"error": …}``; earlier lines come
from libraries and are ignored. On stderr it prints its progress, in lines such as
``3/10 k8v8, 4096 tokens``: the third of ten steps has begun.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import msgspec
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from kvd.cli.console import stderr_console
from kvd.host import blas
from kvd.host.environment import environment
from protocol.errors import ErrorInfo, InternalError, from_info


def run_tool(name: str, arguments: list[str], *, quiet: bool) -> dict[str, Any]:
    """Run a tool of `kvd.worker.tools`, return its result; raises the error that ended it."""
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", "kvd.worker.tools", name, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(blas.choose("auto")),
        encoding="utf-8",
    )
    last_line: list[str] = []
    follower = threading.Thread(target=_follow, args=(process, last_line, quiet), daemon=True)
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
        reason = last_line[-1] if last_line else f"exit status {process.returncode}"
        raise InternalError(f"the measurement ended early: {reason}") from None
    if "error" in result:
        raise from_info(msgspec.convert(result["error"], ErrorInfo))
    return result


def _follow(process: subprocess.Popen[str], last_line: list[str], quiet: bool) -> None:
    """Show the progress, and keep the last line that is not empty."""
    assert process.stderr is not None
    console = stderr_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("starting", total=None)
        for line in process.stderr:
            last_line[:] = [line.strip()] if line.strip() else last_line
            counted, _, text = line.strip().partition(" ")
            done, _, total = counted.partition("/")
            if done.isdigit() and total.isdigit():
                progress.update(task, description=text, completed=int(done) - 1, total=int(total))
