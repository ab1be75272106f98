"""Matrix times activations, in the weight formats that are worth their memory: dense, packed 4-bit, NF4.

The weights' owner is the engine thread. Knows no layers: a model asks `LinearFormat` to make what it multiplies with.
Letters: M rows of activations, K inputs, N outputs.

Few rows are bound by memory, many by arithmetic, so there are two kernels, or a copy in bf16 for the many. Measured
here (2 threads, Xeon with AVX-512 and AMX, torch 2.13), ms for M rows times 30 matrices of 3072 x 576, one after
another:

    kernel                    M=1    4      8      16     32     64     256
    few rows (step.c)         0.8    1.1    1.8    4      10     24     -
    many (prefill.c, AMX)     -      -      3.6    3.8    5.0    7.3    27
    torch's int4pack, bf16    1.7    3.1    5.7    12     -      -      -
    bf16 GEMM                 11     12     11     11     13     15     38

and times 2 layers of ChatGLM-6B in NF4 (0.4 G weights), where no bf16 copy fits:

    few rows                  16     20     33     60     122    240    -
    many                      -      -      27     27     35     47     145
    unpacked, bf16 GEMM       -      -      -      203    173    207    356
    bitsandbytes              20     28     -      -      -      -      -

That for few rows reads 15 GB/s, a plain sum 16; both need a C compiler at the install (`native.py`). It rounds
activations to 15 bits: in the default model's answers to ten questions that costs 0.0001 nats against float32. The one
for many rounds them and the weights to bf16, torch's kernel them and the scales. In float32 torch's is a plain loop
(only bf16 is vectorised): exact, 30 times slower, for checking only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from service.models.errors import ModelError
from service.models.native import NF4, TILE, Library, PackedMatrix, library
from service.models.nf4 import MAX_PACKED_ROWS, Nf4Linear, Parts, TiledNf4Linear, can_block, quantize_blocks
from service.models.weights import GROUP, Grouped, Weight, dense, quantize_4bit

MAX_NATIVE_ROWS = 32  # where the kernel for many is not there
MAX_FEW_ROWS = 8  # where it is
_UNPACKED_WEIGHTS = 2**20  # 2 MB of them at once
_int4_matmul = torch.ops.aten._weight_int4pack_mm_for_cpu.default


class Linear(Protocol):
    """Activations [M, K] in the model's dtype -> [M, N] in the same dtype. No bias."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class DenseLinear:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight  # [N, K]

    def __call__(self, x: Tensor, /) -> Tensor:
        return F.linear(x, self._weight)


class Int4Linear:
    """4 bits a weight for torch's CPU kernel: w = (q - 8) * scale + zero, zero = minimum + 8 * scale."""

    def __init__(self, weight: Grouped, dtype: torch.dtype, *, keeps_dense: bool) -> None:
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.values.int(), 1)
        zero = weight.minimum + 8 * weight.scale
        pairs = torch.stack([weight.scale, zero], dim=-1)  # [N, G, 2]
        self._scale_and_zero = pairs.transpose(0, 1).to(dtype).contiguous()  # [G, N, 2], the kernel's order
        self._dense = weight.dense().to(dtype) if keeps_dense else None

    @staticmethod
    def can_pack(weight: Weight) -> bool:
        """The kernel works in tiles of 16 rows and groups of 32 columns."""
        rows, columns = weight.values.shape if isinstance(weight, Grouped) else weight.shape
        return rows % 16 == 0 and columns % GROUP == 0

    def __call__(self, x: Tensor, /) -> Tensor:
        if x.shape[0] > MAX_PACKED_ROWS and self._dense is not None:
            return F.linear(x, self._dense)
        return _int4_matmul(x, self._packed, GROUP, self._scale_and_zero)


