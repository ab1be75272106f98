"""Finding and loading a model: path and options in, a ready decoder with its tokenizer out.

Loading runs on the engine thread. This file is the registry: it knows which file layouts and families there are, and
resolves every "auto". It imports torch only inside `load_model`, so a wrong path fails fast and `prepare` stays quick.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from service.engine.base import Capabilities
from service.models.errors import ModelError
from service.protocol import Params

if TYPE_CHECKING:
    import torch

    from service.models.families import Model, Shape, Tokenizer
    from service.models.linear import LinearFormat

__all__ = ["DEFAULT_MODEL", "LoadedModel", "ModelError", "choose_model", "find_checkpoint", "load_model"]

DEFAULT_MODEL = "smollm2-135m-instruct"
# Up to this size a packed model also keeps its matrices in bf16: prefill then needs no unpacking.
MAX_DENSE_COPY_BYTES = 2 * 1024**3
# What all KV slots take together at most, and a slot's tokens at least, with neither --max-context nor --kv-memory.
DEFAULT_KV_BYTES = 4 * 1024**3
DEFAULT_CONTEXT = 2048
MIN_CONTEXT = 256  # tokens; less is no conversation


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run. `quantization` and `device` are what was resolved, never "auto"."""

    decoder: Model
    tokenizer: Tokenizer
    family: str
    name: str
    quantization: str  # "int4", "nf4" or "none"
    device: str  # "cpu" or "cuda"
    defaults: Params
    capabilities: Capabilities


def choose_model(model: str, weights_dir: Path) -> Path:
    """The path that `model` names; "auto" = the one under `weights_dir`, the default model only if it is alone.

    Raises `ModelError` when there is none, or more than one to choose from.
    """
    if model != "auto":
        path = Path(model)
        if not path.exists():
            raise ModelError(f"{path} does not exist: give --model a model folder or a GGUF file")
        return path
    found = sorted(path for path in weights_dir.iterdir() if _is_model(path)) if weights_dir.is_dir() else []
    own = [path for path in found if path.name != DEFAULT_MODEL] or found
    if not own:
        raise ModelError(f"there is no model under {weights_dir}: run `make model`, or put a checkpoint there")
    if len(own) > 1:
        raise ModelError(f"choose with --model, there are several: {', '.join(map(str, own))}")
    return own[0]


def load_model(
    path: Path, *, family: str = "auto", quantization: str, dtype: str, device: str, num_slots: int,
    max_context: int | None = None, kv_memory: int | None = None, keeps_quantized: bool = False,
    progress: Callable[[float], None],
) -> LoadedModel:  # fmt: skip
    """Load a GGUF file, or a folder with config.json and weights, or with one GGUF file, beside its tokenizer.

    family: "auto" or one of `families.FAMILIES`; quantization: "auto" (as the file is, or the family's best), "none",
    "int4", "nf4"; dtype: "auto", "float32", "bfloat16", "float16"; device: "auto", "cpu", "cuda". `kv_memory` bounds
    all KV slots together, in bytes: the context gets shorter. `keeps_quantized`: see `open_checkpoint`. `progress` is
    called with 0..1, on this thread. Raises `ModelError`, and `MemoryError` when memory does not suffice.
    """
    checkpoint = find_checkpoint(path)
    import torch

    from service.models.families import open_checkpoint

    opened = open_checkpoint(checkpoint, family, keeps_quantized=keeps_quantized)
    place = _choose_device(device)
    resolved = quantization if quantization != "auto" else opened.quantization(place)
    form = _choose_format(resolved, dtype, place, opened.config)
    context = _choose_context(opened.config, form.dtype, num_slots, max_context, kv_memory)
    try:
        with torch.inference_mode():
            decoder = opened.build(form, num_slots, context, progress)
    except RuntimeError as error:
        if "allocate memory" in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise MemoryError(f"out of memory while loading {path}: use fewer slots or a shorter context") from error
        raise
    _return_freed_memory()
    return LoadedModel(
        decoder, opened.tokenizer, opened.family, path.resolve().name if path.is_dir() else path.stem, resolved,
        place.type, opened.defaults, Capabilities(num_slots, context, causal_prompt=opened.causal_prompt),
    )  # fmt: skip


def _return_freed_memory() -> None:
    """Loading passes each matrix through buffers, and the C library would keep some 0.5 GB of them."""
    with contextlib.suppress(AttributeError, OSError):  # malloc_trim(3) is glibc's
        ctypes.CDLL(None).malloc_trim(0)


def unasked_context(context_limit: int, num_slots: int, token_bytes: int) -> int:
    """Tokens of a slot when nobody chose: a model of 128k must not take the whole machine."""
    return min(context_limit, max(DEFAULT_KV_BYTES // (num_slots * token_bytes), DEFAULT_CONTEXT))


def _is_model(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / "config.json").exists() or any(path.glob("*.gguf"))


def find_checkpoint(path: Path) -> Path:
    """The GGUF file, or the folder with config.json, that `path` means."""
    if path.is_file() or (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(f"{path} holds {len(files)} GGUF files: give --model one of them")
    raise ModelError(f"{path} is no model: give a GGUF file, or a folder with config.json and safetensors")


def _choose_device(device: str) -> torch.device:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("there is no usable CUDA device: use --device cpu, or install a CUDA build of torch")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def _choose_format(quantization: str, dtype: str, place: torch.device, config: Shape) -> LinearFormat:
    import torch

    from service.models.linear import LinearFormat

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    has_bf16 = place.type == "cpu" or torch.cuda.is_bf16_supported()
    chosen = dtypes.get(dtype, torch.bfloat16 if has_bf16 else torch.float16)
    fits_twice = 2 * config.num_matrix_weights <= MAX_DENSE_COPY_BYTES
    form = LinearFormat(quantization, chosen, place, keeps_dense=fits_twice and place.type == "cpu")
    form.check()
    return form


def _choose_context(
    config: Shape, dtype: torch.dtype, num_slots: int, max_context: int | None, kv_memory: int | None
) -> int:
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    context = min(config.context_limit, max_context or config.context_limit)
    if max_context is None and kv_memory is None:
        context = unasked_context(config.context_limit, num_slots, token_bytes)
    if kv_memory is not None:
        context = min(context, kv_memory // (num_slots * token_bytes))
        if context < MIN_CONTEXT:
            raise ModelError(
                f"--kv-memory leaves each of {num_slots} slots {context} tokens, fewer than {MIN_CONTEXT}: raise it to "
                f"{num_slots * token_bytes * MIN_CONTEXT} bytes or use fewer slots"
            )
    return context
