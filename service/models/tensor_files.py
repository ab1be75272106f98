"""A checkpoint folder's tensors by name, in either layout: safetensors or `pytorch_model*.bin`, one file or shards.

Any thread. Nothing is read before it is asked for: safetensors are mapped, .bin files are mapped and unpickled with
`weights_only`, so no code of the checkpoint runs. Knows no model.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from service.models.errors import ModelError
from service.models.tokenizer_files import find_file

_LAYOUTS = (("model.safetensors.index.json", "*.safetensors"), ("pytorch_model.bin.index.json", "pytorch_model*.bin"))


class TensorFiles:
    """Raises `ModelError` for missing or damaged files, and for pointers that Git LFS left in their place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fetchers: dict[str, Callable[[], Tensor]] = {}
        for path in self._find_shards():
            self._open(path)

    @property
    def names(self) -> set[str]:
        return set(self._fetchers)

    def fetch(self, name: str) -> Tensor:
        """Raises `ModelError` when the checkpoint has no such tensor."""
        if name not in self._fetchers:
            raise ModelError(f"{self.folder} has no tensor {name!r}: the checkpoint is incomplete, copy it again")
        return self._fetchers[name]()

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
            found = sorted(self.folder.glob(pattern))
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

    def _open(self, path: Path) -> None:
        try:
            if path.suffix == ".safetensors":
                opened = safe_open(path, framework="pt")
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    self._fetchers[name] = lambda name=name, opened=opened: opened.get_tensor(name)  # type: ignore[misc]
            else:
                for name, tensor in _load_bin(path).items():
                    self._fetchers[name] = lambda tensor=tensor: tensor  # type: ignore[misc]
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise ModelError(f"{path} is truncated or damaged ({str(error)[:120]}): copy it again") from None


def _load_bin(path: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    return loaded
