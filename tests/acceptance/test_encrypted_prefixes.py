"""A real daemon with encrypted prefixes: they survive `kill -9`, and nothing on the disk or of the
processes reveals prompts or the key."""

from __future__ import annotations

import base64
import stat
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.client import Client
from protocol.segments import PrefixStoreStatus
from tests.process.helpers import Daemon, configured, wait_for

WORDS = "The amber falcon carries 4821 letters over the quiet harbour of Ystad. "
CONFIG = """
budget = "1GiB"
models = ["demo"]
[prefix_store]
limit = "1GB"
keep_free = 0
encrypt = true
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with configured(CONFIG) as daemon:
        yield daemon


def started(daemon: Daemon) -> None:
    daemon.start()
    wait_for("demo is ready", lambda: daemon.model("demo").state == "ready", 120)
    wait_for("the store is open", lambda: store(daemon).state == "on")


def store(daemon: Daemon) -> PrefixStoreStatus:
    with daemon.client() as client:
        return client.cache().store


def answer(client: Client, prompt: str) -> tuple[str, int, int]:
    """Return the text, the tokens of the prompt, and those that were cached."""
    done = client.generate("demo", prompt, max_tokens=8, temperature=0.0)
    text = done.text
    assert done.usage is not None
    return text, done.usage.prompt_tokens, done.usage.cached_tokens


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def process_data(pid: int) -> bytes:
    folder = Path(f"/proc/{pid}")
    return (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_encrypted_prefixes_survive_a_kill_and_reveal_nothing(daemon: Daemon) -> None:
    prompt = "".join(f"{number}. {WORDS}" for number in range(400))
    started(daemon)
    assert store(daemon).encrypted
    with daemon.client() as client:
        tokens = client.tokenize("demo", prompt).tokens
        cold = answer(client, prompt)
    assert cold[1:] == (len(tokens), 0)
    wait_for("the prefix is stored", lambda: store(daemon).segments == 1, 60)
    key = daemon.home.key_file.read_bytes()
    assert stat.S_IMODE(daemon.home.key_file.stat().st_mode) == 0o600
    keys = [key, key.hex().encode(), base64.b64encode(key)]
    seen = daemon.kvctl("status", "--json").stdout + daemon.kvctl("config", "get").stdout
    if sys.platform == "linux":
        for pid in (daemon.pid, daemon.worker_pid("demo")):
            assert not [it for it in keys if it in process_data(pid)]
    daemon.end()  # kill -9

    stored = files_below(daemon.home.prefixes)
    (segment,) = [path for path in stored if path.suffix == ".kvs"]
    assert len(stored[segment]) > 100_000
    some = tokens[400:408]
    secrets = [WORDS[4:20].encode(), *(array(kind, some).tobytes() for kind in "HIq")]
    everything = files_below(daemon.home.root) | {Path("output"): seen.encode()}
    everything |= {path: path.read_bytes() for path in (daemon.output, daemon.errors)}
    for path, content in everything.items():
        assert not [it for it in secrets if it in content], f"a prompt is in {path}"
        if path != daemon.home.key_file:
            assert not [it for it in keys if it in content], f"the key is in {path}"

    started(daemon)
    with daemon.client() as client:
        warm = answer(client, prompt)
    assert warm[:2] == cold[:2]
    assert warm[2] >= 0.9 * len(tokens), "the prefix is not restored"
    daemon.end()

    daemon.home.key_file.unlink()
    started(daemon)
    assert store(daemon).segments == 0
    assert not segment.exists()
    assert store(daemon).fault is None
    with daemon.client() as client:
        assert answer(client, prompt) == cold
    assert daemon.home.key_file.read_bytes() != key
