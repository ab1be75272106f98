"""The waiting room is bounded, fair between users and their connections, and nobody starves in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.admission import AGEING_S, Admission
from service.protocol import Busy


def fill(room: Admission, offers: list[tuple[int, tuple[int, int], int]], now: float = 0.0) -> None:
    for key, owner, priority in offers:
        room.offer(key, owner, priority, now)


def drain(room: Admission, now: float = 0.0) -> list[int]:
    keys = list[int]()
    while (key := room.pop(now)) is not None:
        keys.append(key)
    return keys


def full_house(max_queue: int = 32, num_slots: int = 1) -> Admission:
    """All slots are taken."""
    room = Admission(max_queue, num_slots)
    for slot in range(num_slots):
        room.offer(-1 - slot, (99, slot), 0, 0.0)
        assert room.pop(0.0) is not None
    return room


def test_a_full_room_refuses_at_once_and_says_when_to_come_back() -> None:
    room = full_house(max_queue=2)
    fill(room, [(1, (1, 1), 0), (2, (1, 1), 0)])
    with pytest.raises(Busy) as refusal:
        room.offer(3, (2, 2), 10, 0.0)
    assert refusal.value.retry_after_s is not None and refusal.value.retry_after_s > 0
    assert len(room) == 2
    room.withdraw(1)
    room.offer(3, (2, 2), 10, 0.0)


def test_a_request_that_a_free_slot_takes_at_once_does_not_need_a_place() -> None:
    room = Admission(0, 1)
    room.offer(1, (1, 1), 0, 0.0)
    assert room.pop(0.0) == 1
    with pytest.raises(Busy):
        room.offer(2, (1, 1), 0, 0.0)


def test_higher_priority_goes_first() -> None:
    room = full_house()
    fill(room, [(1, (1, 1), -10), (2, (1, 1), 0), (3, (1, 1), 10)])
    assert drain(room) == [3, 2, 1]


def test_one_owner_is_served_in_order_of_arrival() -> None:
    room = full_house()
    fill(room, [(key, (1, 1), 0) for key in (4, 2, 9)])
    assert drain(room) == [4, 2, 9]


def test_users_take_turns_and_so_do_their_connections() -> None:
    room = full_house()
    fill(room, [(1, (1, 1), 0), (2, (1, 1), 0), (3, (1, 2), 0), (4, (2, 3), 0), (5, (2, 3), 0)])
    assert drain(room) == [1, 4, 3, 5, 2]


def test_a_flood_that_has_waited_long_does_not_delay_a_newcomer_of_another_user() -> None:
    room = full_house()
    fill(room, [(key, (1, 1), 0) for key in range(20)])
    room.offer(100, (2, 2), 0, 45.0)
    assert 100 in drain(room, 45.0)[:2]


def test_the_lowest_priority_gets_on_in_bounded_time_under_a_flood_of_the_highest() -> None:
    """One turn a second, and a fresh request of the highest priority for each."""
    room = full_house()
    room.offer(0, (1, 1), -10, 0.0)
    bound = round(20 * AGEING_S) + 2
    for now in range(1, bound + 1):
        room.offer(now, (2, 2), 10, float(now))
        if room.pop(float(now)) == 0:
            return
    pytest.fail(f"it was not served in {bound} s")


@pytest.mark.parametrize("owner_of", [lambda turn: (1, 100 + turn), lambda turn: (100 + turn, 100 + turn)])
def test_a_connection_or_user_for_each_request_is_no_way_to_pass(owner_of: Callable[[int], tuple[int, int]]) -> None:
    room = full_house()
    fill(room, [(0, (1, 1), 0), (1, (1, 1), 0)])
    for turn in range(1, 5):
        room.offer(100 + turn, owner_of(turn), 0, 0.0)
        if room.pop(0.0) == 1:
            return
    pytest.fail("newcomers always went first")


def test_expected_starts_follow_the_measured_service_time() -> None:
    room = full_house(num_slots=2)
    for _ in range(60):
        room.offer(500, (9, 9), 0, 0.0)
        room.pop(0.0)
        room.finished(8.0)
    fill(room, [(1, (1, 1), 0), (2, (1, 1), 0), (3, (1, 1), 0)])
    assert [start for _, _, start in room.positions(0.0)] == pytest.approx([4, 8, 12], abs=0.2)
    room.finished(8.0)  # a slot is free: the next one starts now
    assert room.positions(0.0)[0][2] == 0


def test_a_request_that_never_ran_says_nothing_of_the_service_time() -> None:
    room = full_house()
    before = room.stats().service_s
    room.finished(None)
    assert room.stats().service_s == before


def test_news_is_told_once() -> None:
    room = full_house()
    fill(room, [(1, (1, 1), 0), (2, (1, 1), 0)])
    assert [place[:2] for place in room.changed(0.0)] == [(1, 0), (2, 1)]
    assert room.changed(0.0) == []
    room.withdraw(1)
    assert [place[:2] for place in room.changed(0.0)] == [(2, 0)]
    assert room.changed(0.1) == []


def test_a_start_is_revised_only_when_it_has_clearly_moved() -> None:
    room = full_house()
    fill(room, [(1, (1, 1), 0)])
    room.changed(0.0)
    usual = room.stats().service_s
    room.finished(usual * 1.05)
    room.offer(7, (1, 1), 5, 0.0)
    assert room.pop(0.0) == 7
    assert room.changed(0.0) == []
    for _ in range(20):
        room.finished(usual * 10)
        room.offer(8, (1, 1), 5, 0.0)
        assert room.pop(0.0) == 8
    assert [place[0] for place in room.changed(0.0)] == [1]


@dataclass
class Load:
    """Someone who asks again as soon as an answer starts, at each moment with `num_waiting` requests."""

    owner: tuple[int, int]
    priority: int
    num_waiting: int


LOADS = st.lists(
    st.builds(Load, st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(-10, 10), st.integers(1, 4)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(-10, 10))
def test_nobody_starves_under_any_steady_load(loads: list[Load], priority: int) -> None:
    """The bound: the range of priorities in ageing (20 levels of 4 turns), then two rounds of everyone's requests."""
    room = full_house(max_queue=100)
    keys = iter(range(1, 100_000))
    waiting = dict[int, int]()
    room.offer(0, (7, 7), priority, 0.0)
    turn_s = AGEING_S / 4
    bound = 80 + 2 * sum(load.num_waiting for load in loads)
    for turn in range(bound):
        now = turn * turn_s
        for index, load in enumerate(loads):
            while sum(1 for owner in waiting.values() if owner == index) < load.num_waiting:
                key = next(keys)
                room.offer(key, load.owner, load.priority, now)
                waiting[key] = index
        popped = room.pop(now)
        assert popped is not None
        if popped == 0:
            return
        del waiting[popped]
    pytest.fail(f"not served in {bound} turns")


