"""Runs a real Prometheus that scrapes one daemon, and queries it as a dashboard does."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.process.helpers import wait_for

CONFIG = """
global: {{scrape_interval: 500ms, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvd
    static_configs: [{{targets: ["{target}"]}}]
"""


@dataclass
class Prometheus:
    """A connection to a running Prometheus."""

    http: httpx.Client

    def ask(self, path: str, **fields: str) -> Any:
        """Return the data of a reply of the HTTP API."""
        said = self.http.get(f"/api/v1/{path}", params=fields).json()
        assert said["status"] == "success", (fields, said)
        return said["data"]

    def query(self, expr: str) -> list[Any]:
        """Return the current value of a PromQL expression."""
        return self.ask("query", query=expr)["result"]


@contextlib.contextmanager
def running(folder: Path, target: str, rules: Path) -> Iterator[Prometheus]:
    """Run Prometheus until the block ends, with its files in this folder."""
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(CONFIG.format(target=target, rules=rules))
    program = shutil.which("prometheus")
    assert program is not None
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        found = wait_for(
            "Prometheus listens",
            lambda: (
                re.search(r"Listening on.*address=(127\.0\.0\.1:\d+)", log.read_text())
                or process.poll() is not None
            ),
        )
        assert process.poll() is None, log.read_text()
        with httpx.Client(base_url=f"http://{found[1]}", timeout=30) as http:
            wait_for("Prometheus is ready", lambda: http.get("/-/ready").is_success)
            yield Prometheus(http)
    finally:
        process.terminate()
        process.wait(30)
