"""A GGUF file: its metadata, and its tensors as numpy views of the mapped file.

Knows the container format (github.com/ggml-org/ggml, docs/gguf.md) and the block layouts of Q4_1 and Q8_0; knows no
torch and no model. Any thread. The `gguf` package's own reader takes 2 s for the default model, most of it making an
array object for each of its 98,000 vocabulary strings, so the header is walked here; the package still dequantises
the block formats this file has no lossless form for.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from service.models.errors import ModelError

Array = npt.NDArray[Any]

BLOCK = 32  # weights that share a scale, in Q4_1 and in Q8_0
F32, F16, Q4_1, Q8_0, BF16 = 0, 1, 3, 8, 30  # ggml_type
_BLOCK_BYTES = {F32: (1, 4), F16: (1, 2), Q4_1: (BLOCK, 20), Q8_0: (BLOCK, 34), BF16: (1, 2)}  # (weights, bytes)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is [rows, columns] or [columns]; `data` the raw bytes of the mapped file."""

    name: str
    shape: tuple[int, ...]
    type: int
    data: npt.NDArray[np.uint8]


class GgufFile:
    """An opened file. Raises `ModelError` when it is no GGUF file, or ends too early."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"cannot read {path}: {error}; check the path, or run `make model`") from None
        try:
            self._at = 0
            self._header = memoryview(self._bytes.data)
            num_tensors = self._read_start()
            self.tensors = self._read_directory(num_tensors)
        except (struct.error, ValueError, LookupError, ArithmeticError, TypeError, MemoryError, RecursionError):
            raise self._truncated() from None

    def get(self, key: str) -> Any:
        """A metadata value. Raises `ModelError` when the file lacks it."""
        if key not in self.metadata:
            raise ModelError(f"{self.path} has no {key!r} in its metadata: convert the model again with a current tool")
        return self.metadata[key]

    # --- the header, front to back ---------------------------------------------------------------------------------

    def _read_start(self) -> int:
        if bytes(self._header[:4]) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: give a .gguf file or a folder with config.json")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._header, 4)
        if version not in (2, 3):
            raise ModelError(f"{self.path} has GGUF version {version}, only 2 and 3 are known: convert it again")
        self._at = 24
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        return int(num_tensors)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._header, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._header):
            raise self._truncated()
        return str(self._header[start : self._at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._scalar_code(kind))
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return self._strings(count)
        if item == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        return list(self._scalars(self._scalar_code(item), count))

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self._header, self._at)
        self._at += struct.calcsize(f"<{count}{code}")
        return values

    def _strings(self, count: int) -> list[str]:
        """The long arrays (vocabulary, merges): one tight loop."""
        header, at, unpack = self._header, self._at, struct.Struct("<Q").unpack_from
        values = []
        for _ in range(count):
            (length,) = unpack(header, at)
            values.append(str(header[at + 8 : at + 8 + length], "utf-8"))
            at += 8 + length
        self._at = at
        return values

    def _scalar_code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} has a metadata value of unknown type {kind}: convert the model again")
        return _SCALARS[kind]

    def _read_directory(self, num_tensors: int) -> dict[str, GgufTensor]:
        entries = []
        for _ in range(num_tensors):
            name = self._string()
            shape = self._scalars("Q", self._scalar("I"))[::-1]  # stored fastest dimension first
            entries.append((name, shape, self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        start = math.ceil(self._at / alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in entries:
            block, size = _block_bytes(kind)
            num_bytes = math.prod(shape) // block * size
            data = self._bytes[start + offset : start + offset + num_bytes]
            if len(data) != num_bytes:
                raise self._truncated()
            tensors[name] = GgufTensor(name, shape, kind, data)
        return tensors

    def _truncated(self) -> ModelError:
        return ModelError(f"{self.path} is truncated or damaged ({len(self._bytes)} bytes): fetch or copy it again")


def _block_bytes(kind: int) -> tuple[int, int]:
    if kind in _BLOCK_BYTES:
        return _BLOCK_BYTES[kind]
    import gguf  # 0.3 s, and only for the rarer formats

    try:
        return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ModelError(f"the GGUF file has tensors of unknown type {kind}: use Q4_1, Q8_0 or F16") from None


# --- tensors -> arrays ---------------------------------------------------------------------------------------------


def read_grouped(tensor: GgufTensor) -> tuple[Array, Array, Array | None] | None:
    """(values [N, K] uint8 or int8, scale [N, K / 32], minimum or None): weight = values * scale + minimum, exactly.

    None for a type that is not Q4_1 (values 0..15) or Q8_0 (values -128..127, no minimum).
    """
    if len(tensor.shape) != 2 or tensor.type not in (Q4_1, Q8_0):
        return None
    rows, columns = tensor.shape
    size = _BLOCK_BYTES[tensor.type][1]
    blocks = tensor.data.reshape(rows, columns // BLOCK, size)  # [N, G, bytes]
    scale = blocks[:, :, 0:2].copy().view(np.float16)[:, :, 0].astype(np.float32)
    if tensor.type == Q8_0:
        return blocks[:, :, 2:].copy().view(np.int8).reshape(rows, columns), scale, None
    minimum = blocks[:, :, 2:4].copy().view(np.float16)[:, :, 0].astype(np.float32)
    packed = blocks[:, :, 4:]  # [N, G, 16]: weight j in the low half of byte j, weight j + 16 in the high half
    values = np.empty((rows, columns // BLOCK, BLOCK), np.uint8)
    np.bitwise_and(packed, 15, out=values[:, :, :16])
    np.right_shift(packed, 4, out=values[:, :, 16:])
    return values.reshape(rows, columns), scale, minimum


def read_float(tensor: GgufTensor) -> Array:
    """The tensor as float32, whatever its type."""
    if tensor.type == F32:
        return tensor.data.view(np.float32).reshape(tensor.shape)
    if tensor.type == F16:
        return tensor.data.view(np.float16).reshape(tensor.shape).astype(np.float32)
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.type)
    block, size = _block_bytes(tensor.type)
    raw = tensor.data.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * size)
    try:
        return np.asarray(gguf.dequantize(raw, kind), np.float32).reshape(tensor.shape)
    except NotImplementedError:
        raise ModelError(f"GGUF type {kind.name} cannot be read: use Q4_1, Q8_0 or F16") from None
