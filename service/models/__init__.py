"""The registry: a path → a model that can run, whatever family it is of.

Any thread, once. The only place that knows which module serves which kind of checkpoint. Importing it imports no
torch, so that a wrong path fails at once and the thread settings still count.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
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

__all__ = ["LoadedModel", "ModelError", "choose_model", "load_model"]

DEFAULT_MODEL = "smollm2-135m-instruct"

# A smaller model keeps a dense copy for prefill beside its packed weights; a larger one unpacks layer by layer.
MAX_DENSE_COPY_WEIGHTS = 1_000_000_000
MIN_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything the engine needs of a checkpoint. `defaults` are the family's sampling parameters."""

    decoder: Decoder
    tokenizer: HubTokenizer
    name: str
    family: str
    quantization: str
    device: str
    defaults: Params
    capabilities: Capabilities


def choose_model(model: str, weights_dir: Path) -> Path:
    """The path that --model means. "auto": the one model a user put under `weights_dir`, else the default model.

    Raises `ModelError` when there is none, or several.
    """
    if model != "auto":
        path = Path(model)
        if not path.exists():
            raise ModelError(f"there is no model at {path}: check --model")
        return path
    found = sorted(path for path in weights_dir.iterdir() if _is_model(path)) if weights_dir.is_dir() else []
    own = [path for path in found if path.name != DEFAULT_MODEL]
    if len(own) > 1:
        names = ", ".join(str(path) for path in own)
        raise ModelError(f"there are several models: choose one with --model, or CHATGLM_MODEL: {names}")
    if not found:
        raise ModelError(f"there is no model under {weights_dir}: put one there, or run `make run` for the default one")
    return own[0] if own else found[0]


def load_model(
    path: Path, *, quantization: str, dtype: str, device: str, num_slots: int, max_context: int | None,
    kv_memory: int | None, progress: Callable[[float], None],
) -> LoadedModel:  # fmt: skip
    """Load a GGUF file, or a folder that holds one, or a Hugging Face folder. Raises `ModelError`.

    `max_context` and `kv_memory` (bytes, for all slots) bound the context; None leaves it to the model.
    """
    import torch

    from service.models import llama
    from service.models.decoder import Decoder
    from service.models.gguf_file import GgufFile
    from service.models.tokenizer import HubTokenizer

    gguf_path = _gguf_in(path)
    folder = path if path.is_dir() else path.parent
    place = torch.device(_choose_device(device))
    kind = _choose_dtype(dtype, quantization, is_quantized=gguf_path is not None, place=place)
    tokenizer = HubTokenizer(folder)
    if gguf_path is not None:
        file = GgufFile(gguf_path)
        config = llama.gguf_config(file)
        form = _linear_format(quantization, kind, place, config)
        weights = llama.gguf_weights(file, config, form, progress)
    else:
        config = llama.folder_config(folder, llama.read_folder_config(folder))
        form = _linear_format(quantization, kind, place, config)
        weights = llama.folder_weights(folder, config, form, progress)
    context = _context(config, num_slots, max_context, kv_memory, kind)
    return LoadedModel(
        decoder=Decoder(config, weights, num_slots=num_slots, context=context, dtype=kind, device=place),
        tokenizer=tokenizer,
        name=folder.name if path.is_dir() else path.stem,
        family="llama",
        quantization=_describe(form, is_quantized=gguf_path is not None),
        device=str(place),
        defaults=_sampling_defaults(folder),
        capabilities=Capabilities(num_slots, context, causal_prompt=True),
    )


def _is_model(path: Path) -> bool:
    return path.suffix == ".gguf" or (path.is_dir() and (any(path.glob("*.gguf")) or (path / "config.json").exists()))


def _gguf_in(path: Path) -> Path | None:
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"{path} holds several GGUF files: give one of them with --model")
    if not files and not (path / "config.json").exists():
        raise ModelError(f"{path} holds neither a GGUF file nor a config.json: is it a model's folder?")
    return files[0] if files else None


def _choose_device(device: str) -> str:
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ModelError("--device cuda: torch sees no CUDA device here; use --device cpu, or mend the driver")
    return "cuda" if device != "cpu" and has_cuda else "cpu"


def _choose_dtype(dtype: str, quantization: str, *, is_quantized: bool, place: torch.device) -> torch.dtype:
    """bfloat16 wherever the fast kernels are; float32 for a dense model on a CPU, unless asked otherwise."""
    import torch

    if dtype != "auto":
        named: torch.dtype = getattr(torch, dtype)
        return named
    is_dense = quantization == "none" or (quantization == "auto" and not is_quantized)
    return torch.float32 if is_dense and place.type == "cpu" else torch.bfloat16


def _linear_format(quantization: str, dtype: torch.dtype, place: torch.device, config: DecoderConfig) -> LinearFormat:
    from service.models.linear import LinearFormat

    num_weights = config.num_layers * config.hidden_size * (3 * config.intermediate_size + 4 * config.hidden_size)
    form = LinearFormat(
        quantization, dtype, place, keeps_dense=place.type == "cpu" and num_weights <= MAX_DENSE_COPY_WEIGHTS
    )
    form.check()
    return form


def _context(
    config: DecoderConfig, num_slots: int, max_context: int | None, kv_memory: int | None, dtype: torch.dtype
) -> int:
    """Tokens of one slot. Raises `ModelError` when the memory is too little for any conversation."""
    context = min(config.context_limit, max_context or config.context_limit)
    if kv_memory is not None:
        token_bytes = num_slots * 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        context = min(context, kv_memory // token_bytes)
        if context < MIN_CONTEXT:
            least = -(-MIN_CONTEXT * token_bytes // 2**20)
            raise ModelError(f"--kv-memory is too little for {num_slots} slots: give at least {least}M")
    return context


def _describe(form: LinearFormat, *, is_quantized: bool) -> str:
    """What `health` calls the weights' format."""
    if form.quantization in ("int4", "nf4"):
        return form.quantization
    return "int4" if form.quantization == "auto" and is_quantized else str(form.dtype).removeprefix("torch.")


def _sampling_defaults(folder: Path) -> Params:
    """From generation_config.json, where the checkpoint has one."""
    path = folder / "generation_config.json"
    try:
        given: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return Params()
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    return Params(**{name: given[name] for name in names if given.get(name) is not None})
