"""The example in docs/mlx-lm.md runs, and the page describes every option."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

from kvd.worker.mlx_lm_drop_in.quantize_kv import quantize_kv
from tests.pages import ROOT

pytestmark = pytest.mark.mlx

PAGE = (ROOT / "docs" / "mlx-lm.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    example += "\nassert type(model.make_cache()[0]).__name__ == 'DropInKVCache'\n"

    done = subprocess.run(
        [sys.executable, "-c", example], check=False, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    texts = re.search(r"^\[(['\"]).+\]$", done.stdout, re.MULTILINE)
    assert texts is not None, done.stdout


def test_every_option_is_described() -> None:
    options = list(inspect.signature(quantize_kv).parameters)[1:]
    assert options == re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)[: len(options)]
