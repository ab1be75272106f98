"""KV slots as integers: who owns which, what each holds, the longest shared prefix, the order of eviction.

Thread: the engine's. It knows no tensors: a slot is a number, its content the token ids whose KV is valid there.

    slot:   [0 ............ shared ............ length)            tokens with valid KV
    prompt: [0 ............ shared ...................... end)
             ^ reused, or copied                ^ computed by the new request

A finished request leaves its tokens behind; idle slots stay in the order in which they were last used, and that
order is the free list. Ids are compared, never hashes alone: a collision must not serve somebody else's KV.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Copying a prefix from another slot is worth it from here on: below, computing so few tokens costs about as much.
MIN_COPY_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Lease:
    """Where a request runs: KV of prompt[:cached] is there, once [0, cached) has been copied from `copy_from`."""

    slot: int
    cached: int
    copy_from: int | None = None


class SlotStats(NamedTuple):
    num_slots: int
    num_busy: int
    num_tokens: int
    capacity: int


class Slots:
    """`num_slots` slots of `capacity` tokens each."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        if num_slots < 1 or capacity < 1:
            raise ValueError("at least one slot of one token is needed")
        self.num_slots = num_slots
        self.capacity = capacity
        self._tokens = [array("i") for _ in range(num_slots)]
        self._num_prompt = [0] * num_slots
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))  # least recently used first
        self._busy: set[int] = set()

    def can_acquire(self) -> bool:
        return bool(self._idle)

    def acquire(self, prompt: Sequence[int], *, causal: bool) -> Lease:
        """Take an idle slot for a prompt, with as much of it reused as is exact.

        At least the last token is left to compute, because its logits are needed. With `causal` the longest common
        prefix of any slot serves, busy ones included; without, only an idle slot with the identical whole prompt.
        The caller has asked `can_acquire`, and the prompt fits the capacity.
        """
        assert self._idle and 1 <= len(prompt) <= self.capacity
        ids = array("i", prompt)
        lease = self._match(ids) if causal else self._match_whole(ids)
        tokens = self._tokens[lease.slot]
        if lease.copy_from is None:
            del tokens[lease.cached :]
        else:
            tokens[:] = ids[: lease.cached]
        self._num_prompt[lease.slot] = len(ids)
        del self._idle[lease.slot]
        self._busy.add(lease.slot)
        return lease

    def append(self, slot: int, ids: Sequence[int]) -> None:
        """KV of further tokens of a busy slot has been computed."""
        assert slot in self._busy and len(self._tokens[slot]) + len(ids) <= self.capacity
        self._tokens[slot].extend(ids)

    def release(self, slot: int) -> None:
        """The request is over; its tokens stay for reuse."""
        self._busy.remove(slot)
        self._idle[slot] = None

    def discard(self, slot: int) -> None:
        """The request is over and its KV is not to be trusted: first in line for the next one."""
        self._busy.remove(slot)
        del self._tokens[slot][:]
        self._idle[slot] = None
        self._idle.move_to_end(slot, last=False)

    def tokens(self, slot: int) -> list[int]:
        return self._tokens[slot].tolist()

    def length(self, slot: int) -> int:
        return len(self._tokens[slot])

    def stats(self) -> SlotStats:
        held = sum(len(tokens) for tokens in self._tokens)
        return SlotStats(self.num_slots, len(self._busy), held, self.capacity)

    def check(self) -> None:
        """Integrity: every slot is idle or busy, never both, and within its capacity."""
        idle = set(self._idle)
        assert not idle & self._busy and idle | self._busy == set(range(self.num_slots))
        assert all(len(tokens) <= self.capacity for tokens in self._tokens)

    def _match(self, ids: array[int]) -> Lease:
        limit = len(ids) - 1
        shared = {slot: shared_prefix(ids, self._tokens[slot], limit) for slot in range(self.num_slots)}
        victim = next(iter(self._idle))
        # In place when most of what the slot holds goes on living (or it goes anyway); else the other conversation
        # keeps its slot, and what it shares is copied, where that saves more than what is in place already.
        homes = [slot for slot in self._idle if 2 * shared[slot] >= len(self._tokens[slot]) or slot == victim]
        home = max(homes, key=shared.__getitem__)  # of equals the least recently used
        source = max(shared, key=shared.__getitem__)
        if shared[source] - shared[home] >= MIN_COPY_TOKENS:
            return Lease(victim, shared[source], copy_from=source)
        return Lease(home, shared[home])

    def _match_whole(self, ids: array[int]) -> Lease:
        for slot in reversed(self._idle):
            size = self._num_prompt[slot]
            if size == len(ids) and len(self._tokens[slot]) >= size and self._tokens[slot][:size] == ids:
                return Lease(slot, size - 1)
        return Lease(next(iter(self._idle)), 0)


def shared_prefix(left: array[int], right: array[int], limit: int) -> int:
    """Length of the longest common prefix, at most `limit`; by bisection over slices, which compare in C."""
    high = min(len(left), len(right), limit)
    if left[:high] == right[:high]:
        return high
    low = 0  # left[:low] == right[:low], left[:high] != right[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
