"""The kernel between a layer's joined projection and the attention of a prefill pass.

It applies norms and RoPE to queries and keys, and puts queries, keys and values where attention
reads them (`kvd.worker.attention.pass_layout`): each chunk padded at its end, with zeros. A warp
processes one vector of one place.
"""

from __future__ import annotations

from kvd.worker.attention.kernels.append import THREADS
from kvd.worker.attention.kernels.arguments import Rotation
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.rotate import WARPS, add_rotation
from kvd.worker.attention.kernels.shape import LANES
from kvd.worker.attention.kernels.text import Text


def spread_source(
    language: Language, q_heads: int, kv_heads: int, k_dim: int, v_dim: int, rotation: Rotation
) -> str:
    text = Text(1)
    text.add(language.prologue)
    text.add(f"""
constexpr int Q_HEADS = {q_heads}, HEADS = {kv_heads}, K_DIM = {k_dim}, V_DIM = {v_dim};
constexpr int VALUES = (Q_HEADS + HEADS) * K_DIM, ROW = VALUES + HEADS * V_DIM;
constexpr int EACH = Q_HEADS + 2 * HEADS;
const int vector = block.x * {WARPS} + warp;
if (vector >= sources_shape[0] * EACH) return;
const int place = vector / EACH, which = vector % EACH, row = sources[place];
if (which >= Q_HEADS + HEADS) {{
  const int head = which - Q_HEADS - HEADS;
  {language.output} T* to = new_values + (place * HEADS + head) * V_DIM;
  for (int one = lane; one < V_DIM; one += {LANES}) {{
    to[one] = row < 0 ? T(0.0f) : qkv[row * ROW + VALUES + head * V_DIM + one];
  }}
  return;
}}
const bool is_query = which < Q_HEADS;
{language.output} T* to = new_queries + (place * Q_HEADS + which) * K_DIM;
if (!is_query) to = new_keys + (place * HEADS + which - Q_HEADS) * K_DIM;
if (row < 0) {{
  for (int one = lane; one < K_DIM; one += {LANES}) to[one] = T(0.0f);
  return;
}}
GLOBAL T* from = qkv + row * ROW + which * K_DIM;
""")
    add_rotation(text, rotation)
    return str(text)


def blocks(places: int, q_heads: int, kv_heads: int) -> int:
    return -(-places * (q_heads + 2 * kv_heads) // (THREADS // LANES))
