"""Weight matrices before they are packed for a kernel: dense, or in groups that share a scale.

Letters: N rows (outputs), K columns (inputs), G = K / 32 groups of a row. Any thread. Knows no kernels and no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # GGUF's block: weights of a row that share a scale


@dataclass(frozen=True, slots=True)
class Grouped:
    """weight = values * scale + minimum, group by group."""

    values: Tensor  # [N, K] uint8 0..15, or int8
    scale: Tensor  # [N, G] float32
    minimum: Tensor  # [N, G] float32

    @property
    def is_4bit(self) -> bool:
        return self.values.dtype == torch.uint8

    def dense(self) -> Tensor:
        rows, columns = self.values.shape
        groups = self.values.view(rows, columns // GROUP, GROUP).float()  # [N, G, 32]
        return groups.mul_(self.scale[..., None]).add_(self.minimum[..., None]).view(rows, columns)


Weight = Tensor | Grouped


def dense(weight: Weight) -> Tensor:
    """The matrix itself [N, K]; float32 where it was grouped."""
    return weight.dense() if isinstance(weight, Grouped) else weight


def concat_rows(weights: Sequence[Weight]) -> Weight:
    """One matrix over several: dense as soon as their formats differ."""
    grouped = [weight for weight in weights if isinstance(weight, Grouped)]
    if len(grouped) == len(weights) and len({weight.is_4bit for weight in grouped}) == 1:
        return Grouped(
            torch.cat([weight.values for weight in grouped]),
            torch.cat([weight.scale for weight in grouped]),
            torch.cat([weight.minimum for weight in grouped]),
        )
    return torch.cat([dense(weight) for weight in weights])


def quantize_4bit(weight: Tensor) -> Grouped:
    """Round a dense matrix to 4 bits with a scale and a minimum per group, as GGUF's Q4_1 does. K % 32 == 0."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)  # [N, G, 32]
    low, high = groups.aminmax(dim=-1)
    scale = (high - low) / 15
    step = torch.where(scale == 0, 1.0, scale)
    values = ((groups - low[..., None]) / step[..., None]).round_().clamp_(0, 15)
    return Grouped(values.to(torch.uint8).view(rows, columns), scale, low)


def paired_rows(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """The row order that makes half-split rotary interleaved: in each head (i, i + rotary_dim / 2) become neighbours.

    Applied to q and k alike it leaves q · k as it is, and rotary becomes one complex multiplication (`decoder.py`).
    """
    pairs = torch.arange(rotary_dim).view(2, rotary_dim // 2).T.reshape(-1)
    head = torch.cat([pairs, torch.arange(rotary_dim, head_dim)])
    return (torch.arange(num_heads)[:, None] * head_dim + head).reshape(-1)
