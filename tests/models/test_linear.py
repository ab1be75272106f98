"""Every weight format multiplies like the matrix it stands for."""

from __future__ import annotations

import pytest
import torch

from service.models.errors import ModelError
from service.models.linear import MAX_PACKED_ROWS, DenseLinear, Int4Linear, LinearFormat, NativeLinear, Nf4Linear
from service.models.native import library
from service.models.weights import quantize_4bit

CPU = torch.device("cpu")
NUM_ROWS = [1, 3, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 40]


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.006)])
@pytest.mark.parametrize("keeps_dense", [True, False])
def test_packed_4bit_multiplies_like_the_weights_of_the_file(
    num_rows: int, dtype: torch.dtype, bound: float, keeps_dense: bool
) -> None:
    torch.manual_seed(num_rows)
    weight = quantize_4bit(torch.randn(48, 96))
    x = torch.randn(num_rows, 96).to(dtype)
    got = Int4Linear(weight, dtype, keeps_dense=keeps_dense)(x)
    assert got.dtype == dtype
    # float32: nothing is rounded but the sums. bf16: scales (2^-9 at most) and the result (2^-9).
    assert error(got, x.double() @ weight.dense().double().T) < bound


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("keeps_dense", [True, False])
@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, while it is imported
def test_nf4_gives_the_same_for_few_rows_and_for_many(num_rows: int, keeps_dense: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128), torch.randn(num_rows, 128).bfloat16()
    got = Nf4Linear(weight, torch.bfloat16, keeps_dense=keeps_dense)(x)
    exact = x.double() @ weight.double().T
    assert error(got, exact) < 0.12  # NF4 rounds normal weights by 9 %
    first_row = Nf4Linear(weight, torch.bfloat16, keeps_dense=keeps_dense)(x[:1])
    assert error(first_row, got[:1].double()) < 0.006


def test_the_format_decides_by_what_the_file_holds() -> None:
    packed, plain = quantize_4bit(torch.randn(32, 64)), torch.randn(32, 64)
    auto = LinearFormat("auto", torch.bfloat16, CPU, keeps_dense=False)
    four_bits = Int4Linear if library() is None else NativeLinear
    assert isinstance(auto.make(packed), four_bits)
    assert isinstance(auto.make(plain), DenseLinear)
    assert isinstance(LinearFormat("none", torch.bfloat16, CPU, keeps_dense=False).make(packed), DenseLinear)
    int4 = LinearFormat("int4", torch.bfloat16, CPU, keeps_dense=False)
    assert isinstance(int4.make(plain), four_bits)
    assert isinstance(LinearFormat("int4", torch.float32, CPU, keeps_dense=False).make(plain), Int4Linear)
    assert isinstance(int4.make(torch.randn(33, 64)), DenseLinear)  # no whole tiles


def test_formats_without_a_kernel_are_refused() -> None:
    with pytest.raises(ModelError, match="use --quantization nf4"):
        LinearFormat("int4", torch.bfloat16, torch.device("cuda"), keeps_dense=False).check()
    with pytest.raises(ModelError, match="use --dtype bfloat16"):
        LinearFormat("auto", torch.float16, CPU, keeps_dense=False).check()
