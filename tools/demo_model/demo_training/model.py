"""The Qwen3 architecture in torch, for training: all tokens of a batch are on one flat axis.

So everything except attention is independent of the sequence length, and is compiled only once for
all lengths of the curriculum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The shape of the model; ``gain`` is the initial value of the QK-norm scales."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    theta: float = 1e6
    epsilon: float = 1e-6
    positions: int = 16384
    gain: float = 1.6

    def as_qwen3(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta,
            "tie_word_embeddings": True,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, to be stored with a checkpoint."""
        return asdict(self)


def _norm(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * scale


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def before_attention(
    x: Tensor,
    norm: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, (tokens, heads, head_dim) each."""
    size = q_norm.shape[0]
    h = _norm(x, norm, epsilon).to(dtype)
    q = F.linear(h, q_weight.to(dtype)).unflatten(-1, (-1, size))
    k = F.linear(h, k_weight.to(dtype)).unflatten(-1, (-1, size))
    v = F.linear(h, v_weight.to(dtype)).unflatten(-1, (-1, size))
    q = _rotate(_norm(q, q_norm, epsilon), cos, sin).to(dtype)
    k = _rotate(_norm(k, k_norm, epsilon), cos, sin).to(dtype)
    return q, k, v


def after_attention(
    x: Tensor,
    attended: Tensor,
    o_weight: Tensor,
    norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    dropout: float,
) -> Tensor:
    """Add the attention's output, then the feed-forward block's."""
    x = x + F.dropout(F.linear(attended.flatten(1), o_weight.to(dtype)), dropout)
    h = _norm(x, norm, epsilon).to(dtype)
    h = F.silu(F.linear(h, gate.to(dtype))) * F.linear(h, up.to(dtype))
    return x + F.dropout(F.linear(h, down.to(dtype)), dropout)


def weighted_loss(
    x: Tensor,
    norm: Tensor,
    embedding: Tensor,
    targets: Tensor,
    weights: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weighted mean of the cross-entropy."""
    h = _norm(x, norm, epsilon).to(dtype)
    logits = F.linear(h, embedding.to(dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def _attend(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Run causal attention over rows of ``length`` tokens."""
    q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


class Block(nn.Module):
    """The parameters of one layer."""

    def __init__(self, c: Config) -> None:
        """Draw random matrices; those that write to the residual stream start at zero."""
        super().__init__()
        std = 0.7 / math.sqrt(c.hidden)

        def matrix(rows: int, columns: int, scale: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) * scale)

        self.input_layernorm = nn.Parameter(torch.ones(c.hidden))
        self.q_proj = matrix(c.heads * c.head_dim, c.hidden, std)
        self.k_proj = matrix(c.kv_heads * c.head_dim, c.hidden, std)
        self.v_proj = matrix(c.kv_heads * c.head_dim, c.hidden, std)
        self.o_proj = matrix(c.hidden, c.heads * c.head_dim, 0.0)
        self.q_norm = nn.Parameter(torch.full((c.head_dim,), c.gain))
        self.k_norm = nn.Parameter(torch.full((c.head_dim,), c.gain))
        self.post_attention_layernorm = nn.Parameter(torch.ones(c.hidden))
        self.gate_proj = matrix(c.intermediate, c.hidden, std)
        self.up_proj = matrix(c.intermediate, c.hidden, std)
        self.down_proj = matrix(c.hidden, c.intermediate, 0.0)


class Qwen3(nn.Module):
    """The whole model; ``dtype`` is the type of the matrix products."""

    def __init__(
        self, config: Config, dtype: torch.dtype = torch.float32, dropout: float = 0.0
    ) -> None:
        """Create the parameters. On a GPU, call ``compile_parts`` next."""
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.dropout = dropout
        self.embed_tokens = nn.Parameter(torch.randn(config.vocabulary, config.hidden) * 0.04)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self._before: Callable[..., tuple[Tensor, Tensor, Tensor]] = before_attention
        self._after: Callable[..., Tensor] = after_attention
        self._loss: Callable[..., Tensor] = weighted_loss
        self._rotation: tuple[Tensor, Tensor] | None = None

    def compile_parts(self) -> None:
        """Compile the parts whose shapes are the same for each sequence length."""
        self._before = torch.compile(before_attention, dynamic=False)
        self._after = torch.compile(after_attention, dynamic=False)
        self._loss = torch.compile(weighted_loss, dynamic=False)

    def rotation(self, rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of RoPE, (tokens, 1, head_dim / 2)."""
        if self._rotation is None:
            half = self.config.head_dim // 2
            frequencies = self.config.theta ** (-torch.arange(half, dtype=torch.float64) / half)
            angles = torch.outer(
                torch.arange(self.config.positions, dtype=torch.float64), frequencies
            ).unsqueeze(1)
            self._rotation = angles.cos().float().to(device), angles.sin().float().to(device)
        cos, sin = self._rotation
        return cos[:length].repeat(rows, 1, 1), sin[:length].repeat(rows, 1, 1)

    def hidden(self, ids: Tensor, training: bool) -> Tensor:
        """Return the residual stream after the last layer, (rows * length, hidden)."""
        rows, length = ids.shape
        before = self._before if training else before_attention
        after = self._after if training else after_attention
        dropout = self.dropout if training else 0.0
        epsilon, dtype = self.config.epsilon, self.dtype
        cos, sin = self.rotation(rows, length, ids.device)
        x = F.embedding(ids.flatten(), self.embed_tokens)
        for b in self.layers:
            q, k, v = before(
                x, b.input_layernorm, b.q_proj, b.k_proj, b.v_proj, b.q_norm, b.k_norm,
                cos, sin, epsilon, dtype,
            )  # fmt: skip
            x = after(
                x, _attend(q, k, v, length), b.o_proj, b.post_attention_layernorm,
                b.gate_proj, b.up_proj, b.down_proj, epsilon, dtype, dropout,
            )  # fmt: skip
        return x

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted training loss of (rows, length) tokens."""
        x = self.hidden(ids, training=True)
        epsilon, dtype = self.config.epsilon, self.dtype
        return self._loss(
            x, self.norm, self.embed_tokens, targets.flatten(), weights.flatten(), epsilon, dtype
        )

    @torch.no_grad()
    def logits(self, ids: Tensor, last: int) -> Tensor:
        """Return float32 logits of the last ``last`` positions of each row."""
        x = self.hidden(ids, training=False).unflatten(0, ids.shape)[:, -last:]
        h = _norm(x, self.norm, self.config.epsilon).to(self.dtype)
        return F.linear(h, self.embed_tokens.to(self.dtype)).float()

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the parameters under the names of Qwen3 checkpoints."""
        tensors = {
            "model.embed_tokens.weight": self.embed_tokens,
            "model.norm.weight": self.norm,
        }
        attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        feed_forward = ("gate_proj", "up_proj", "down_proj")
        for i, block in enumerate(self.layers):
            for name, parameter in block.named_parameters():
                part = "self_attn." if name in attention else "mlp." if name in feed_forward else ""
                tensors[f"model.layers.{i}.{part}{name}.weight"] = parameter
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def load_hf(self, tensors: dict[str, Tensor]) -> None:
        """Copy the parameters from a checkpoint."""
        own = self.hf_tensors()
        assert own.keys() == tensors.keys()
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
