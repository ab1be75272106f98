"""Slots never leak or alias, reuse only what is exact, and keep other conversations where they can."""

from __future__ import annotations

import time
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.slots import MIN_COPY_TOKENS, Lease, Slots, shared_prefix

SYSTEM = list(range(1000, 1100))  # a system prompt that everyone shares


def run(slots: Slots, prompt: list[int], answer: list[int] | None = None, *, causal: bool = True) -> Lease:
    """A whole request: acquire, compute what is missing, release."""
    lease = slots.acquire(prompt, causal=causal)
    slots.append(lease.slot, prompt[lease.cached :])
    slots.append(lease.slot, answer or [])
    slots.release(lease.slot)
    slots.check()
    return lease


IDS = st.lists(st.integers(0, 2), max_size=200)


@given(IDS, IDS, IDS, st.integers(0, 300))
def test_the_shared_prefix_is_what_a_plain_loop_finds(
    start: list[int], left: list[int], right: list[int], limit: int
) -> None:
    a, b = start + left, start + right
    expected = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert shared_prefix(array("i", a), array("i", b), limit) == min(expected, limit)


def test_a_prefix_of_128k_ids_is_found_without_a_loop_in_python() -> None:
    ids = array("i", range(131072))
    other = ids[:]
    other[-2] = -1
    started_at = time.thread_time()
    assert shared_prefix(ids, other, len(ids)) == len(ids) - 2
    assert time.thread_time() - started_at < 0.05  # about 1 ms here; a loop takes over 100


def test_the_next_turn_continues_in_place_and_computes_only_what_is_new() -> None:
    slots = Slots(2, 500)
    first = run(slots, [1, 2, 3], [4, 5])
    assert run(slots, [1, 2, 3, 4, 5, 6, 7]) == Lease(first.slot, 5, None)


def test_at_least_one_token_is_left_to_compute() -> None:
    slots = Slots(2, 500)
    run(slots, SYSTEM)
    assert run(slots, SYSTEM).cached == len(SYSTEM) - 1
    assert run(slots, SYSTEM[:50]).cached == 49


def test_a_shared_system_prompt_is_copied_and_the_other_conversation_survives() -> None:
    slots = Slots(3, 1000)
    long = SYSTEM + list(range(300))
    home = run(slots, long).slot
    other = run(slots, [*SYSTEM, 7, 7, 7])
    assert (other.cached, other.copy_from) == (len(SYSTEM), home) and other.slot != home
    assert slots.tokens(home) == long


def test_a_busy_slot_is_copied_from_as_far_as_it_is_computed() -> None:
    slots = Slots(2, 500)
    first = slots.acquire(SYSTEM, causal=True)
    slots.append(first.slot, SYSTEM[:40])
    second = slots.acquire([*SYSTEM, 7], causal=True)
    assert (second.cached, second.copy_from) == (40, first.slot) and second.slot != first.slot
    slots.check()


def test_a_few_shared_tokens_are_not_worth_a_copy() -> None:
    slots = Slots(2, 500)
    few = MIN_COPY_TOKENS - 1
    run(slots, SYSTEM[:few] + list(range(100)))
    assert run(slots, [*SYSTEM[:few], 7]).copy_from is None


def test_what_the_next_free_slot_holds_already_is_not_copied_into_it() -> None:
    slots = Slots(2, 1000)
    newer = slots.acquire([*SYSTEM, 1, *range(200)], causal=True)
    slots.append(newer.slot, [*SYSTEM, 1, *range(200)])
    run(slots, [*SYSTEM, 2, *range(300, 500)])
    slots.release(newer.slot)
    lease = run(slots, [*SYSTEM, 3])
    assert lease.copy_from is None and lease.cached == len(SYSTEM) and lease.slot != newer.slot


def test_a_slightly_longer_prefix_in_a_busy_slot_does_not_lose_the_one_an_idle_slot_has() -> None:
    slots = Slots(3, 1000)
    busy = slots.acquire([*SYSTEM, *range(50)], causal=True)
    slots.append(busy.slot, [*SYSTEM, *range(50)])
    run(slots, SYSTEM[:95] + list(range(500, 900)))
    assert run(slots, [*SYSTEM, 7]).cached >= 95


