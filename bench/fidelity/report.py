"""Write the tables and the plot of docs/fidelity.md from the results.

    python -m bench.fidelity.report

Reads bench/results/fidelity-*.json. Text between the page's markers is replaced; the prose around
them is written by hand.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "fidelity.md"
PLOT = ROOT / "docs" / "fidelity.svg"
LENGTHS = (1024, 2048, 4096, 8192)

SCHEMES = ("k8v8", "k8v6", "k8v4", "k6v6", "k6v4", "k4v8", "k5v3", "k4v4", "k3v4", "k3v3", "k2v2")
LAYOUTS = (
    ("per channel", ""), ("per token", ":token"), ("Hadamard, per token", ":hadamard"),
    ("Hadamard, per channel", ":rotated"),
)  # fmt: skip
MIXES = (
    "k8v8", "k8v6", "k8v4", "k6v6", "k6v5", "k6v4", "k6v3", "k5v5", "k5v4", "k6v2", "k5v3", "k4v4",
    "k5v2", "k4v3", "k3v4", "k3v3",
)  # fmt: skip
VARIANTS = (
    ("as it is", "variants", "k4v4"),
    ("first page at 8 bits", "variants", "k4v4:head8"),
    ("first 64 tokens dense", "variants", "k4v4:sink64"),
    ("groups of 32: values", "variants", "k4v4:vg32"),
    ("groups of 32: keys", "variants", "k4v4:kg32"),
    ("groups of 32: both", "variants", "k4v4:kg32:vg32"),
    ("values per channel", "variants", "k4v4:vchannel"),
    ("values after a Hadamard rotation", "variants", "k4v4:vhadamard"),
    ("keys per channel after a rotation", "variants", "k4v4:rotated"),
    ("the same, channels divided by their mean first", "even", "k4v4:even:rotated"),
    ("clipped by error: keys", "variants", "k4v4:kclip"),
    ("clipped by error: values", "variants", "k4v4:vclip"),
    ("least-squares scales: keys", "variants", "k4v4:krefit"),
    ("least-squares scales: values", "variants", "k4v4:vrefit"),
    ("float16 scales", "variants", "k4v4:half"),
    ("stepped down from K8V8", "variants", "k4v4:via8"),
    ("K5V3 instead", "variants", "k5v3"),
    ("keys of the most sensitive layer at 8 bits", "even", "k4v4:fine4"),
    ("K5V3, keys of the most sensitive layer at 8 bits", "even", "k5v3:fine4"),
)
BY_LAYER = (
    ("K8V8 in all layers", "k8v8"),
    ("K8V4 in all layers", "k8v4"),
    ("K6V6 in all layers", "k6v6"),
    ("K8V4's size, from the probe", "k8v4:by-k4v3-k6v5-k5v5-k6v6-k8v8-k8v8"),
    ("K8V4's size, from a calibration", "k8v4:by-k5v3-k6v5-k6v5-k6v6-k8v8-k8v6"),
    ("K8V4's size, all layers measured", "k8v4:by-k5v4-k6v5-k6v5-k6v5-k8v8-k8v6"),
    ("K8V4's size, from the probe, 4 and 8 bits", "k8v4:by-k4v4-k8v4-k4v4-k8v4-k8v8-k8v8"),
    ("K6V4 in all layers", "k6v4"),
    ("K5V5 in all layers", "k5v5"),
    ("K6V4's size, from the probe", "k6v4:by-k3v3-k5v4-k4v3-k5v5-k8v6-k8v6"),
    ("K5V4 in all layers", "k5v4"),
    ("K6V3 in all layers", "k6v3"),
    ("K5V4's size, from the probe", "k5v4:by-k3v3-k5v3-k4v3-k5v4-k8v5-k6v5"),
    ("K4V4 in all layers", "k4v4"),
    ("K5V3 in all layers", "k5v3"),
    ("K4V4's size, from the probe", "k4v4:by-k3v3-k4v3-k3v3-k4v4-k8v4-k5v4"),
    ("K4V4's size, from a calibration", "k4v4:by-k3v2-k4v3-k4v3-k4v3-k8v5-k5v4"),
    ("K4V4's size, all layers measured", "k4v4:by-k4v3-k4v3-k4v3-k4v3-k6v5-k5v4"),
)
OTHERS = (
    ("kvd K8V8", "bits", "k8v8"),
    ("mlx-lm, 8 bits", "bits", "k8v8:mlx-lm"),
    ("llama.cpp q8_0", "llama", "llama q8_0"),
    ("kvd K4V4 in all layers", "bits", "k4v4"),
    ("kvd K4V4, from the probe", "bits", "k4v4:by-k3v3-k4v3-k3v3-k4v4-k8v4-k5v4"),
    ("mlx-lm, 4 bits", "bits", "k4v4:mlx-lm"),
    ("llama.cpp q4_0", "llama", "llama q4_0"),
    ("mlx-lm, 8 bits, flat keys", "flat-keys", "k8v8:mlx-lm"),
    ("mlx-lm, 4 bits, flat keys", "flat-keys", "k4v4:mlx-lm"),
    ("larger model: kvd K8V8", "trained", "k8v8"),
    ("larger model: mlx-lm, 8 bits", "trained", "k8v8:mlx-lm"),
    ("larger model: kvd K4V4 in all layers", "trained", "k4v4"),
    ("larger model: kvd K4V4, from the probe", "trained", "k4v4:probe"),
    ("larger model: mlx-lm, 4 bits", "trained", "k4v4:mlx-lm"),
)
TRAINED = (
    ("K8V8 in all layers", "k8v8"),
    ("K8V4 in all layers", "k8v4"),
    ("K8V4's size, from the probe", "k8v4:probe"),
    ("K4V4 in all layers", "k4v4"),
    ("K5V3 in all layers", "k5v3"),
    ("K4V4's size, from the probe", "k4v4:probe"),
)
CPU_RUNS = ("bits", "flat-keys", "llama", "trained")


@dataclass(frozen=True)
class Run:
    """One file of results."""

    found: dict[str, Any]

    @classmethod
    def read(cls, name: str, device: str = "h200") -> Run:
        """Read the file ``fidelity-DEVICE-NAME.json``."""
        return cls(json.loads((RESULTS / f"fidelity-{device}-{name}.json").read_text()))

    def get(self, recipe: str, length: int) -> dict[str, Any]:
        """Return the entry of a recipe at a length."""
        for one in self.found["results"]:
            if one["recipe"] == recipe and one["length"] == length:
                return dict(one)
        raise KeyError(f"{recipe} at {length} was not measured")

    def row(self, title: str, recipe: str) -> list[str]:
        """Return a line of a table with all lengths, of which some may not be measured.

        ``recipe``: as in the file, or the name for which bits were chosen, such as ``k4v4:probe``.
        """
        names = {given: name for name, given in self.found.get("chosen", {}).items()}
        recipe = names.get(recipe, recipe)
        found = {one["length"]: one for one in self.found["results"] if one["recipe"] == recipe}
        some = next(iter(found.values()))
        parts = [one[part] for one in found.values() for part in ("prefill", "decode")]
        return [
            title,
            f"{some['bytes_to_dense']:.3f}",
            *(_both(found[n], "kl", _kl) if n in found else "not measured" for n in LENGTHS),
            f"{min(part['top1'] for part in parts):.4f}",
            f"{100 * max((part['perplexity_change'] for part in parts), key=abs):+.2f}",
            " ".join(f"{100 * found[n]['recall']:.0f}" for n in LENGTHS if n in found),
        ]


def _kl(value: float) -> str:
    return f"{value:.5f}" if value < 0.01 else f"{value:.3f}"


def _both(entry: dict[str, Any], key: str, show: Any) -> str:
    return f"{show(entry['prefill'][key])} / {show(entry['decode'][key])}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _name(scheme: str) -> str:
    return scheme.upper()


def schemes(run: Run) -> str:
    """Tabulate the schemes in kvd's layout; the last column is without the tail."""
    rows = []
    for scheme in SCHEMES:
        entries = [run.get(scheme, length) for length in LENGTHS]
        bare = run.get(f"{scheme}:no-tail", 8192)
        rows.append(
            [
                _name(scheme),
                f"{entries[0]['bytes_to_dense']:.3f}",
                *(_both(entry, "kl", _kl) for entry in entries),
                f"{min(min(e['prefill']['top1'], e['decode']['top1']) for e in entries):.4f}",
                f"{100 * max(abs(e['prefill']['perplexity_change']) for e in entries):.2f} %",
                " ".join(f"{100 * entry['recall']:.0f}" for entry in entries),
                _both(bare, "kl", _kl),
            ]
        )
    head = ["scheme", "bytes", *(f"KL at {length}" for length in LENGTHS)]
    return _table([*head, "least top-1", "perplexity", "recall %", "KL at 8192, no tail"], rows)


