"""Settings of processes that run an engine, tried in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvd.worker.process import interpreter

_PROGRAM = """
import importlib, json, os, sys
from kvd.worker.process import interpreter
interpreter.prepare()
missing = []
for name in ("torch", "jax", "json"):
    try:
        importlib.import_module(name)
    except ImportError:
        missing.append(name)
print(json.dumps([missing, sys.getswitchinterval(), os.environ["HF_HUB_DISABLE_XET"],
                  os.environ["MLX_USE_CUDA_GRAPHS"]]))
"""


@pytest.mark.process
def test_libraries_that_no_model_needs_are_not_imported(tmp_path) -> None:
    """With packages of these names on the path, as where they are installed."""
    for name in ("torch", "jax"):
        (tmp_path / f"{name}.py").write_text("loaded = True\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{_PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    missing, interval, xet, graphs = json.loads(done.stdout)
    assert missing == ["torch", "jax"]
    assert interval == pytest.approx(0.0005)
    assert xet == "1"
    assert graphs == "0"


def test_a_choice_of_launches_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "1")
    interpreter.launch_directly()
    assert os.environ["MLX_USE_CUDA_GRAPHS"] == "1"
