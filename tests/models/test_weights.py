"""Grouped weights: fusing, rounding, and the row order that makes rotary pairs neighbours."""

from __future__ import annotations

import pytest
import torch

from service.models.weights import Grouped, concat_rows, dense, paired_rows, quantize_4bit


def grouped(rows: int, seed: int) -> Grouped:
    torch.manual_seed(seed)
    return quantize_4bit(torch.randn(rows, 64))


def test_fusing_keeps_every_row() -> None:
    parts = [grouped(3, 1), grouped(5, 2)]
    together = concat_rows(parts)
    assert isinstance(together, Grouped)
    assert torch.equal(dense(together), torch.cat([part.dense() for part in parts]))


def test_fusing_different_formats_gives_a_dense_matrix() -> None:
    plain = torch.randn(2, 64)
    together = concat_rows([grouped(3, 1), plain])
    assert isinstance(together, torch.Tensor)
    assert torch.equal(together[3:], plain)


def test_four_bits_are_at_most_half_a_step_off() -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    weight[0, :32] = 0.25  # a group without any spread
    rounded = quantize_4bit(weight)
    steps = rounded.scale.repeat_interleave(32, dim=1)
    assert ((rounded.dense() - weight).abs() <= steps / 2 + 1e-6).all()
    assert rounded.values.max() <= 15


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_paired_rows_turn_half_split_rotary_into_neighbouring_pairs(rotary_dim: int) -> None:
    order = paired_rows(num_heads=2, head_dim=8, rotary_dim=rotary_dim)
    assert sorted(order.tolist()) == list(range(16))
    half = rotary_dim // 2
    for head in range(2):
        for i in range(half):
            assert order[head * 8 + 2 * i : head * 8 + 2 * i + 2].tolist() == [head * 8 + i, head * 8 + i + half]
        assert order[head * 8 + rotary_dim : head * 8 + 8].tolist() == list(range(head * 8 + rotary_dim, head * 8 + 8))
