"""Llama-family checkpoints (Llama, SmolLM2, …) as a `Decoder`'s config and weights: from GGUF, or a Hugging Face folder.

Any thread. Knows tensor names and config keys; no kernels (`linear.py`) and no tokenizer.
Both sources end in the same place: rotary pairs are neighbours. llama.cpp's converter already wrote its q and k rows
so; a Hugging Face checkpoint has (i, i + D / 2) as pairs and is reordered here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from service.models.decoder import DecoderConfig, DecoderWeights, Layer
from service.models.errors import ModelError
from service.models.gguf_file import GgufFile, GgufTensor, read_float, read_grouped
from service.models.head import make_embedding, make_head
from service.models.linear import LinearFormat
from service.models.weights import GROUP, Grouped, Weight, concat_rows, dense, paired_rows, take_rows

Progress = Callable[[float], None]
Fetch = Callable[[str], Weight]  # a tensor's name in our words -> the tensor; raises ModelError when it is missing

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


# --- GGUF ----------------------------------------------------------------------------------------------------------


def gguf_config(file: GgufFile) -> DecoderConfig:
    """Raises `ModelError` for an architecture, or a rope scaling, that this decoder does not compute."""
    architecture = file.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{file.path} has architecture {architecture!r}: only 'llama' GGUF files can be run")
    if "rope_freqs.weight" in file.tensors or file.metadata.get("llama.rope.scaling.type", "none") != "none":
        raise ModelError(f"{file.path} scales its rotary frequencies, which is not supported: use another model")
    num_heads = file.get("llama.attention.head_count")
    hidden_size = file.get("llama.embedding_length")
    head_dim = file.metadata.get("llama.attention.key_length", hidden_size // num_heads)
    return DecoderConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
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


def gguf_weights(file: GgufFile, config: DecoderConfig, form: LinearFormat, progress: Progress) -> DecoderWeights:
    def fetch(name: str) -> Weight:
        if name not in file.tensors:
            raise ModelError(f"{file.path} has no tensor {name!r}: it is not a complete llama model")
        return _gguf_weight(file.tensors[name])

    is_tied = _NAMES["head"][0] not in file.tensors
    return _assemble(lambda key: fetch(_spell(key, 0)), config, form, progress, is_tied=is_tied)


def _gguf_weight(tensor: GgufTensor) -> Weight:
    grouped = read_grouped(tensor)
    if grouped is None:
        return torch.from_numpy(read_float(tensor).copy())
    values, scale, minimum = grouped
    scales = torch.from_numpy(scale)
    minimums = torch.zeros_like(scales) if minimum is None else torch.from_numpy(minimum)
    return Grouped(torch.from_numpy(values), scales, minimums)


# --- Hugging Face folder -------------------------------------------------------------------------------------------


def folder_config(folder: Path, config: dict[str, Any]) -> DecoderConfig:
    """From config.json. Raises `ModelError` for what this decoder does not compute."""
    if config.get("model_type") != "llama":
        raise ModelError(f"{folder} has model_type {config.get('model_type')!r}: only 'llama' can be run")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # transformers 5, 4
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear"):
        raise ModelError(f"{folder} has rope type {kind!r}, which is not supported: use another model")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ModelError(f"{folder} has {key}, which Llama checkpoints here may not have: use another model")
    try:
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
    except KeyError as error:
        raise ModelError(f"{folder}/config.json lacks {error}: copy the checkpoint again") from None


def folder_weights(folder: Path, config: DecoderConfig, form: LinearFormat, progress: Progress) -> DecoderWeights:
    """From *.safetensors, one file or many."""
    from safetensors import SafetensorError, safe_open

    where: dict[str, Any] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            opened = safe_open(path, framework="pt")
            where |= dict.fromkeys(opened.keys(), opened)
    except SafetensorError as error:
        raise ModelError(f"{path} is truncated or damaged ({error}): copy it again") from None
    turn = {
        "q": paired_rows(config.num_heads, config.head_dim, config.rotary_dim),
        "k": paired_rows(config.num_kv_heads, config.head_dim, config.rotary_dim),
    }

    def fetch(key: str) -> Weight:
        name = _spell(key, 1)
        if name not in where:
            raise ModelError(f"{folder} has no tensor {name!r}: it is not a complete llama model")
        weight: Tensor = where[name].get_tensor(name)
        rows = turn.get(key.partition(".")[0])
        return weight if rows is None else take_rows(weight, rows)

    return _assemble(fetch, config, form, progress, is_tied=_spell("head", 1) not in where)


def read_folder_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {folder / 'config.json'}: {error}") from None
    return config


# --- both ----------------------------------------------------------------------------------------------------------


def _spell(key: str, source: int) -> str:
    """"q.3" -> the checkpoint's name of layer 3's q."""
    name, _, layer = key.partition(".")
    return _NAMES[name][source].format(layer)


def _assemble(
    fetch: Fetch, config: DecoderConfig, form: LinearFormat, progress: Progress, *, is_tied: bool
) -> DecoderWeights:
    """Fuse q, k, v and gate, up, and put every matrix into the wanted format. Raises `ModelError`."""
    if form.quantization == "int4" and (config.hidden_size % GROUP or config.intermediate_size % GROUP):
        raise ModelError(f"int4 needs sizes that are multiples of {GROUP}: use --quantization none")

    def norm(key: str) -> Tensor:
        return dense(fetch(key)).float().to(form.device)

    def fused(*keys: str) -> Weight:
        return concat_rows([fetch(key) for key in keys])

    layers = []
    for i in range(config.num_layers):
        layers.append(
            Layer(
                input_norm=norm(f"input_norm.{i}"),
                qkv=form.make(fused(f"q.{i}", f"k.{i}", f"v.{i}")),
                qkv_bias=None,
                out=form.make(fetch(f"out.{i}")),
                mlp_norm=norm(f"mlp_norm.{i}"),
                gate_up=form.make(fused(f"gate.{i}", f"up.{i}")),
                down=form.make(fetch(f"down.{i}")),
            )
        )
        progress((i + 1) / (config.num_layers + 2))
    table = fetch("embedding")
    head = make_head(table if is_tied else fetch("head"), form)
    progress(1.0)
    return DecoderWeights(make_embedding(table, form), tuple(layers), norm("final_norm"), head)