class NativeLinear:
    """4 bits a weight for our own kernel, which a `FusedStep` may also call on `matrix` itself.

    Many rows take the copy in bf16, or NF4 unpacked a few tiles at a time, into a buffer that stays in the cache.
    """

    def __init__(self, matrix: PackedMatrix, dense: Tensor | None) -> None:
        self.matrix = matrix
        self._dense = dense  # [N, K]

    @classmethod
    def of_nf4(cls, parts: Parts, functions: Library, *, keeps_dense: bool) -> NativeLinear:
        matrix = PackedMatrix(parts["blocks"], NF4, functions)
        is_worth_it = keeps_dense and not matrix.has_many
        return cls(matrix, matrix.unpack(0, matrix.shape[0] // TILE).T if is_worth_it else None)

    def parts(self) -> Parts:
        return {"blocks": self.matrix.blocks}

    def __call__(self, x: Tensor, /) -> Tensor:
        has_many = self.matrix.has_many
        if x.shape[0] <= (MAX_FEW_ROWS if has_many else MAX_NATIVE_ROWS):
            return self.matrix(x).to(x.dtype)
        if has_many:
            return self.matrix.multiply_many(x).to(x.dtype)
        if self._dense is not None:
            return F.linear(x, self._dense)
        return self._multiply_many(x) if self.matrix.kind == NF4 else self.matrix(x).to(x.dtype)

    def _multiply_many(self, x: Tensor) -> Tensor:
        rows, columns = self.matrix.shape
        num_tiles, at_once = rows // TILE, max(1, _UNPACKED_WEIGHTS // (TILE * columns))
        room = torch.empty(columns * at_once * TILE, dtype=torch.bfloat16)
        out = torch.empty(x.shape[0], rows, dtype=x.dtype)
        for first in range(0, num_tiles, at_once):
            num = min(at_once, num_tiles - first)
            out[:, first * TILE : (first + num) * TILE] = x @ self.matrix.unpack(first, num, room)
        return out


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """How a model's matrices are kept. `quantization`: "auto" (as the file is), "none", "int4" or "nf4"."""

    quantization: str
    dtype: torch.dtype
    device: torch.device
    keeps_dense: bool  # a packed matrix also keeps a copy in `dtype`, for many rows

    def make(self, weight: Weight) -> Linear:
        """Raises `ModelError` when the format cannot be had on this device."""
        if self._wants_int4(weight) and Int4Linear.can_pack(weight):
            grouped = weight if isinstance(weight, Grouped) and weight.is_4bit else quantize_4bit(dense(weight))
            return self._make_int4(grouped)
        placed = dense(weight).to(self.device)
        if self.quantization == "nf4":
            if self.has_native and can_block(placed):
                return self.restore(quantize_blocks(placed))
            if TiledNf4Linear.can_tile(placed):
                return self.restore(TiledNf4Linear.quantize(placed))
            return Nf4Linear(placed, self.dtype, keeps_dense=self.keeps_dense)
        return DenseLinear(placed.to(self.dtype).contiguous())

    @property
    def has_native(self) -> bool:
        """Whether the compiled kernels serve this device and dtype."""
        return self.device.type == "cpu" and self.dtype == torch.bfloat16 and library() is not None

    def restore(self, parts: Parts) -> NativeLinear | TiledNf4Linear | Nf4Linear:
        """The NF4 matrix that gave these parts."""
        functions = library()
        if "blocks" in parts and functions is not None:
            return NativeLinear.of_nf4(parts, functions, keeps_dense=self.keeps_dense)
        if "scales" in parts:
            return TiledNf4Linear(parts, self.dtype, keeps_dense=self.keeps_dense)
        placed = {name: part.to(self.device) for name, part in parts.items()}
        return Nf4Linear(placed, self.dtype, keeps_dense=self.keeps_dense)

    def _make_int4(self, weight: Grouped) -> Linear:
        functions = library()
        if functions is None or self.dtype != torch.bfloat16:
            return Int4Linear(weight, self.dtype, keeps_dense=self.keeps_dense)
        matrix = PackedMatrix.pack(weight, functions)
        is_worth_it = self.keeps_dense and not matrix.has_many
        return NativeLinear(matrix, weight.dense().to(self.dtype) if is_worth_it else None)

    def _wants_int4(self, weight: Weight) -> bool:
        if self.quantization == "int4":
            return True
        return self.quantization == "auto" and isinstance(weight, Grouped) and weight.is_4bit

    def check(self) -> None:
        """Raises `ModelError` for a combination that no kernel serves."""
        if self.quantization == "int4" and self.device.type != "cpu":
            raise ModelError("quantization int4 is for the CPU: use --quantization nf4 on a GPU")
        if self.device.type == "cpu" and self.dtype == torch.float16 and self.quantization != "none":
            raise ModelError("float16 has no quantised kernel on a CPU: use --dtype bfloat16")
