"""LiteLLM's proxy with the configuration of deploy/litellm, for other addresses and models."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.scale.fleet import ROOT, Fleet, free_port, running

CONFIG = ROOT / "deploy/litellm/config.yaml"
INSTALLED = Path(sys.prefix) / "clients/litellm"
"""Where `make test-scale` installs the proxy: its dependencies replace none of kvd's."""
START_S = 180.0
_RUN = "from litellm.proxy.proxy_cli import run_server; run_server()"
_SERVER = re.compile(r"127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Proxy:
    """A running proxy."""

    url: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


def config_of(fleet: Fleet, models: tuple[str, ...]) -> str:
    """Return the configuration with these daemons and models."""
    text = CONFIG.read_text()
    old = list(dict.fromkeys(_SERVER.findall(text)))
    new = dict(zip(old, (member.place for member in fleet.members), strict=True))
    text = _SERVER.sub(lambda found: new[found[1]], text)
    first, end = text.index("  - model_name"), text.index("\nrouter_settings:")
    entries = "".join(text[first:end].replace("demo", name) for name in models)
    return text[:first] + entries + text[end:]


@contextlib.contextmanager
def litellm(fleet: Fleet, *models: str) -> Iterator[Proxy]:
    """Run the proxy before these daemons."""
    config, port = fleet.root / "litellm.yaml", free_port()
    config.write_text(config_of(fleet, models))
    proxy = Proxy(f"http://127.0.0.1:{port}", f"sk-{secrets.token_hex(24)}")
    environment = os.environ | {
        "PYTHONPATH": str(INSTALLED),
        "LITELLM_MASTER_KEY": proxy.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would ask the network
    }
    command = [sys.executable, "-c", _RUN, "--config", str(config), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--telemetry", "False"]
    log = fleet.root / "litellm.log"
    with running(command, proxy.url, "/health/readiness", log, START_S, **environment):
        yield proxy
