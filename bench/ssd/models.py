"""The models that are measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_model(name: str, context: int, parent: str | None = None) -> Iterator[str]:
    """Yield ``demo`` or a model's folder.

    Any other name is a shape of `bench.gpu`: a model with random weights and a context of at least
    so many tokens, in a folder in ``parent`` that is deleted at the end.
    """
    if name == "demo" or Path(name).is_dir():
        yield name
        return
    with tempfile.TemporaryDirectory(prefix="kvd-ssd-model-", dir=parent) as temporary:
        folder = Path(temporary, name)
        start = time.monotonic()
        # In a process of its own, so that its memory is free again.
        command = [sys.executable, "-m", "bench.gpu", "--shape", name, "--folder", str(folder)]
        subprocess.run(command, check=True)
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = max(config["max_position_embeddings"], context)
        (folder / "config.json").write_text(json.dumps(config))
        print(f"{name}: written in {time.monotonic() - start:.1f} s", flush=True)
        yield str(folder)
