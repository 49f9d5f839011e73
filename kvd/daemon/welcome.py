"""The text that `kvd serve` prints once the daemon serves."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import kvd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.host.home import Home
    from protocol.types import ModelStatus, Problem


def welcome(
    home: Home,
    loaded: list[ModelStatus],
    failed: list[tuple[str, str]],
    http: Sequence[str] = (),
    problems: Sequence[Problem] = (),
    *,
    page: bool = False,
) -> str:
    """Return the models, addresses and first commands to try.

    ``failed``: name and reason. ``page``: the web page is on.
    """
    kvctl = _command("kvctl")
    if home.root != Path("~/.kvd").expanduser():
        kvctl += f" --home {shlex.quote(str(home.root))}"
    model = loaded[0].name if loaded else None
    models = ", ".join(f"{m.name} ({m.kv.name})" for m in loaded) or "no model yet"
    commands = [f"{kvctl} status"]
    if model:
        commands += [
            f'{kvctl} generate {shlex.quote(model)} "To open a file," --max-tokens 64',
            f"{kvctl} chat {shlex.quote(model)}",
        ]
    elif not failed:
        commands += [f"{kvctl} load demo", f'{kvctl} generate demo "To open a file,"']
    lines = [f"kvd {kvd.__version__} serves {models}"]
    lines += [f"failed  {name}: {reason}" for name, reason in failed]
    lines.append(f"socket  {home.socket}")
    tcp = [address for address in http if address.startswith("http:")]
    lines += [f"http    {address}/v1" for address in tcp]
    lines += [f"page    {address}/" for address in tcp if page]
    lines += [f"WARNING {one.observed}\n        {one.advice}" for one in problems]
    lines += [("try     " if i == 0 else "        ") + line for i, line in enumerate(commands)]
    return "\n".join([*lines, "stop    Ctrl-C"])


def _command(name: str) -> str:
    """Return how to call a script that was installed with this interpreter."""
    path = Path(sys.executable).with_name(name)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder and Path(folder, name).exists():
            return name if Path(folder, name).samefile(path) else str(path)
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
