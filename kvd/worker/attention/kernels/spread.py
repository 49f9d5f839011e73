"""The kernel between a layer's joined projection and the attention of a prefill pass.

It applies norms and RoPE to queries and keys, and separates queries, keys and values. A warp
processes one vector of one token.
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
if (vector >= qkv_shape[0] * EACH) return;
const int row = vector / EACH, which = vector % EACH;
if (which >= Q_HEADS + HEADS) {{
  const int head = which - Q_HEADS - HEADS;
  {language.output} T* to = new_values + (row * HEADS + head) * V_DIM;
  for (int one = lane; one < V_DIM; one += {LANES}) {{
    to[one] = qkv[row * ROW + VALUES + head * V_DIM + one];
  }}
  return;
}}
const bool is_query = which < Q_HEADS;
{language.output} T* to = new_queries + (row * Q_HEADS + which) * K_DIM;
if (!is_query) to = new_keys + (row * HEADS + which - Q_HEADS) * K_DIM;
GLOBAL T* from = qkv + row * ROW + which * K_DIM;
""")
    add_rotation(text, rotation)
    return str(text)


def blocks(tokens: int, q_heads: int, kv_heads: int) -> int:
    return -(-tokens * (q_heads + 2 * kv_heads) // (THREADS // LANES))
