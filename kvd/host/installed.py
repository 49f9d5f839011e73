"""How kvd was installed, and the command that installs it again in the same way."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import kvd

DISTRIBUTION = "mlx-kvd"
"""`kvd` on package indexes is another project."""


@dataclass(frozen=True)
class Installation:
    """One environment with kvd in it."""

    prefix: Path
    """The environment's folder."""
    python: str
    """Its interpreter."""
    has_pip: bool
    origin: dict[str, Any] = field(default_factory=dict)
    """``direct_url.json`` of the distribution (PEP 610); empty if it came from an index."""

    def command(self, extra: str = "") -> str:
        """Return the shell command that installs kvd again, with an extra such as ``plot``."""
        return shlex.join([*self._installer(), *self._requirement(f"[{extra}]" if extra else "")])

    def _installer(self) -> list[str]:
        if (self.prefix / "uv-receipt.toml").is_file():
            return ["uv", "tool", "install", "--force"]
        if (self.prefix / "pipx_metadata.json").is_file():
            return ["pipx", "install", "--force"]
        if self.has_pip:
            return [self.python, "-m", "pip", "install"]
        return ["uv", "pip", "install", "--python", self.python]

    def _requirement(self, extra: str) -> list[str]:
        url = self.origin.get("url", "")
        path = unquote(url.removeprefix("file://"))
        if self.origin.get("dir_info", {}).get("editable"):
            return ["-e", path + extra]
        if url.startswith("file:"):
            return [path + extra]
        vcs = self.origin.get("vcs_info", {}).get("vcs")
        source = f" @ {vcs}+{url}" if vcs else f" @ {url}" if url else ""
        return [f"{DISTRIBUTION}{extra}{source}"]


def find() -> Installation:
    """Return the installation that this process runs from."""
    has_pip = importlib.util.find_spec("pip") is not None
    return Installation(Path(sys.prefix), sys.executable, has_pip, _origin())


def _origin() -> dict[str, Any]:
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        checkout = Path(kvd.__file__).parents[1]
        return {"url": f"file://{checkout}", "dir_info": {"editable": True}}
    found: dict[str, Any] = json.loads(text) if text else {}
    return found
