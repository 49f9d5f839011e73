"""One line of the results: what a recipe costs at one length."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from bench.fidelity.flow import Score


def entry(recipe: str, length: int, bytes_to_dense: float, score: Score) -> dict[str, Any]:
    """Return what is stored. ``bytes_to_dense``: those of the cache, relative to 16-bit KV."""
    parts = {
        name: asdict(part) | {"perplexity_change": part.perplexity_change}
        for name, part in score.parts().items()
    }
    return {
        "recipe": recipe,
        "length": length,
        "bytes_to_dense": round(bytes_to_dense, 5),
        "recall": score.recall,
        **parts,
    }


def line(entry: dict[str, Any]) -> str:
    """Return an entry as a line of text."""
    parts = [f"{entry['length']:6} {entry['recipe']:28}"]
    parts += [
        f"{name} KL {part['kl']:.6f} top-1 {part['top1']:.4f}"
        f" ppl {100 * part['perplexity_change']:+7.3f} %"
        for name in ("prefill", "decode")
        if (part := entry.get(name))
    ]
    if entry["recall"] is not None:
        parts.append(f"recall {entry['recall']:.3f}")
    return "  ".join(parts)


def compact(found: dict[str, Any]) -> str:
    """Return JSON with one line for each result."""
    head = {key: value for key, value in found.items() if key != "results"}
    lines = ",\n".join(f"  {json.dumps(one)}" for one in found["results"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "results": [\n{lines}\n ]\n}}\n'
