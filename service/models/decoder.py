"""The causal decoder: RMSNorm, rotary, grouped KV, SwiGLU. Llama, SmolLM2, ChatGLM2/3 and GLM-4 are all this.

The engine thread's. Knows token ids, positions and KV slots; no tokenizer, no sampling, no file format, nothing of
transformers. Positions are explicit, buffers keep their shape, and there is one Python object per layer.

Letters: N rows (of different slots in a decode, of one slot in a prefill), E hidden size, H query heads, G kv heads,
D head dim, F mlp size, V vocabulary.

Rotary is always of neighbouring pairs here, so that it is one complex multiplication: a checkpoint with half-split
rotary has its q and k rows reordered at load (`weights.paired_rows`), which changes no score. Dimensions that do not
rotate (partial rotary), and the values, ride along with an angle of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from service.engine.base import Aborted
from service.models.attention import Attention, DecodeAttention, KvSlots, PrefillAttention
from service.models.head import Embedding, Head
from service.models.linear import Linear, NativeLinear
from service.models.native import FusedStep, PackedLayer, library

MAX_FUSED_TOKENS = 48  # of a prompt, in one compiled step
_MAX_FUSED_PAIRS = 2**14  # of a token and a position that it sees


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int  # the first so many dimensions of a head rotate; head_dim = all
    context_limit: int  # positions the model was made for
    rope_scale: float = 1.0  # positions are divided by it ("linear" scaling)
    log_scale_from: int = 0  # queries grow by max(1, ln(position + log_scale_offset) / ln of this); 0 = they do not
    log_scale_offset: int = 0

    @property
    def num_matrix_weights(self) -> int:
        """Weights of the layers' matrices, embeddings and head not counted."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def angles(self, context: int) -> Tensor:
        """Rotary angles [context, D / 2] in float32: position / theta^(2i / rotary_dim), 0 where nothing rotates."""
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        positions = torch.arange(context, dtype=torch.float32) / self.rope_scale
        rotating = torch.outer(positions, 1.0 / self.rope_theta**exponent)
        return F.pad(rotating, (0, (self.head_dim - self.rotary_dim) // 2))

    def query_scales(self, context: int) -> Tensor:
        """What queries are multiplied with at each position: [context] float32."""
        grown = torch.arange(context, dtype=torch.float32).add_(self.log_scale_offset).log_()
        return (grown / math.log(self.log_scale_from)).clamp_(min=1.0)


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor  # [E] float32
    qkv: Linear  # E -> (H + 2G) * D: queries, keys, values
    qkv_bias: Tensor | None  # [(H + 2G) * D] float32
    out: Linear  # H * D -> E
    mlp_norm: Tensor  # [E] float32
    gate_up: Linear  # E -> 2F: gate, up
    down: Linear  # F -> E


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Embedding
    layers: tuple[Layer, ...]
    final_norm: Tensor  # [E] float32
    head: Head


class Decoder:
    """Weights and KV slots. Residuals and norms are float32, matrices and KV have `dtype`."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, *, num_slots: int, context: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.config = config
        self.dtype = dtype
        self.device = device
        self.kv = KvSlots(config.num_layers, num_slots, config.num_kv_heads, context, config.head_dim, dtype, device)
        # sqrt(|x|^2 / E + eps) = hypot(|x|, sqrt(E * eps)) / sqrt(E): the last factor goes into the norms' weights.
        root = math.sqrt(config.hidden_size)
        self._norm_floor = torch.tensor(root * math.sqrt(config.rms_norm_eps), device=device)
        self._embedding, self._head, self._final_norm = weights.embedding, weights.head, weights.final_norm * root
        self._layers = [
            replace(layer, input_norm=layer.input_norm * root, mlp_norm=layer.mlp_norm * root)
            for layer in weights.layers
        ]
        angles = config.angles(context)
        self._rotations = torch.polar(torch.ones_like(angles), angles).to(device)  # [C, D / 2] complex64
        self._fused = _fuse(config, weights.layers, self.kv)
        self._query_scales = config.query_scales(context).to(device) if config.log_scale_from else None  # [C]

    def decode(self, slots: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One token in each of N different slots, row i at `positions[i]` -> logits [N, V] float32."""
        if self._fused is not None:
            where = torch.tensor(positions)
            scales = None if self._query_scales is None else self._query_scales[where]
            embedded = self._embedding(torch.tensor(ids))
            return self._logits(self._fused(slots, positions, self._rotations[where], scales, embedded))
        attention = DecodeAttention(self.kv, slots, positions, self.device)
        return self._logits(self._forward(ids, torch.tensor(positions, device=self.device), attention, None, None))

    def prefill(
        self, slot: int, start: int, ids: Sequence[int], *, wants_logits: bool, is_replay: bool = False,
        should_abort: Callable[[], bool],
    ) -> Tensor | None:  # fmt: skip
        """T tokens of one slot at [start, start + T) -> logits of the last [1, V] float32, if they are wanted.

        `is_replay`: where the compiled step runs, and for up to MAX_FUSED_TOKENS, the result is bit for bit that of
        decoding one after another. Asks `should_abort` before each layer and raises `Aborted` when it says yes.
        """
        fused, where = self._fused, torch.arange(start, start + len(ids), device=self.device)
        as_decoded = len(ids) <= MAX_FUSED_TOKENS and (is_replay or _are_few(start, len(ids)))
        if fused is not None and (fused.can_prefill or as_decoded):
            at, hidden = self._rotations[where], self._embedding(torch.tensor(ids))
            scales = None if self._query_scales is None else self._query_scales[where]
            if fused.can_prefill and not (is_replay and as_decoded):
                hidden = fused.prefill(slot, start, at, scales, hidden, should_abort)
            else:
                hidden = fused([slot] * len(ids), where.tolist(), at, scales, hidden, should_abort)
            return self._logits(hidden[-1:]) if wants_logits else None
        attention = PrefillAttention(self.kv, slot, start, len(ids))
        hidden = self._forward(ids, where, attention, -1, should_abort)
        return self._logits(hidden) if wants_logits else None

    def _forward(
        self, ids: Sequence[int], positions: Tensor, attention: Attention, only_row: int | None,
        should_abort: Callable[[], bool] | None,
    ) -> Tensor:  # fmt: skip
        """Hidden states [N, E]. `only_row`: the one that is wanted; the others leave once their last KV is written."""
        hidden = self._embedding(torch.tensor(ids, device=self.device))  # [N, E]
        rotations = self._gather_rotations(positions)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if should_abort is not None and should_abort():
                raise Aborted
            attended = attention(index, self._heads(layer, hidden, rotations))  # [N, H * D]
            if index == last and only_row is not None:
                hidden, attended = hidden[only_row:], attended[only_row:]
            hidden = hidden + layer.out(attended)
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)  # [N, F] each
            hidden += layer.down(F.silu(gate).mul_(up))
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._norm(hidden, self._final_norm, torch.float32))

    def _gather_rotations(self, positions: Tensor) -> Tensor:
        """[N, H + 2G, D / 2] complex64: queries and keys turn by their position, values by nothing."""
        num_rotating = self.config.num_heads + self.config.num_kv_heads
        rotations = torch.ones(
            len(positions), num_rotating + self.config.num_kv_heads, self.config.head_dim // 2,
            dtype=torch.complex64, device=self.device,
        )  # fmt: skip
        rotations[:, :num_rotating] = self._rotations[positions][:, None]
        if self._query_scales is not None:  # a rotation's length scales what it turns
            rotations[:, : self.config.num_heads] *= self._query_scales[positions, None, None]
        return rotations

    def _heads(self, layer: Layer, hidden: Tensor, rotations: Tensor) -> Tensor:
        """[N, E] -> rotated queries and keys, and values: [N, H + 2G, D]."""
        qkv = layer.qkv(self._norm(hidden, layer.input_norm)).float()
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        pairs = torch.view_as_complex(qkv.view(*rotations.shape, 2))
        return torch.view_as_real(pairs * rotations).to(self.dtype).flatten(-2)

    def _norm(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """RMSNorm in float32, rounded once. Four small kernels: `F.rms_norm` takes twice as long on a CPU."""
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)  # [N, 1]
        return (hidden / length.hypot_(self._norm_floor)).mul_(weight).to(dtype or self.dtype)


