"""A checkpoint folder's tensors by name, in either layout: safetensors or `pytorch_model*.bin`, one file or shards.

Any thread. Nothing is read before it is asked for, and then into memory of its own: were the files mapped, a process
that goes through 13 GB of shards would be as large as that. .bin files are unpickled with `weights_only`, so no code of
the checkpoint runs. Knows no model.
"""

from __future__ import annotations

import json
import os
import pickle
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from service.models.errors import ModelError
from service.models.tokenizer_files import find_file

_LAYOUTS = (("model.safetensors.index.json", "*.safetensors"), ("pytorch_model.bin.index.json", "pytorch_model*.bin"))
_READ_BYTES = 2**30  # one read call gives at most 2 GiB


class OpenFile:
    """A file that is open for as long as something may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where a tensor lies in a file, and how to read all of it, or some of its rows."""

    file: OpenFile
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> Tensor:
        return self._read(self.offset, self.shape)

    def rows(self, indices: Iterable[int]) -> Tensor:
        """Some rows of a matrix [N, K] -> [len(indices), K]: a few microseconds each, from the system's file cache."""
        row = self.shape[1:]
        row_bytes = row.numel() * self.dtype.itemsize
        return torch.stack([self._read(self.offset + index * row_bytes, row) for index in indices])

    def _read(self, offset: int, shape: torch.Size) -> Tensor:
        read = torch.empty(shape, dtype=self.dtype)
        view = read.view(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(view):
            size = os.preadv(self.file.fd, [view[done : done + _READ_BYTES]], offset + done)
            if size == 0:
                raise ModelError(f"{self.file.path} is truncated or damaged (it became shorter): copy it again")
            done += size
        return read


class TensorFiles:
    """Raises `ModelError` for missing or damaged files, and for pointers that Git LFS left in their place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: dict[str, FileTensor | Tensor] = {}
        self.paths = self._find_shards()
        for path in self.paths:
            self._tensors |= map_tensors(path)[0]

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def find(self, name: str) -> FileTensor | None:
        """The tensor's place in its file; none when it lies there in another order."""
        found = self._tensors.get(name)
        return found if isinstance(found, FileTensor) else None

    def fetch(self, name: str) -> Tensor:
        """Raises `ModelError` when the checkpoint has no such tensor."""
        if name not in self._tensors:
            raise ModelError(f"{self.folder} has no tensor {name!r}: the checkpoint is incomplete, copy it again")
        found = self._tensors[name]
        return found.read() if isinstance(found, FileTensor) else found

    def check(self, wanted: Iterable[str], is_ignored: Callable[[str], bool]) -> None:
        """Exactly the wanted tensors are there, besides ignored ones. Raises `ModelError` that names the first."""
        wanted = set(wanted)
        missing = sorted(wanted - self.names)
        if missing:
            raise ModelError(f"{self.folder} has no tensor {missing[0]!r} ({len(missing)} missing): copy it again")
        unknown = sorted(name for name in self.names - wanted if not is_ignored(name))
        if unknown:
            raise ModelError(
                f"{self.folder} has an unknown tensor {unknown[0]!r} ({len(unknown)} such): it is another kind of model"
            )

    def _find_shards(self) -> list[Path]:
        for index_name, pattern in _LAYOUTS:
            if (self.folder / index_name).exists():
                return [self._shard(name) for name in self._indexed(self.folder / index_name)]
            found = sorted(path for path in self.folder.glob(pattern) if not path.name.startswith("."))
            if found:
                return [find_file(self.folder, path.name) for path in found]
        raise ModelError(f"{self.folder} has no weights: *.safetensors or pytorch_model*.bin belong there")

    def _indexed(self, path: Path) -> list[str]:
        try:
            weight_map: dict[str, str] = json.loads(path.read_text("utf-8"))["weight_map"]
            return sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} cannot be read ({error!r}): copy it again") from None

    def _shard(self, name: str) -> Path:
        if not (self.folder / name).exists():
            raise ModelError(f"{self.folder} lacks the shard {name}: copy it into the folder")
        return find_file(self.folder, name)


def map_tensors(path: Path) -> tuple[dict[str, FileTensor | Tensor], dict[str, str]]:
    """One file's tensors and, for safetensors, its metadata; nothing is read yet. Raises `ModelError`."""
    try:
        tensors, metadata = _map_safetensors(path) if path.suffix == ".safetensors" else (_map_bin(path), {})
        mapped = _mappings(path)
        file = OpenFile(path)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(f"{path} is truncated or damaged ({str(error)[:120]}): copy it again") from None
    found: dict[str, FileTensor | Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{path} holds something else than tensors ({name!r}): it is another kind of file")
        start = tensor.data_ptr()
        place = [offset + start - low for low, high, offset in mapped if low <= start < high]
        is_plain = bool(place) and tensor.is_contiguous()
        found[name] = FileTensor(file, place[0], tensor.shape, tensor.dtype) if is_plain else tensor
    return found, metadata


def _map_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    opened = safe_open(path, framework="pt")
    tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return tensors, opened.metadata() or {}


def _map_bin(path: Path) -> dict[str, Any]:
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    if not isinstance(loaded, dict):
        raise ValueError("it is no table of tensors")
    return loaded


def _mappings(path: Path) -> list[tuple[int, int, int]]:
    """Where this process has the file mapped: (first address, end, offset in the file).

    Both libraries map the file, and neither says where in it a tensor lies. What is not found here stays mapped.
    """
    inode = str(path.stat().st_ino)
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, mapped_inode, *_ = line.split(maxsplit=5)
        if mapped_inode == inode:
            low, high = addresses.split("-")
            found.append((int(low, 16), int(high, 16), int(offset, 16)))
    return found
