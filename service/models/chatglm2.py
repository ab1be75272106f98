"""ChatGLM2, ChatGLM3 and GLM-4 checkpoints as a `Decoder`'s config and weights.

Any thread. Knows config keys and tensor names; no kernels and no tokenizer. All three are the causal decoder with
grouped KV, a bias on q, k and v, and rotary of neighbouring pairs over the first half of each head. They differ in
what `rope_ratio` means:

    chatglm2-6b-32k                  positions are divided by it
    chatglm3-6b-32k, -128k, glm-4    the base 10000 is multiplied by it
    chatglm3-6b-128k                 and queries grow with ln(position), past 2,000
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from service.models.decoder import DecoderConfig, DecoderWeights, Layer
from service.models.errors import ModelError
from service.models.matrices import Matrices
from service.models.tokenizer_files import naming_missing_keys

ROPE_BASE = 10000.0
# chatglm3-6b-128k: queries are multiplied by max(1, ln(position + 1 + 64) / ln 2048), after rotary.
LOG_SCALE_FROM = 2048
LOG_SCALE_OFFSET = 65
_LONG_CONTEXT = 131_072

_EMBEDDING = "transformer.embedding.word_embeddings.weight"
_FINAL_NORM = "transformer.encoder.final_layernorm.weight"
_HEAD = "transformer.output_layer.weight"
_LAYER = "transformer.encoder.layers.{}."
_LAYER_TENSORS = (
    "input_layernorm.weight", "self_attention.query_key_value.weight", "self_attention.query_key_value.bias",
    "self_attention.dense.weight", "post_attention_layernorm.weight", "mlp.dense_h_to_4h.weight",
    "mlp.dense_4h_to_h.weight",
)  # fmt: skip


def read_config(folder: Path, config: Mapping[str, Any], family: str) -> DecoderConfig:
    """From config.json; `family` is "chatglm2", "chatglm3" or "glm4". Raises `ModelError`."""
    expected = {
        "add_bias_linear": False, "add_qkv_bias": True, "rmsnorm": True, "multi_query_attention": True,
        "apply_residual_connection_post_layernorm": False, "post_layer_norm": True, "original_rope": True,
    }  # fmt: skip
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise ModelError(
                f"{folder}/config.json has {key}={config[key]!r}: no {family} checkpoint is known with that"
            )
    with naming_missing_keys(folder):
        ratio = float(config.get("rope_ratio", 1))
        is_divided = family == "chatglm2"
        context_limit = int(config["seq_length"])
        return DecoderConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_layers=config["num_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["multi_query_group_num"],
            head_dim=config["kv_channels"],
            rms_norm_eps=config["layernorm_epsilon"],
            rope_theta=ROPE_BASE if is_divided else ROPE_BASE * ratio,
            rope_scale=ratio if is_divided else 1.0,
            rotary_dim=config["kv_channels"] // 2,
            context_limit=context_limit,
            log_scale_from=LOG_SCALE_FROM if family == "chatglm3" and context_limit >= _LONG_CONTEXT else 0,
            log_scale_offset=LOG_SCALE_OFFSET,
        )


def load_weights(matrices: Matrices, config: DecoderConfig, progress: Callable[[float], None]) -> DecoderWeights:
    """Tensor by tensor into the wanted format. Raises `ModelError`."""
    layer_names = [_LAYER.format(index) + name for index in range(config.num_layers) for name in _LAYER_TENSORS]
    matrices.files.check([_EMBEDDING, _FINAL_NORM, _HEAD, *layer_names], lambda name: name.endswith("inv_freq"))
    layers = []
    for index in range(config.num_layers):
        prefix = _LAYER.format(index)
        layers.append(
            Layer(
                input_norm=matrices.vector(prefix + "input_layernorm.weight"),
                qkv=matrices.linear(prefix + "self_attention.query_key_value.weight"),
                qkv_bias=matrices.vector(prefix + "self_attention.query_key_value.bias"),
                out=matrices.linear(prefix + "self_attention.dense.weight"),
                mlp_norm=matrices.vector(prefix + "post_attention_layernorm.weight"),
                gate_up=matrices.linear(prefix + "mlp.dense_h_to_4h.weight"),
                down=matrices.linear(prefix + "mlp.dense_4h_to_h.weight"),
            )
        )
        progress((index + 1) / (config.num_layers + 2))
    embedding, head, final_norm = matrices.embedding(_EMBEDDING), matrices.head(_HEAD), matrices.vector(_FINAL_NORM)
    matrices.finish()
    progress(1.0)
    return DecoderWeights(embedding, tuple(layers), final_norm, head)
