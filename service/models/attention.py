"""KV slots, and attention of one step over them.

The engine thread's. One allocation holds everything: [layers, slots, 2, kv heads, context, head dim], keys at 0 and
values at 1. Room that was never written, or that a failed step left, may hold anything, NaN too: so each row attends
over a view of exactly its own positions. A mask over a longer view would let a stale NaN through (0 * NaN), and its
batched form saves only about 5 microseconds a row.

Letters: N rows, H query heads, G kv heads, D head dim, C context, S positions attended to. The rows of one step come
as "heads" [N, H + 2G, D]: queries, keys and values side by side, rotated, in the KV's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class KvSlots:
    """K and V of every layer and slot. All of it is touched here: memory that is not there is missed at the start, not
    in the middle of an answer, and the process does not grow afterwards."""

    def __init__(
        self, num_layers: int, num_slots: int, num_kv_heads: int, context: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.num_slots = num_slots
        self.context = context
        self.num_kv_heads = num_kv_heads
        shape = (num_layers, num_slots, 2, num_kv_heads, context, head_dim)
        self._all = torch.empty(shape, dtype=dtype, device=device).fill_(0)  # NOTE: zeros() would touch nothing
        self.layers = list(self._all.unbind(0))  # per layer [slots, 2, G, C, D]
        # Views made once, because making one costs as much as a small kernel: [layer][slot] -> [1, G, C, D].
        self.keys = [[slot[0:1] for slot in layer.unbind(0)] for layer in self.layers]
        self.values = [[slot[1:2] for slot in layer.unbind(0)] for layer in self.layers]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._all[:, target, :, :, :length].copy_(self._all[:, source, :, :, :length])


class Attention(Protocol):
    """One step's attention. Writes the rows' keys and values, then attends; heads -> [N, H * D]."""

    def __call__(self, layer: int, heads: Tensor, /) -> Tensor: ...


class DecodeAttention:
    """N rows in N different slots, each at its own position."""

    def __init__(self, kv: KvSlots, slots: Sequence[int], positions: Sequence[int], device: torch.device) -> None:
        self._kv = kv
        self._rows = [(slot, position + 1) for slot, position in zip(slots, positions, strict=True)]
        self._slots = torch.tensor(slots, device=device)
        self._positions = torch.tensor(positions, device=device)

    def __call__(self, layer: int, heads: Tensor, /) -> Tensor:
        kv, num_kv_heads = self._kv, self._kv.num_kv_heads
        num_rows, num_heads, head_dim = heads.shape
        num_queries = num_heads - 2 * num_kv_heads
        new = heads[:, num_queries:].view(num_rows, 2, num_kv_heads, head_dim)
        kv.layers[layer][self._slots, :, :, self._positions] = new
        keys, values = kv.keys[layer], kv.values[layer]
        attend, is_grouped = F.scaled_dot_product_attention, num_queries != num_kv_heads
        queries = heads[:, :num_queries, None].unbind(0)  # N of [H, 1, D]
        out = [
            attend(
                query[None], keys[slot].narrow(2, 0, length), values[slot].narrow(2, 0, length), enable_gqa=is_grouped
            )
            for query, (slot, length) in zip(queries, self._rows, strict=True)
        ]  # N of [1, H, 1, D]
        return (out[0] if num_rows == 1 else torch.cat(out)).view(num_rows, -1)


class PrefillAttention:
    """T tokens of one slot at [start, start + T): each sees what came before it, and itself.

    With `num_mutual`, and start 0, the first so many see each other both ways, as a prefix LM's prompt does.
    """

    def __init__(self, kv: KvSlots, slot: int, start: int, num_tokens: int, *, num_mutual: int = 0) -> None:
        self._kv = kv
        self._slot = slot
        self._start = start
        self._end = start + num_tokens
        self._mask: Tensor | None = None
        if start > 0 or num_mutual:  # additive: a boolean mask is converted again in every layer
            mask = torch.full((num_tokens, self._end), float("-inf"), dtype=kv.layers[0].dtype)
            mask.triu_(start + 1)[:, :num_mutual] = 0
            self._mask = mask.to(kv.layers[0].device)

    def __call__(self, layer: int, heads: Tensor, /) -> Tensor:
        kv, num_kv_heads = self._kv, self._kv.num_kv_heads
        num_tokens, num_heads, head_dim = heads.shape
        num_queries = num_heads - 2 * num_kv_heads
        new = heads[:, num_queries:].view(num_tokens, 2, num_kv_heads, head_dim)
        kv.layers[layer][self._slot, :, :, self._start : self._end] = new.permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(
            heads[:, :num_queries].transpose(0, 1)[None],  # [1, H, T, D]
            kv.keys[layer][self._slot].narrow(2, 0, self._end),
            kv.values[layer][self._slot].narrow(2, 0, self._end),
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=num_queries != num_kv_heads,
        )  # [1, H, T, D]
        return out[0].transpose(0, 1).reshape(num_tokens, -1)