class Room(RuleBasedStateMachine):
    """Any sequence of offers, withdrawals, turns and ends, against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Admission(5, 2)
        self.waiting = set[int]()
        self.num_running = 0
        self.now = 0.0
        self.last_key = 0

    @rule(owner=st.tuples(st.integers(1, 2), st.integers(1, 2)), priority=st.integers(-10, 10))
    def offer(self, owner: tuple[int, int], priority: int) -> None:
        self.last_key += 1
        is_full = len(self.waiting) >= 5 + max(0, 2 - self.num_running)
        try:
            self.room.offer(self.last_key, owner, priority, self.now)
        except Busy as refusal:
            assert is_full and refusal.retry_after_s is not None and refusal.retry_after_s > 0
        else:
            assert not is_full
            self.waiting.add(self.last_key)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        self.room.withdraw(key)
        self.waiting.remove(key)

    @rule()
    def pop(self) -> None:
        expected = [key for key, _, _ in self.room.positions(self.now)]
        key = self.room.pop(self.now)
        assert key == (expected[0] if expected else None)
        if key is not None:
            self.waiting.remove(key)
            self.num_running += 1
            # The others keep the order that was promised: `positions` is what `pop` gives.
            assert [key for key, _, _ in self.room.positions(self.now)] == expected[1:]

    @precondition(lambda self: self.num_running)
    @rule(duration_s=st.floats(0, 100))
    def finish(self, duration_s: float) -> None:
        self.room.finished(duration_s)
        self.num_running -= 1

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def everyone_has_one_place(self) -> None:
        places = self.room.positions(self.now)
        assert {key for key, _, _ in places} == self.waiting
        assert [position for _, position, _ in places] == list(range(len(places)))
        starts = [start for _, _, start in places]
        assert starts == sorted(starts) and all(start >= 0 for start in starts)
        assert self.room.stats().num_waiting == len(self.room) == len(self.waiting)


TestRoom = Room.TestCase
TestRoom.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
