"""Train the demo model on one or several GPUs for a fixed number of minutes.

    python -m demo_training.train --data work --tokenizer kvd/demo/tokenizer.json --out run \
        --minutes 13.2

The learning rate and the sequence lengths depend on the share of the time that has passed, so a run
ends on time on any machine. Loader processes make the rows while the GPU computes.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_training.batches import WEIGHTS, Mix, Rows
from demo_training.evaluate import (
    LENGTHS,
    Encoder,
    call_accuracy,
    copy_accuracy,
    prose_loss,
    recall_accuracy,
    recall_set,
)
from demo_training.export import lower_key_channels
from demo_training.model import Config, Qwen3
from demo_training.muon import Muon, flat_gradient

AHEAD = 12  # batches that the loaders may be ahead
SYNC_EVERY = 16  # steps between two readings of the clock
# (share of the time, {sequence length: share of the steps})
CURRICULUM = (
    (0.10, {128: 0.1, 512: 0.9}),
    (0.25, {128: 0.1, 512: 0.4, 2048: 0.5}),
    (0.45, {128: 0.1, 512: 0.2, 2048: 0.4, 8192: 0.3}),
    (1.01, {128: 0.15, 512: 0.2, 2048: 0.25, 8192: 0.35, 16384: 0.05}),
)


@dataclass(frozen=True)
class Rates:
    """Peak learning rates, and their schedule as shares of the run."""

    matrix: float = 0.02
    other: float = 0.004
    warm_up: float = 0.01
    decay_from: float = 0.55

    def factor(self, progress: float) -> float:
        """Return the share of the peak rate: it rises, stays at 1, and falls to 0."""
        if progress < self.warm_up:
            return max(progress / self.warm_up, 0.01)
        return min(1.0, max(0.0, (1.0 - progress) / (1.0 - self.decay_from)))


_process_rows: list[Rows] = []  # a loader process keeps its one instance here


def _start_loader(data: Path, tokenizer: Path, seed: int, mix: Mix) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _process_rows.append(Rows(data, tokenizer, seed + os.getpid(), mix))


def _load(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    return _process_rows[0].batch(rows, length)


def draw_length(step: int, progress: float) -> int:
    """Draw the sequence length of a step, the same on every GPU."""
    lengths = next(lengths for until, lengths in CURRICULUM if progress < until)
    return random.Random(step).choices(list(lengths), list(lengths.values()))[0]


class Loader:
    """Makes batches in other processes, a few ahead, and returns them in the order of the steps."""

    def __init__(self, args: argparse.Namespace, rank: int, device: torch.device) -> None:
        """Start the processes."""
        self.tokens = args.tokens
        self.device = device
        self.weights = torch.tensor(WEIGHTS, device=device)
        self.pool = ProcessPoolExecutor(
            args.loaders,
            mp_context=get_context("forkserver"),
            initializer=_start_loader,
            initargs=(args.data, args.tokenizer, args.seed + 100_000 * rank, Mix(**args.mix)),
        )
        self.waiting: collections.deque[Future[tuple[np.ndarray, np.ndarray]]] = collections.deque()
        self.step = 0

    def next(self, progress: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and the loss weights of the targets."""
        while len(self.waiting) < AHEAD:
            length = draw_length(self.step, progress)
            rows = max(1, self.tokens // length)
            self.waiting.append(self.pool.submit(_load, rows, length))
            self.step += 1
        raw_ids, raw_classes = self.waiting.popleft().result()
        ids = torch.from_numpy(raw_ids).to(self.device, non_blocking=True).long()
        classes = torch.from_numpy(raw_classes).to(self.device, non_blocking=True).long()
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), self.weights[classes[:, 1:]]


class Evaluator:
    """Measures recall, prose and copying; each GPU takes a part of the recall prompts."""

    def __init__(self, args: argparse.Namespace, rank: int, world: int) -> None:
        """Build this GPU's prompts."""
        self.encoder = Encoder(args.tokenizer)
        share = math.ceil(args.eval_prompts / world)
        self.sets = [
            recall_set(self.encoder, length, share, 1000 + rank * share)
            for length in args.eval_lengths
        ]
        self.held_out = np.load(args.data / "data.npz")["held_out"][: args.eval_prose]

    def __call__(self, model: Qwen3, device: torch.device, everything: bool) -> str:
        """Return a line of numbers."""
        counts = torch.tensor(
            [recall_accuracy(model, tasks, device) for tasks in self.sets], device=device
        )
        if dist.is_initialized():
            dist.all_reduce(counts)
        parts = [
            f"{tasks.length}:{right / asked:.3f}"
            for tasks, (right, asked) in zip(self.sets, counts.tolist(), strict=True)
        ]
        if everything:
            parts.append(f"prose {prose_loss(model, self.held_out, 2048, device):.3f}")
            parts.append(f"calls {call_accuracy(model, self.encoder, 100, device):.3f}")
            parts.append(f"copy {copy_accuracy(model, self.encoder, 20, device):.3f}")
        return "recall " + " ".join(parts)


