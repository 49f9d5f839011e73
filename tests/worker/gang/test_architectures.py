"""Divided models of several architectures, with random weights, give the tokens of one process."""

from __future__ import annotations

import pytest

from tests.worker.gang.gang import GangProcesses
from tests.worker.gang.models import save
from tests.worker.gang.test_gang import GREEDY, SAMPLED, Single, run
from tests.worker.process.peer import submit

pytestmark = [pytest.mark.process, pytest.mark.mlx]
PROMPT = [5 + 7 * place % 400 for place in range(150)]
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 192, "head_dim": 64}


def requests():
    fields = {"prompt": None, "ignore_eos": True}
    return (
        [
            submit("page", tokens=PROMPT[:120], max_tokens=12, sampling=GREEDY, **fields),
            submit("short", tokens=PROMPT[:20], max_tokens=8, sampling=SAMPLED, **fields),
            submit("scored", tokens=PROMPT[:90], max_tokens=2, prompt_logprobs=0, **fields),
        ],
        [submit("choices", tokens=PROMPT, max_tokens=8, n=2, sampling=SAMPLED, **fields)],
    )


@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("llama", 2, {}),
        ("llama", 3, THREE),
        ("qwen2", 2, {}),
        ("qwen3", 2, {}),
        ("qwen3_moe", 2, {}),
        ("gpt_oss", 2, {}),
        ("deepseek_v3", 2, {}),
        ("qwen3_5", 2, {}),
    ],
)
def test_a_divided_model_gives_the_tokens_of_one_process(tmp_path, name, ranks, changes):
    source = str(save(tmp_path / name, name, **changes))
    found = []
    for worker, fields in ((Single("mlx"), {}), (GangProcesses(ranks), {"ranks": ranks})):
        try:
            info = worker.load(source, **fields)
            assert all(part.path != "dense" for part in info.kv)
            found.append(run(worker, *requests()))
        finally:
            worker.close()
    assert found[0] == found[1]
