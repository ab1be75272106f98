"""ChatGLM-6B (v1): a prefix LM with two position streams. Config, weights and forwards.

The engine thread's. Knows token ids, positions and KV slots; no tokenizer, no sampling.

    prompt:    text …  [gMASK]  <sop>  answer …
    index:     0 …     n        n+1    n+2 …
    sees:      every one of [0, n], both ways | causal from <sop> on
    position:  0 …     n        n      n …          (the mask's own)
    block:     0 …     0        1      2 …

A longer prompt changes the KV of its own beginning, so a prompt is computed whole; see `Capabilities.causal_prompt`.

Letters: N rows, E hidden size, H heads, D head dim, F mlp size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from service.engine.base import Aborted
from service.models.attention import Attention, DecodeAttention, KvSlots, PrefillAttention
from service.models.errors import ModelError
from service.models.head import Embedding, Head
from service.models.linear import Linear
from service.models.matrices import Matrices
from service.models.tensor_files import TensorFiles
from service.models.tokenizer_files import naming_missing_keys

# The original scales the residual by sqrt(2 * 28), whatever `num_layers` says.
ALPHA = math.sqrt(2 * 28)
ROPE_BASE = 10000.0

_LAYER = "transformer.layers.{}."
_MATRICES = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class ChatGLM1Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float
    context_limit: int
    sop_id: int
    mask_ids: tuple[int, int]  # [gMASK], else [MASK]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def num_matrix_weights(self) -> int:
        """Weights of all layers' matrices."""
        return self.num_layers * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix with its bias, the bias in float32."""

    linear: Linear
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x).float().add_(self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor  # [E] float32
    bias: Tensor  # [E] float32
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class ChatGLM1Layer:
    input_norm: Norm
    qkv: Affine  # E -> 3 * H * D: queries, keys, values, each head's rotary pairs side by side
    out: Affine
    mlp_norm: Norm
    up: Affine  # E -> F
    down: Affine  # F -> E


def read_config(folder: Path, config: Mapping[str, Any]) -> ChatGLM1Config:
    """From config.json. Raises `ModelError`."""
    if config.get("num_image_tokens"):
        raise ModelError(f"{folder} is from before the vocabulary was cut (num_image_tokens): take a later revision")
    with naming_missing_keys(folder):
        return ChatGLM1Config(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["inner_hidden_size"],
            num_layers=config["num_layers"],
            num_heads=config["num_attention_heads"],
            layer_norm_eps=config["layernorm_epsilon"],
            context_limit=config["max_sequence_length"],
            sop_id=config["bos_token_id"],
            mask_ids=(config["gmask_token_id"], config["mask_token_id"]),
        )


class ChatGLM1:
    """Weights and KV slots; the same surface as `Decoder`. Residuals and norms are float32."""

    def __init__(
        self, matrices: Matrices, config: ChatGLM1Config, *, num_slots: int, context: int,
        progress: Callable[[float], None],
    ) -> None:  # fmt: skip
        """Load tensor by tensor into the wanted format. Raises `ModelError`."""
        form = matrices.form
        self.config = config
        self.dtype = form.dtype
        self.device = form.device
        _check_tensors(matrices.files, config)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_load_layer(matrices, _LAYER.format(index), config))
            progress((index + 1) / (config.num_layers + 2))
        self._embedding: Embedding = matrices.embedding("transformer.word_embeddings.weight")
        self._head: Head = matrices.head("lm_head.weight")
        self._final_norm = _load_norm(matrices, "transformer.final_layernorm", config)
        matrices.finish()
        self.kv = KvSlots(
            config.num_layers, num_slots, config.num_heads, context, config.head_dim, form.dtype, form.device
        )
        self._turns = _turns(config.head_dim, context).to(form.device)  # [C, D / 4] complex64
        self._prefixes = [(0, 0)] * num_slots  # per slot: the mask's position, and the index of <sop>
        progress(1.0)

    def decode(self, slots: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One token in each of N different slots, row i at index `positions[i]` -> logits [N, V] float32."""
        attention = DecodeAttention(self.kv, slots, positions, self.device)
        streams = [self._streams(slot, index) for slot, index in zip(slots, positions, strict=True)]
        return self._logits(self._forward(ids, streams, attention, None))

    def prefill(
        self, slot: int, start: int, ids: Sequence[int], *, wants_logits: bool, is_replay: bool = False,
        should_abort: Callable[[], bool],
    ) -> Tensor | None:  # fmt: skip
        """A whole prompt of T tokens, or (start > 0) what follows one in this slot -> logits of the last [1, V]."""
        if start == 0:
            self._prefixes[slot] = self._find_prefix(ids)
        prefix = self._prefixes[slot][1]
        attention = PrefillAttention(self.kv, slot, start, len(ids), num_mutual=prefix if start == 0 else 0)
        streams = [self._streams(slot, index) for index in range(start, start + len(ids))]
        hidden = self._forward(ids, streams, attention, should_abort)
        return self._logits(hidden[-1:]) if wants_logits else None

    def _find_prefix(self, ids: Sequence[int]) -> tuple[int, int]:
        """The mask token's index, and the first <sop>'s: what lies before it sees itself both ways."""
        sop = ids.index(self.config.sop_id) if self.config.sop_id in ids else len(ids)
        mask = next((ids.index(mask_id) for mask_id in self.config.mask_ids if mask_id in ids), max(0, sop - 1))
        return mask, sop

    def _streams(self, slot: int, index: int) -> tuple[int, int]:
        """(position, block position) of the token at an index."""
        mask, sop = self._prefixes[slot]
        return (index, 0) if index < sop else (mask, index - sop + 1)

    def _forward(
        self, ids: Sequence[int], streams: Sequence[tuple[int, int]], attention: Attention,
        should_abort: Callable[[], bool] | None,
    ) -> Tensor:  # fmt: skip
        """Hidden states [N, E] float32."""
        hidden = self._embedding(torch.tensor(ids, device=self.device))  # [N, E]
        rotations = self._rotations(torch.tensor(streams, device=self.device))
        for index, layer in enumerate(self._layers):
            if should_abort is not None and should_abort():
                raise Aborted
            # The residual is the *normalised* input, scaled.
            normed = layer.input_norm(hidden)
            attended = attention(index, self._heads(layer, normed, rotations))  # [N, H * D]
            hidden = layer.out(attended).add_(normed, alpha=ALPHA)
            normed = layer.mlp_norm(hidden)
            risen = F.gelu(layer.up(normed.to(self.dtype)), approximate="tanh")  # [N, F]
            hidden = layer.down(risen.to(self.dtype)).add_(normed, alpha=ALPHA)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._final_norm(hidden))

    def _rotations(self, streams: Tensor) -> Tensor:
        """[N, 2] positions -> [N, 3H, D / 2] complex64: half of a head turns by each stream, values by nothing."""
        turns = self._turns[streams].flatten(1)  # [N, D / 2]
        num_heads = self.config.num_heads
        rotations = torch.ones(len(streams), 3 * num_heads, turns.shape[1], dtype=turns.dtype, device=turns.device)
        rotations[:, : 2 * num_heads] = turns[:, None]
        return rotations

    def _heads(self, layer: ChatGLM1Layer, normed: Tensor, rotations: Tensor) -> Tensor:
        """[N, E] -> rotated queries and keys, and values: [N, 3H, D]."""
        pairs = torch.view_as_complex(layer.qkv(normed.to(self.dtype)).view(*rotations.shape, 2))
        return torch.view_as_real(pairs * rotations).to(self.dtype).flatten(-2)


