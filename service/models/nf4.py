"""NF4 matrices: 4 bits a weight with a scale per 64, through bitsandbytes, one copy of each in memory.

The engine thread's. Knows no layers and no files. Three forms: blocks for our own kernel, which is the fastest
(`linear.py`); where it was not compiled, tiles for bitsandbytes' AVX-512 kernel; and what bitsandbytes keeps itself
(CUDA, and CPUs without either).

Letters: M rows of activations, K inputs, N outputs, T = N / 32 tiles, B = K / 64 blocks of a row.

Blocks and tiles are quantised straight from the checkpoint's matrix, a few rows at a time: a code table of 256 entries
with each NF4 value 16 times makes the 8-bit quantiser of bitsandbytes give the NF4 index in the upper half of a byte.
Measured here for 67 M weights (2 threads): 0.3 s, against 1.6 s of `quantize_4bit` and 0.27 s of its repacking, and no
int32 copies of the matrix. Scales are kept in bf16, as the kernel wants them: doubly quantised ones would be rounded
twice and be no smaller in memory.

Many rows unpack the tiles a few at a time, into a buffer that stays in the cache, and run one GEMM on each. Measured
for 16384 x 4096 with 2 threads beside other programs (alone it takes half of that), ms for M rows:

    M                                1      16     48     64     128    512
    4-bit kernel                     12     50     135    177    365    1501
    unpack 32 tiles + bf16 GEMM      196    204    217    220    327    343
    bf16 GEMM alone                  24     25     36     36     68     141
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from service.models.native import GROUP_BYTES, NF4, interleave_4bit, interleave_scales
from service.models.native import TILE as NATIVE_TILE

TILE = 32  # rows that the kernel works on together
BLOCK = 64  # weights of a row that share a scale
MAX_TILED_ROWS = 63  # from 64 rows on unpacking wins, see above
MAX_PACKED_ROWS = 15  # where a dense copy is kept: see linear.py
_TILES_AT_ONCE = 32
_ROWS_AT_ONCE = 2048  # while quantising

Parts = dict[str, Tensor]  # what a matrix is made of, by name: what the quantised cache keeps


def _bitsandbytes() -> Any:
    """Imported late: that takes seconds, and what our own kernel runs and is quantised already does not need it."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # NOTE: it warns that an optional package is missing
    import bitsandbytes

    return bitsandbytes


def can_block(weight: Tensor) -> bool:
    rows, columns = weight.shape
    return rows % NATIVE_TILE == 0 and columns % BLOCK == 0


