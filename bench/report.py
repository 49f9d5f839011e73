"""The report of a run: printed, and written to a file if there is a name for one."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any


def publish(report: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(report, indent=1)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


def machine() -> dict[str, Any]:
    return {"system": platform.system(), "cores": os.cpu_count()}
