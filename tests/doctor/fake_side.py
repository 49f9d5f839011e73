"""A side of the speed comparison without a model; the source says how it behaves."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec

from kvd.worker.selftest.speed import Failed, Loaded, Ran, Task
from protocol.types import FastPath, ModelInfo

INFO = ModelInfo(
    architecture="qwen3", parameters=1000, context_length=4096, vocab_size=100, layers=2,
    dtype="float32", kv_scheme="k8v8", kv_layout="", page_bytes=0, kv_bytes_per_token=0,
    attention_path="native", attention_error=1e-6, has_chat_template=False, device="cpu",
    paths=[
        FastPath(name="whole layers", used=False, cause="model", reason="other parts"),
        FastPath(name="fused attention", used=False, cause="results", reason="off by 0.3"),
        FastPath(name="compiled steps", used=False, cause="error", reason="ValueError: no"),
        FastPath(name="packed prefill", used=True),
    ],
)  # fmt: skip


def answer(name: str, manner: str, task: Task) -> Ran | Failed:
    if manner == "dies":
        sys.stderr.write("Fatal: the end\n")
        sys.stderr.flush()
        os.abort()
    if manner == "short" and name == "mlx-lm":
        return Failed("no memory left", short=True)
    while manner == "hangs" and name == "mlx-lm" and task.kind == "decode":
        os.read(0, 1)  # until it is killed
    slower = 2.0 if name == "mlx-lm" else 1.0
    seconds = slower * (1 + task.seed) / 10
    return Ran(tokens=task.rows * 100, seconds=seconds, mlx_peak_bytes=7, process_peak_bytes=9)


def main() -> None:
    name, manner = sys.argv[1], Path(sys.argv[2]).name
    log = Path(os.environ["FAKE_SIDE_LOG"])
    with socket.socket(fileno=0) as sock, sock.makefile("rwb") as stream:

        def send(one: Loaded | Ran | Failed) -> None:
            stream.write(msgspec.json.encode(one) + b"\n")
            stream.flush()

        info = INFO if name == "kvd" else None
        send(Loaded(seconds={"weights": 0.0}, dtype="float32", active_bytes=5, info=info))
        if manner == "ends":
            os._exit(3)
        for line in stream:
            task = msgspec.json.decode(line, type=Task)
            with log.open("a") as file:
                file.write(f"{name} {task.kind} {task.rows} {task.seed}\n")
            send(answer(name, manner, task))


if __name__ == "__main__":
    main()
