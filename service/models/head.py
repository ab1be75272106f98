"""Token embeddings and output logits: the two ends of a decoder, over one vocabulary-sized table.

The engine thread's. Letters: N rows of hidden states, H hidden size, V vocabulary, G = H / 32 groups.
Knows no layers and no sampling.

An 8-bit table (GGUF Q8_0) gives logits in two stages: all V coarsely, then the best few exactly in float32.
Measured for V = 49152, H = 576, one row, one thread, weights not in a cache; error = rms of the difference over rms
of all logits, and the largest over the best 32:

    one stage: exact split into two 4-bit halves, int4pack     5.0 ms   0.28 %   0.24 %
    one stage: dense bf16                                     10.5 ms   0.29 %   0.24 %
    one stage: int8pack, a scale per row                       4.9 ms   1.47 %   1.27 %
    two stages: int8pack, then the best 64 in float32          5.4 ms   1.47 %   0.00 %

A bf16 logit near 20 has steps of 0.125, which alone makes ties at the top: the second stage removes them.

A 16-bit table (ChatGLM: 1.1 GB) stays in its file: a token needs one row of it, and the rows of its best few logits.
Measured for V = 130528, H = 1024, random weights and hidden states that favour no token, some, or few:

                            same best token     divergence in nats
    NF4                     75 %, 84 %, 97 %    0.068, 0.070, 0.015
    NF4, 64 from the file   100 % in all three  0.009, 0.008, 0.0001
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from service.models.linear import Linear, LinearFormat
from service.models.native import PackedMatrix, library
from service.models.tensor_files import FileTensor
from service.models.weights import Grouped, Weight, dense

NUM_REFINED = 64  # covers what top-p 0.8 keeps, with a wide margin for the first stage's error
_int8_matmul = torch.ops.aten._weight_int8pack_mm.default


class Embedding(Protocol):
    def __call__(self, ids: Tensor, /) -> Tensor:
        """Ids [N] int64 -> rows [N, H] float32."""


class Head(Protocol):
    def __call__(self, hidden: Tensor, /) -> Tensor:
        """Normalised hidden states [N, H] float32 -> logits [N, V] float32."""


class DenseEmbedding:
    def __init__(self, table: Tensor) -> None:
        self._table = table  # [V, H]

    def __call__(self, ids: Tensor, /) -> Tensor:
        return F.embedding(ids, self._table).float()


class GroupedEmbedding:
    """Looks rows up in a quantised table: exact, and a quarter of the float32 table's memory."""

    def __init__(self, table: Grouped) -> None:
        self._table = table

    def __call__(self, ids: Tensor, /) -> Tensor:
        table = self._table
        return Grouped(table.values[ids], table.scale[ids], table.minimum[ids]).dense()


class FileEmbedding:
    """Reads rows from the checkpoint's file: exact, and no memory but the system's file cache."""

    def __init__(self, table: FileTensor) -> None:
        self._table = table  # [V, H]

    def __call__(self, ids: Tensor, /) -> Tensor:
        return self._table.rows(ids.tolist()).float()


class LinearHead:
    """One matrix product in the model's dtype."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        self._linear = linear
        self._dtype = dtype

    def __call__(self, hidden: Tensor, /) -> Tensor:
        return self._linear(hidden.to(self._dtype)).float()


class TwoStageHead:
    """All logits from int8 with a scale per row, the best `NUM_REFINED` again in float32. CPU only."""

    def __init__(self, table: Grouped) -> None:
        weight = table.dense()  # [V, H]
        self._rows = GroupedEmbedding(table)
        scale = weight.abs().amax(dim=1).clamp_(min=1e-12) / 127  # [V]
        self._values = (weight / scale[:, None]).round_().to(torch.int8)
        self._scale = scale.bfloat16()

    def __call__(self, hidden: Tensor, /) -> Tensor:
        logits = _int8_matmul(hidden.bfloat16(), self._values, self._scale).float()  # [N, V]
        return _refine(logits, hidden, self._rows)


class NativeHead:
    """All logits from the 8-bit table itself and activations of 15 bits, the best `NUM_REFINED` again in float32."""

    def __init__(self, table: Grouped, matrix: PackedMatrix) -> None:
        self._matrix = matrix
        self._rows = GroupedEmbedding(table)

    def __call__(self, hidden: Tensor, /) -> Tensor:
        return _refine(self._matrix(hidden), hidden, self._rows)


class RefinedHead:
    """All logits from a quantised matrix, the best `NUM_REFINED` again from the checkpoint's own rows. CPU only."""

    def __init__(self, coarse: LinearHead, rows: FileEmbedding) -> None:
        self._coarse = coarse
        self._rows = rows

    def __call__(self, hidden: Tensor, /) -> Tensor:
        return _refine(self._coarse(hidden), hidden, self._rows)


def _refine(logits: Tensor, hidden: Tensor, rows: Embedding) -> Tensor:
    """`logits` [N, V], with the best of each row computed again in float32."""
    best = logits.topk(min(NUM_REFINED, logits.shape[1]), sorted=False).indices  # [N, 64]
    weight = rows(best.view(-1)).view(*best.shape, -1)  # [N, 64, H]
    exact = (weight * hidden[:, None]).sum(-1)  # NOTE: a matrix product's last bits depend on the number of rows
    return logits.scatter_(1, best, exact)


def make_embedding(table: Weight, form: LinearFormat) -> Embedding:
    if form.quantization != "none" and isinstance(table, Grouped) and form.device.type == "cpu":
        return GroupedEmbedding(table)
    return DenseEmbedding(dense(table).to(form.device, form.dtype))


def make_head(table: Weight, form: LinearFormat) -> Head:
    """The output matrix [V, H] in its best form. 8-bit tables stay 8-bit, unless everything is to be dense."""
    is_8bit = isinstance(table, Grouped) and not table.is_4bit
    if is_8bit and form.quantization != "none" and form.device.type == "cpu" and form.dtype == torch.bfloat16:
        assert isinstance(table, Grouped)
        functions = library()
        if functions is not None and PackedMatrix.can_pack(table):
            return NativeHead(table, PackedMatrix.pack(table, functions))
        return TwoStageHead(table)
    plain = LinearFormat("none", form.dtype, form.device, keeps_dense=False) if is_8bit else form
    return LinearHead(plain.make(table), form.dtype)
