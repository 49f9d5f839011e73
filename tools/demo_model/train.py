"""Train the demo model on one or several GPUs for a fixed number of minutes.

    torchrun --nproc-per-node 4 train.py --data work --tokenizer kvd/demo/tokenizer.json \
        --out run --minutes 19

The rate and the lengths follow the share of the time that has passed, so the run ends on time on
any machine. Loader processes make the rows while the GPU works.
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
from batches import WEIGHTS, Mix, Rows
from evaluate import LENGTHS, Encoder, copy_accuracy, prose_loss, recall_accuracy, recall_set
from model import Config, Qwen3
from muon import Muon, flat_gradient
from safetensors.torch import load_file, save_file
from torch import Tensor

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
    """Learning rates at their highest."""

    matrix: float = 0.02
    other: float = 0.004
    warm_up: float = 0.01
    decay_from: float = 0.55

    def factor(self, progress: float) -> float:
        """Return the share of the highest rate: rise, stay, fall to zero."""
        if progress < self.warm_up:
            return max(progress / self.warm_up, 0.01)
        return min(1.0, max(0.0, (1.0 - progress) / (1.0 - self.decay_from)))


_rows: Rows


def _start_loader(data: Path, tokenizer: Path, seed: int) -> None:
    global _rows
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _rows = Rows(data, tokenizer, seed + os.getpid(), Mix())


def _load(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    return _rows.batch(rows, length)


def draw_length(step: int, progress: float) -> int:
    """Draw the sequence length of a step, the same on every GPU."""
    lengths = next(lengths for until, lengths in CURRICULUM if progress < until)
    return random.Random(step).choices(list(lengths), list(lengths.values()))[0]


class Loader:
    """Keeps a few batches in the making, in the order of the steps."""

    def __init__(self, args: argparse.Namespace, rank: int, device: torch.device) -> None:
        """Start the processes."""
        self.tokens = args.tokens
        self.device = device
        self.weights = torch.tensor(WEIGHTS, device=device)
        self.pool = ProcessPoolExecutor(
            args.loaders,
            mp_context=get_context("forkserver"),
            initializer=_start_loader,
            initargs=(args.data, args.tokenizer, args.seed + 100_000 * rank),
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
    """Measures recall, prose and copying; the prompts are shared out among the GPUs."""

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
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step on each GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loaders", type=int, default=8, help="loader processes for each GPU")
    parser.add_argument("--matrix-rate", type=float, default=Rates.matrix)
    parser.add_argument("--decay", type=float, default=0.02, help="weight decay of the matrices")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of Config's fields")
    parser.add_argument("--eval-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--eval-prompts", type=int, default=48)
    parser.add_argument("--eval-lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--eval-prose", type=int, default=100_000, help="tokens")
    return parser.parse_args()


def main() -> None:
    """Train until the time is up."""
    args = parse()
    begun = time.monotonic()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    loader = Loader(args, rank, device)
    loader.next(0.0)
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(args.seed)
    rates = Rates(matrix=args.matrix_rate)
    dtype = torch.bfloat16 if cuda else torch.float32
    model = Qwen3(Config(**args.config), dtype, args.dropout).to(device)
    torch.manual_seed(args.seed + 1 + rank)
    if args.resume:
        model.load_hf(load_file(args.resume, device=str(device)))
    if cuda:
        model.compile_parts()
    gradient = flat_gradient(model)
    muon = Muon([p for p in model.layers.parameters() if p.ndim == 2], args.decay, 0.95)
    others = [p for p in model.parameters() if p.ndim == 1] + [model.embed_tokens]
    adam = torch.optim.Adam(others, lr=rates.other, betas=(0.9, 0.95), fused=cuda)
    evaluate = Evaluator(args, rank, world)

    def report(line: str) -> None:
        if rank == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            line = f"{time.monotonic() - begun:6.0f} s  {line}"
            print(line, flush=True)
            with (args.out / "log.txt").open("a") as log:
                log.write(line + "\n")

    report(f"{sum(p.numel() for p in model.parameters())} parameters, {world} x {device.type}")
    clock = torch.zeros(2, device=device)
    progress, step, seen, next_eval = 0.0, 0, 0, args.eval_every
    shown = torch.full((), 8.0, device=device)
    while progress < 1.0:
        ids, targets, weights = loader.next(progress)
        gradient.zero_()
        loss = model.loss(ids, targets, weights)
        loss.backward()
        if world > 1:
            dist.all_reduce(gradient)
            gradient /= world
        factor = rates.factor(progress)
        muon.step(args.matrix_rate * factor)
        adam.param_groups[0]["lr"] = rates.other * factor
        adam.step()
        shown.lerp_(loss.detach(), 0.02)
        step += 1
        seen += ids.numel() * world
        if step % SYNC_EVERY == 0:
            clock.fill_(time.monotonic() - begun)
            if world > 1:
                dist.broadcast(clock, 0)
            passed = float(clock[0])
            progress = passed / (60 * args.minutes)
            if passed > next_eval or progress >= 1.0:
                line = evaluate(model, device, progress >= 1.0 or rank == 0)
                report(
                    f"step {step}  {seen / 1e6:.0f} M tokens  progress {progress:.3f}  "
                    f"loss {float(shown):.3f}  {line}"
                )
                next_eval = passed + args.eval_every
                if rank == 0:
                    save(model, args.out)
    if world > 1:
        dist.destroy_process_group()
    loader.pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
