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
# takes 1.35 times what it was planned for (measured: other programs), so the first share keeps the p95 of the gaps at
# the budget. The last one is for torch's kernels alone: there a chunk costs 50 ms before its first token, so that the
# last 15 ms carry a third of its tokens.
SHARES = (0.7, 0.8, 0.9, 1.0, 1.15)
# Of tokens that were generated before, so many at once: as many as the compiled step computes like decodes.
REPLAY_CHUNK = 48
# Weight of a new measurement.
_ALPHA = 0.3
# One measurement may change an estimate by at most this factor, so that one hiccup does not starve prefill.
_MAX_JUMP = 2.0
# The same where nothing like it was measured yet: a chunk further on in a prompt than any before.
_MAX_FIRST_JUMP = 8.0
# What a measurement of attention's cost still counts for when the next one comes: some fifty of them count.
_FADING = 0.98
# How far tokens and pairs must vary apart (1 - their squared correlation) to tell what each costs.
_LEAST_APART = 0.05


@dataclass(slots=True, eq=False)
class Sequence:
    """Token state of one running request."""

    key: int
    slot: int
    num_prompt: int
    tokens: list[int]  # prompt and generated
    computed: int = 0  # tokens whose KV is in the slot
    replay_from: int | None = None  # what the prompt has from here on was generated before, when it was not a prompt

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.num_prompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, end) of a prompt; `is_last`: the first token follows from it."""

    seq: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.seq.num_prompt

    @property
    def is_replay(self) -> bool:
        """Its tokens were generated before: they are to be computed as decoding them did, in their own chunks."""
        return self.seq.replay_from is not None and self.start >= self.seq.replay_from


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
        self._chunk_cost, self._replay_cost = ChunkCost(), ChunkCost()
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
            chunk = step.prefill
            cost = self._replay_cost if chunk.is_replay else self._chunk_cost
            cost.learn(chunk.start, chunk.end - chunk.start, prefill_s)

    def _plan_chunk(self, waiting: list[Sequence], *, has_readers: bool) -> Chunk:
        oldest = waiting[0]
        if not self._causal_prompt:
            return Chunk(oldest, oldest.computed, oldest.num_prompt)
        chosen = oldest
        if not self._has_overtaken:
            # A short prompt that one chunk finishes may go first, but not twice in a row.
            chosen = next((seq for seq in waiting if self._cut(seq, has_readers).is_last), oldest)
        self._has_overtaken = chosen is not oldest
        return self._cut(chosen, has_readers)

    def _cut(self, seq: Sequence, has_readers: bool) -> Chunk:
        """The chunk of this prompt that would run now."""
        start, largest, end, cost = seq.computed, self._max_chunk, seq.num_prompt, self._chunk_cost
        if seq.replay_from is not None and start < seq.replay_from:
            end = seq.replay_from
        elif seq.replay_from is not None:
            largest, cost = min(REPLAY_CHUNK, largest), self._replay_cost
        size = self._fitting_size(cost, start, largest) if has_readers else largest
        return Chunk(seq, start, min(end, start + size))

    def _fitting_size(self, cost: ChunkCost, start: int, largest: int) -> int:
        """The chunk from position `start` on that fits beside a decode; the smallest one before any was measured."""
        size = smallest = min(self._min_chunk, largest)
        if not cost.is_known:
            return smallest
        alone_s = cost.expect(start, largest) / largest
        sizes = range(smallest, largest + 1)
        for share in SHARES[0 if cost.is_confirmed else -2 :]:
            left_s = share * self._step_budget_s - self._decode_s
            size = sizes[max(0, bisect_right(sizes, left_s, key=lambda size: cost.expect(start, size)) - 1)]
            if (self._decode_s + cost.expect(start, size)) / size <= MAX_SLOWDOWN * alone_s:
                break
        return size


@dataclass(slots=True)
class _Mean:
    """Of the chunks whose tokens are in one power of two."""

    tokens: float
    pairs: float
    seconds: float


class ChunkCost:
    """Seconds a chunk takes: a part by its tokens, and attention's by its pairs of a token and a position it sees.

    The first is known for each power of two, as small chunks pay the same overhead, and drawn through these by straight
    lines; below the smallest its seconds (how much of them is overhead is unknown), above the largest its rate. There a
    larger chunk counts as taking no less than a smaller one, and no more per token, so that one bad measurement cannot
    keep its size from being tried, and measured, again.

    The second is one factor: of a regression of seconds on tokens and pairs, each as the difference from the mean of
    its power of two. While chunks differ in one way only (longer ones that begin at the same place) it stays as it is.
    """

    def __init__(self) -> None:
        self.pair_s = 0.0
        self._means: dict[int, _Mean] = {}  # by power of two
        self._line: list[tuple[float, float]] = []  # (tokens, seconds without attention), in order and straightened
        self._num_largest = 0  # measurements of the largest power of two
        self._most_pairs = 0.0  # so far; what more of them cost is a guess that may be far off
        # Fading sums of products of these differences: tokens and pairs with themselves, each other, and the seconds.
        self._tt = self._tp = self._pp = self._ts = self._ps = 0.0

    @property
    def is_known(self) -> bool:
        return bool(self._line)

    @property
    def is_confirmed(self) -> bool:
        """What a large chunk costs was measured more than once: the first one may have been a cold start."""
        return self._num_largest > 1

    def learn(self, start: int, size: int, seconds: float) -> None:
        # NOTE: tokens are averaged too. Crediting a chunk's share to a fixed size would forget the overhead, and
        # each step would then take up to 30 % more than planned.
        bucket, pairs = (size - 1).bit_length(), _num_pairs(start, size)
        largest = max(self._means, default=0)
        if bucket >= largest:
            self._num_largest = 1 + self._num_largest * (bucket == largest)
        mean = self._means.get(bucket)
        if mean is None:
            self._means[bucket] = _Mean(size, pairs, seconds)
        else:
            jump = _MAX_JUMP if pairs <= self._most_pairs else _MAX_FIRST_JUMP
            low, high = sorted((mean.seconds, self.expect(start, size)))
            seconds = min(max(seconds, low / jump), high * jump)
            further = size - mean.tokens, pairs - mean.pairs, seconds - mean.seconds
            self._regress(*further)
            mean.tokens += _ALPHA * further[0]
            mean.pairs += _ALPHA * further[1]
            mean.seconds += _ALPHA * further[2]
        self._most_pairs = max(self._most_pairs, pairs)
        self._draw()

    def _regress(self, tokens: float, pairs: float, seconds: float) -> None:
        self._tt = _FADING * self._tt + tokens * tokens
        self._tp = _FADING * self._tp + tokens * pairs
        self._pp = _FADING * self._pp + pairs * pairs
        self._ts = _FADING * self._ts + tokens * seconds
        self._ps = _FADING * self._ps + pairs * seconds
        apart = self._tt * self._pp - self._tp * self._tp  # 0 where one follows from the other
        if not self._tt and self._pp:
            self.pair_s = self._ps / self._pp
        elif apart > _LEAST_APART * self._tt * self._pp:
            self.pair_s = (self._ps * self._tt - self._ts * self._tp) / apart

    def _draw(self) -> None:
        most = min(mean.seconds / mean.pairs for mean in self._means.values())
        self.pair_s = min(max(0.0, self.pair_s), most)
        self._line = []
        for _, mean in sorted(self._means.items()):
            tokens, seconds = mean.tokens, mean.seconds - self.pair_s * mean.pairs
            if self._line:
                last_tokens, last_s = self._line[-1]
                seconds = min(max(seconds, last_s), last_s * tokens / last_tokens)
            self._line.append((tokens, seconds))

    def expect(self, start: int, size: int) -> float:
        """Seconds of a chunk of `size` tokens from position `start` on; 0 before anything was measured."""
        return self.without_attention(size) + self.pair_s * _num_pairs(start, size)

    def without_attention(self, size: float) -> float:
        """The part of it that does not depend on the position. Never less for a larger `size`."""
        above = bisect_right(self._line, size, key=lambda point: point[0])
        if above == 0:
            return self._line[0][1] if self._line else 0.0
        tokens, seconds = self._line[above - 1]
        if above == len(self._line):
            return seconds * size / tokens
        next_tokens, next_s = self._line[above]
        return seconds + (next_s - seconds) * (size - tokens) / (next_tokens - tokens)


def _num_pairs(start: int, size: int) -> float:
    return size * (start + size / 2)


def _learn(old: float, new: float) -> float:
    """A moving average in which one outlier counts for little."""
    return old + _ALPHA * (min(max(new, old / _MAX_JUMP), old * _MAX_JUMP) - old)
