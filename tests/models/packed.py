"""Small random models in packed matrices, for the tests of the compiled kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from service.models.compiled import find_libraries
from service.models.decoder import Decoder, DecoderConfig, DecoderWeights, Layer
from service.models.head import DenseEmbedding, LinearHead
from service.models.linear import DenseLinear, Linear, NativeLinear
from service.models.native import Library, PackedMatrix
from service.models.weights import GROUP, Grouped, quantize_4bit

Wrap = Callable[[Grouped], Linear]  # puts a 4-bit matrix into a form
CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=32,
    rms_norm_eps=1e-5, rope_theta=500.0, rotary_dim=32, context_limit=600,
)  # fmt: skip
CONFIGS = {
    "grouped heads": CONFIG,
    "a kv head for each": replace(CONFIG, num_kv_heads=6),
    "half of it rotates": replace(CONFIG, rotary_dim=16),
    "queries grow": replace(CONFIG, log_scale_from=8, log_scale_offset=1),
    "wide heads": replace(CONFIG, num_heads=2, num_kv_heads=1, head_dim=128, rotary_dim=64),
}


def load(instructions: str) -> Library:
    """The variant for these instructions. Skips the test where there is none; in CI one of them must be there."""
    found = find_libraries()
    if instructions not in found:
        message = f"service/models/*.c were not compiled for {instructions}, or this processor lacks it"
        is_needed = os.environ.get("CI") == "true" and not found
        pytest.fail(message) if is_needed else pytest.skip(message)
    return Library(found[instructions])


def grouped_8bit(rows: int, columns: int) -> Grouped:
    scale = torch.rand(rows, columns // GROUP).half().float() + 0.01
    return Grouped(
        torch.randint(-128, 128, (rows, columns)).to(torch.int8), scale.half().float(), torch.zeros_like(scale)
    )


def grouped_4bit(rows: int, columns: int) -> Grouped:
    weight = quantize_4bit(torch.randn(rows, columns) / columns**0.5)
    return Grouped(weight.values, weight.scale.half().float(), weight.minimum.half().float())


def make_layers(config: DecoderConfig, wrap: Wrap) -> list[Layer]:
    """Random layers; `wrap` makes a `Linear` of a 4-bit matrix."""
    torch.manual_seed(3)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    hidden, mlp = config.hidden_size, config.intermediate_size

    def linear(rows: int, columns: int) -> Linear:
        return wrap(grouped_4bit(rows, columns))

    return [
        Layer(
            torch.rand(hidden) + 0.5, linear(width, hidden), torch.randn(width) * 0.3,
            linear(hidden, config.num_heads * config.head_dim), torch.rand(hidden) + 0.5, linear(2 * mlp, hidden),
            linear(hidden, mlp),
        )
        for _ in range(config.num_layers)
    ]  # fmt: skip


def make_decoder(config: DecoderConfig, wrap: Wrap, dtype: torch.dtype) -> Decoder:
    layers = make_layers(config, wrap)
    torch.manual_seed(4)
    table = torch.randn(config.vocab_size, config.hidden_size)
    head = LinearHead(DenseLinear(table), torch.float32)
    weights = DecoderWeights(DenseEmbedding(table), tuple(layers), torch.ones(config.hidden_size), head)
    return Decoder(config, weights, num_slots=4, context=config.context_limit, dtype=dtype, device=CPU)


def make_native(config: DecoderConfig, functions: Library) -> Decoder:
    """`make_decoder` with packed matrices. The caller sees to it that `decoder.library()` gives these functions."""
    decoder = make_decoder(
        config, lambda weight: NativeLinear(PackedMatrix.pack(weight, functions), None), torch.bfloat16
    )
    assert decoder._fused is not None
    return decoder


def fill(decoder: Decoder, lengths: dict[int, int]) -> None:
    """Equal keys and values in equal slots of any decoder, and NaN behind them."""
    generator = torch.Generator().manual_seed(5)
    for layer in decoder.kv.layers:
        layer.fill_(float("nan"))
        for slot in range(4):
            values = torch.randn(layer[slot].shape, generator=generator).bfloat16()
            layer[slot, :, :, : lengths.get(slot, 0)] = values[:, :, : lengths.get(slot, 0)].to(layer.dtype)
