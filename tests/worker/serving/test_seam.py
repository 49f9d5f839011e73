"""The one function of mlx-lm that kvd replaces. New versions of mlx-lm may change it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mlx


def test_signature_of_the_replaced_function() -> None:
    from mlx_lm.models import base

    from kvd.worker.serving import seam

    original = list(inspect.signature(seam._original).parameters)

    assert original == ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
    assert list(inspect.signature(seam.scaled_dot_product_attention).parameters) == original
    assert base.scaled_dot_product_attention is not None


def test_models_import_kvds_function_and_install_fails_if_late() -> None:
    code = """
from kvd.worker.serving import seam
seam.install()
seam.install()
from mlx_lm.models import qwen3, llama
assert qwen3.scaled_dot_product_attention is seam.scaled_dot_product_attention
assert llama.scaled_dot_product_attention is seam.scaled_dot_product_attention
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    late = """
from mlx_lm.models import qwen3
from kvd.worker.serving import seam
try:
    seam.install()
except RuntimeError as error:
    assert "mlx_lm.models.qwen3" in str(error)
else:
    raise SystemExit("installed although a model had the original")
"""
    subprocess.run([sys.executable, "-c", late], check=True)
