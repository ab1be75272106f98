"""Logits → the next id of each row, by its own parameters, its own random generator and its own history.

Thread: the engine's. Knows no model and no slots. Letters: N rows, V vocabulary, C candidates that are kept.

A row's id depends on nothing but its own logits, parameters, seed and history: greedy rows share one argmax, which is
row by row anyhow, and a sampled row is worked on alone, so batch-mates cannot change even its last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from service.protocol import Params

# How many of the best candidates are looked at first for top-p, and the factor by which that grows when their
# probabilities do not reach p. Each answer is exact: the rest of the vocabulary enters by its logsumexp.
FIRST_CANDIDATES = 64
GROWTH = 8


class RowSampler:
    """One request's sampling state. `prompt` counts for the repetition penalty, as in transformers."""

    def __init__(self, params: Params, prompt: Sequence[int], device: torch.device) -> None:
        self.params = params
        self.is_greedy = params.temperature == 0 or params.top_k == 1 or params.top_p == 0
        self.is_plain_argmax = self.is_greedy and params.repetition_penalty == 1
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._seen = set(prompt) if params.repetition_penalty != 1 else set()
        self._seen_ids = torch.tensor(sorted(self._seen), dtype=torch.long, device=device)

    def choose(self, logits: Tensor) -> int:
        """The next id from logits [V] float32; remembers it for the penalty."""
        params = self.params
        if params.repetition_penalty != 1:
            logits = self._penalised(logits)
        next_id = int(logits.argmax()) if self.is_greedy else self._draw(logits / params.temperature)
        if params.repetition_penalty != 1 and next_id not in self._seen:
            self._seen.add(next_id)
            self._seen_ids = torch.cat([self._seen_ids, self._seen_ids.new_tensor([next_id])])
        return next_id

    def _penalised(self, logits: Tensor) -> Tensor:
        """Scores of ids that occurred: positive ones divided, negative ones multiplied (CTRL, arXiv:1909.05858)."""
        scores = logits[self._seen_ids]
        penalty = self.params.repetition_penalty
        return logits.index_put((self._seen_ids,), torch.where(scores < 0, scores * penalty, scores / penalty))

    def _draw(self, logits: Tensor) -> int:
        """Temperature is applied; then top-k, then top-p, then a draw by the inverse of the cumulative sum."""
        params = self.params
        ids: Tensor | None = None
        if 0 < params.top_k < len(logits):
            logits, ids = logits.topk(params.top_k)
        if params.top_p < 1:
            logits, ids = _nucleus(logits, ids, params.top_p)
        cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)  # [C]
        point = torch.rand(1, generator=self._generator, dtype=torch.float64, device=logits.device) * cumulative[-1]
        index = torch.searchsorted(cumulative, point, right=True).clamp_(max=len(logits) - 1)
        return int(index if ids is None else ids[index])


def _nucleus(logits: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of best candidates whose probabilities reach `top_p` (arXiv:1904.09751), best first.

    logits [V] and what ids they stand for (None: their positions) → logits [C], ids [C].
    """
    total = logits.logsumexp(-1)
    size = min(FIRST_CANDIDATES, len(logits))
    while True:
        best, where = logits.topk(size)  # sorted
        cumulative = (best - total).exp().cumsum(-1)
        if size == len(logits) or float(cumulative[-1]) >= top_p:
            break
        size = min(size * GROWTH, len(logits))
    keep = min(size, int((cumulative < top_p).sum()) + 1)
    return best[:keep], where[:keep] if ids is None else ids[where[:keep]]


def sample(logits: Tensor, rows: Sequence[RowSampler]) -> list[int | None]:
    """Logits [N, V] float32 → N ids; None where a row's best logit is not finite (NaN wins every maximum)."""
    best, best_ids = logits.max(dim=-1)  # [N], [N]
    finite = best.isfinite().tolist()
    greedy = best_ids.tolist()
    return [
        (greedy[index] if row.is_plain_argmax else row.choose(logits[index])) if finite[index] else None
        for index, row in enumerate(rows)
    ]
