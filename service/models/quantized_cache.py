"""The quantised matrices of a checkpoint in one file beside it, so that the next start reads a third of the bytes.

The engine thread's, while loading. A file is of one checkpoint (names, sizes and times of its shards), one kind of
packing and one version of this format; any other is ignored, and replaced by the next one that is written. Each part
has a checksum, so what a crash or a bad disk left is quantised again. Nothing here ever stops a start: what cannot be
written is a warning. The format is safetensors, written part by part because its own writer needs all of it twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from service.models.errors import ModelError
from service.models.nf4 import Parts
from service.models.tensor_files import FileTensor, map_tensors

log = logging.getLogger(__name__)

VERSION = 1  # of the packing, of the row order that models ask for, and of the names here
_STEM = ".chatglm-nf4-"
_TYPES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


class QuantizedCache:
    """`find` what an earlier start kept, `add` every matrix, `save` when the model is complete."""

    def __init__(self, folder: Path, shards: Iterable[Path], kind: str) -> None:
        """`kind`: the form of the packing, such as the device's."""
        self._fingerprint = _fingerprint(shards, kind)
        self.path = folder / f"{_STEM}{kind}-{self._fingerprint}.safetensors"
        self._stale = f"{_STEM}{kind}-*"
        self._kept, self._checksums = self._open()
        self._parts: dict[str, Tensor] = {}
        self._is_complete = True

    def find(self, name: str) -> Parts | None:
        """The parts of a matrix; None when they are not here, or damaged."""
        try:
            prefix = name + "/"
            parts = {
                full.removeprefix(prefix): self._read(full, place)
                for full, place in self._kept.items()
                if full.startswith(prefix)
            }
        except (OSError, ValueError, ModelError) as error:
            log.warning("%s is damaged (%s): quantising again", self.path, error)
            return None
        return parts or None

    def add(self, name: str, parts: Parts, *, is_new: bool) -> None:
        """Keep a matrix for `save`. The parts stay the model's: nothing is copied."""
        self._is_complete = self._is_complete and not is_new
        self._parts |= {f"{name}/{key}": part for key, part in parts.items()}

    def save(self) -> None:
        """Write the file, unless it is there already. What does not work is a warning."""
        if self._is_complete:
            return
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            for old in self.path.parent.glob(self._stale):
                old.unlink()
            self._write(temporary)
            temporary.replace(self.path)
            log.info("kept the quantised matrices in %s", self.path)
        except OSError as error:
            log.warning("cannot keep the quantised matrices in %s (%s): the next start is as slow", self.path, error)
            _remove(temporary)

    def _open(self) -> tuple[dict[str, FileTensor], dict[str, int]]:
        if not self.path.exists():
            return {}, {}
        try:
            tensors, metadata = map_tensors(self.path)
            if metadata["fingerprint"] != self._fingerprint:
                raise ValueError("it is of another checkpoint")
            checksums: dict[str, int] = json.loads(metadata["checksums"])
            places = {name: place for name, place in tensors.items() if isinstance(place, FileTensor)}
        except (ModelError, KeyError, ValueError, TypeError) as error:
            log.warning("%s cannot be used (%s): quantising again", self.path, error)
            return {}, {}
        return places, checksums

    def _read(self, full: str, place: FileTensor) -> Tensor:
        part = place.read()
        if _checksum(part) != self._checksums.get(full):
            raise ValueError(f"wrong checksum of {full}")
        return part

    def _write(self, path: Path) -> None:
        header: dict[str, Any] = {}
        end = 0
        checksums = {}
        for name, part in self._parts.items():
            checksums[name] = _checksum(part)
            start, end = end, end + part.nbytes
            header[name] = {"dtype": _TYPES[part.dtype], "shape": list(part.shape), "data_offsets": [start, end]}
        header["__metadata__"] = {"fingerprint": self._fingerprint, "checksums": json.dumps(checksums)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for part in self._parts.values():
                file.write(_bytes(part))


def _fingerprint(shards: Iterable[Path], kind: str) -> str:
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in shards]
    return hashlib.sha256(json.dumps([VERSION, kind, stats]).encode()).hexdigest()[:16]


def _checksum(part: Tensor) -> int:
    """The sum of its words, modulo 2^64: ten times as fast as a CRC, and finds what a crash leaves unwritten."""
    all_bytes = part.cpu().contiguous().view(-1).view(torch.uint8)
    whole = len(all_bytes) // 8 * 8
    return int(all_bytes[:whole].view(torch.int64).sum()) + int(all_bytes[whole:].sum())


def _bytes(part: Tensor) -> memoryview:
    return part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)