def _turns(head_dim: int, context: int) -> Tensor:
    """Rotations [C, D / 4] of one stream: position / 10000^(2i / (D / 2)).

    The original keeps the inverse frequencies in float16, in every precision.
    """
    rotary_dim = head_dim // 2
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    inverse = (1.0 / ROPE_BASE**exponent).half().float()
    angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse)
    return torch.polar(torch.ones_like(angles), angles)


def _qkv_rows(num_heads: int, head_dim: int) -> Tensor:
    """Where the rows of [queries | keys | values] lie in the checkpoint's matrix, which has q, k, v head by head.

    Each half of a q or k head has its rotary pairs (i, i + D / 4), which become neighbours.
    """
    quarter = head_dim // 4
    half = torch.arange(2 * quarter).view(2, quarter).T.reshape(-1)
    paired = torch.cat([half, half + 2 * quarter])
    starts = torch.arange(num_heads)[:, None] * 3 * head_dim
    queries, keys = starts + paired, starts + head_dim + paired
    values = starts + 2 * head_dim + torch.arange(head_dim)
    return torch.cat([rows.reshape(-1) for rows in (queries, keys, values)])


def _load_layer(matrices: Matrices, prefix: str, config: ChatGLM1Config) -> ChatGLM1Layer:
    rows = _qkv_rows(config.num_heads, config.head_dim)

    def affine(name: str, order: Tensor | None = None) -> Affine:
        bias = matrices.vector(f"{prefix}{name}.bias")
        return Affine(
            matrices.linear(f"{prefix}{name}.weight", order), bias if order is None else bias[order.to(bias.device)]
        )

    return ChatGLM1Layer(
        input_norm=_load_norm(matrices, prefix + _NORMS[0], config),
        qkv=affine(_MATRICES[0], rows),
        out=affine(_MATRICES[1]),
        mlp_norm=_load_norm(matrices, prefix + _NORMS[1], config),
        up=affine(_MATRICES[2]),
        down=affine(_MATRICES[3]),
    )


def _load_norm(matrices: Matrices, name: str, config: ChatGLM1Config) -> Norm:
    return Norm(matrices.vector(f"{name}.weight"), matrices.vector(f"{name}.bias"), config.layer_norm_eps)


def _check_tensors(files: TensorFiles, config: ChatGLM1Config) -> None:
    wanted = ["transformer.word_embeddings.weight", "lm_head.weight"]
    wanted += [f"transformer.final_layernorm.{part}" for part in ("weight", "bias")]
    for index in range(config.num_layers):
        wanted += [
            f"{_LAYER.format(index)}{name}.{part}" for name in (*_MATRICES, *_NORMS) for part in ("weight", "bias")
        ]
    files.check(wanted, lambda name: name.endswith("inv_freq"))
