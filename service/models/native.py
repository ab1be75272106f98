"""The compiled decode step (`step.c`) and prefill (`prefill.c`): packs matrices, and calls them. Optional, CPU only.

The engine thread's. Knows no files and no models. Everything that C cannot check is checked here, so that no input
makes it read or write where it may not. Calls release the GIL.

Letters: M rows, N outputs, K inputs, T = N / 16 tiles, G = K / 32 groups, E hidden size, D head dim, C context.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from service.engine.base import Aborted
from service.models.compiled import find_lack, find_libraries
from service.models.weights import GROUP, Grouped

TILE = 16
_HUGE_PAGE = 2**21
_CHUNK = 2**26
Q4, Q8, NF4 = 4, 8, 40  # kinds of a matrix
GROUP_BYTES = {Q4: 320, Q8: 544, NF4: 272}  # of a tile, for one group of columns
_MAX_HEAD_DIM, _MAX_SHARED = 256, 32  # of step.h
_MIN_PREFILL_CONTEXT = 32  # of prefill.c

log = logging.getLogger(__name__)


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("kind", ctypes.c_int64), ("data", ctypes.c_void_p),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p), ("qkv", _Matrix), ("qkv_bias", ctypes.c_void_p), ("out", _Matrix),
        ("mlp_norm", ctypes.c_void_p), ("gate_up", _Matrix), ("down", _Matrix), ("kv", ctypes.c_void_p),
    )  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_int64), ("mlp", ctypes.c_int64), ("heads", ctypes.c_int64), ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64), ("context", ctypes.c_int64), ("num_layers", ctypes.c_int64),
        ("eps", ctypes.c_float), ("layers", ctypes.POINTER(_Layer)),
    )  # fmt: skip


_SHOULD_ABORT = ctypes.CFUNCTYPE(ctypes.c_int32)


class Library:
    """The functions of one compiled variant. Raises `OSError` when the file cannot be loaded.

    `has_prefill`: those for many rows are there, and the kernel lets this process use AMX.
    """

    def __init__(self, path: Path) -> None:
        functions = ctypes.CDLL(str(path))  # NOTE: after torch, whose libgomp it uses
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.multiply = functions.chatglm_multiply
        self.multiply.argtypes = [pointer, number, pointer, pointer]
        self.unpack_nf4 = functions.chatglm_unpack_nf4
        self.unpack_nf4.argtypes = [pointer, number, number, pointer]
        self.unpack_nf4.restype = None
        self.step = functions.chatglm_step
        self.step.argtypes = [pointer, number, pointer, pointer, pointer, pointer, pointer, pointer]
        self.has_prefill = hasattr(functions, "chatglm_prefill") and bool(functions.chatglm_can_prefill())
        if self.has_prefill:
            self.multiply_many = functions.chatglm_multiply_many
            self.multiply_many.argtypes = self.multiply.argtypes
            self.prefill = functions.chatglm_prefill
            self.prefill.argtypes = [pointer, number, number, number, pointer, pointer, pointer, pointer]


@cache
def library() -> Library | None:
    """The best one, or None: no compiler at the install, another processor, a torch without its libgomp."""
    if lack := find_lack():
        log.warning("%s: %s", *lack)
    for name, path in find_libraries().items():
        try:
            functions = Library(path)
        except OSError as error:
            log.warning("the compiled step %s cannot be used: %s", path, error)
            continue
        log.info("the compiled step is used: %s%s", name, ", for prompts too" if functions.has_prefill else "")
        return functions
    return None


class _Arena:
    """Memory in huge pages where the system has them: a matrix is read from end to end for each token, and with pages
    of 4 kB the processor's prefetching stops at each of them. Measured: 9 GB/s a core, 15 with both (`AHEAD`)."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    @torch.inference_mode(False)  # or else only inference mode might ever write there
    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to 64 bytes. Never given back while a tensor of its chunk lives."""
        size = -(-num_bytes // 64) * 64
        if size > len(self._free):
            self._free = self._map(max(size, _CHUNK))
        taken, self._free = self._free[:num_bytes], self._free[size:]
        return taken

    def _map(self, size: int) -> Tensor:
        mapped = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        start = -memory.data_ptr() % _HUGE_PAGE
        return memory[start : start + size]


_arena = _Arena()


class PackedMatrix:
    """A matrix [N, K] of 4 or 8 bits in the order of `step.c`: `blocks` [T, G, bytes] uint8."""

    def __init__(self, blocks: Tensor, kind: int, functions: Library) -> None:
        """Raises `ValueError` for blocks that are no matrix of this kind."""
        num_tiles, num_groups, size = blocks.shape
        if blocks.dtype != torch.uint8 or size != GROUP_BYTES[kind] or not blocks.is_contiguous():
            raise ValueError(f"blocks {blocks.dtype} {list(blocks.shape)} are not of kind {kind}")
        self.shape = (num_tiles * TILE, num_groups * GROUP)
        self.kind = kind
        self.blocks = _arena.take(blocks.numel()).view(blocks.shape).copy_(blocks)
        self.struct = _Matrix(*self.shape, kind, self.blocks.data_ptr())
        self._functions = functions

    @property
    def has_many(self) -> bool:
        """Whether it can `multiply_many`."""
        return self._functions.has_prefill

    @classmethod
    def pack(cls, weight: Grouped, functions: Library) -> PackedMatrix:
        """Lossless where scales are float16, as GGUF's are. Raises `ValueError` when it cannot be packed."""
        if not cls.can_pack(weight):
            shape = " x ".join(map(str, weight.values.shape))
            raise ValueError(f"{shape} is not in tiles of {TILE} x {GROUP}, or has minimums and 8 bits")
        return cls(*((_pack_4bit(weight), Q4) if weight.is_4bit else (_pack_8bit(weight), Q8)), functions)

    @staticmethod
    def can_pack(weight: Grouped) -> bool:
        rows, columns = weight.values.shape
        has_form = weight.is_4bit or not weight.minimum.any()
        return rows % TILE == 0 and columns % GROUP == 0 and has_form

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] of any float type -> [M, N] float32, activations rounded to 15 bits. Raises `MemoryError`."""
        return self._run(self._functions.multiply, x, torch.float32)

    def multiply_many(self, x: Tensor) -> Tensor:
        """The same for many rows, bfloat16 to bfloat16, as the weights are rounded to. Where it `has_many`."""
        return self._run(self._functions.multiply_many, x, torch.bfloat16)

    def _run(self, function: Callable[..., int], x: Tensor, dtype: torch.dtype) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.shape[1]:
            raise ValueError(f"activations {list(x.shape)} for a matrix {list(self.shape)}")
        x = x.to(dtype).contiguous()
        out = torch.empty(x.shape[0], self.shape[0], dtype=dtype)
        if function(ctypes.addressof(self.struct), x.shape[0], x.data_ptr(), out.data_ptr()):
            raise MemoryError("can't allocate memory for rounded activations")
        return out

    def unpack(self, first: int, num: int, room: Tensor | None = None) -> Tensor:
        """Tiles [first, first + num) of an NF4 matrix -> bfloat16 [K, 16 * num]: transposed. `room`: for the result."""
        if self.kind != NF4 or not 0 <= first <= first + num <= self.shape[0] // TILE:
            raise ValueError(f"tiles {first} to {first + num} of kind {self.kind}, {list(self.shape)}")
        size = self.shape[1] * num * TILE
        room = torch.empty(size, dtype=torch.bfloat16) if room is None else room
        out = room[:size].view(self.shape[1], num * TILE)
        self._functions.unpack_nf4(ctypes.addressof(self.struct), first, num, out.data_ptr())
        return out


def interleave_4bit(values: Tensor) -> Tensor:
    """Values 0..15 [N, K] uint8 -> [T, G, 256]: the order that a product reads them in."""
    tiles = values.view(values.shape[0] // TILE, TILE, -1, 4, 2, 4)  # [T, 16, G, j, half, c]
    both = tiles[..., 0, :].bitwise_or(tiles[..., 1, :].bitwise_left_shift(4))  # [T, 16, G, j, c]
    return both.permute(0, 2, 3, 1, 4).flatten(2)


def interleave_scales(scale: Tensor) -> Tensor:
    """[N, G] -> float16 bytes [T, G, 32]."""
    tiles = scale.half().view(scale.shape[0] // TILE, TILE, -1).transpose(1, 2).contiguous()  # [T, G, 16]
    return tiles.view(torch.uint8)


def _pack_4bit(weight: Grouped) -> Tensor:
    parts = interleave_4bit(weight.values), interleave_scales(weight.scale), interleave_scales(weight.minimum)
    return torch.cat(parts, dim=-1).contiguous()


def _pack_8bit(weight: Grouped) -> Tensor:
    unsigned = weight.values.view(torch.uint8).bitwise_xor(128)
    tiles = unsigned.view(weight.values.shape[0] // TILE, TILE, -1, 8, 4)  # [T, 16, G, j, c]
    return torch.cat([tiles.permute(0, 2, 3, 1, 4).flatten(2), interleave_scales(weight.scale)], dim=-1).contiguous()


@dataclass(frozen=True, slots=True)
class PackedLayer:
    input_norm: Tensor  # [E] float32
    qkv: PackedMatrix
    qkv_bias: Tensor | None  # [(H + 2G) * D] float32
    out: PackedMatrix
    mlp_norm: Tensor  # [E] float32
    gate_up: PackedMatrix
    down: PackedMatrix
    kv: Tensor  # [slots, 2, G, C, D] bfloat16


class FusedStep:
    """All layers of a step of few tokens in one call."""

    def __init__(
        self, layers: Sequence[PackedLayer], *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float,
        functions: Library,
    ) -> None:  # fmt: skip
        first = layers[0]
        self._num_slots, _, _, self._context, _ = first.kv.shape
        self._hidden_size, self._head_dim = first.qkv.shape[1], head_dim
        self._keeps = [_check_layer(layer, first, num_heads, num_kv_heads, head_dim) for layer in layers]
        self._layers = (_Layer * len(layers))(*map(_layer_struct, self._keeps))
        self._model = _Model(
            self._hidden_size, first.down.shape[1], num_heads, num_kv_heads, head_dim, self._context, len(layers), eps,
            self._layers,
        )  # fmt: skip
        self._functions = functions

    @property
    def can_prefill(self) -> bool:
        return self._functions.has_prefill and self._context >= _MIN_PREFILL_CONTEXT

    @staticmethod
    def can_run(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
        return head_dim <= _MAX_HEAD_DIM and head_dim % 32 == 0 and num_heads // num_kv_heads <= _MAX_SHARED

    def __call__(
        self, slots: Sequence[int], positions: Sequence[int], rotations: Tensor, query_scales: Tensor | None,
        hidden: Tensor, should_abort: Callable[[], bool] | None = None,
    ) -> Tensor:  # fmt: skip
        """Embeddings [M, E] -> hidden states after the last layer; the rows' keys and values are written.

        A row sees all positions of its slot up to its own, also those written here: rows may be of different answers,
        or of one prompt. `rotations` [M, D / 2] complex64, `query_scales` [M] float32. Asks `should_abort` before each
        layer and raises `Aborted` when it says yes. Raises `MemoryError`, with nothing changed.
        """
        num_rows = len(slots)
        in_range = all(0 <= slot < self._num_slots for slot in slots)
        if len(positions) != num_rows or not in_range or not all(0 <= at < self._context for at in positions):
            raise ValueError(f"slots {list(slots)} at {list(positions)}: outside the KV")
        if len(set(zip(slots, positions, strict=True))) < num_rows:
            raise ValueError(f"slots {list(slots)} at {list(positions)}: two rows in one place")
        where = torch.tensor([slots, positions], dtype=torch.int64)
        return self._run(
            self._functions.step, num_rows, (where[0].data_ptr(), where[1].data_ptr()), rotations, query_scales, hidden,
            should_abort,
        )  # fmt: skip

    def prefill(
        self, slot: int, start: int, rotations: Tensor, query_scales: Tensor | None, hidden: Tensor,
        should_abort: Callable[[], bool] | None = None,
    ) -> Tensor:  # fmt: skip
        """M tokens of one slot at [start, start + M), where it `can_prefill`: for the rest, and what it raises, see
        `__call__`. Only the last row of the result is its hidden state after the last layer."""
        num_rows = len(hidden)
        if not 0 <= slot < self._num_slots or not 0 <= start < start + num_rows <= self._context:
            raise ValueError(f"slot {slot} at {start} to {start + num_rows}: outside the KV")
        function = self._functions.prefill
        return self._run(function, num_rows, (slot, start), rotations, query_scales, hidden, should_abort)

    def _run(
        self, function: Callable[..., int], num_rows: int, where: tuple[int, int], rotations: Tensor,
        query_scales: Tensor | None, hidden: Tensor, should_abort: Callable[[], bool] | None,
    ) -> Tensor:  # fmt: skip
        hidden = _floats(hidden, num_rows, self._hidden_size).clone()
        turns = _floats(torch.view_as_real(rotations).flatten(1), num_rows, self._head_dim)
        scales = None if query_scales is None else _floats(query_scales[:, None], num_rows, 1)
        asks = None if should_abort is None else _SHOULD_ABORT(should_abort)
        outcome = function(
            ctypes.addressof(self._model), num_rows, *where, turns.data_ptr(),
            None if scales is None else scales.data_ptr(), hidden.data_ptr(),
            None if asks is None else ctypes.cast(asks, ctypes.c_void_p),
        )  # fmt: skip
        if outcome > 0:
            raise Aborted
        if outcome < 0:
            raise MemoryError("can't allocate memory for a step")
        return hidden


def _floats(x: Tensor, rows: int, columns: int) -> Tensor:
    if x.shape != (rows, columns) or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"{x.dtype} {list(x.shape)} where float32 [{rows}, {columns}] is needed")
    return x.contiguous()


def _check_layer(
    layer: PackedLayer, first: PackedLayer, num_heads: int, num_kv_heads: int, head_dim: int
) -> PackedLayer:
    """The layer, with everything contiguous. Raises `ValueError` when a shape is not what the others imply."""
    hidden, mlp, width = first.qkv.shape[1], first.down.shape[1], (num_heads + 2 * num_kv_heads) * head_dim
    shapes = [layer.qkv.shape, layer.out.shape, layer.gate_up.shape, layer.down.shape]
    wanted = [(width, hidden), (hidden, num_heads * head_dim), (2 * mlp, hidden), (hidden, mlp)]
    kv = (*first.kv.shape[:2], num_kv_heads, first.kv.shape[3], head_dim)
    if shapes != wanted or layer.kv.shape != kv or layer.kv.dtype != torch.bfloat16 or not layer.kv.is_contiguous():
        raise ValueError(f"matrices {shapes} and KV {list(layer.kv.shape)}: {wanted} and {list(kv)} are needed")
    bias = layer.qkv_bias
    return PackedLayer(
        _floats(layer.input_norm[None], 1, hidden), layer.qkv,
        None if bias is None else _floats(bias[None], 1, width), layer.out,
        _floats(layer.mlp_norm[None], 1, hidden), layer.gate_up, layer.down, layer.kv,
    )  # fmt: skip


def _layer_struct(layer: PackedLayer) -> _Layer:
    return _Layer(
        layer.input_norm.data_ptr(), layer.qkv.struct, None if layer.qkv_bias is None else layer.qkv_bias.data_ptr(),
        layer.out.struct, layer.mlp_norm.data_ptr(), layer.gate_up.struct, layer.down.struct, layer.kv.data_ptr(),
    )  # fmt: skip