def save(model: Qwen3, out: Path) -> None:
    """Write a checkpoint that export.py reads."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.hf_tensors().items()}
    save_file(tensors, out / "new.safetensors")
    (out / "new.safetensors").rename(out / "checkpoint.safetensors")
    (out / "config.json").write_text(json.dumps(model.config.as_dict()))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--begin-with", type=Path, help="folder of an exported model")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step on each GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loaders", type=int, default=8, help="loader processes for each GPU")
    parser.add_argument("--matrix-rate", type=float, default=Rates.matrix)
    parser.add_argument("--other-rate", type=float, default=Rates.other)
    parser.add_argument("--start-at", type=float, default=0.0, help="progress at the start")
    parser.add_argument("--mix", type=json.loads, default={}, help="JSON of Mix's fields")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay of the matrices")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of Config's fields")
    parser.add_argument("--eval-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--eval-prompts", type=int, default=48)
    parser.add_argument("--eval-lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--eval-prose", type=int, default=100_000, help="tokens")
    return parser.parse_args()


class Trainer:
    """One GPU's part of a training run."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Start the loaders, then build the model, its optimizers and the prompts."""
        self.args = args
        self.begun = time.monotonic()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        self.loader = Loader(args, self.rank, self.device)
        self.loader.next(0.0)
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("nccl" if cuda else "gloo")
        torch.manual_seed(args.seed)
        dtype = torch.bfloat16 if cuda else torch.float32
        self.model = Qwen3(Config(**args.config), dtype, args.dropout).to(self.device)
        if args.begin_with is not None:
            self.begin_with(args.begin_with)
        torch.manual_seed(args.seed + 1 + self.rank)
        if cuda:
            self.model.compile_parts()
        self.rates = Rates(args.matrix_rate, args.other_rate)
        self.gradient = flat_gradient(self.model)
        matrices = [p for p in self.model.layers.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if p.ndim == 1] + [self.model.embed_tokens]
        self.muon = Muon(matrices, args.decay, 0.95)
        self.adam = torch.optim.Adam(others, lr=self.rates.other, betas=(0.9, 0.95), fused=cuda)
        self.evaluate = Evaluator(args, self.rank, self.world)
        self.loss = torch.full((), 8.0, device=self.device)
        self.steps = self.seen = 0
        size = sum(p.numel() for p in self.model.parameters())
        self.report(f"{size} parameters, {self.world} x {self.device.type}")

    def begin_with(self, folder: Path) -> None:
        """Take the weights of an exported model."""
        tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        lower_key_channels(tensors, self.model.config)
        with torch.no_grad():
            self.model.load_hf({name: tensor.to(self.device) for name, tensor in tensors.items()})

    def report(self, line: str) -> None:
        """Print a line and add it to the log."""
        if self.rank == 0:
            self.args.out.mkdir(parents=True, exist_ok=True)
            line = f"{time.monotonic() - self.begun:6.0f} s  {line}"
            print(line, flush=True)
            with (self.args.out / "log.txt").open("a") as log:
                log.write(line + "\n")

    def step(self, progress: float) -> None:
        """Take one batch and update the parameters."""
        ids, targets, weights = self.loader.next(progress)
        self.gradient.zero_()
        loss = self.model.loss(ids, targets, weights)
        loss.backward()
        if self.world > 1:
            dist.all_reduce(self.gradient)
            self.gradient /= self.world
        factor = self.rates.factor(progress)
        self.muon.step(self.rates.matrix * factor)
        self.adam.param_groups[0]["lr"] = self.rates.other * factor
        self.adam.step()
        self.loss.lerp_(loss.detach(), 0.02)
        self.steps += 1
        self.seen += ids.numel() * self.world

    def passed(self) -> float:
        """Return the seconds since the start, the same on every GPU."""
        clock = torch.full((), time.monotonic() - self.begun, device=self.device)
        if self.world > 1:
            dist.broadcast(clock, 0)
        return float(clock)

    def run(self) -> None:
        """Train until the time is up."""
        first = progress = self.args.start_at
        next_eval = self.args.eval_every
        while progress < 1.0:
            for _ in range(SYNC_EVERY):
                self.step(progress)
            passed = self.passed()
            progress = first + (1.0 - first) * passed / (60 * self.args.minutes)
            if passed > next_eval or progress >= 1.0:
                next_eval = passed + self.args.eval_every
                numbers = self.evaluate(self.model, self.device, self.rank == 0)
                self.report(
                    f"step {self.steps}  {self.seen / 1e6:.0f} M tokens  progress {progress:.3f}  "
                    f"loss {float(self.loss):.3f}  {numbers}"
                )
                if self.rank == 0:
                    save(self.model, self.args.out)
        if self.world > 1:
            dist.destroy_process_group()
        self.loader.pool.shutdown(cancel_futures=True)


def main() -> None:
    """Train with the command line's options."""
    Trainer(parse()).run()


if __name__ == "__main__":
    main()
