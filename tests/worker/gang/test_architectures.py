"""Divided models of several architectures, with random weights, give the tokens of one process."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from kvd.worker.native import build
from protocol.worker import RowTokens
from tests.breadth import ALL
from tests.worker.gang.gang import GangProcesses
from tests.worker.gang.models import save
from tests.worker.gang.test_gang import GREEDY, SAMPLED, Single, run
from tests.worker.process.peer import submit

pytestmark = [pytest.mark.process, pytest.mark.mlx]
PROMPT = [5 + 7 * place % 400 for place in range(150)]
SHORT = PROMPT[:20]
"""With its answer, it is too short for a page, so no key and no value is quantized."""
WHOLE = {"llama", "qwen2", "qwen3", "qwen3_moe"}
"""Architectures with layers that run as whole layers, also if they are divided."""
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 192, "head_dim": 64}


def requests():
    fields = {"prompt": None, "ignore_eos": True}
    return (
        [
            submit("page", tokens=PROMPT[:120], max_tokens=12, sampling=GREEDY, **fields),
            submit("short", tokens=SHORT, max_tokens=8, sampling=SAMPLED, logprobs=0, **fields),
            submit("scored", tokens=PROMPT[:90], max_tokens=2, prompt_logprobs=0, **fields),
        ],
        [submit("choices", tokens=PROMPT, max_tokens=8, n=2, sampling=SAMPLED, **fields)],
    )


@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("llama", 3, THREE),
        ("qwen2", 2, {}),
        ("qwen3_moe", 2, {}),
        ("gpt_oss", 2, {}),
        ("deepseek_v3", 2, {}),
        ("qwen3_5", 2, {}),
        *([("llama", 2, {}), ("qwen3", 2, {})] if ALL else []),
    ],
)
def test_a_divided_model_gives_the_tokens_of_one_process(tmp_path, name, ranks, changes):
    source = save(tmp_path / name, name, **changes)
    found, paths = [], []
    for worker, fields in ((Single("mlx"), {}), (GangProcesses(ranks), {"ranks": ranks})):
        try:
            info = worker.load(str(source), **fields)
            assert all(part.path != "dense" for part in info.kv)
            assert info.native == ("on" if build.compiler() else info.native)
            paths.append({path.name: path.used for path in info.paths})
            found.append(run(worker, *requests()))
            logprobs = [one.logprob for one in logprobs_of(worker, "short")]
        finally:
            worker.close()
    assert found[0] == found[1]
    assert paths[0]["whole layers"] == paths[1]["whole layers"]
    assert paths[1]["whole layers"] == (name in WHOLE and build.compiler() is not None)
    tokens = found[1]["short"][0][0]
    assert logprobs == pytest.approx(reference_logprobs(source, tokens), abs=1e-4)


def logprobs_of(worker, rid):
    return [one for report in worker.of(RowTokens, rid) for one in report.logprobs]


def reference_logprobs(source: Path, tokens: list[int]) -> list[float]:
    """Return each token's logprob after `SHORT`, by mlx-lm's undivided model in float32."""
    model, _ = load_model(source)
    logits = np.array(model(mx.array([SHORT + tokens])), np.float64)[0, len(SHORT) - 1 : -1]
    totals = np.log(np.exp(logits).sum(axis=-1))
    return [
        float(row[token] - total) for row, token, total in zip(logits, tokens, totals, strict=True)
    ]
