"""A checkpoint folder's small files, its tokenizer's above all; one that cannot be used says what to do.

Any thread. Knows no formats beyond JSON; nothing here is kept.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.models.errors import ModelError

# What Git LFS leaves in place of a file that was never downloaded (version 1 of its pointer format).
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_REMEDY = "copy the checkpoint again"


def find_file(folder: Path, name: str) -> Path:
    """The file's path. Raises `ModelError` when it is missing, or only a pointer to it is there."""
    path = folder / name
    if not path.is_file():
        raise ModelError(f"{folder} has no {name}: copy the checkpoint's tokenizer files into it")
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelError(f"{path} is a Git LFS pointer, not the file itself: run 'git lfs pull' in {folder}")
    return path


def read_json(path: Path, remedy: str = _REMEDY) -> dict[str, Any]:
    """Raises `ModelError`, which ends with the remedy, when it is not there or no JSON object."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path} ({error}): {remedy}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not a JSON object: {remedy}")
    return values


@contextlib.contextmanager
def naming_missing_keys(folder: Path) -> Iterator[None]:
    """Around the reading of config.json's keys: a `KeyError` becomes the `ModelError` that names the key."""
    try:
        yield
    except KeyError as error:
        raise ModelError(f"{folder}/config.json lacks {error}: {_REMEDY}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`; empty when there is none."""
    path = folder / "tokenizer_config.json"
    return read_json(find_file(folder, path.name)) if path.exists() else {}
