"""The decoder against transformers' Llama on random weights of odd shapes, and against itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from service.engine.base import Aborted
from service.models.decoder import DecoderConfig
from service.models.families import Model
from tests.models.conftest import Load, MakeFolder, reference_logits

# float32 on both sides, another order of additions; logits have a standard deviation near 1. Measured: 4e-6.
TOLERANCE = 5e-5
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1, "num_attention_heads": 3, "hidden_size": 51, "head_dim": 16},
    {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
]
IDS = [(7 * i * i + 3 * i) % 300 for i in range(40)]


def never() -> bool:
    return False


def prefill(decoder: Model, slot: int, start: int, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits = decoder.prefill(slot, start, ids, wants_logits=True, should_abort=never)
    assert logits is not None
    return logits[0]


def decode(decoder: Model, slots: list[int], ids: list[int], positions: list[int]) -> Tensor:
    with torch.inference_mode():
        return decoder.decode(slots, ids, positions)


@pytest.fixture
def decoder(make_folder: MakeFolder, load: Load) -> Model:
    return load(make_folder()[0], dtype="float32").decoder


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_logits_equal_transformers_for_every_prefix(sizes: dict[str, Any], make_folder: MakeFolder, load: Load) -> None:
    folder, reference = make_folder(**sizes)
    decoder = load(folder, dtype="float32").decoder
    wanted = reference_logits(reference, IDS)
    torch.testing.assert_close(prefill(decoder, 0, 0, IDS), wanted[-1], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(prefill(decoder, 1, 0, IDS[:5]), wanted[4], atol=TOLERANCE, rtol=0)
    for position in range(5, len(IDS)):
        row = decode(decoder, [1], [IDS[position]], [position])[0]
        torch.testing.assert_close(row, wanted[position], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunks", [[1, 39], [39, 1], [7, 20, 13], [1] * 40])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(decoder: Model, chunks: list[int]) -> None:
    wanted = prefill(decoder, 0, 0, IDS)
    start = 0
    for size in chunks:
        got = prefill(decoder, 2, start, IDS[start : start + size])
        start += size
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


def test_rows_of_different_length_in_one_batch_equal_each_row_alone(decoder: Model) -> None:
    lengths = {3: 1, 0: 17, 2: 39, 1: 6}  # slot -> tokens before this step; slots in no order
    for slot, length in lengths.items():
        prefill(decoder, slot, 0, IDS[:length])
    slots, positions = list(lengths), list(lengths.values())
    together = decode(decoder, slots, [11, 12, 13, 14], positions)
    for row, slot in enumerate(slots):
        alone = decode(decoder, [slot], [11 + row], [positions[row]])[0]
        torch.testing.assert_close(together[row], alone, atol=TOLERANCE, rtol=0)


def test_rows_never_see_what_another_slot_or_a_later_position_holds(decoder: Model) -> None:
    prefill(decoder, 0, 0, IDS[:9])
    wanted = decode(decoder, [0], [5], [9])
    with torch.inference_mode():
        for layer in decoder.kv.layers:
            layer[1:] = float("nan")
            layer[0, :, :, 10:] = float("nan")
    assert torch.equal(decode(decoder, [0], [5], [9]), wanted)
    assert torch.equal(prefill(decoder, 0, 0, IDS[:9]), prefill(decoder, 1, 0, IDS[:9]))


def test_a_copied_prefix_continues_exactly_like_its_source(decoder: Model) -> None:
    prefill(decoder, 0, 0, IDS)
    with torch.inference_mode():
        decoder.kv.copy_prefix(0, 3, 23)
    assert torch.equal(prefill(decoder, 3, 23, IDS[23:]), prefill(decoder, 0, 23, IDS[23:]))


def test_a_prefill_asks_before_every_layer_and_stops_there(decoder: Model) -> None:
    asked: list[bool] = []

    def third_time() -> bool:
        asked.append(True)
        return len(asked) == 3

    with pytest.raises(Aborted), torch.inference_mode():
        decoder.prefill(0, 0, IDS, wants_logits=True, should_abort=third_time)
    assert len(asked) == 3


def test_a_chunk_that_is_not_the_last_gives_no_logits(decoder: Model) -> None:
    with torch.inference_mode():
        assert decoder.prefill(0, 0, IDS[:5], wants_logits=False, should_abort=never) is None


def test_partial_rotary_leaves_the_other_dimensions_alone() -> None:
    config = DecoderConfig(10, 32, 8, 1, 2, 1, 16, 1e-5, 10000.0, rotary_dim=8, context_limit=64)
    angles = config.angles(64)  # [64, 8]: one per pair
    assert torch.equal(angles[:, 4:], torch.zeros(64, 4))
    assert angles[3, 0] == 3.0
    assert angles[3, 1] == pytest.approx(3.0 / 10000.0 ** (2 / 8))
