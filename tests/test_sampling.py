"""Sampling: transformers' semantics, and rows that know nothing of each other."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from service.protocol import Params
from service.sampling import RowSampler, _nucleus, sample

GREEDY = Params(temperature=0, top_p=1, repetition_penalty=1)
PARAMS = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 1e-6, 0.2, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.8, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 10_000]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


def random_logits(rows: int, size: int, seed: int, spread: float = 4.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(PARAMS, st.lists(st.integers(0, 199), max_size=5)), min_size=2, max_size=6), st.integers(0, 99)
)
def test_a_row_gives_the_same_ids_alone_and_in_any_company(rows: list[tuple[Params, list[int]]], seed: int) -> None:
    steps = [random_logits(len(rows), 200, 1000 * seed + step) for step in range(4)]
    together = [RowSampler(params, prompt) for params, prompt in rows]
    ids = [sample(logits, together) for logits in steps]
    for index, (params, prompt) in enumerate(rows):
        alone = RowSampler(params, prompt)
        assert [sample(logits[index : index + 1], [alone])[0] for logits in steps] == [step[index] for step in ids]


@settings(deadline=None, max_examples=150)
@given(
    top_p=st.floats(0, 0.9999), size=st.integers(1, 400), seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 50.0]),
)  # fmt: skip
@example(top_p=0.0, size=10, seed=0, spread=0.0)  # all alike
def test_top_p_keeps_the_smallest_likeliest_set_that_reaches_p(
    top_p: float, size: int, seed: int, spread: float
) -> None:
    scores = random_logits(1, size, seed, spread)[0]
    kept, kept_scores = _nucleus(scores, top_p)
    probabilities = scores.double().softmax(0)
    assert torch.equal(scores[kept], kept_scores)
    assert len(set(kept.tolist())) == len(kept)
    assert probabilities[kept].sum() >= top_p - 1e-9
    assert probabilities[kept[:-1]].sum() < top_p + 1e-9
    left_out = torch.ones(size, dtype=torch.bool).index_fill_(0, kept, False)
    assert not left_out.any() or scores[left_out].max() <= kept_scores.min()


@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=0.7, top_p=0.8, top_k=0, repetition_penalty=1.0),
        Params(temperature=1.5, top_p=1.0, top_k=5, repetition_penalty=1.0),
        Params(temperature=1.0, top_p=0.9, top_k=9, repetition_penalty=1.4),
        Params(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=0.7),
    ],
    ids=str,
)
def test_drawn_shares_are_the_probabilities_of_transformers_processors(params: Params) -> None:
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    prompt, logits, draws = [3, 4, 5, 5], random_logits(1, 30, 8, 2.0), 4000
    chain: list[Any] = [
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty), TemperatureLogitsWarper(params.temperature),
    ]  # fmt: skip
    chain += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    chain += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    wanted = LogitsProcessorList(chain)(torch.tensor([prompt]), logits.clone())[0].softmax(0)
    counts = Counter(RowSampler(replace(params, seed=seed), prompt).draw(logits[0]) for seed in range(draws))
    for id, probability in enumerate(wanted.tolist()):
        deviation = math.sqrt(probability * (1 - probability) / draws)
        assert abs(counts[id] / draws - probability) <= 5 * deviation, id  # never drawn where it is 0


def test_zero_temperature_takes_the_likeliest_and_a_penalty_moves_it() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9, -1.0]])
    assert sample(logits, [RowSampler(GREEDY, [1])]) == [1]
    penalised = RowSampler(replace(GREEDY, repetition_penalty=1.5), [1])
    assert [sample(logits, [penalised])[0] for _ in range(3)] == [2, 1, 1]  # answers count too; then 3/1.5 > 2.9/1.5


def test_a_tiny_temperature_is_as_good_as_none() -> None:
    logits = random_logits(1, 1000, 1)
    assert sample(logits, [RowSampler(Params(temperature=1e-30, top_p=1, seed=1), [])]) == [int(logits.argmax())]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", [GREEDY, Params(temperature=1, top_p=0.8, seed=1)], ids=["greedy", "random"])
def test_a_row_that_is_not_finite_gives_none_and_leaves_the_others(bad: float, params: Params) -> None:
    logits = random_logits(3, 50, 2)
    wanted = sample(logits, [RowSampler(params, []) for _ in range(3)])
    logits[1, 7] = bad
    assert sample(logits, [RowSampler(params, []) for _ in range(3)]) == [wanted[0], None, wanted[2]]


def test_the_logits_stay_as_they_are() -> None:
    logits = random_logits(1, 50, 3)
    before = logits.clone()
    sample(logits, [RowSampler(Params(temperature=1, top_p=0.5, top_k=5, repetition_penalty=2, seed=0), [1, 2])])
    assert torch.equal(logits, before)


def test_without_a_seed_two_requests_differ() -> None:
    logits = torch.zeros(1, 10_000)
    params = Params(temperature=1, top_p=1)
    drawn = {tuple(RowSampler(params, []).draw(logits[0]) for _ in range(2)) for _ in range(5)}
    assert len(drawn) == 5
