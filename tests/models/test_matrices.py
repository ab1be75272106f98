"""Tables stay in the checkpoint's file when the model is quantised, and are exact there; else they are in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from service.models.head import DenseEmbedding, FileEmbedding, LinearHead, RefinedHead
from service.models.linear import DenseLinear, LinearFormat
from service.models.matrices import Matrices
from service.models.tensor_files import TensorFiles
from tests.models.chatglm import LAYOUTS, write_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, while it is imported
CPU = torch.device("cpu")
NF4 = LinearFormat("nf4", torch.bfloat16, CPU, keeps_dense=False)
NONE = LinearFormat("none", torch.float32, CPU, keeps_dense=False)
TABLE = torch.randn(1024, 128, generator=torch.Generator().manual_seed(0)).half()
IDS = torch.tensor([1000, 3, 3])


@pytest.fixture(params=LAYOUTS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> TensorFiles:
    write_weights(tmp_path, {"table": TABLE, "bias": torch.arange(6).half()}, request.param)
    return TensorFiles(tmp_path)


def test_an_embedding_is_exact_on_file_and_in_memory(files: TensorFiles) -> None:
    on_file, in_memory = Matrices(files, NF4).embedding("table"), Matrices(files, NONE).embedding("table")
    assert isinstance(on_file, FileEmbedding) and isinstance(in_memory, DenseEmbedding)
    assert torch.equal(on_file(IDS), TABLE[IDS].float())
    assert torch.equal(in_memory(IDS), TABLE[IDS].float())


def test_the_best_logits_of_a_quantised_head_are_those_of_the_file(files: TensorFiles) -> None:
    hidden = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    exact = hidden @ TABLE.float().T
    head = Matrices(files, NF4).head("table")
    assert isinstance(head, RefinedHead)
    got = head(hidden)
    best = exact.topk(10).indices
    torch.testing.assert_close(got.gather(1, best), exact.gather(1, best), atol=1e-4, rtol=0)
    assert (got - exact).norm() / exact.norm() < 0.12  # the others: NF4
    plain = Matrices(files, NONE).head("table")
    assert isinstance(plain, LinearHead)
    torch.testing.assert_close(plain(hidden), exact)


def test_rows_can_be_asked_for_in_another_order(files: TensorFiles) -> None:
    order = torch.arange(1023, -1, -1)
    linear = Matrices(files, NONE).linear("table", order)
    assert isinstance(linear, DenseLinear)
    x = torch.randn(2, 128)
    torch.testing.assert_close(linear(x), x @ TABLE.float().flip(0).T)


def test_vectors_are_float32(files: TensorFiles) -> None:
    assert torch.equal(Matrices(files, NF4).vector("bias"), torch.arange(6.0))
