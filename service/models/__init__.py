"""Finding and loading a model: path and options in, a ready decoder with its tokenizer out.

Loading runs on the engine thread. This file is the registry: it knows which file layouts and families there are, and
resolves every "auto". It imports torch only inside `load_model`, so a wrong path fails fast and `prepare` stays quick.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.engine.base import Capabilities
from service.models.errors import ModelError
from service.protocol import Params

if TYPE_CHECKING:
    import torch

    from service.models.decoder import Decoder, DecoderConfig
    from service.models.linear import LinearFormat
    from service.models.tokenizer import HubTokenizer

__all__ = ["DEFAULT_MODEL", "LoadedModel", "ModelError", "choose_model", "load_model"]

DEFAULT_MODEL = "smollm2-135m-instruct"
# Up to this size a packed model also keeps its matrices in bf16: prefill then needs no unpacking.
MAX_DENSE_COPY_BYTES = 2 * 1024**3
MIN_CONTEXT = 256  # tokens; less is no conversation
# SmolLM2's model card; other checkpoints say theirs in generation_config.json.
_LLAMA_DEFAULTS = Params(temperature=0.2, top_p=0.9, top_k=0, repetition_penalty=1.0, max_new_tokens=1024)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run. `quantization` and `device` are what was resolved, never "auto"."""

    decoder: Decoder
    tokenizer: HubTokenizer
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
    path: Path, *, quantization: str, dtype: str, device: str, num_slots: int, max_context: int | None = None,
    kv_memory: int | None = None, progress: Callable[[float], None],
) -> LoadedModel:  # fmt: skip
    """Load a GGUF file or a folder (config.json and safetensors, or one GGUF file, beside tokenizer.json).

    quantization: "auto" (as the file is), "none", "int4", "nf4"; dtype: "auto", "float32", "bfloat16", "float16";
    device: "auto", "cpu", "cuda". `kv_memory` bounds all KV slots together, in bytes: the context gets shorter.
    `progress` is called with 0..1, on this thread. Raises `ModelError`, and `MemoryError` when memory does not suffice.
    """
    checkpoint = _find_checkpoint(path)
    import torch

    from service.models import llama
    from service.models.decoder import Decoder
    from service.models.tokenizer import HubTokenizer

    form = _choose_format(quantization, dtype, device)
    source: llama.Source = llama.GgufSource(checkpoint) if checkpoint.is_file() else llama.FolderSource(checkpoint)
    config = source.config
    context = _choose_context(config, form.dtype, num_slots, max_context, kv_memory)
    form = replace(
        form, keeps_dense=2 * config.num_matrix_weights <= MAX_DENSE_COPY_BYTES and form.device.type == "cpu"
    )
    folder = path if path.is_dir() else path.parent
    tokenizer = HubTokenizer(folder)
    try:
        with torch.inference_mode():
            weights = llama.load_weights(source, form, progress)
            decoder = Decoder(
                config, weights, num_slots=num_slots, context=context, dtype=form.dtype, device=form.device
            )
    except RuntimeError as error:
        if "allocate memory" in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise MemoryError(f"out of memory while loading {path}: use fewer slots or a shorter context") from error
        raise
    resolved = quantization if quantization != "auto" else source.quantization(form.device)
    return LoadedModel(
        decoder, tokenizer, "llama", path.name if path.is_dir() else path.stem, resolved, form.device.type,
        _read_defaults(folder), Capabilities(num_slots, context, causal_prompt=True),
    )  # fmt: skip


def _is_model(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / "config.json").exists() or any(path.glob("*.gguf"))


def _find_checkpoint(path: Path) -> Path:
    """The GGUF file, or the folder with config.json, that `path` means."""
    if path.is_file() or (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(f"{path} holds {len(files)} GGUF files: give --model one of them")
    raise ModelError(f"{path} is no model: give a GGUF file, or a folder with config.json and safetensors")


def _choose_format(quantization: str, dtype: str, device: str) -> LinearFormat:
    import torch

    from service.models.linear import LinearFormat

    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("there is no usable CUDA device: use --device cpu, or install a CUDA build of torch")
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    has_bf16 = kind == "cpu" or torch.cuda.is_bf16_supported()
    chosen = dtypes.get(dtype, torch.bfloat16 if has_bf16 else torch.float16)
    form = LinearFormat(quantization, chosen, torch.device(kind), keeps_dense=False)
    form.check()
    return form


def _choose_context(
    config: DecoderConfig, dtype: torch.dtype, num_slots: int, max_context: int | None, kv_memory: int | None
) -> int:
    context = min(config.context_limit, max_context or config.context_limit)
    if kv_memory is not None:
        token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        context = min(context, kv_memory // (num_slots * token_bytes))
        if context < MIN_CONTEXT:
            raise ModelError(
                f"--kv-memory leaves each of {num_slots} slots {context} tokens, fewer than {MIN_CONTEXT}: raise it to "
                f"{num_slots * token_bytes * MIN_CONTEXT} bytes or use fewer slots"
            )
    return context


def _read_defaults(folder: Path) -> Params:
    """Sampling defaults: what generation_config.json says, on top of the family's."""
    path = folder / "generation_config.json"
    try:
        given: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ModelError(f"cannot read {path} ({error}): copy the checkpoint again") from None
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    changes = {name: given[name] for name in names if given.get(name) is not None}
    if given.get("do_sample") is False:
        changes["temperature"] = 0.0
    return replace(_LLAMA_DEFAULTS, **changes)
