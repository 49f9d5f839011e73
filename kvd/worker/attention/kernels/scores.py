"""The part of the split kernel that computes scores: 64 tokens, two per lane.

Lane ``8 c + j`` reads channels ``c, c + 4 ...`` of the tokens ``8 j`` to ``8 j + 7``. Lanes with
the same ``j`` then exchange their sums, so that each keeps the scores of ``token`` and
``token + 1``.
"""

from __future__ import annotations

from kvd.worker.attention.kernels.shape import Shape, Side
from kvd.worker.attention.kernels.text import RUN, Text, power
from kvd.worker.attention.kernels.unpacking import dense_run, find_run


def add_scores(text: Text, shape: Shape, level: int, fold: int, unfold: int) -> None:
    side = shape.keys[level]
    if side.packed:
        _fold_queries(text, shape, level, fold)
    run = side.run(shape.dtype)
    text.zero(*(f"acc{number}" for number in range(RUN)))
    text.add(find_run("lane", run.size))
    text.add(f"""
GLOBAL {run.kind}* runs = (GLOBAL {run.kind}*)(keys{level})
    + page * (K_DIM * 2 * {run.size}) + place;
""")
    run.add_stream(
        text,
        shape.k_dim // 4,
        "32",
        f"const int d = step * 4 + c;\nconst {text.vector} q = {_query(shape, side)};",
        lambda number, found: f"acc{number}@ += {found} * q@;",
    )
    if run.packed:
        for number, shift in enumerate(run.shifts):
            text.scale(f"acc{number}", unfold - shift)
    _share_out(text)
    if side.packed:
        bias = "bias0@" if side.groups(shape.k_dim) == 1 else "(j < 4 ? bias0@ : bias1@)"
        text.add(f"score0@ += {bias};\nscore1@ += {bias};")
        text.add("SYNC_WARP();")  # the folded queries are no longer needed


def _fold_queries(text: Text, shape: Shape, level: int, fold: int) -> None:
    """Add the code that multiplies queries with a page's scales and biases, once for all tokens."""
    groups = shape.keys[level].groups(shape.k_dim)
    text.zero(*(f"bias{group}" for group in range(groups)))
    text.add(f"""
GLOBAL T* scales = key_scales{level} + page * (K_DIM * {groups});
GLOBAL T* biases = key_biases{level} + page * (K_DIM * {groups});
for (int d = lane; d < K_DIM; d += 32) {{
const {text.vector} q = asked[query + d];
""")
    for group in range(groups):
        text.add(f"""
{{
const float scale = float(scales[d * {groups} + {group}]) * {power(fold)};
const float bias = float(biases[d * {groups} + {group}]);
{text.vector} folded;
folded@ = q@ * scale;
bias{group}@ += q@ * bias;
work[base + {group} * K_DIM + d] = folded;
}}
""")
    text.add("}")
    for group in range(groups):
        text.add(f"bias{group}@ = SUM(bias{group}@);")
    text.add("SYNC_WARP();")


def _query(shape: Shape, side: Side) -> str:
    if not side.packed:
        return "asked[query + d]"
    if side.groups(shape.k_dim) == 1:
        return "work[base + d]"
    return f"work[base + j / {side.group // RUN} * K_DIM + d]"


def _share_out(text: Text) -> None:
    """Add the code that exchanges sums between lanes, so that each keeps two complete ones.

    A lane exchanges half of its sums with lane ``lane ^ 8``, then half of the rest with
    ``lane ^ 16``.
    """
    for bit, half, name in ((8, 4, "acc"), (16, 2, "score")):
        for number in range(half):
            text.add(f"""
{{
{text.vector} mine, other;
mine@ = lane & {bit} ? acc{number + half}@ : acc{number}@;
other@ = lane & {bit} ? acc{number}@ : acc{number + half}@;
{name}{number}@ = mine@ + SWAP(other@, {bit});
}}
""")


def add_tail_scores(text: Text, shape: Shape) -> None:
    """Add the code for the scores of 64 tail tokens, whose keys lie one after another."""
    run = dense_run(shape.dtype)
    text.add("""
GLOBAL uint4* runs = (GLOBAL uint4*)(tail_keys
    + ((size_t(tail) * HEADS + head) * TAIL + item * PAGE + token) * K_DIM);
score0@ = 0;
score1@ = 0;
#pragma unroll 4
for (int step = 0; step < K_DIM / 8; ++step) {
constexpr int from = 0;
""")
    for which, step in enumerate(("step", "step + K_DIM / 8")):
        text.add(f"{{\nuint4 now[{run.count}];")
        for part in range(run.count):
            text.add(f"now[{part}] = runs[({step}) * {run.count} + {part}];")
        score = f"score{which}@"
        run.add_to(
            text,
            lambda number, found, score=score: (  # type: ignore[misc]
                f"{score} += {found} * asked[query + step * 8 + {number}]@;"
            ),
        )
        text.add("}")
    text.add("}")


def add_softmax(text: Text, shape: Shape, sums: list[str]) -> None:
    """Add the code that replaces scores by weights, and rescales the sums so far."""
    text.add(f"""
const int position = start + token;
{text.integers} ago;  // how far a query is behind the row's newest
ago@ = {shape.queries - 1} - (asking + #) % {shape.queries};
if (position > newest - ago@) score0@ = LEAST;
if (position + 1 > newest - ago@) score1@ = LEAST;
if (position < low - ago@ && position >= KEEP) score0@ = LEAST;
if (position + 1 < low - ago@ && position + 1 >= KEEP) score1@ = LEAST;
{text.vector} peak, fade;
peak@ = max(top@, LARGEST(max(score0@, score1@)));
fade@ = POWER(top@ - peak@);
top@ = peak@;
score0@ = score0@ == LEAST ? 0.0f : POWER(score0@ - peak@);
score1@ = score1@ == LEAST ? 0.0f : POWER(score1@ - peak@);
total@ = total@ * fade@ + score0@ + score1@;
""")
    for name in sums:
        text.add(f"{name}@ *= fade@;")
    if shape.by_channel:
        text.add("""
#pragma unroll
for (int step = 0; step < V_DIM / 4; ++step) {
channel[step]@ *= fade@;
}
""")
