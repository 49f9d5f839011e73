"""Muon for the matrices, Adam for the rest, and one flat gradient for the all-reduce."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _orthogonalize(g: Tensor) -> Tensor:
    """Push the singular values of a batch of matrices towards 1 (five Newton-Schulz steps)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum with orthogonalized updates; matrices of the same shape are updated together."""

    def __init__(self, parameters: list[nn.Parameter], decay: float, momentum: float) -> None:
        """Group the parameters by shape."""
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros_like(torch.stack(list(g))) for g in self.groups]
        self.decay = decay
        self.momentum = momentum

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply one update with Nesterov momentum."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([p.grad for p in group])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = _orthogonalize(gradient.lerp_(buffer, self.momentum))
            scale = max(1.0, group[0].shape[0] / group[0].shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * scale)


def flat_gradient(model: nn.Module) -> Tensor:
    """Give every parameter a gradient that is a view of one tensor, and return that tensor."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    at = 0
    for p in parameters:
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return flat
