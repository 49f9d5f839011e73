"""A worker's imports of mlx-lm, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvd import demo
from kvd.worker.serving import seam
from tests.worker.text import tokenizer_kinds
from tests.worker.text.tokenizers_zoo import byte_level

LARGE = "bad = [m for m in ('transformers', 'huggingface_hub', 'torch') if m in sys.modules]"
LOAD = """
import sys
from pathlib import Path
from kvd.worker import lean_imports
lean_imports.install()
from kvd.worker.core.builder import load_model
from protocol.types import ChatMessage
from protocol.types import Sampling
from protocol.worker import Grant, LoadModel, Submit

def grant(total_bytes, reason):
    return Grant(seq=1, total_bytes=total_bytes, granted=True, available_bytes=0)

model = load_model(LoadModel(source=sys.argv[1]), lambda stage, part: None, grant)
text = model.text
prompt = {"messages": [ChatMessage(role="user", content="x")]}
if not text.has_chat_template:
    prompt = {"prompt": "x"}
print(text.encode(Submit(rid="a", sampling=Sampling(), **prompt)))
print(type(model.loaded.tokenizer).__name__, "transformers" in sys.modules)
"""


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_no_model_of_mlx_lm_imports_transformers():
    """Fails if a new version of mlx-lm needs another stand-in."""
    code = f"""
import importlib, pkgutil, sys
from kvd.worker import lean_imports
lean_imports.install()
import mlx_lm.models, mlx_lm.utils, mlx_lm.tool_parsers
names = [one.name for package in (mlx_lm.models, mlx_lm.tool_parsers)
         for one in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
names.remove("mlx_lm.models.olmo")  # ends the process if its own library is missing
for name in names:
    importlib.import_module(name)
{LARGE}
print(len(names), bad)
"""
    count, _, bad = run(code)[0].partition(" ")
    assert int(count) > 100
    assert bad == "[]"


def test_the_real_modules_are_found_afterwards():
    code = """
import sys
from kvd.worker import lean_imports
lean_imports.install()
assert "mlx_lm.tokenizer_utils" not in sys.modules and "huggingface_hub" not in sys.modules
assert not lean_imports.has_transformers()
from mlx_lm.utils import load_tokenizer
from pathlib import Path
wrapper = load_tokenizer(Path(sys.argv[1]))
assert lean_imports.has_transformers()
import mlx_lm.tokenizer_utils, huggingface_hub
print(type(wrapper) is mlx_lm.tokenizer_utils.TokenizerWrapper, callable(
    huggingface_hub.snapshot_download), wrapper.encode("a"))
"""
    assert run(code, demo.path())[0].startswith("True True [")


def test_a_process_that_has_mlx_lm_keeps_it():
    code = """
import sys, mlx_lm
from kvd.worker import lean_imports
lean_imports.install()
print(sys.modules["mlx_lm"] is mlx_lm, callable(mlx_lm.generate))
"""
    assert run(code) == ["True True"]


SERVE = """
import sys
from kvd.worker import lean_imports
lean_imports.install()
from kvd.worker.core.engine import MLXEngine
from protocol.types import Sampling
from protocol.worker import Grant, LoadModel, MemoryRequested, RowTokens, Submit

def grant(total_bytes, seq=1):
    return Grant(seq=seq, total_bytes=total_bytes, granted=True, available_bytes=1 << 30)

engine, count = MLXEngine(), 0
engine.load(LoadModel(source=sys.argv[1]), lambda stage, part: None, lambda total, _: grant(total))
greedy = Sampling(temperature=0.0)
engine.submit(Submit(rid="a", tokens=[7] * 300, max_tokens=70, sampling=greedy, ignore_eos=True))
while engine.has_work:
    for report in engine.step():
        if isinstance(report, MemoryRequested):
            engine.granted(grant(report.total_bytes, report.seq))
        if isinstance(report, RowTokens):
            count += len(report.tokens)
print(count, "numpy" in sys.modules)
"""


def test_a_worker_serves_a_request_without_numpy():
    assert run(SERVE, demo.path()) == ["70 False"]


def test_a_worker_loads_a_model_without_transformers():
    tokens, kind = run(LOAD, demo.path())
    assert kind == "FastWrapper False"
    assert tokens == str(with_transformers())


def with_transformers():
    from mlx_lm.utils import load_tokenizer

    seam.install()  # loading a tokenizer imports its model's module
    wrapper = load_tokenizer(Path(demo.path()))
    return wrapper._tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, return_dict=False
    )


@pytest.fixture
def slow_model(tmp_path):
    """Return a copy of the embedded model whose tokenizer needs transformers."""
    for file in Path(demo.path()).iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    settings = {"chat_template_type": "deepseek_v32", "eos_token": "<|im_end|>"}
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").unlink()
    tokenizer_kinds.write_folder(tmp_path, byte_level(), settings)
    (tmp_path / "config.json").write_text(config)
    return tmp_path


def test_a_worker_uses_transformers_where_it_must(slow_model, monkeypatch, tmp_path):
    tokens, kind = run(LOAD, slow_model)
    assert kind == "TokenizerWrapper True"
    assert len(tokens) > 2
