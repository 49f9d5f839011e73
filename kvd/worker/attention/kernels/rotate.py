"""The kernel between a layer's joined projection and its attention: one launch instead of five.

It applies norms and RoPE to queries and keys, and puts keys and values into tails. All three arrive
in one array, the joined projection's result: each row holds its queries, then its keys, then its
values. A warp processes one query or key vector. Queries go to an array for attention, keys to
their places in the tails. Other blocks copy new values and the earlier contents of the tails
(`append`).
"""

from __future__ import annotations

from kvd.worker.attention.kernels.append import THREADS, add_copies, add_sizes, token_row_of
from kvd.worker.attention.kernels.arguments import Rotation
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.shape import LANES
from kvd.worker.attention.kernels.text import Text, literal

WARPS = THREADS // LANES


def rotate_source(
    language: Language,
    q_heads: int,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    itemsize: int,
    rotation: Rotation,
    *,
    token_rows: bool,
) -> str:
    text = Text(1)
    text.add(language.prologue)
    add_sizes(text, kv_heads, k_dim, v_dim, itemsize)
    text.add(f"""
constexpr int Q_HEADS = {q_heads}, K_DIM = {k_dim};
constexpr int VALUES = (Q_HEADS + HEADS) * K_DIM, ROW = VALUES + HEADS * {v_dim};
const int q_vectors = qkv_shape[0] * Q_HEADS, vectors = q_vectors + tails * HEADS;
const int vector_blocks = (vectors + {WARPS} - 1) / {WARPS};
if (int(block.x) < vector_blocks) {{
  const int vector = block.x * {WARPS} + warp;
  if (vector >= vectors) return;
  const bool is_query = vector < q_vectors;
  const int tail = (vector - q_vectors) / HEADS, kv_head = (vector - q_vectors) % HEADS;
  if (!is_query && places[tail] < 0) return;
  const int row = is_query ? vector / Q_HEADS : {token_row_of("tail", token_rows=token_rows)};
  const int head = is_query ? vector % Q_HEADS : Q_HEADS + kv_head;
  GLOBAL T* from = qkv + row * ROW + head * K_DIM;
  {language.output} T* to = new_queries + vector * K_DIM;
  if (!is_query) to = new_keys + ((tail * HEADS + kv_head) * TAIL + places[tail] % TAIL) * K_DIM;
""")
    add_rotation(text, rotation)
    text.add(f"""
  return;
}}
int at = (int(block.x) - vector_blocks) * {THREADS} + me;
""")
    add_copies(text, language, {"values": "qkv + giver * ROW + VALUES"}, token_rows=token_rows)
    return str(text)


def add_rotation(text: Text, rotation: Rotation) -> None:
    """Add the code by which a warp applies norm and RoPE to one vector.

    The code before it declares ``from``, ``to``, ``K_DIM``, ``is_query``, and the ``row`` whose
    position is ``offsets[row]``.
    """
    text.add(f"constexpr int ROTATED = {rotation.dims}, HALF = ROTATED / 2;")
    if rotation.normed:
        text.add(f"""
float squares = 0;
for (int one = lane; one < K_DIM; one += {LANES}) squares += float(from[one]) * float(from[one]);
const float factor = 1.0f / SQRT(SUM(squares) / K_DIM + {literal(rotation.eps)});
""")
    first, second = (
        ("2 * pair", "2 * pair + 1") if rotation.traditional else ("pair", "pair + HALF")
    )
    text.add(f"""
for (int pair = lane; pair < HALF; pair += {LANES}) {{
  const float angle = float(offsets[row]) * frequencies[pair];
  const float c = COS(angle), s = SIN(angle);
  const float x = {_normed("from", first, rotation)};
  const float y = {_normed("from", second, rotation)};
  to[{first}] = T(x * c - y * s);
  to[{second}] = T(x * s + y * c);
}}
for (int one = ROTATED + lane; one < K_DIM; one += {LANES}) {{
  to[one] = T({_normed("from", "one", rotation)});
}}
""")


def blocks(q_vectors: int, kv_vectors: int, tail_bytes: int, piece: int) -> int:
    return -(-(q_vectors + kv_vectors) // WARPS) + -(-(tail_bytes // piece) // THREADS)


def _normed(vector: str, place: str, rotation: Rotation) -> str:
    value = f"float({vector}[{place}])"
    if not rotation.normed:
        return value
    weight = f"float(is_query ? query_weight[{place}] : key_weight[{place}])"
    return f"{value} * factor * {weight}"
