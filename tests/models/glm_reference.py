"""transformers' GLM as the reference of ChatGLM2, ChatGLM3 and GLM-4, and its weights under the checkpoints' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_ENDS = {
    "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
    "transformer.output_layer.weight": "lm_head.weight",
}
_PARTS = {
    "input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm",
    "self_attention.dense": "self_attn.o_proj", "mlp.dense_h_to_4h": "mlp.gate_up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}  # fmt: skip


def glm(name: str, config: dict[str, Any], spread: float = 0.15) -> Any:
    """The model of a family's config.json, its weights random."""
    from transformers import GlmConfig, GlmForCausalLM

    glm_config = GlmConfig(
        vocab_size=config["padded_vocab_size"], hidden_size=config["hidden_size"],
        intermediate_size=config["ffn_hidden_size"], num_hidden_layers=config["num_layers"],
        num_attention_heads=config["num_attention_heads"], num_key_value_heads=config["multi_query_group_num"],
        head_dim=config["kv_channels"], attention_bias=True, rms_norm_eps=config["layernorm_epsilon"],
        max_position_embeddings=config["seq_length"], tie_word_embeddings=False, initializer_range=spread,
        pad_token_id=0, eos_token_id=2, rope_parameters=rope_parameters(name, config),
    )  # fmt: skip
    return GlmForCausalLM(glm_config).eval()


def rope_parameters(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What rope_ratio means in each family, in transformers' words."""
    ratio = config.get("rope_ratio", 1)
    shared = {"partial_rotary_factor": 0.5}
    if name == "chatglm2-6b" and ratio != 1:
        return {**shared, "rope_type": "linear", "rope_theta": 10000.0, "factor": float(ratio)}
    return {**shared, "rope_type": "default", "rope_theta": 10000.0 * ratio}


def as_published(state: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The model's weights, as a checkpoint of the family has them."""
    tensors = {ours: state[theirs] for ours, theirs in _ENDS.items()}
    tensors["transformer.rotary_pos_emb.inv_freq"] = torch.ones(3)
    for index in range(num_layers):
        ours, theirs = f"transformer.encoder.layers.{index}.", f"model.layers.{index}."
        for kind in ("weight", "bias"):
            heads = [state[f"{theirs}self_attn.{which}_proj.{kind}"] for which in "qkv"]
            tensors[f"{ours}self_attention.query_key_value.{kind}"] = torch.cat(heads)
        for our, their in _PARTS.items():
            tensors[f"{ours}{our}.weight"] = state[f"{theirs}{their}.weight"]
    return tensors


def as_transformers(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """A checkpoint's weights in float32, as the model has them."""
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    rows = [config["kv_channels"] * config[key] for key in ("num_attention_heads", *["multi_query_group_num"] * 2)]
    state = {theirs: tensors[ours] for ours, theirs in _ENDS.items()}
    for index in range(config["num_layers"]):
        ours, theirs = f"transformer.encoder.layers.{index}.", f"model.layers.{index}."
        for kind in ("weight", "bias"):
            heads = tensors[f"{ours}self_attention.query_key_value.{kind}"].split(rows)
            state |= {f"{theirs}self_attn.{which}_proj.{kind}": head for which, head in zip("qkv", heads, strict=True)}
        for our, their in _PARTS.items():
            state[f"{theirs}{their}.weight"] = tensors[f"{ours}{our}.weight"]
    return state
