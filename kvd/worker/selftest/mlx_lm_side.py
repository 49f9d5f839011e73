"""mlx-lm's side of the speed comparison: its loop for one row, its `BatchGenerator` for several."""

from __future__ import annotations

import time
from typing import Any

from kvd.worker.selftest.stages import Stages
from protocol.speed import Loaded


class MlxLmSide:
    """A model in mlx-lm, whose own attention and caches are in place."""

    def __init__(self, source: str, stages: Stages) -> None:
        import mlx.core as mx  # noqa: PLC0415 - a part of the load
        from mlx_lm import generate  # noqa: PLC0415, F401 - a part of the load
        from mlx_lm.utils import load_model, load_tokenizer  # noqa: PLC0415

        from kvd.worker.serving import describe, model_files  # noqa: PLC0415 - after mlx-lm

        path = model_files.resolve(source)
        stages.begin("weights")
        self._model, config = load_model(path, lazy=True)
        if (dtype := model_files.default_dtype()) is not None:
            self._model.set_dtype(dtype)
        mx.eval(self._model.parameters())
        stages.begin("tokenizer")
        load_tokenizer(path)
        stages.begin("")
        text = config.get("text_config") or config
        self.vocabulary = int(text["vocab_size"])
        self.loaded = Loaded(
            seconds=stages.seconds,
            dtype=describe.dtype_name(self._model),
            active_bytes=int(mx.get_active_memory()),
        )

    def run(self, prompts: list[list[int]], output: int) -> list[list[float]]:
        if len(prompts) == 1:
            return [self._one(prompts[0], output)]
        return self._several(prompts, output)

    def _one(self, prompt: list[int], output: int) -> list[float]:
        import mlx.core as mx  # noqa: PLC0415
        from mlx_lm.generate import generate_step, generation_stream, wired_limit  # noqa: PLC0415

        with wired_limit(self._model, [generation_stream]):
            steps = generate_step(mx.array(prompt), self._model, max_tokens=output)
            return [time.monotonic() for _ in steps]

    def _several(self, prompts: list[list[int]], output: int) -> list[list[float]]:
        from mlx_lm.generate import BatchGenerator  # noqa: PLC0415

        generator: Any = BatchGenerator(self._model, max_tokens=output)
        try:
            arrivals = {uid: list[float]() for uid in generator.insert(prompts)}
            running = set(arrivals)
            while running:
                found = generator.next_generated()
                now = time.monotonic()
                for response in found:
                    arrivals[response.uid].append(now)
                    if response.finish_reason is not None:
                        running.discard(response.uid)
        finally:
            generator.close()
        return list(arrivals.values())
