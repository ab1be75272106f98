"""NF4 in both forms multiplies like bitsandbytes' own, for few rows and for many, from one copy of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from service.models import linear as linear_module
from service.models.linear import MAX_NATIVE_ROWS, LinearFormat, NativeLinear
from service.models.native import library
from service.models.nf4 import MAX_PACKED_ROWS, MAX_TILED_ROWS, Nf4Linear, TiledNf4Linear, quantize_blocks

pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, while it is imported
BOUND = 0.01  # scales, weights, activations and the product are rounded to bf16: 0.2 to 0.4 % each
NUM_ROWS = [1, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, MAX_TILED_ROWS, MAX_TILED_ROWS + 1, 200]
needs_kernel = pytest.mark.usefixtures("kernel")


@pytest.fixture
def kernel() -> None:
    if not TiledNf4Linear.has_kernel():  # asked here, because bitsandbytes takes seconds to import
        pytest.skip("this CPU has no AVX-512 with bf16")


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def dequantized(weight: Tensor) -> Tensor:
    """What bitsandbytes makes of the matrix, without doubly quantised scales."""
    import bitsandbytes as bnb

    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    made: Tensor = bnb.functional.dequantize_4bit(packed, state)
    return made


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(32, 64), (96, 192), (2080, 128)], ids=str)
def test_tiles_are_the_bytes_that_bitsandbytes_makes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    import bitsandbytes as bnb

    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    parts = TiledNf4Linear.quantize(weight)
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    wanted, state = bnb.functional._convert_weight_packed_for_cpu(packed, state)
    # A weight half way between two values may fall to either side.
    assert (parts["values"] != wanted).float().mean() < 0.002
    assert torch.equal(parts["scales"], state.absmax)


@needs_kernel
@pytest.mark.parametrize("keeps_dense", [False, True])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", [(64, 128), (2080, 64)], ids=str)
def test_few_rows_and_many_multiply_with_the_same_weights(
    shape: tuple[int, int], num_rows: int, keeps_dense: bool
) -> None:
    torch.manual_seed(num_rows)
    weight, x = torch.randn(shape).half(), torch.randn(num_rows, shape[1]).bfloat16()
    linear = TiledNf4Linear(TiledNf4Linear.quantize(weight), torch.bfloat16, keeps_dense=keeps_dense)
    got = linear(x)
    assert got.shape == (num_rows, shape[0]) and got.dtype == torch.bfloat16
    assert error(got, x.float() @ dequantized(weight.float()).T) < BOUND
    assert error(linear(x[:1]), got[:1]) < BOUND


@pytest.mark.parametrize("keeps_dense", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, MAX_NATIVE_ROWS, MAX_NATIVE_ROWS + 1, 200])
@pytest.mark.parametrize("shape", [(64, 128), (2080, 64), (48, 16384)], ids=str)
def test_the_compiled_kernel_multiplies_with_the_same_weights(
    shape: tuple[int, int], num_rows: int, keeps_dense: bool
) -> None:
    functions = library()
    if functions is None:
        pytest.skip("service/models/step.c was not compiled")
    torch.manual_seed(num_rows)
    weight, x = torch.randn(shape).half(), torch.randn(num_rows, shape[1]).bfloat16()
    product = NativeLinear.of_nf4(quantize_blocks(weight), functions, keeps_dense=keeps_dense)
    got = product(x)
    assert got.shape == (num_rows, shape[0]) and got.dtype == torch.bfloat16
    exact = x.float() @ dequantized(weight.float()).T
    # Few rows: values of NF4 to 0.4 %. Many: both to bf16, 0.3 %. And a weight half way between two values may fall to
    # either side.
    assert error(got, exact) < (0.009 if num_rows <= MAX_NATIVE_ROWS else 0.008)


def test_the_compiled_kernel_unpacks_what_bitsandbytes_does() -> None:
    functions = library()
    if functions is None:
        pytest.skip("service/models/step.c was not compiled")
    torch.manual_seed(4)
    weight = torch.randn(96, 192)
    matrix = NativeLinear.of_nf4(quantize_blocks(weight), functions, keeps_dense=False).matrix
    largest = weight.view(96, 3, 64).abs().amax(-1, keepdim=True)
    wanted = (dequantized(weight).view(96, 3, 64) / largest * largest.half().float()).view(96, 192)
    is_other = (matrix.unpack(0, 6).T.float() - wanted).abs() > 2**-8 * wanted.abs()
    assert is_other.float().mean() < 0.002  # a weight half way between two values may fall to either side
    assert torch.equal(matrix.unpack(2, 3), matrix.unpack(0, 6)[:, 32:80])
    assert matrix.blocks.nbytes * 8 == 4.25 * 96 * 192
    for first, num in ((-1, 1), (0, 7), (6, 1), (3, -1)):
        with pytest.raises(ValueError, match="tiles"):
            matrix.unpack(first, num)


@needs_kernel
def test_float32_activations_stay_float32_and_close() -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(64, 128), torch.randn(100, 128)
    linear = TiledNf4Linear(TiledNf4Linear.quantize(weight), torch.float32, keeps_dense=False)
    wanted = x @ dequantized(weight).T
    for rows in (x, x[:3]):
        assert linear(rows).dtype == torch.float32
        assert error(linear(rows), wanted[: len(rows)]) < BOUND


@needs_kernel
def test_tiles_are_one_copy_of_four_and_a_quarter_bits_a_weight() -> None:
    linear = TiledNf4Linear(TiledNf4Linear.quantize(torch.randn(256, 1024)), torch.bfloat16, keeps_dense=False)
    held = [value for value in vars(linear).values() if isinstance(value, Tensor) and value.numel() > 256]
    assert 8 * sum(tensor.nbytes for tensor in held) == 4.25 * 256 * 1024


def test_blocks_of_zeros_give_zeros() -> None:
    weight = torch.zeros(64, 128)
    weight[:, 64:] = 1.0
    for linear in made(weight):
        product = linear(torch.ones(2, 128).bfloat16())
        torch.testing.assert_close(product, torch.full_like(product, 64.0), rtol=0.01, atol=0)


def made(weight: Tensor) -> list[Any]:
    """The matrix in every form that there is here."""
    forms: list[Any] = [Nf4Linear(weight, torch.bfloat16)]
    if TiledNf4Linear.can_tile(weight):
        forms.append(TiledNf4Linear(TiledNf4Linear.quantize(weight), torch.bfloat16, keeps_dense=False))
    if (functions := library()) is not None:
        forms.append(NativeLinear.of_nf4(quantize_blocks(weight), functions, keeps_dense=False))
    return forms


def test_a_matrix_made_of_kept_parts_is_the_same() -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 128).bfloat16()
    form = LinearFormat("nf4", torch.bfloat16, torch.device("cpu"), keeps_dense=False)
    for linear in made(torch.randn(64, 128)):
        again = form.restore(linear.parts())
        assert type(again) is type(linear)
        assert torch.equal(again(x), linear(x))


def test_shapes_without_whole_tiles_take_the_form_of_bitsandbytes() -> None:
    torch.manual_seed(3)
    form = LinearFormat("nf4", torch.bfloat16, torch.device("cpu"), keeps_dense=False)
    for shape in ((33, 64), (64, 66)):
        weight, x = torch.randn(shape), torch.randn(4, shape[1]).bfloat16()
        linear = form.make(weight)
        assert isinstance(linear, Nf4Linear)
        assert error(linear(x), x.float() @ weight.T) < 0.12


def test_without_the_kernel_the_form_of_bitsandbytes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TiledNf4Linear, "has_kernel", lambda: False)
    monkeypatch.setattr(linear_module, "library", lambda: None)
    form = LinearFormat("nf4", torch.bfloat16, torch.device("cpu"), keeps_dense=False)
    assert isinstance(form.make(torch.randn(64, 128)), Nf4Linear)
