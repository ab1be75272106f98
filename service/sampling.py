"""Logits -> next ids, each row by its own parameters, history and random generator.

The engine thread's. A row's result depends on nothing but its own logits, parameters, seed and history: rows share
only the one pass that finds maxima and non-finite rows, and the rest is done row by row.
Semantics and order are those of transformers' logits processors: repetition penalty over prompt and answer, then
temperature, top-k, top-p (the smallest set of the likeliest ids whose probabilities reach p).

Letters: N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from service.protocol import Params


class RowSampler:
    """One sequence's sampling state. `prompt` counts for the repetition penalty.

    `saved` is what `save` gave: the generator goes on from there. Raises `ValueError` when it is not.
    """

    def __init__(self, params: Params, prompt: Sequence[int], saved: bytes = b"") -> None:
        self._params = params
        self._generator = torch.Generator()
        if saved:
            try:
                self._generator.set_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8))
            except RuntimeError as error:
                raise ValueError(f"not a generator's state: {error}") from None
        elif params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._seen = set(prompt) if params.repetition_penalty != 1 else set()

    def save(self) -> bytes:
        """The generator's state."""
        return bytes(self._generator.get_state().numpy())

    @property
    def is_argmax(self) -> bool:
        return self._params.temperature == 0 and self._params.repetition_penalty == 1

    def draw(self, logits: Tensor) -> int:
        """The next id by finite logits [V] float32, which stay as they are; it joins the history."""
        params = self._params
        if params.repetition_penalty != 1:
            logits = self._penalize(logits)
        chosen = int(logits.argmax()) if params.temperature == 0 else self._draw_random(logits)
        if params.repetition_penalty != 1:
            self._seen.add(chosen)
        return chosen

    def _penalize(self, logits: Tensor) -> Tensor:
        """Divide positive and multiply negative logits of ids already seen (Keskar et al. 2019, CTRL, 4.1)."""
        seen = torch.tensor(sorted(self._seen), dtype=torch.int64, device=logits.device)
        scores = logits[seen]
        penalty = self._params.repetition_penalty
        return logits.index_copy(0, seen, torch.where(scores < 0, scores * penalty, scores / penalty))

    def _draw_random(self, logits: Tensor) -> int:
        params = self._params
        # Relative to the maximum first: a tiny temperature then gives -inf for the others, never an overflow.
        scores = (logits - logits.max()) / params.temperature
        ids: Tensor | None = None  # None: candidate i is id i
        if 0 < params.top_k < len(scores):
            scores, ids = scores.topk(params.top_k)  # [C] each
        if params.top_p < 1:
            kept, scores = _nucleus(scores, params.top_p)
            ids = kept if ids is None else ids[kept]
        cumulative = scores.double().exp().cumsum(0)  # [C]; float64, because float32 loses the tail of 130,000 terms
        point = torch.rand((), generator=self._generator, dtype=torch.float64).to(cumulative.device) * cumulative[-1]
        index = int(torch.searchsorted(cumulative, point, right=True).clamp_(max=len(cumulative) - 1))
        return index if ids is None else int(ids[index])


def sample(logits: Tensor, rows: Sequence[RowSampler]) -> list[int | None]:
    """Next ids by logits [N, V] float32; None for a row that holds NaN or Inf."""
    is_finite = logits.sum(dim=1).isfinite().tolist()  # one pass: NaN and Inf survive a sum
    best = logits.argmax(dim=1).tolist() if any(row.is_argmax for row in rows) else [0] * len(rows)
    return [
        (best[index] if row.is_argmax else row.draw(logits[index])) if is_finite[index] else None
        for index, row in enumerate(rows)
    ]


def _nucleus(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Indices and scores [C] of the smallest set of the likeliest with cumulative probability >= p, best first.

    Sorts only what can be in it: ids below (1 - p) / V hold less than 1 - p together, so the others hold at least p
    and the set lies among them.
    """
    log_total = scores.double().exp().sum().log()
    bound = log_total + math.log((1 - top_p) / len(scores)) - 1e-6  # a little lower: rounding leaves none out
    candidates = (scores >= bound).nonzero()[:, 0]  # the likeliest id is at least average, so never empty
    ordered, order = scores[candidates].sort(descending=True, stable=True)
    cumulative = (ordered.double() - log_total).exp().cumsum(0)
    num_kept = int((cumulative < top_p).sum()) + 1  # the first that reaches p is kept too
    return candidates[order[:num_kept]], ordered[:num_kept]
