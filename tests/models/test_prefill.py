"""The compiled prefill: its arithmetic against plain torch, its independence of chunks and threads, its bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from service.engine.base import Aborted
from service.models import decoder as decoder_module
from service.models.decoder import MAX_FUSED_TOKENS, Decoder
from service.models.linear import MAX_FEW_ROWS, DenseLinear, LinearFormat, NativeLinear
from service.models.native import NF4, Library, PackedMatrix
from service.models.nf4 import quantize_blocks
from service.models.weights import Grouped
from tests.models.packed import CONFIG, CONFIGS, CPU, fill, grouped_4bit, grouped_8bit, load, make_decoder, make_native

IDS = [(7 * i * i + 3) % 96 for i in range(600)]


@pytest.fixture(scope="module")
def functions() -> Library:
    functions = load("amx")
    if not functions.has_prefill:
        pytest.skip("this system does not let processes use AMX")
    return functions


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def native(functions: Library, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Decoder:
    monkeypatch.setattr(decoder_module, "library", lambda: functions)
    return make_native(CONFIGS[getattr(request, "param", "grouped heads")], functions)


def prefill(decoder: Decoder, slot: int, start: int, end: int) -> Tensor:
    """IDS[start:end] -> the last hidden state, without the head."""
    assert decoder._fused is not None and decoder._fused.can_prefill
    scales = None if decoder._query_scales is None else decoder._query_scales[start:end]
    embedded = decoder._embedding(torch.tensor(IDS[start:end]))
    return decoder._fused.prefill(slot, start, decoder._rotations[start:end], scales, embedded)[-1]


# --- products --------------------------------------------------------------------------------------------------------


def pack_nf4(rows: int, columns: int) -> tuple[PackedMatrix, Tensor]:
    matrix = PackedMatrix(quantize_blocks(torch.randn(rows, columns))["blocks"], NF4, load("amx"))
    return matrix, matrix.unpack(0, rows // 16).T


def pack_grouped(make: Callable[[int, int], Grouped]) -> Callable[[int, int], tuple[PackedMatrix, Tensor]]:
    def pack(rows: int, columns: int) -> tuple[PackedMatrix, Tensor]:
        weight = make(rows, columns)
        return PackedMatrix.pack(weight, load("amx")), weight.dense()

    return pack


@pytest.mark.parametrize(
    "pack", [pack_grouped(grouped_4bit), pack_grouped(grouped_8bit), pack_nf4], ids=["4bit", "8bit", "nf4"]
)
@pytest.mark.parametrize("shape", [(16, 64), (48, 1344), (320, 192), (144, 4096)], ids=str)
@pytest.mark.usefixtures("functions")
def test_a_product_is_that_of_bfloat16_weights_and_activations(
    pack: Callable[[int, int], tuple[PackedMatrix, Tensor]], shape: tuple[int, int]
) -> None:
    """Few and many tiles of weights, depths of columns and blocks of rows, all with remainders."""
    torch.manual_seed(0)
    matrix, weight = pack(*shape)
    rounded = matrix.multiply_many(torch.eye(shape[1])).T.float()
    half = 2.0**-8 * (2 if weight.dtype == torch.bfloat16 else 1)  # already rounded: the other of two as near
    assert ((rounded - weight.float()).abs() <= half * weight.float().abs() + 1e-6).all()
    for num_rows in (1, 16, 17, 33, 300):
        x = torch.randn(num_rows, shape[1]).bfloat16()
        got, wanted = matrix.multiply_many(x), x.double() @ rounded.double().T
        assert got.dtype == torch.bfloat16
        assert ((got - wanted).abs() <= 2.0**-8 * wanted.abs() + 3e-6 * wanted.abs().max()).all()


def test_infinities_and_nan_come_out_as_such(functions: Library) -> None:
    matrix = PackedMatrix.pack(grouped_4bit(16, 64), functions)
    x = torch.zeros(40, 64)
    x[1, 5], x[20, 40] = float("nan"), float("inf")
    bad = ~matrix.multiply_many(x.bfloat16()).isfinite().all(dim=1)
    assert bad.nonzero().flatten().tolist() == [1, 20]
    with pytest.raises(ValueError, match="activations"):
        matrix.multiply_many(torch.zeros(1, 96))


@pytest.mark.usefixtures("functions")
def test_many_rows_take_it_and_no_copy_of_the_weights_is_kept() -> None:
    form = LinearFormat("auto", torch.bfloat16, CPU, keeps_dense=True)
    weight = grouped_4bit(64, 128)
    product = form.make(weight)
    assert isinstance(product, NativeLinear) and product._dense is None
    x = torch.randn(MAX_FEW_ROWS + 1, 128).bfloat16()
    assert torch.equal(product(x), product.matrix.multiply_many(x))
    assert torch.equal(product(x[:-1]), product.matrix(x[:-1]).bfloat16())


# --- prompts ---------------------------------------------------------------------------------------------------------


def in_three(decoder: Decoder) -> Tensor:
    """IDS[:333] into slot 2, behind what is in slot 1 -> logits."""
    fill(decoder, {1: 300})
    for start, end in ((0, 7), (7, 290), (290, 333)):
        logits = decoder.prefill(2, start, IDS[start:end], wants_logits=end == 333, should_abort=lambda: False)
    assert logits is not None
    return logits


@pytest.mark.parametrize("native", CONFIGS, indirect=True)
def test_a_prompt_is_what_the_torch_decoder_computes(native: Decoder) -> None:
    plain = make_decoder(native.config, lambda weight: DenseLinear(weight.dense()), torch.float32)
    got, wanted = in_three(native), in_three(plain)
    assert (got - wanted).norm() < 0.02 * wanted.norm()  # bfloat16 has 8 bits; measured 0.9 %
    for mine, theirs in zip(native.kv.layers, plain.kv.layers, strict=True):
        new, old = mine[2, :, :, :333].float(), theirs[2, :, :, :333]
        assert (new - old).norm() < 0.03 * old.norm()
        assert torch.equal(mine[1, :, :, :300].float(), theirs[1, :, :, :300]), "another slot was written to"
        assert mine[2, :, :, 333:].isnan().all() and mine[3].isnan().all(), "something was written behind the prompt"


@pytest.mark.parametrize("native", CONFIGS, indirect=True)
@pytest.mark.parametrize("cuts", [[1, 2, 3, 31, 64], [255, 256, 257], [100, 599], [33]], ids=str)
def test_a_prompt_is_the_same_bit_for_bit_however_it_is_cut(cuts: list[int], native: Decoder) -> None:
    fill(native, {})
    wanted = prefill(native, 0, 0, 600)
    for start, end in zip([0, *cuts], [*cuts, 600], strict=True):
        got = prefill(native, 2, start, end)
    assert torch.equal(got, wanted)
    for layer in native.kv.layers:
        assert torch.equal(layer[0], layer[2]) and layer[0].isfinite().all()


def test_a_prompt_is_the_same_bit_for_bit_with_any_number_of_threads(native: Decoder) -> None:
    wanted = prefill(native, 0, 0, 333)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(prefill(native, 1, 0, 333), wanted)
    finally:
        torch.set_num_threads(before)


def test_torch_computes_the_same_before_and_after(native: Decoder) -> None:
    """Both set the processor's tile registers up, and torch may believe that its own are still there."""
    x, weight = torch.randn(128, 256).bfloat16(), torch.randn(512, 256).bfloat16()
    keys = torch.randn(1, 4, 300, 64).bfloat16()

    def compute() -> list[Tensor]:
        return [x @ weight.T, torch.nn.functional.scaled_dot_product_attention(keys, keys, keys, is_causal=True)]

    before = compute()
    for end in (5, 100):
        prefill(native, 0, 0, end)
        assert all(map(torch.equal, compute(), before))


