"""Attention of one step against the textbook formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from service.models.attention import DecodeAttention, KvSlots, PrefillAttention

CPU = torch.device("cpu")
H, G, D, CONTEXT = 6, 2, 16, 32


def slots() -> KvSlots:
    kv = KvSlots(1, 3, G, CONTEXT, D, torch.float32, CPU)
    kv.layers[0].fill_(float("nan"))  # whatever was never written must never be read
    return kv


def textbook(heads: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with a causal mask, one head after the other: [T, H + 2G, D] -> [T, H * D]."""
    out = []
    for head in range(H):
        query, key, value = heads[:, head], heads[:, H + head // (H // G)], heads[:, H + G + head // (H // G)]
        scores = query @ key.T / math.sqrt(D)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        out.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("cut", [0, 1, 7, 19])
def test_prefill_in_one_or_two_parts_is_causal_attention(cut: int) -> None:
    heads = torch.randn(20, H + 2 * G, D, generator=torch.Generator().manual_seed(0))
    kv, parts = slots(), []
    for start, end in ((0, cut), (cut, 20)):
        if end > start:
            parts.append(PrefillAttention(kv, 1, start, end - start)(0, heads[start:end]))
    torch.testing.assert_close(torch.cat(parts), textbook(heads), atol=1e-5, rtol=0)


def test_decode_attends_over_each_rows_own_positions() -> None:
    heads = torch.randn(20, H + 2 * G, D, generator=torch.Generator().manual_seed(0))
    kv = slots()
    for slot, length in ((2, 5), (0, 19)):
        PrefillAttention(kv, slot, 0, length)(0, heads[:length])
    got = DecodeAttention(kv, [2, 0, 1], [5, 19, 0], CPU)(0, heads[[5, 19, 0]])
    torch.testing.assert_close(got, textbook(heads)[[5, 19, 0]], atol=1e-5, rtol=0)


def test_a_copied_prefix_is_bit_for_bit_and_nothing_more() -> None:
    kv = slots()
    PrefillAttention(kv, 0, 0, 9)(0, torch.randn(9, H + 2 * G, D))
    kv.copy_prefix(0, 2, 6)
    assert torch.equal(kv.layers[0][2, :, :, :6], kv.layers[0][0, :, :, :6])
    assert kv.layers[0][2, :, :, 6:].isnan().all()
