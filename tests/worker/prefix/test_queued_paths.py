"""Paths of queued prompts: where a prefilled prompt diverges from them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.prefix.queued_paths import QueuedPaths, path_of

C = 4
PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=14).map(
    lambda halves: [half for half in halves for _ in range(2)]
)


@given(
    waiting=st.lists(st.tuples(PROMPTS, st.sampled_from(["", "salt"])), max_size=8),
    removed=st.integers(0, 8),
    reads=PROMPTS,
)
def test_checkpoints_are_made_where_a_queued_prompt_diverges(waiting, removed, reads):
    paths = QueuedPaths()
    for prompt, salt in waiting:
        paths.add(path_of(prompt, salt, C))
    for prompt, salt in waiting[:removed]:
        paths.remove(path_of(prompt, salt, C))
    common = set()
    for prompt, salt in waiting[removed:]:
        whole = min(len(prompt) - 1, len(reads) - 1) // C
        shared = 0
        while shared < whole and prompt[: C * shared + C] == reads[: C * shared + C]:
            shared += 1
        common |= {shared} - {0} if not salt else set()
    path = path_of(reads, "", C)

    assert paths.divergences(path) == common
    assert not any(paths.diverges_at(path, chunks) for chunks in (0, len(path) + 1))
    for prompt, salt in waiting[removed:]:
        paths.remove(path_of(prompt, salt, C))
    assert not paths._counts


def test_a_lookup_among_ten_thousand_queued_prompts_reads_only_the_path():
    """10 000 equal paths are stored as five names. A lookup reads each name at most twice."""
    paths, shared = QueuedPaths(), [1] * 1500
    for number in range(10_000):
        paths.add(path_of([*shared, number, number], "", 256))
    assert len(paths._counts) == 5
    lookups = Counter()

    class Counted(Counter):
        def __getitem__(self, name):
            lookups[name] += 1
            return super().__getitem__(name)

    paths._counts = Counted(paths._counts)
    assert paths.divergences(path_of([*shared, *range(600)], "", 256)) == {5}
    assert lookups.total() <= 2 * 8


def test_a_salt_of_the_bytes_of_a_chunk_names_another_prompt():
    first, rest = [ord(letter) for letter in "chunk..."], [1, 2, 3, 4, 5, 6, 7, 8, 9]
    salt = b"".join(token.to_bytes(4, "little") for token in first).decode()
    public = path_of([*first, *rest], "", len(first))
    assert public[1] not in path_of(rest, salt, len(first))