def test_a_prompt_goes_on_from_decoded_tokens_and_they_from_it(native: Decoder) -> None:
    for decoder in (native, make_decoder(CONFIG, lambda weight: DenseLinear(weight.dense()), torch.float32)):
        logits = decoder.prefill(0, 0, IDS[:40], wants_logits=False, should_abort=lambda: False)
        assert logits is None
        for position in range(40, 45):
            decoder.decode([0], [IDS[position]], [position])
        decoder.prefill(0, 45, IDS[45:80], wants_logits=False, should_abort=lambda: False)
        last = decoder.decode([0], [IDS[80]], [80])
        if decoder is native:
            got = last
    assert (got - last).norm() < 0.02 * last.norm()


def test_what_was_decoded_is_replayed_bit_for_bit(native: Decoder) -> None:
    """As an answer that goes on in another process is."""

    def prefill(start: int, end: int, is_replay: bool) -> Tensor:
        logits = native.prefill(
            1, start, IDS[start:end], wants_logits=True, is_replay=is_replay, should_abort=lambda: False
        )
        assert logits is not None
        return logits

    native.prefill(0, 0, IDS[:70], wants_logits=False, should_abort=lambda: False)
    for position in range(70, 70 + MAX_FUSED_TOKENS + 2):
        wanted = native.decode([0], [IDS[position]], [position])
    prefill(0, 70, False)
    prefill(70, 70 + MAX_FUSED_TOKENS, True)
    assert torch.equal(prefill(70 + MAX_FUSED_TOKENS, 72 + MAX_FUSED_TOKENS, True), wanted)
    for layer in native.kv.layers:
        assert torch.equal(layer[0], layer[1])
    assert not torch.equal(prefill(70, 72 + MAX_FUSED_TOKENS, False), wanted)


