"""The whole of kvd with the embedded model: real daemon, real worker, real `kvctl`."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvd import demo
from kvd.demo.recall import filler_sentences
from kvd.host.home import Home
from protocol.messages import Tokens
from tests.process.helpers import Daemon, wait_for

pytestmark = [pytest.mark.mlx, pytest.mark.process, pytest.mark.slow]

LENGTHS = (10, 2500, 25, 1500, 64, 70, 900, 120, 200, 600, 300, 400, 128, 800, 63, 500)
"""Exact prompt tokens of the concurrent requests."""
MAX_TOKENS = 70


TOKENIZER = Tokenizer.from_file(str(demo.path() / "tokenizer.json"))


class Encoder:
    """The model's tokenizer with the interface of the recall tasks."""

    def encode(self, text: str) -> list[int]:
        return list(TOKENIZER.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        return len(self.encode(text))


@dataclass(frozen=True)
class Request:
    prompt: str
    settings: dict[str, Any]

    @property
    def options(self) -> list[str]:
        """The settings as `kvctl generate` takes them."""
        return [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in self.settings.items()
        ]


def request(index: int, tokens: int) -> Request:
    rng = random.Random(index)
    sentences = filler_sentences()
    place = rng.randrange(len(sentences))
    ids: list[int] = []
    while len(ids) < tokens + 8:
        ids += Encoder().encode(sentences[place % len(sentences)])
        place += 1
    # A cut may split a word and so change its tokens: try cuts until the count is exact.
    prompt = next(
        text
        for extra in range(-3, 8)
        if Encoder().count(text := TOKENIZER.decode(ids[: tokens + extra]).lstrip()) == tokens
    )
    sampled = {"temperature": 0.8, "top_p": 0.95} if index % 2 else {}
    return Request(prompt, {"max_tokens": MAX_TOKENS, "seed": 100 + index, **sampled})


def start(daemon: Daemon, one: Request) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        daemon.kvctl_command("generate", "demo", "-", *one.options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(one.prompt.encode() + b"\n")  # kvctl removes one final newline
    process.stdin.close()
    process.stdin = None
    return process


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    daemon = Daemon(Home(root / "h"), "--model", "demo").start()
    try:
        wait_for("demo is ready", lambda: daemon.model("demo").state == "ready", 120)
        yield daemon
    finally:
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        shutil.rmtree(root, ignore_errors=True)


def test_status_shows_the_model(daemon: Daemon) -> None:
    done = daemon.kvctl("status", "--json")
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)["models"]

    assert model["name"] == "demo"
    assert model["state"] == "ready"
    assert model["worker_pid"] > 0
    assert model["info"]["kv_scheme"] == "k8v8"
    assert model["info"]["attention_path"].startswith(("native", "reference, gathered pages"))
    stats = model["stats"]
    assert stats["pages_total"] >= stats.get("pages_used", 0)
    assert stats["memory"]["kv_pages"] == stats["pages_total"] * model["info"]["page_bytes"]
    assert stats["memory"]["footprint"] > 50_000_000
    # 5.8 M parameters, as they are stored or, without a compiler, in float32.
    assert 11_000_000 < stats["memory"]["weights"] < 24_000_000


def test_tokens_are_streamed_as_they_are_generated(daemon: Daemon) -> None:
    settings = {"max_tokens": 2000, "temperature": 1.2, "ignore_eos": True}
    one = Request("The list of all values that", settings)
    process = start(daemon, one)
    assert process.stdout is not None
    first = process.stdout.read(3)

    assert first
    assert process.poll() is None
    wait_for("a row runs", lambda: daemon.model("demo").stats.rows_running >= 1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    wait_for("its row is gone", lambda: daemon.model("demo").requests == 0)


def test_sixteen_concurrent_requests_get_the_same_text_as_alone(daemon: Daemon) -> None:
    requests = [request(index, tokens) for index, tokens in enumerate(LENGTHS)]
    with daemon.client() as kvd:
        # With a salt of their own, so that the requests together find no cached prompts.
        alone = [
            kvd.generate("demo", one.prompt, prefix_salt="alone", **one.settings).text.encode()
            for one in requests
        ]
    assert all(alone)
    running = [start(daemon, one) for one in requests]
    cancelled = 8
    assert running[cancelled].stdout is not None
    head = running[cancelled].stdout.read(1)
    running[cancelled].kill()
    together = [process.communicate(timeout=240) for process in running]

    for index, ((output, errors), process) in enumerate(zip(together, running, strict=True)):
        if index == cancelled:
            assert alone[index].startswith(head)
        else:
            assert (index, process.returncode) == (index, 0), errors
            assert (index, output) == (index, alone[index])
    # The number of requests that overlap depends on how fast the machine starts processes.
    assert daemon.model("demo").stats.max_rows_in_step >= 4
    wait_for("no page is in use", lambda: daemon.model("demo").stats.pages_used == 0)


def test_bad_input_is_reported_and_affects_nothing_else(daemon: Daemon, tmp_path: Path) -> None:
    whole = demo.path()
    broken = tmp_path / "truncated"
    shutil.copytree(whole, broken)
    weights = broken / "model.safetensors"
    weights.chmod(0o600)
    with weights.open("r+b") as stream:
        stream.truncate(weights.stat().st_size // 2)
    bare = tmp_path / "bare"
    shutil.copytree(whole, bare)
    (bare / "config.json").unlink()
    for arguments, code, says in (
        (("load", str(broken)), "invalid_model", "truncated"),
        (("load", str(bare)), "invalid_model", "config.json is missing"),
        (("load", str(tmp_path / "nowhere")), "unknown_model", "nowhere"),
        (("generate", "nobody", "Hello"), "unknown_model", "nobody"),
        (("generate", "demo", ""), "empty_prompt", "empty"),
        (("generate", "demo", "word " * 20000), "context_too_long", "16384"),
        (("generate", "demo", "a", "--max-tokens", "16384"), "context_too_long", "16384"),
    ):
        done = daemon.kvctl("--json", *arguments)
        assert done.returncode not in {0, 2}, (arguments[:2], done)
        error = json.loads(done.stdout.splitlines()[-1])["error"]
        assert (error["code"], says in error["message"]) == (code, True), error
    names = [
        model["name"] for model in json.loads(daemon.kvctl("status", "--json").stdout)["models"]
    ]
    assert names == ["demo"]


def test_recall_through_the_daemon_agrees_with_dense(daemon: Daemon) -> None:
    """A sample of `bench/recall.py`, which asks for 400 digits."""
    daemon.kvctl("load", "demo", "--alias", "dense", "--kv", "k16v16")
    same = 0
    with daemon.client() as kvd:
        for seed, length in enumerate((2048, 4096)):
            task = demo.make_recall_prompt(seed, length, Encoder())
            digits, dense = (
                kvd.generate(name, task.prompt, max_tokens=6).text.strip()[:4]
                for name in ("demo", "dense")
            )
            assert len(dense) == 4, dense
            same += sum(a == b for a, b in zip(digits, dense, strict=True))

    assert same >= 7
    assert daemon.kvctl("unload", "dense").returncode == 0


def test_a_second_model_continues_when_the_worker_of_the_first_dies(daemon: Daemon) -> None:
    done = daemon.kvctl("load", str(demo.path()), "--alias", "second", "--kv", "k4v4")
    assert done.returncode == 0, done.stderr
    assert daemon.model("second").kv.name == "k4v4"
    options = ("--max-tokens", "400", "--temperature", "0.9", "--seed", "4")
    with daemon.client() as kvd:
        stream = kvd.generate("second", "The module", max_tokens=400, temperature=0.9, seed=4)
        next(event for event in stream if isinstance(event, Tokens))
        subprocess.run(["kill", "-9", str(daemon.worker_pid("demo"))], check=True)
        text = stream.text
    command = daemon.kvctl_command("generate", "second", "The module", *options)
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == (
        text.strip()
    )
    assert daemon.model("second").restarts == 0
    wait_for("demo is back", lambda: daemon.model("demo").state == "ready", 120)
    assert daemon.kvctl("unload", "second").returncode == 0


def test_a_killed_worker_restarts_and_its_stream_continues(daemon: Daemon) -> None:
    settings = {"max_tokens": 700, "temperature": 1.3, "seed": 5, "ignore_eos": True}
    long = Request("An iterator is", settings)
    undisturbed, _ = start(daemon, long).communicate(timeout=60)
    before = daemon.model("demo")
    with start(daemon, long) as stream:
        assert stream.stdout is not None
        first = stream.stdout.read(1)
        subprocess.run(["kill", "-9", str(before.worker_pid)], check=True)
        rest = stream.stdout.read()

    assert stream.returncode == 0
    assert first + rest == undisturbed
    assert daemon.model("demo").restarts == before.restarts + 1
