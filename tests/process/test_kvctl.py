"""kvctl against a real daemon: output, exit codes, streaming and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from kvd.config.config import Config
from tests.process.helpers import Daemon, source, wait_for


def start(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        daemon.kvctl_command(*arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_load_status_generate_unload(daemon: Daemon):
    loaded = daemon.kvctl(
        "load", source(tps=500, load=0.2), "--alias", "m", "--kv", "k8v4", "--json"
    )
    assert loaded.returncode == 0
    assert json.loads(loaded.stdout)["kv"]["v_bits"] == 4
    status = json.loads(daemon.kvctl("status", "--json").stdout)
    model = status["models"][0]
    assert (model["name"], model["state"]) == ("m", "ready")
    assert model["worker_pid"] != status["pid"]
    assert model["info"]["attention_path"]
    text = daemon.kvctl("generate", "m", "Hi", "--max-tokens", "20", "--seed", "3")
    again = daemon.kvctl("generate", "m", "Hi", "--max-tokens", "20", "--seed", "3")
    assert text.returncode == 0
    assert text.stdout
    assert (text.stdout, text.stderr) == (again.stdout, "")
    unloaded = daemon.kvctl("unload", "m", "--json")
    assert json.loads(unloaded.stdout)["model"] == "m"
    assert daemon.kvctl("unload", "m").returncode == 6


def test_usage_counts_the_cached_tokens_of_a_prompt(shared: Daemon):
    chunk = Config().chunk
    for cached in (0, 389 // chunk * chunk):
        done = shared.kvctl("generate", "fast", "A beginning. " * 30, "--max-tokens", "2", "--json")
        usage = json.loads(done.stdout.splitlines()[-1])["usage"]
        counts = {"prompt_tokens": 390, "completion_tokens": 2, "cached_tokens": cached}
        assert usage == {**counts, "levels": [0], "reasoning_tokens": 0}


def test_choices_logprobs_and_stop_tokens_through_the_whole_daemon(shared: Daemon):
    sampled = ("--temperature", "1", "--seed", "4", "--max-tokens", "6")
    single = shared.kvctl("generate", "fast", "Hi", *sampled).stdout
    done = shared.kvctl(
        "generate", "fast", "Hi", *sampled, "--n", "3", "--logprobs", "2", "--prompt-logprobs", "0",
        "--json",
    )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [event["event"] for event in events[:3]] == ["accepted", "prefill", "prompt_logprobs"]
    assert [entry["token"] for entry in events[2]["logprobs"]] == [ord("H"), ord("i")]
    texts, tokens, listed = ["", "", ""], [[], [], []], [[], [], []]
    for event in events:
        if event["event"] == "tokens":
            choice = event.get("choice", 0)
            texts[choice] += event["text"]
            tokens[choice] += event["tokens"]
            listed[choice] += [entry["token"] for entry in event["logprobs"]]
    assert texts[0] == single
    assert len(set(texts)) == 3
    assert listed == tokens
    ends = [event["choice"] for event in events if event["event"] == "choice_finished"]
    assert sorted(ends) == [0, 1, 2]
    counts = {"prompt_tokens": 2, "completion_tokens": 18, "cached_tokens": 0}
    assert events[-1]["usage"] == {**counts, "levels": [0], "reasoning_tokens": 0}
    printed = shared.kvctl("generate", "fast", "Hi", *sampled, "--n", "3", "--logprobs", "2").stdout
    assert [f"choice {n}  length, 6 tokens" in printed for n in range(3)] == [True] * 3
    assert "LIKELIEST" in printed
    stop = str(tokens[0][3])
    cut = shared.kvctl("generate", "fast", "Hi", *sampled, "--stop-token", stop).stdout
    assert single.startswith(cut)
    assert len(cut.split()) == tokens[0].index(int(stop))
    bad = shared.kvctl("generate", "fast", "Hi", "--logit-bias", "999=1")
    assert (bad.returncode, "sampling.logit_bias names token 999" in bad.stderr) == (6, True)


def test_a_deadline_ends_a_request_wherever_it_is(daemon: Daemon):
    daemon.load(source(tps=20), "slow")
    late = daemon.kvctl("generate", "slow", "Hi", "--max-tokens", "10000", "--deadline", "0.5")
    assert (late.returncode, "deadline passed after" in late.stderr) == (7, True)
    assert late.stdout
    running = start(daemon, "load", source(tps=20, load=20), "--alias", "loading")
    wait_for("the model loads", lambda: len(daemon.kvctl("status").stdout.split("loading")) > 1)
    waiting = daemon.kvctl("generate", "loading", "Hi", "--deadline", "0.5")
    assert (waiting.returncode, "while the request waited" in waiting.stderr) == (7, True)
    running.kill()
    running.communicate(timeout=10)
    assert daemon.model("slow").requests == 0


def test_kv_settings_reach_the_worker_and_status_shows_them(daemon: Daemon):
    options = "--kv k8v4 --kv-group-size 32 --kv-value-group-size 128 --kv-floor -1=k8v8"
    options += " --kv-schemes k4v4 --quantized-kv-start 512 --max-kv-size 1024 --kv-keep 8"
    options += " --prefix-cache 64MiB --prefix-every 512"
    loaded = daemon.kvctl("load", source(tps=500), "--alias", "m", *options.split())
    assert (loaded.returncode, "k8g32v4g128" in loaded.stdout) == (0, True), loaded.stderr
    model = json.loads(daemon.kvctl("status", "m", "--json").stdout)
    assert model["kv"] == {
        "k_bits": 8,
        "v_bits": 4,
        "group_size": 32,
        "value_group_size": 128,
        "schemes": ["k4v4"],
        "floors": {"-1": "k8v8"},
        "quantized_kv_start": 512,
        "max_kv_size": 1024,
        "keep": 8,
        "prefix_cache": 64 * 2**20,
        "prefix_every": 512,
    }
    (part,) = model["info"]["kv"]
    assert (part["kind"], part["scheme"]) == ("window 1024 keep 8", "k8g32v4g128")
    page = " ".join(daemon.kvctl("status", "m").stdout.split())
    assert "may step down to k4g32v4g128; layer -1 not below k8g32v8g128; dense until" in page
    again = daemon.kvctl("load", source(tps=500), "--alias", "m", "--kv", "k8v4")
    assert (again.returncode, "unload it first" in again.stderr) == (6, True)


def test_exit_codes_of_bad_requests(shared: Daemon):
    assert shared.kvctl("generate", "nope", "Hi").returncode == 6
    assert shared.kvctl("generate", "fast", "").returncode == 6
    assert shared.kvctl("generate", "fast", "Hi", "--temperature", "-1").returncode == 6
    assert shared.kvctl("generate", "fast").returncode == 2
    assert shared.kvctl("frobnicate").returncode == 2
    taken = shared.kvctl("load", source(tps=1), "--alias", "fast")
    assert (taken.returncode, taken.stdout) == (6, "")
    error = json.loads(shared.kvctl("generate", "nope", "Hi", "--json").stdout)["error"]
    assert error["code"] == "unknown_model"


def test_a_prompt_that_is_not_utf_8_is_refused(shared: Daemon):
    command = [os.fsencode(word) for word in shared.kvctl_command("generate", "fast")]
    for prompt, stdin in ((b"\xff\xfe", b""), (b"-", b"caf\xe9")):
        done = subprocess.run(
            [*command, prompt], input=stdin, capture_output=True, timeout=30, check=False
        )
        assert (done.returncode, done.stdout) == (6, b"")
        assert done.stderr.count(b"\n") == 1
        assert b"not UTF-8" in done.stderr


def test_a_completion_is_streamed(daemon: Daemon):
    daemon.load(source(tps=20), "slow")
    running = start(daemon, "generate", "slow", "Hi", "--max-tokens", "40")
    assert running.stdout is not None
    began = time.monotonic()
    assert running.stdout.read(1)
    first = time.monotonic() - began
    rest = running.communicate(timeout=30)[0]
    total = time.monotonic() - began
    assert rest
    assert first < total / 2


def test_ctrl_c_ends_a_completion_in_the_daemon_too(daemon: Daemon):
    daemon.load(source(tps=20), "slow")
    running = start(daemon, "generate", "slow", "Hi", "--max-tokens", "10000")
    assert running.stdout is not None
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=10)
    assert (running.returncode, errors) == (130, "")
    wait_for("the row is gone", lambda: daemon.model("slow").requests == 0)


def test_ctrl_c_in_a_chat_ends_only_the_reply(daemon: Daemon):
    daemon.load(source(tps=20), "slow")
    chat = start(daemon, "chat", "slow", "--max-tokens", "10000")
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("Tell me all\n")
    chat.stdin.flush()
    assert chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    wait_for("the reply has ended", lambda: daemon.model("slow").requests == 0)
    out, errors = chat.communicate("/set max_tokens 3\nAnd now?\n", timeout=20)
    assert chat.returncode == 0
    assert "cancelled" in errors
    reply = out.splitlines()[-1]
    assert len(reply.split()) == 3


def test_a_reader_that_closes_the_pipe_ends_generate_quietly(shared: Daemon):
    command = " ".join(shared.kvctl_command("generate", "fast", "Hi", "--max-tokens", "2000"))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -c 5"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, len(done.stdout), done.stderr) == (141, 5, "")


PRINTING = (
    "status", "status --json", "models", "models --json", "config", "config get budget", "logs",
    "metrics", "doctor", "tokenize fast Hi", "key new me",
)  # fmt: skip


@pytest.mark.parametrize("words", PRINTING)
def test_a_closed_stdout_ends_a_command_quietly(shared: Daemon, words: str):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        shared.kvctl_command(*words.split()),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", ["status unknown", "status unknown --json", "chat fast"])
def test_a_closed_stderr_ends_a_command(shared: Daemon, words: str):
    reader, writer = os.pipe()
    os.close(reader)
    command = shared.kvctl_command(*words.split())
    done = subprocess.run(
        command, input=b"/nonsense\n", stdout=writer, stderr=writer, timeout=30, check=False
    )
    os.close(writer)
    assert done.returncode == 141


def test_a_drained_daemon_accepts_no_requests(daemon: Daemon):
    daemon.load(source(tps=100), "m")
    assert json.loads(daemon.kvctl("drain", "--json").stdout) == {"state": "drained"}
    refused = daemon.kvctl("generate", "m", "Hi")
    assert refused.returncode == 7
    assert "no new work" in refused.stderr
    assert daemon.answers()


def test_the_prefix_store_of_a_real_daemon_survives_its_death(daemon: Daemon):
    assert "off; turn it on" in daemon.kvctl("cache").stdout
    assert daemon.kvctl("cache", "drop", "--all").returncode == 6
    changed = daemon.kvctl("config", "set", "prefix_store.limit", "1GB", "--save")
    assert changed.returncode == 0, changed.stderr

    def store() -> dict[str, object]:
        found: dict[str, object] = json.loads(daemon.kvctl("cache", "--json").stdout)["store"]
        return found

    wait_for("the store is open", lambda: store()["state"] == "on")
    status = json.loads(daemon.kvctl("status", "--json").stdout)
    assert status["prefix_store"] == store()
    part = daemon.home.prefixes / "00" / f"{'00' * 16}.part"
    part.parent.mkdir(0o700)
    part.write_bytes(b"begun")
    daemon.end()  # kill -9
    daemon.start()
    wait_for("the store is open", lambda: store()["state"] == "on")
    assert store()["limit_bytes"] == 10**9
    assert not part.exists()
    dropped = daemon.kvctl("cache", "drop", "--all", "--json")
    assert json.loads(dropped.stdout) == {"segments": 0, "freed_bytes": 0}