def test_a_prompt_is_given_up_between_layers(native: Decoder) -> None:
    answers = iter([False, False, True])
    with pytest.raises(Aborted):
        native.prefill(0, 0, IDS[:100], wants_logits=True, should_abort=lambda: next(answers))
    assert next(answers, None) is None
    assert torch.equal(prefill(native, 0, 0, 100), prefill(native, 1, 0, 100))


@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_what_is_not_finite_in_the_slot_reaches_those_who_see_it(which: int, native: Decoder) -> None:
    fill(native, {0: 50, 1: 50})
    native.kv.layers[1][0, which, 0, 30, 0] = float("nan")
    assert prefill(native, 0, 50, 60).isnan().all() and prefill(native, 1, 50, 60).isfinite().all()
    native.kv.layers[1][1, which, 0, 70, 0] = float("nan")  # nobody sees it yet
    assert prefill(native, 1, 60, 65).isfinite().all()


@pytest.mark.parametrize(
    ("slot", "start", "num"), [(4, 0, 1), (-1, 0, 1), (0, 600, 1), (0, -1, 2), (0, 590, 11), (0, 0, 0)]
)
def test_a_prompt_outside_the_kv_is_refused(slot: int, start: int, num: int, native: Decoder) -> None:
    assert native._fused is not None
    with pytest.raises(ValueError, match="outside the KV"):
        native._fused.prefill(slot, start, torch.ones(num, 16, dtype=torch.complex64), None, torch.zeros(num, 64))
    with pytest.raises(ValueError, match="is needed"):
        native._fused.prefill(0, 0, torch.ones(5, 16, dtype=torch.complex64), None, torch.zeros(4, 64))


def test_a_context_shorter_than_what_a_tile_reads_takes_the_other_path(
    functions: Library, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(decoder_module, "library", lambda: functions)
    short, shortest = (make_native(replace(CONFIG, context_limit=limit), functions) for limit in (31, 32))
    assert short._fused is not None and not short._fused.can_prefill
    assert shortest._fused is not None and shortest._fused.can_prefill
    logits = [
        decoder.prefill(3, 0, IDS[:31], wants_logits=True, should_abort=lambda: False) for decoder in (short, shortest)
    ]
    assert logits[0] is not None and logits[1] is not None
    assert (logits[0] - logits[1]).norm() < 0.03 * logits[0].norm()
