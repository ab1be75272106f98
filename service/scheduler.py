"""What runs in this step: every decode first, then a prefill chunk within what is left of the step's *time* budget.

Thread: the engine's. No clock, no tensors: measured times are fed in by `commit`.

There are no phases: a sequence's `computed` catches up with its `tokens`.

    tokens:  [0 ...... computed ...... num_prompt ...... end)
              ^ in KV   ^ to prefill    ^ generated
    end - computed == 1 and computed >= num_prompt: it decodes; else it prefills.
"""

from __future__ import annotations

from dataclasses import dataclass

# Chunk sizes whose speed is measured apart: a small chunk pays the same overhead for fewer tokens.
_SIZES = (16, 32, 64, 128, 256, 512)
# Before anything is measured: seconds a chunk costs at least, and per token. A slow guess, so that readers are safe.
_GUESS_FIXED_S = 0.05
_GUESS_TOKEN_S = 0.001
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

    While somebody reads, a chunk is sized so that decode + chunk take about `step_budget_s`, but never below
    `min_chunk` tokens, so that decodes which fill the budget alone cannot starve prefill. With nobody reading a chunk
    has `max_chunk` tokens. Without `causal_prompt` a prompt is one chunk, whatever it costs.
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
        self._chunk_s = {size: _GUESS_FIXED_S + size * _GUESS_TOKEN_S for size in _SIZES}
        self._measured: set[int] = set()
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
            size = step.prefill.end - step.prefill.start
            bucket = max((known for known in _SIZES if known <= size), default=_SIZES[0])
            # NOTE: a chunk between two sizes is credited to the lower with its share, never with more than it took.
            seconds = prefill_s * bucket / size if size > bucket else prefill_s
            if bucket in self._measured:
                self._chunk_s[bucket] = _learn(self._chunk_s[bucket], seconds)
            else:
                self._measured.add(bucket)
                self._chunk_s[bucket] = seconds

    def chunk_s(self, size: int) -> float:
        """Expected seconds of a chunk of so many tokens: between the measured sizes, by straight lines."""
        below = max((known for known in _SIZES if known <= size), default=_SIZES[0])
        above = min((known for known in _SIZES if known >= size), default=_SIZES[-1])
        low_s, high_s = self._chunk_s[below], max(self._chunk_s[above], self._chunk_s[below])
        if above <= below:
            return low_s * max(1.0, size / below)
        return low_s + (high_s - low_s) * (size - below) / (above - below)

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
        """The largest chunk that fits beside a decode; sizes beyond twice what was measured are not trusted yet."""
        left_s = self._step_budget_s - self._decode_s
        trusted = 2 * max(self._measured, default=_SIZES[1])
        low, high = self._min_chunk, max(self._min_chunk, min(self._max_chunk, trusted))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.chunk_s(middle) <= left_s else (low, middle - 1)
        return low


def _learn(old: float, new: float) -> float:
    """A moving average in which one outlier counts for little."""
    return old + _ALPHA * (min(max(new, old / _MAX_JUMP), old * _MAX_JUMP) - old)