def test_the_least_recently_used_slot_is_taken_first_and_a_discarded_one_before_it() -> None:
    slots = Slots(3, 100)
    used = [run(slots, [10 * n + i for i in range(5)]).slot for n in range(3)]
    assert sorted(used) == [0, 1, 2]
    assert run(slots, [90, 91]).slot == used[0]
    failed = slots.acquire([10, 11, 12, 13, 14, 15], causal=True)
    assert failed == Lease(used[1], 5, None)
    slots.discard(failed.slot)
    assert slots.length(failed.slot) == 0
    assert slots.acquire([80, 81], causal=True).slot == used[1]


def test_without_causal_prompts_only_the_identical_whole_prompt_is_reused() -> None:
    slots = Slots(2, 500)
    home = run(slots, SYSTEM, [1, 2, 3], causal=False).slot
    assert run(slots, [*SYSTEM, 1, 2, 3, 9], causal=False).cached == 0  # the next turn: its beginning has new KV
    assert slots.acquire(SYSTEM, causal=False) == Lease(home, len(SYSTEM) - 1, None)
    assert slots.acquire(SYSTEM, causal=False).cached == 0  # the other one is busy


def test_without_causal_prompts_another_prompt_of_the_same_length_is_not_reused() -> None:
    slots = Slots(1, 500)
    run(slots, SYSTEM, causal=False)
    assert run(slots, [*SYSTEM[:-1], 7], causal=False).cached == 0


def test_without_causal_prompts_a_prompt_that_was_not_computed_to_its_end_is_not_reused() -> None:
    slots = Slots(1, 500)
    lease = slots.acquire(SYSTEM, causal=False)
    slots.append(lease.slot, SYSTEM[:-1])
    slots.release(lease.slot)
    assert slots.acquire(SYSTEM, causal=False).cached == 0


class SlotLife(RuleBasedStateMachine):
    """Any order of requests, failures and steps, against a model that remembers what each slot must hold."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(3, 120)
        self.held: dict[int, list[int]] = {slot: [] for slot in range(3)}
        self.prompts: dict[int, list[int]] = {}  # of the last request in each slot
        self.missing: dict[int, list[int]] = {}  # busy slot -> prompt ids still to be computed

    @precondition(lambda self: self.slots.can_acquire())
    @rule(shared=st.integers(0, 90), own=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def acquire(self, shared: int, own: list[int]) -> None:
        prompt = SYSTEM[:shared] + own
        lease = self.slots.acquire(prompt, causal=self.causal)
        assert lease.slot not in self.missing, "aliased a busy slot"
        assert 0 <= lease.cached < len(prompt)
        source = lease.slot if lease.copy_from is None else lease.copy_from
        assert self.held[source][: lease.cached] == prompt[: lease.cached], "reused KV of other ids"
        if lease.copy_from is not None:
            assert self.causal and lease.cached >= MIN_COPY_TOKENS and lease.copy_from != lease.slot
        if lease.cached and not self.causal:
            assert self.prompts[lease.slot] == prompt and lease.cached == len(prompt) - 1
        self.held[lease.slot] = prompt[: lease.cached]
        self.prompts[lease.slot] = prompt
        self.missing[lease.slot] = prompt[lease.cached :]

    @precondition(lambda self: self.missing)
    @rule(data=st.data(), num=st.integers(1, 50))
    def compute(self, data: st.DataObject, num: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.missing)))
        ids = self.missing[slot][:num] or [num % 2]
        if len(self.held[slot]) + len(ids) <= 120:
            self.slots.append(slot, ids)
            self.held[slot] += ids
            self.missing[slot] = self.missing[slot][num:]

    @precondition(lambda self: self.missing)
    @rule(data=st.data(), has_failed=st.booleans())
    def leave(self, data: st.DataObject, has_failed: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.missing)))
        del self.missing[slot]
        (self.slots.discard if has_failed else self.slots.release)(slot)
        if has_failed:
            self.held[slot] = []

    @invariant()
    def books_are_right(self) -> None:
        self.slots.check()
        assert {slot: self.slots.tokens(slot) for slot in self.held} == self.held
        stats = self.slots.stats()
        assert stats == (3, len(self.missing), sum(map(len, self.held.values())), 120)
        assert self.slots.can_acquire() == (len(self.missing) < 3)


class SlotLifeNotCausal(SlotLife):
    causal = False


TestSlotLife = SlotLife.TestCase
TestSlotLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlotLifeNotCausal = SlotLifeNotCausal.TestCase
TestSlotLifeNotCausal.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