def quantize_blocks(weight: Tensor) -> Parts:
    """[N, K] of any float type -> the blocks of `step.c`. Extra memory: some rows."""
    rows, columns = weight.shape
    size = GROUP_BYTES[NF4]  # a block is two groups: their values, then the scales of both
    blocks = torch.empty(rows // NATIVE_TILE, columns // BLOCK, 2 * size, dtype=torch.uint8)
    for some, indices, largest in _quantized(weight):
        tiles = blocks[some.start // NATIVE_TILE : some.stop // NATIVE_TILE]
        tiles[..., :512] = interleave_4bit(indices).view(*tiles.shape[:2], 512)
        tiles[..., 512:] = interleave_scales(largest)
    return {"blocks": blocks.view(rows // NATIVE_TILE, -1, size)}


def _quantized(weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows at a time: which, their NF4 indices [n, K] uint8 and the largest magnitudes [n, B] float32."""
    bnb = _bitsandbytes()
    rows, columns = weight.shape
    code = bnb.functional.get_4bit_type("nf4", device="cpu").repeat_interleave(16)
    quantize = torch.ops.bitsandbytes.quantize_blockwise.default
    for start in range(0, rows, _ROWS_AT_ONCE):
        some = slice(start, min(start + _ROWS_AT_ONCE, rows))
        bytes_, largest = quantize(weight[some].contiguous(), code, BLOCK)
        yield some, bytes_.view(-1, columns).bitwise_right_shift(4), largest.view(-1, columns // BLOCK)


class TiledNf4Linear:
    """NF4 in the order of the AVX-512 kernel.

    Byte [t, k, j] of `values`, with j < 32, holds the weights at column 2k + j % 2 of row j // 2 of tile t (lower half
    of the byte) and of row 16 + j // 2 (upper half).
    """

    def __init__(self, parts: Parts, dtype: torch.dtype, *, keeps_dense: bool) -> None:
        bnb = _bitsandbytes()

        self._values = parts["values"]  # [N, K / 2] uint8
        self._scales = parts["scales"]  # [B, N] bf16
        self._shape = (self._values.shape[0], 2 * self._values.shape[1])
        self._code = bnb.functional.get_4bit_type("nf4", device="cpu")  # [16]
        self._multiply = torch.ops.bitsandbytes.gemv_4bit.default
        self._dequantize = torch.ops.bitsandbytes.dequantize_blockwise.default
        # Which weight a whole byte stands for, in the upper and in the lower rows of a tile.
        self._codes = (self._code.repeat(16), self._code.repeat_interleave(16))
        self._max_rows = MAX_PACKED_ROWS if keeps_dense else MAX_TILED_ROWS
        self._dense = self._unpack_all(dtype) if keeps_dense else None

    @staticmethod
    def has_kernel() -> bool:
        return bool(_bitsandbytes().functional.has_avx512bf16())

    @classmethod
    def can_tile(cls, weight: Tensor) -> bool:
        rows, columns = weight.shape
        return weight.device.type == "cpu" and rows % TILE == 0 and columns % BLOCK == 0 and cls.has_kernel()

    @staticmethod
    def quantize(weight: Tensor) -> Parts:
        """[N, K] of any float type -> the parts. Extra memory: some rows."""
        rows, columns = weight.shape
        values = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty(columns // BLOCK, rows, dtype=torch.bfloat16)
        for some, indices, largest in _quantized(weight):
            halves = indices.view(-1, 2, TILE // 2, columns)  # [T, 2, 16, K]
            both = halves[:, 0].bitwise_or(halves[:, 1].bitwise_left_shift(4))
            pairs = both.view(torch.int16).transpose(1, 2)  # [T, K / 2, 16]
            values[some] = pairs.contiguous().view(torch.uint8).view(-1, columns // 2)
            scales[:, some] = largest.T
        return {"values": values, "scales": scales}

    def parts(self) -> Parts:
        return {"values": self._values, "scales": self._scales}

    def __call__(self, x: Tensor, /) -> Tensor:
        if x.shape[0] <= self._max_rows:
            few: Tensor = self._multiply(x, self._values, self._shape, self._scales, self._code, BLOCK)
            return few
        if self._dense is not None:
            return F.linear(x, self._dense)
        return self._multiply_many(x)

    def _multiply_many(self, x: Tensor) -> Tensor:
        num_rows, (rows, columns) = x.shape[0], self._shape
        out = torch.empty(num_rows, rows // TILE, 2, TILE // 2, dtype=x.dtype)  # [M, T, 2, 16]

        def multiply(first: int, half: int, weight: Tensor) -> None:
            tiles = weight.shape[0]
            product = F.linear(x, weight.view(-1, columns))
            out[:, first : first + tiles, half] = product.view(num_rows, tiles, TILE // 2)

        self._unpack(x.dtype, multiply)
        return out.view(num_rows, rows)

    def _unpack_all(self, dtype: torch.dtype) -> Tensor:
        rows, columns = self._shape
        out = torch.empty(rows // TILE, 2, TILE // 2, columns, dtype=dtype)

        def copy(first: int, half: int, weight: Tensor) -> None:
            out[first : first + weight.shape[0], half] = weight

        self._unpack(dtype, copy)
        return out.view(rows, columns)

    def _unpack(self, dtype: torch.dtype, use: Callable[[int, int, Tensor], None]) -> None:
        """Calls `use(first tile, half, weights [tiles, 16, K])` for every few tiles and both halves of them."""
        rows, columns = self._shape
        words = self._values.view(torch.int16).view(rows // TILE, columns // 2, TILE // 2)
        scales = self._scales.T.float().view(rows // TILE, 2, TILE // 2, columns // BLOCK)
        for first in range(0, rows // TILE, _TILES_AT_ONCE):
            some = slice(first, first + _TILES_AT_ONCE)
            packed = words[some].transpose(1, 2).contiguous().view(torch.uint8)  # [tiles, 16, K]
            for half, code in enumerate(self._codes):
                use(first, half, self._dequantize(packed, scales[some, half].contiguous(), code, BLOCK, dtype))


class Nf4Linear:
    """NF4 as bitsandbytes keeps it, with doubly quantised scales: any device, any shape."""

    def __init__(self, weight: Tensor | Parts, dtype: torch.dtype, *, keeps_dense: bool = False) -> None:
        bnb = _bitsandbytes()

        if isinstance(weight, Tensor):
            placed = weight.to(dtype).contiguous()
            packed, state = bnb.functional.quantize_4bit(placed, quant_type="nf4", compress_statistics=True)
        else:
            weight = dict(weight)
            packed = weight.pop("weight")
            state = bnb.functional.QuantState.from_dict(weight, packed.device)
            state.dtype = dtype
        self._packed: Tensor = packed
        self._state: Any = state
        self._matmul = bnb.matmul_4bit
        self._unpack = bnb.functional.dequantize_4bit
        self._dense: Tensor | None = self._unpack(packed, state) if keeps_dense else None

    def parts(self) -> Parts:
        return {"weight": self._packed, **self._state.as_dict(packed=True)}

    def __call__(self, x: Tensor, /) -> Tensor:
        if x.is_cuda:
            product: Tensor = self._matmul(x, self._packed.t(), self._state)
            return product
        return F.linear(x, self._dense if self._dense is not None else self._unpack(self._packed, self._state))
