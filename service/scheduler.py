"""What runs in this step: every decode first, then a prefill chunk within what is left of the step's *time* budget.

Thread: the engine's. No clock, no tensors: measured times are fed in by `commit`.

There are no phases: a sequence's `computed` catches up with its `tokens`.

    tokens:  [0 ...... computed ...... num_prompt ...... end)
              ^ in KV   ^ to prefill    ^ generated
    end - computed == 1 and computed >= num_prompt: it decodes; else it prefills.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

# While others read, a prompt should take at most 2.5 times what it takes alone (DESIGN.md); 2.2 leaves room for noise.
MAX_SLOWDOWN = 2.2
# Shares of its budget that a step may be planned for, the next one where a prompt would take longer. One step in twenty
# takes 1.35 times what it was planned for (measured: other programs, and longer attention late in a prompt), so the
# first share keeps the p95 of the gaps at the budget. The last one is for torch's kernels alone: there a chunk costs 50
# ms before its first token, so that the last 15 ms carry a third of its tokens.
SHARES = (0.7, 0.8, 0.9, 1.0, 1.15)
# Weight of a new measurement.
_ALPHA = 0.3
# One measurement may change an estimate by at most this factor, so that one hiccup does not starve prefill.
_MAX_JUMP = 2.0


@dataclass(slots=True, eq=False)
class Sequence:
    """Token state of one running request."""

    key: int
    slot: int
    num_prompt: int
    tokens: list[int]  # prompt and generated
    computed: int = 0  # tokens whose KV is in the slot

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.num_prompt

    @property
    def num_left(self) -> int:
        """Prompt tokens still to compute."""
        return self.num_prompt - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, end) of a prompt; `is_last`: the first token follows from it."""

    seq: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.seq.num_prompt


@dataclass(frozen=True, slots=True)
class Step:
    decode: tuple[Sequence, ...]
    prefill: Chunk | None


class Scheduler:
    """Plans one step at a time; `commit` tells how long its two parts took.

    While somebody reads, a chunk is sized so that decode + chunk take a share of `step_budget_s`, but never below
    `min_chunk` tokens, so that decodes which fill the budget alone cannot starve prefill. The share is the smallest of
    SHARES that does not make the prompt MAX_SLOWDOWN times slower than alone. With nobody reading a chunk has
    `max_chunk` tokens. Without `causal_prompt` a prompt is one chunk, whatever it costs.
    """

    def __init__(
        self, *, step_budget_s: float = 0.1, max_chunk: int = 512, min_chunk: int = 16, causal_prompt: bool = True
    ) -> None:
        assert 1 <= min_chunk <= max_chunk and step_budget_s > 0
        self._step_budget_s = step_budget_s
        self._max_chunk = max_chunk
        self._min_chunk = min_chunk
        self._causal_prompt = causal_prompt
        self._sequences: dict[int, Sequence] = {}  # oldest first
        self._decode_s = 0.0
        self._chunk_cost = ChunkCost()
        self._has_overtaken = False

    def add(self, seq: Sequence) -> None:
        assert seq.key not in self._sequences and seq.is_prefilling
        self._sequences[seq.key] = seq

    def remove(self, key: int) -> None:
        del self._sequences[key]

    def __len__(self) -> int:
        return len(self._sequences)

    def plan(self) -> Step | None:
        """The next step, or None when there is nothing to run."""
        if not self._sequences:
            return None
        decode = tuple(seq for seq in self._sequences.values() if not seq.is_prefilling)
        waiting = [seq for seq in self._sequences.values() if seq.is_prefilling]
        return Step(decode, self._plan_chunk(waiting, has_readers=bool(decode)) if waiting else None)

    def commit(self, step: Step, decode_s: float, prefill_s: float) -> None:
        """Learn from a step that ran. Its sequences have been advanced by the caller."""
        if step.decode:
            self._decode_s = _learn(self._decode_s, decode_s) if self._decode_s else decode_s
        if step.prefill is not None:
            self._chunk_cost.learn(step.prefill.end - step.prefill.start, prefill_s)

    def _plan_chunk(self, waiting: list[Sequence], *, has_readers: bool) -> Chunk:
        oldest = waiting[0]
        if not self._causal_prompt:
            return Chunk(oldest, oldest.computed, oldest.num_prompt)
        size = self._fitting_size() if has_readers else self._max_chunk
        chosen = oldest
        if not self._has_overtaken:
            # A short prompt that one chunk finishes may go first, but not twice in a row.
            chosen = next((seq for seq in waiting if seq.num_left <= size), oldest)
        self._has_overtaken = chosen is not oldest
        return Chunk(chosen, chosen.computed, min(chosen.num_prompt, chosen.computed + size))

    def _fitting_size(self) -> int:
        """The chunk that fits beside a decode; the smallest one before any was measured."""
        if not self._chunk_cost.is_known:
            return self._min_chunk
        alone_s = self._chunk_cost.expect(self._max_chunk) / self._max_chunk
        size = self._min_chunk
        for share in SHARES[0 if self._chunk_cost.is_confirmed else -2 :]:
            size = self._largest_within(share * self._step_budget_s - self._decode_s)
            if (self._decode_s + self._chunk_cost.expect(size)) / size <= MAX_SLOWDOWN * alone_s:
                break
        return size

    def _largest_within(self, seconds: float) -> int:
        sizes = range(self._min_chunk, self._max_chunk + 1)
        return sizes[max(0, bisect_right(sizes, seconds, key=self._chunk_cost.expect) - 1)]


