"""What lies in a checkpoint, without loading it: its files, whether they are whole, and what memory it will take.

Any thread. Knows file layouts and the names of sizes in their headers; no torch, so that asking takes milliseconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.models import find_checkpoint, unasked_context
from service.models.errors import ModelError
from service.models.tokenizer_files import find_file, read_json

KV_BYTES = 2  # of one number in a KV slot: bfloat16 or float16
# Bytes in memory for each byte of a 16-bit checkpoint: 4-bit codes and scales, with the ends of the model in 8 bits.
PACKED_SHARE = 0.32
# Up to this many weights a GGUF model keeps its matrices in bf16 too (MAX_DENSE_COPY_BYTES of service.models).
MAX_DENSE_WEIGHTS = 2**30
_Q4_BYTES = 0.625  # of one weight in GGUF's Q4_1
_HEADER_LIMIT = 100 * 2**20  # safetensors' own bound of its header


@dataclass(frozen=True, slots=True)
class Survey:
    """`token_bytes` is the KV of one token; it and `context_limit` are 0 where the files do not tell."""

    path: Path
    num_files: int
    file_bytes: int
    is_gguf: bool
    token_bytes: int
    context_limit: int

    def memory_bytes(self, *, quantization: str, num_slots: int, max_context: int, kv_memory: int) -> int:
        """About what the loaded model takes, with the KV of all slots."""
        if self.is_gguf:
            num_weights = self.file_bytes / _Q4_BYTES
            weights = self.file_bytes + (2 * num_weights if num_weights <= MAX_DENSE_WEIGHTS else 0)
        else:
            weights = self.file_bytes * (1.0 if quantization == "none" else PACKED_SHARE)
        context = min(self.context_limit, max_context or self.context_limit)
        if not max_context and not kv_memory:
            context = unasked_context(self.context_limit, num_slots, self.token_bytes)
        kv = num_slots * context * self.token_bytes
        return int(weights) + (min(kv, kv_memory) if kv_memory else kv)


def survey(path: Path) -> Survey:
    """`path`: as `--model` takes it. Raises `ModelError` for what is missing, a Git LFS pointer, or cut short."""
    checkpoint = find_checkpoint(path)
    if checkpoint.is_file():
        find_file(checkpoint.parent, checkpoint.name)
        return _survey_gguf(checkpoint)
    files = [find_file(checkpoint, name) for name in _weight_names(checkpoint)]
    for file in files:
        if file.suffix == ".safetensors":
            _check_safetensors(file)
    token_bytes, context_limit = _kv_sizes(read_json(checkpoint / "config.json"))
    num_bytes = sum(file.stat().st_size for file in files)
    return Survey(checkpoint, len(files), num_bytes, False, token_bytes, context_limit)


def _survey_gguf(path: Path) -> Survey:
    from service.models.gguf_file import GgufFile

    known = GgufFile(path).metadata
    heads, hidden = known.get("llama.attention.head_count", 0), known.get("llama.embedding_length", 0)
    head_dim = known.get("llama.attention.key_length", hidden // heads if heads else 0)
    kv_heads = known.get("llama.attention.head_count_kv", heads)
    token_bytes = 2 * known.get("llama.block_count", 0) * kv_heads * head_dim * KV_BYTES
    return Survey(path, 1, path.stat().st_size, True, token_bytes, known.get("llama.context_length", 0))


def _kv_sizes(config: dict[str, Any]) -> tuple[int, int]:
    """(KV bytes of a token, context) by config.json, in the names of Llama, ChatGLM2 to GLM-4, and ChatGLM."""

    def first(*names: str) -> int:
        return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)

    layers, heads = first("num_hidden_layers", "num_layers"), first("num_attention_heads")
    kv_heads = first("num_key_value_heads") or heads
    if config.get("multi_query_attention"):
        kv_heads = first("multi_query_group_num") or kv_heads
    hidden = first("hidden_size")
    head_dim = first("head_dim", "kv_channels") or (hidden // heads if heads else 0)
    context = first("max_position_embeddings", "seq_length", "max_sequence_length")
    return 2 * layers * kv_heads * head_dim * KV_BYTES, context


def _weight_names(folder: Path) -> list[str]:
    """Shards that an index names, or else what lies there; safetensors first, as the loader has it."""
    for index, pattern in (
        ("model.safetensors.index.json", "*.safetensors"), ("pytorch_model.bin.index.json", "pytorch_model*.bin"),
    ):  # fmt: skip
        if (folder / index).exists():
            shards = read_json(folder / index).get("weight_map", {})
            names = sorted(set(shards.values())) if isinstance(shards, dict) else []
            if missing := [name for name in names if not (folder / name).exists()]:
                raise ModelError(f"{folder} lacks {len(missing)} of {len(names)} shards, first {missing[0]}: copy it")
            return names
        if names := sorted(path.name for path in folder.glob(pattern)):
            return names
    raise ModelError(f"{folder} has no weights: *.safetensors or pytorch_model*.bin belong there")


def _check_safetensors(path: Path) -> None:
    """The header says how long the file must be: github.com/huggingface/safetensors, format."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > _HEADER_LIMIT:
                raise ValueError("the header is too long")
            entries = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ModelError(f"{path} is truncated or damaged: copy it again") from None
    wanted = 8 + header_bytes + max(ends, default=0)
    if size != wanted:
        raise ModelError(f"{path} has {size:,} bytes instead of {wanted:,}: copy it again")