def layouts(exported: Run, flat: Run, variants: Run) -> str:
    """Tabulate the key layouts, on the model as it is shipped and without its outlier channels."""
    rows = []
    for scheme in ("k4v8", "k4v4", "k2v2"):
        for title, option in LAYOUTS:
            cells = [f"{_name(scheme)}, {title}"]
            for run in (variants if option == ":rotated" else exported, flat):
                for length in (1024, 8192):
                    try:
                        cells.append(_both(run.get(scheme + option, length), "kl", _kl))
                    except KeyError:
                        cells.append("not measured")
            rows.append(cells)
    head = ["keys", *(f"{model}, {n}" for model in ("shipped", "flat keys") for n in (1024, 8192))]
    return _table(head, rows)


def mixes(run: Run) -> str:
    """Tabulate combinations of key bits and value bits, those with the most bytes first."""
    order = sorted(MIXES, key=lambda m: (-run.get(m, 1024)["bytes_to_dense"], m))
    rows = [
        [_name(mix), f"{run.get(mix, 1024)['bytes_to_dense']:.3f}"]
        + [_both(run.get(mix, length), "kl", _kl) for length in LENGTHS]
        + [_both(run.get(mix, 8192), "top1", lambda x: f"{x:.4f}")]
        for mix in order
    ]
    head = ["scheme", "bytes", *(f"KL at {length}" for length in LENGTHS), "top-1 at 8192"]
    return _table(head, rows)