def _are_few(start: int, num_tokens: int) -> bool:
    """Whether the compiled step computes these prompt tokens about as fast as torch does. Its result is that of
    decoding one after another, bit for bit. Measured at positions 0, 500 and 1,500, ms:

        16 tokens: 15, 25,  43; torch 23, 28, 34
        32 tokens: 29, 45,  83; torch 38, 47, 57
        48 tokens: 41, 66, 122; torch 58, 65, 82
    """
    return num_tokens * (start + num_tokens) <= _MAX_FUSED_PAIRS


def _fuse(config: DecoderConfig, layers: Sequence[Layer], kv: KvSlots) -> FusedStep | None:
    """The compiled step, where it was compiled and every matrix is packed for it."""
    functions = library()
    if functions is None or not FusedStep.can_run(config.num_heads, config.num_kv_heads, config.head_dim):
        return None
    packed = []
    for layer, layer_kv in zip(layers, kv.layers, strict=True):
        matrices = [linear.matrix for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
                    if isinstance(linear, NativeLinear)]  # fmt: skip
        if len(matrices) < 4 or layer_kv.dtype != torch.bfloat16:
            return None
        qkv, out, gate_up, down = matrices
        packed.append(PackedLayer(layer.input_norm, qkv, layer.qkv_bias, out, layer.mlp_norm, gate_up, down, layer_kv))
    return FusedStep(
        packed, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        eps=config.rms_norm_eps, functions=functions,
    )  # fmt: skip
