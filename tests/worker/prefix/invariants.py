"""Invariants of the prefix cache and its tree."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.worker.prefix.cache import PrefixCache, TrackedPrompt
from kvd.worker.prefix.tree import PrefixTree


def check_prefix_cache(cache: PrefixCache, prompts: Iterable[TrackedPrompt]) -> None:
    """Assert the invariants; ``prompts`` are those of all requests in the engine."""
    prompts = list(prompts)
    assert cache._filled == sum(prompt.has_checkpoint for prompt in prompts)
    assert cache._wanted.keys() <= {prompt.rid for prompt in prompts}
    names = {name for prompt in prompts if prompt.queued for name in prompt.path}
    assert cache._queued._counts.keys() == names
    if cache.tree is not None:
        check_tree(cache.tree)


def check_tree(tree: PrefixTree) -> None:
    assert tree.held_bytes <= tree.cap_bytes
    nodes = list(tree._root.children.values())
    stored = set()
    while nodes:
        node = nodes.pop()
        assert node.snapshot is not None or node.children, "a leaf has no checkpoint"
        assert all(child.parent is node for child in node.children.values())
        assert node.chunks == sorted(node.children)
        nodes += node.children.values()
        if node.snapshot is not None:
            stored.add(node)
    assert stored == set(tree._stored), "a checkpoint is not on any path"
