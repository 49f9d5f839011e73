"""What the engine calls on the cache is sent to the followers, unless it only reads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvd.worker.core
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.sequence_snapshots import SequenceSnapshots
from kvd.worker.gang.leader import LeaderCache, LeaderSnapshots

pytestmark = pytest.mark.mlx

READS = {
    "arrays", "charge_of", "charged_bytes", "costs", "freed_bytes", "held_bytes", "lacks_idle_room",
    "lacks_room", "levels", "limit_bytes", "nbytes", "needs_flush", "row_bytes", "sequences",
    "settings", "snapshot_charge", "stage_ends", "tail_slots", "unlowered", "usage",
}  # fmt: skip
"""Attributes of the cache and of its snapshots that change nothing."""
OFF = {"discard", "undo_prefill", "add"}
"""What a gang never calls: it repeats no failed step, and reads no snapshots from disk."""


def used(name: str) -> set[str]:
    """Return the attributes of every ``cache`` or ``snapshots`` that the engine's code names."""
    files = [*Path(kvd.worker.core.__path__[0]).glob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    found = [node for node in nodes if isinstance(node, ast.Attribute)]
    return {
        node.attr
        for node in found
        if (isinstance(node.value, ast.Attribute) and node.value.attr.lstrip("_") == name)
        or (isinstance(node.value, ast.Name) and node.value.id == name)
    }


@pytest.mark.parametrize(
    ("name", "plain", "leader"),
    [
        ("cache", ModelCache, LeaderCache),
        ("snapshots", SequenceSnapshots, LeaderSnapshots),
    ],
)
def test_every_change_is_sent(name, plain, leader):
    own = {attribute for attribute in dir(leader) if attribute in vars(leader)}
    own |= {"snapshots"}
    methods = {one for one in used(name) if callable(getattr(plain, one, None))}
    assert methods
    assert methods - own - READS - OFF == set()
    assert not own & OFF
