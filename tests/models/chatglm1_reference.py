"""A plain reference of ChatGLM-6B, and random checkpoints for it.

Written from the specification with loops, in float64, on weights nobody has seen: no fixture can be fitted. Shares
nothing with the implementation.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.chatglm import random_weights, write_config, write_weights

GMASK, SOP, MASK = 485, 488, 484  # of the small vocabulary


def write_random(folder: Path, seed: int, *, num_heads: int, head_dim: int, num_layers: int, inner: int) -> Any:
    """A checkpoint of random weights: (tensors in float64, config)."""
    width = num_heads * head_dim
    config = write_config(
        folder,
        "chatglm-6b",
        hidden_size=width,
        num_attention_heads=num_heads,
        num_layers=num_layers,
        inner_hidden_size=inner,
    )
    ends = ("transformer.word_embeddings.weight", "lm_head.weight")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(ends, (config["vocab_size"], width))
    norms = ["transformer.final_layernorm"]
    for index in range(num_layers):
        layer = f"transformer.layers.{index}."
        norms += [layer + "input_layernorm", layer + "post_attention_layernorm"]
        for name, rows, columns in (
            ("attention.query_key_value", 3 * width, width), ("attention.dense", width, width),
            ("mlp.dense_h_to_4h", inner, width), ("mlp.dense_4h_to_h", width, inner),
        ):  # fmt: skip
            shapes |= {f"{layer}{name}.weight": (rows, columns), f"{layer}{name}.bias": (rows,)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    tensors = random_weights(shapes, seed)
    write_weights(folder, tensors, "bin", num_shards=3)
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}, config


def reference(weights: dict[str, np.ndarray], config: dict[str, Any], ids: list[int]) -> np.ndarray:
    """Logits [T, V]: the specification, step by step. Shares nothing with the implementation."""
    length, num_heads = len(ids), config["num_attention_heads"]
    head_dim = config["hidden_size"] // num_heads
    context = ids.index(config["bos_token_id"])
    mask_at = ids.index(GMASK) if GMASK in ids else ids.index(MASK)
    positions = [t if t < context else mask_at for t in range(length)]
    blocks = [0 if t < context else t - context + 1 for t in range(length)]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        deviation = x - x.mean(-1, keepdims=True)
        scaled: np.ndarray = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + config["layernorm_epsilon"])
        return scaled * weights[name + ".weight"] + weights[name + ".bias"]

    def affine(x: np.ndarray, name: str) -> np.ndarray:
        made: np.ndarray = x @ weights[name + ".weight"].T + weights[name + ".bias"]
        return made

    def rotate(vector: np.ndarray, t: int) -> np.ndarray:
        out, quarter = vector.copy(), head_dim // 4
        for start, position in ((0, positions[t]), (head_dim // 2, blocks[t])):
            for i in range(quarter):
                inverse = float(np.float16(np.float32(1) / np.float32(10000) ** np.float32(2 * i / (head_dim // 2))))
                a, b, angle = vector[start + i], vector[start + i + quarter], position * inverse
                out[start + i] = a * math.cos(angle) - b * math.sin(angle)
                out[start + i + quarter] = b * math.cos(angle) + a * math.sin(angle)
        return out

    x = weights["transformer.word_embeddings.weight"][ids]
    for index in range(config["num_layers"]):
        layer = f"transformer.layers.{index}."
        normed = norm(x, layer + "input_layernorm")
        qkv = affine(normed, layer + "attention.query_key_value")
        attended = np.zeros_like(normed)
        for head in range(num_heads):
            q, k, v = (
                qkv[:, (3 * head + part) * head_dim : (3 * head + part + 1) * head_dim] for part in range(3)
            )  # each head's own three, side by side
            q = np.array([rotate(q[t], t) for t in range(length)])
            k = np.array([rotate(k[t], t) for t in range(length)])
            for t in range(length):
                seen = [s for s in range(length) if s < context or s <= t]
                scores = np.array([q[t] @ k[s] for s in seen]) / math.sqrt(head_dim)
                shares = np.exp(scores - scores.max())
                attended[t, head * head_dim : (head + 1) * head_dim] = shares @ v[seen] / shares.sum()
        x = normed * math.sqrt(56) + affine(attended, layer + "attention.dense")
        normed = norm(x, layer + "post_attention_layernorm")
        risen = affine(normed, layer + "mlp.dense_h_to_4h")
        risen = 0.5 * risen * (1 + np.tanh(math.sqrt(2 / math.pi) * (risen + 0.044715 * risen**3)))
        x = normed * math.sqrt(56) + affine(risen, layer + "mlp.dense_4h_to_h")
    logits: np.ndarray = norm(x, "transformer.final_layernorm") @ weights["lm_head.weight"].T
    return logits