class ChunkCost:
    """Seconds a chunk takes, by its tokens: a mean for each power of two, as small chunks pay the same overhead.

    Between the means by straight lines; below the smallest its seconds (how much of them is overhead is unknown);
    above the largest its rate. A larger chunk counts as taking no less than a smaller one, and no more per token, so
    that one bad measurement cannot keep its size from being tried, and measured, again.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # power of two -> (tokens, seconds)
        self._line: list[tuple[float, float]] = []  # the same, in order and straightened
        self._num_largest = 0  # measurements of the largest power of two

    @property
    def is_known(self) -> bool:
        return bool(self._line)

    @property
    def is_confirmed(self) -> bool:
        """What a large chunk costs was measured more than once: the first one may have been a cold start."""
        return self._num_largest > 1

    def learn(self, size: int, seconds: float) -> None:
        # NOTE: tokens are averaged too. Crediting a chunk's share to a fixed size would forget the overhead, and
        # each step would then take up to 30 % more than planned.
        bucket = (size - 1).bit_length()
        largest = max(self._means, default=0)
        if bucket >= largest:
            self._num_largest = 1 + self._num_largest * (bucket == largest)
        old_size, old_s = self._means.get(bucket, (float(size), seconds))
        self._means[bucket] = old_size + _ALPHA * (size - old_size), _learn(old_s, seconds)
        self._line = []
        for _, (tokens, mean_s) in sorted(self._means.items()):
            if self._line:
                last_tokens, last_s = self._line[-1]
                mean_s = min(max(mean_s, last_s), last_s * tokens / last_tokens)
            self._line.append((tokens, mean_s))

    def expect(self, size: int) -> float:
        """Never less for a larger `size`; 0 before anything was measured."""
        above = bisect_right(self._line, float(size), key=lambda point: point[0])
        if above == 0:
            return self._line[0][1] if self._line else 0.0
        tokens, seconds = self._line[above - 1]
        if above == len(self._line):
            return seconds * size / tokens
        next_tokens, next_s = self._line[above]
        return seconds + (next_s - seconds) * (size - tokens) / (next_tokens - tokens)


def _learn(old: float, new: float) -> float:
    """A moving average in which one outlier counts for little."""
    return old + _ALPHA * (min(max(new, old / _MAX_JUMP), old * _MAX_JUMP) - old)
