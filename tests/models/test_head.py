"""Embeddings and logits over an 8-bit table."""

from __future__ import annotations

import pytest
import torch

from service.models.head import (
    NUM_REFINED,
    DenseEmbedding,
    GroupedEmbedding,
    Head,
    LinearHead,
    NativeHead,
    TwoStageHead,
    make_embedding,
    make_head,
)
from service.models.linear import LinearFormat
from service.models.native import PackedMatrix, library
from service.models.weights import Grouped

CPU = torch.device("cpu")


def table(num_rows: int) -> Grouped:
    torch.manual_seed(0)
    values = torch.randint(-127, 128, (num_rows, 64), dtype=torch.int8)
    return Grouped(values, torch.rand(num_rows, 2) * 0.01, torch.zeros(num_rows, 2))


def test_an_8bit_embedding_gives_its_rows_exactly() -> None:
    rows = table(100)
    ids = torch.tensor([7, 99, 0, 7])
    assert torch.equal(GroupedEmbedding(rows)(ids), rows.dense()[ids])


def heads(rows: Grouped) -> list[Head]:
    functions = library()
    return [TwoStageHead(rows), *([NativeHead(rows, PackedMatrix.pack(rows, functions))] if functions else [])]


@pytest.mark.parametrize("which", range(len(heads(table(16)))))
def test_the_best_logits_are_exact_and_all_others_close(which: int) -> None:
    rows, hidden = table(4000), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    exact = hidden @ rows.dense().T
    head = heads(rows)[which]
    got = head(hidden)
    for row in range(3):
        if which > 0:  # torch's own kernels are not asked for this
            assert torch.equal(head(hidden[row : row + 1])[0], got[row])
    best = exact.topk(NUM_REFINED // 2).indices
    torch.testing.assert_close(got.gather(1, best), exact.gather(1, best), atol=1e-5, rtol=0)
    assert ((got - exact).norm() / exact.norm()) < 0.03
    assert torch.equal(got.argmax(1), exact.argmax(1))


def test_a_vocabulary_smaller_than_the_second_stage_works() -> None:
    rows, hidden = table(20), torch.randn(2, 64)
    torch.testing.assert_close(TwoStageHead(rows)(hidden), hidden @ rows.dense().T, atol=1e-5, rtol=0)


def test_the_format_chooses_the_ends() -> None:
    auto = LinearFormat("auto", torch.bfloat16, CPU, keeps_dense=False)
    none = LinearFormat("none", torch.float32, CPU, keeps_dense=False)
    assert isinstance(make_head(table(32), auto), TwoStageHead if library() is None else NativeHead)
    assert isinstance(make_head(table(33), auto), TwoStageHead)  # no whole tiles
    assert isinstance(make_embedding(table(32), auto), GroupedEmbedding)
    assert isinstance(make_embedding(table(32), none), DenseEmbedding)
    hidden, head = torch.randn(2, 64), make_head(table(32), none)
    assert isinstance(head, LinearHead)
    torch.testing.assert_close(head(hidden), hidden @ table(32).dense().T)