def variants(runs: dict[str, Run]) -> str:
    """Tabulate attempts to lower K4V4's KL divergence, relative to plain K4V4."""
    rows = []
    for title, name, recipe in VARIANTS:
        cells = [title, f"{runs[name].get(recipe, 4096)['bytes_to_dense']:.3f}"]
        for length in LENGTHS:
            entry, plain = runs[name].get(recipe, length), runs["variants"].get("k4v4", length)
            cells.append(
                " / ".join(
                    f"{entry[part]['kl'] / plain[part]['kl']:.2f}" for part in ("prefill", "decode")
                )
            )
        rows.append(cells)
    return _table(["K4V4", "bytes at 4096", *(f"KL x at {length}" for length in LENGTHS)], rows)


def layers(run: Run) -> str:
    """Tabulate K4V4 with a single quantized layer, for each layer."""
    rows = [
        [str(layer), *(_both(run.get(f"k4v4:only{layer}", n), "kl", _kl) for n in LENGTHS)]
        for layer in range(6)
    ]
    return _table(["layer", *(f"KL at {length}" for length in LENGTHS)], rows)


def by_layer(run: Run) -> str:
    """Tabulate bits by layer, and the same bits in all layers."""
    return _table(_row_head("bits"), [run.row(*one) for one in BY_LAYER])


def trained(run: Run) -> str:
    """Tabulate a larger model."""
    return _table(_row_head("bits"), [run.row(*one) for one in TRAINED])


def others(runs: dict[str, Run]) -> str:
    """Tabulate kvd's pages and the caches of mlx-lm and llama.cpp, for both models."""
    rows = [runs[name].row(title, recipe) for title, name, recipe in OTHERS]
    return _table(_row_head("cache"), rows)


def _row_head(first: str) -> list[str]:
    kl = (f"KL at {length}" for length in LENGTHS)
    return [first, "bytes", *kl, "least top-1", "perplexity %", "recall %"]


def plot(exported: Run, flat: Run, mixed: Run, even: Run) -> None:
    """Draw KL by length and layout, and KL by bytes."""
    mpl.rcParams |= {"svg.hashsalt": "kvd", "font.size": 9, "svg.fonttype": "none"}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for axis, run, title in (
        (left, exported, "K4V8 by key layout\nas shipped, with outlier channels"),
        (middle, flat, "K4V8 by key layout\noutlier channels taken out"),
    ):
        for label, option in LAYOUTS[:3]:
            y = [run.get(f"k4v8{option}", length)["decode"]["kl"] for length in LENGTHS]
            axis.plot(LENGTHS, y, marker="o", label=label)
        axis.set(xscale="log", yscale="log", title=title, xlabel="tokens")
        axis.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.set_ylim(1e-3, 1)
    left.set_ylabel("KL to dense KV, decode, nats")
    middle.legend(loc="upper right")
    points = [(mixed, mix, _name(mix)) for mix in MIXES]
    points.append((even, "k4v4:fine4", "K4V4, a layer's\nkeys at 8"))
    for run, recipe, label in points:
        entry = run.get(recipe, 8192)
        x, y = entry["bytes_to_dense"], entry["decode"]["kl"]
        known = recipe in {"k8v8", "k8v4", "k4v4"}
        right.plot(x, y, "o", color="C3" if ":" in recipe else "C0" if known else "C7")
        below = ":" in recipe
        right.annotate(
            label,
            (x, y),
            (-5, -12) if below else (4, 3),
            textcoords="offset points",
            fontsize=7,
            ha="right" if below else "left",
        )
    right.set(yscale="log", title="What bytes buy, 8192 tokens", xlabel="bytes, of 16-bit KV")
    right.set_xlim(0.15, 0.6)
    right.grid(alpha=0.3)
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    """Read, draw, write."""
    names = ("layouts", "flat-keys", "mixes", "variants", "even")
    runs = {name: Run.read(name) for name in names}
    on_cpu = {name: Run.read(name, "linux-cpu") for name in CPU_RUNS}
    plot(runs["layouts"], runs["flat-keys"], runs["mixes"], runs["even"])
    blocks = {
        "schemes": schemes(runs["layouts"]),
        "layouts": layouts(runs["layouts"], runs["flat-keys"], runs["variants"]),
        "mixes": mixes(runs["mixes"]),
        "variants": variants(runs),
        "layers": layers(runs["mixes"]),
        "by layer": by_layer(on_cpu["bits"]),
        "others": others(on_cpu),
        "trained": trained(Run.read("h200", "trained")),
    }
    page = PAGE.read_text()
    for name, block in blocks.items():
        page, found = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, block=block: f"{match[1]}{block}\n{match[2]}",
            page,
            flags=re.DOTALL,
        )
        if found != 1:
            raise SystemExit(f"{PAGE} has {found} places for {name}")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
