"""Llama-family checkpoints (Llama, SmolLM2, …), GGUF or Hugging Face folder -> a `Decoder`'s config and weights.

Any thread. Knows tensor names and config keys; no kernels (`linear.py`) and no tokenizer.
Both sources end in the same place: rotary pairs are neighbours. llama.cpp's converter already wrote its q and k rows
so; a Hugging Face checkpoint has (i, i + D / 2) as pairs and is reordered here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from service.models.decoder import DecoderConfig, DecoderWeights, Layer
from service.models.errors import ModelError
from service.models.gguf_file import Q4_1, GgufFile, GgufTensor, read_float, read_grouped
from service.models.head import make_embedding, make_head
from service.models.linear import LinearFormat
from service.models.tokenizer_files import naming_missing_keys, read_json
from service.models.weights import GROUP, Grouped, Weight, concat_rows, dense, paired_rows

Progress = Callable[[float], None]

# Our name -> GGUF's, the Hugging Face one; the layer's number goes into {}.
_NAMES = {
    "embedding": ("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "model.norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
    "input_norm": ("blk.{}.attn_norm.weight", "model.layers.{}.input_layernorm.weight"),
    "q": ("blk.{}.attn_q.weight", "model.layers.{}.self_attn.q_proj.weight"),
    "k": ("blk.{}.attn_k.weight", "model.layers.{}.self_attn.k_proj.weight"),
    "v": ("blk.{}.attn_v.weight", "model.layers.{}.self_attn.v_proj.weight"),
    "out": ("blk.{}.attn_output.weight", "model.layers.{}.self_attn.o_proj.weight"),
    "mlp_norm": ("blk.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    "gate": ("blk.{}.ffn_gate.weight", "model.layers.{}.mlp.gate_proj.weight"),
    "up": ("blk.{}.ffn_up.weight", "model.layers.{}.mlp.up_proj.weight"),
    "down": ("blk.{}.ffn_down.weight", "model.layers.{}.mlp.down_proj.weight"),
}


class Source(Protocol):
    """A checkpoint: its config, and its tensors by our names, q and k rows in rotary pairs."""

    @property
    def config(self) -> DecoderConfig: ...

    def fetch(self, key: str) -> Weight:
        """Raises `ModelError` when the tensor is missing."""

    def has(self, key: str) -> bool: ...

    def quantization(self, device: torch.device) -> str:
        """What "auto" comes to."""


class GgufSource:
    """Raises `ModelError` for an architecture, or a rope scaling, that this decoder does not compute."""

    def __init__(self, path: Path) -> None:
        self._file = file = GgufFile(path)
        architecture = file.get("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path} has architecture {architecture!r}: only 'llama' GGUF files can be run")
        if "rope_freqs.weight" in file.tensors or file.metadata.get("llama.rope.scaling.type", "none") != "none":
            raise ModelError(f"{path} scales its rotary frequencies, which is not supported: use another model")
        num_heads, hidden_size = file.get("llama.attention.head_count"), file.get("llama.embedding_length")
        head_dim = file.metadata.get("llama.attention.key_length", hidden_size // num_heads)
        self.config = DecoderConfig(
            vocab_size=self._tensor("embedding").shape[0],
            hidden_size=hidden_size,
            intermediate_size=file.get("llama.feed_forward_length"),
            num_layers=file.get("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=file.metadata.get("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=file.get("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=file.metadata.get("llama.rope.freq_base", 10000.0),
            rotary_dim=file.metadata.get("llama.rope.dimension_count", head_dim),
            context_limit=file.get("llama.context_length"),
        )

    def fetch(self, key: str) -> Weight:
        tensor = self._tensor(key)
        grouped = read_grouped(tensor)
        if grouped is None:
            return torch.from_numpy(read_float(tensor).copy())
        values, scale, minimum = grouped
        scales = torch.from_numpy(scale)
        minimums = torch.zeros_like(scales) if minimum is None else torch.from_numpy(minimum)
        return Grouped(torch.from_numpy(values), scales, minimums)

    def has(self, key: str) -> bool:
        return _spell(key, 0) in self._file.tensors

    def quantization(self, device: torch.device) -> str:
        return "int4" if device.type == "cpu" and self._tensor("down.0").type == Q4_1 else "none"

    def _tensor(self, key: str) -> GgufTensor:
        name = _spell(key, 0)
        if name not in self._file.tensors:
            raise ModelError(f"{self._file.path} has no tensor {name!r}: it is not a complete llama model")
        return self._file.tensors[name]


class FolderSource:
    """A Hugging Face folder: config.json and *.safetensors, one file or many. Raises `ModelError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = config = _read_config(folder)
        self._rows = {
            "q": paired_rows(config.num_heads, config.head_dim, config.rotary_dim),
            "k": paired_rows(config.num_kv_heads, config.head_dim, config.rotary_dim),
        }
        self._files: dict[str, Any] = {}  # tensor's name -> the opened file that holds it
        for path in sorted(folder.glob("*.safetensors")):
            try:
                opened = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is truncated or damaged ({error}): copy it again") from None

    def fetch(self, key: str) -> Weight:
        name = _spell(key, 1)
        if name not in self._files:
            raise ModelError(f"{self._folder} has no tensor {name!r}: it is not a complete llama model")
        weight: Tensor = self._files[name].get_tensor(name)
        rows = self._rows.get(key.partition(".")[0])
        return weight if rows is None else weight[rows]

    def has(self, key: str) -> bool:
        return _spell(key, 1) in self._files

    def quantization(self, device: torch.device) -> str:
        return "none"


def _read_config(folder: Path) -> DecoderConfig:
    config = read_json(folder / "config.json")
    if config.get("model_type") != "llama":
        raise ModelError(f"{folder} has model_type {config.get('model_type')!r}: only 'llama' can be run")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # transformers 5, 4
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear") or config.get("attention_bias") or config.get("mlp_bias"):
        raise ModelError(f"{folder} has biases, or rope type {kind!r}, which are not supported: use another model")
    with naming_missing_keys(folder):
        num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden_size // num_heads
        return DecoderConfig(
            vocab_size=config["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            rotary_dim=head_dim,
            context_limit=config["max_position_embeddings"],
            rope_scale=rope.get("factor", 1.0) if kind == "linear" else 1.0,
        )


def load_weights(source: Source, form: LinearFormat, progress: Progress) -> DecoderWeights:
    """Fuse q, k, v and gate, up, and put every matrix into the wanted format. Raises `ModelError`."""
    config = source.config
    if form.quantization == "int4" and (config.hidden_size % GROUP or config.intermediate_size % GROUP):
        raise ModelError(f"int4 needs sizes that are multiples of {GROUP}: use --quantization none")

    def norm(key: str) -> Tensor:
        return dense(source.fetch(key)).float().to(form.device)

    def fused(*keys: str) -> Weight:
        return concat_rows([source.fetch(key) for key in keys])

    layers = []
    for i in range(config.num_layers):
        layers.append(
            Layer(
                input_norm=norm(f"input_norm.{i}"),
                qkv=form.make(fused(f"q.{i}", f"k.{i}", f"v.{i}")),
                qkv_bias=None,
                out=form.make(source.fetch(f"out.{i}")),
                mlp_norm=norm(f"mlp_norm.{i}"),
                gate_up=form.make(fused(f"gate.{i}", f"up.{i}")),
                down=form.make(source.fetch(f"down.{i}")),
            )
        )
        progress((i + 1) / (config.num_layers + 2))
    table = source.fetch("embedding")
    head = make_head(source.fetch("head") if source.has("head") else table, form)  # without one it is tied
    progress(1.0)
    return DecoderWeights(make_embedding(table, form), tuple(layers), norm("final_norm"), head)


def _spell(key: str, source: int) -> str:
    """The checkpoint's name of, say, "q.3": layer 3's q."""
    name, _, layer = key.partition(".")
    return _NAMES[name][source].format(layer)
