"""The waiting room: bounded, by priority, in fair turns, with positions and expected starts.

Thread: the event loop's, not the engine's: a queue that waited for step boundaries could not answer an interrupt or
a full house at once while a long prefill runs. No clock of its own: `now` is passed in, in seconds.

Covers: who is next, how long it may take, when to refuse. Does not cover: deadlines (the server's timers end a
request wherever it is), slots and KV (the engine's).

Order. Higher priority first; one waits up by a level for each AGEING_S, but not above the highest priority that
anyone waiting was given. Within a level the users take turns, and within a user their connections do: whoever was
served least recently is next, and who joins is last.
- So nobody starves: the lowest priority is on the highest level after 20 * AGEING_S, and one round later it runs.
- NOTE: without that ceiling one user's flood, aged, would go before another's newcomer of the same priority. If who
  joins were first, a client with a new connection for each request would always go first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from service.protocol import Busy

# A request that has waited this long counts as one priority level higher: the lowest (-10) passes a stream of fresh
# requests of the highest (10) after 20 levels, 200 s.
AGEING_S = 10.0

# Seconds a request is expected to take before any has finished, and the weight of each that does.
GUESS_SERVICE_S = 5.0
ALPHA = 0.2

# An expected start is told again when it has moved by more than both of these.
REVISE_S = 1.0
REVISE_SHARE = 0.2

Owner = tuple[int, int]  # uid, connection


@dataclass(slots=True)
class _Entry:
    key: int
    owner: Owner
    priority: int
    since: float
    told: tuple[int, float] | None = None

    def level(self, now: float) -> int:
        return self.priority + int((now - self.since) / AGEING_S)


class AdmissionStats(NamedTuple):
    num_waiting: int
    max_queue: int
    service_s: float


class Admission:
    """At most `max_queue` waiting requests in front of `num_slots` servers.

    Requests that can start at once pass through it too (`offer`, then `pop`), and do not count against `max_queue`.
    """

    def __init__(self, max_queue: int, num_slots: int) -> None:
        self._max_queue = max_queue
        self._num_slots = num_slots
        self._entries: dict[int, _Entry] = {}  # in order of arrival
        self._served_users: dict[int, int] = {}  # turn in which a waiting uid was last served, or joined
        self._served_owners: dict[Owner, int] = {}
        self._num_turns = 0
        self._num_running = 0
        self._service_s = GUESS_SERVICE_S

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, key: int, owner: Owner, priority: int, now: float) -> None:
        """Let a request in. Raises `Busy` when as many wait as may."""
        num_free = max(0, self._num_slots - self._num_running)
        if len(self._entries) >= self._max_queue + num_free:
            raise Busy(
                f"{len(self._entries)} requests wait already, and {self._num_running} run",
                retry_after_s=round(max(1.0, self._start_s(len(self._entries))), 1),
            )
        self._entries[key] = _Entry(key, owner, priority, now)
        self._num_turns += 1
        self._served_users.setdefault(owner[0], self._num_turns)
        self._served_owners.setdefault(owner, self._num_turns)

    def withdraw(self, key: int) -> None:
        """A waiting request no longer wants to run."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._forget_idle(entry.owner)

    def pop(self, now: float) -> int | None:
        """The next request, which starts now; or None."""
        key = next(self._order(now), None)
        if key is None:
            return None
        entry = self._entries.pop(key)
        self._num_turns += 1
        self._num_running += 1
        self._served_users[entry.owner[0]] = self._num_turns
        self._served_owners[entry.owner] = self._num_turns
        self._forget_idle(entry.owner)
        return key

    def finished(self, duration_s: float | None) -> None:
        """A started request has ended; `duration_s` in its slot, or None when that says nothing of the others."""
        self._num_running -= 1
        if duration_s is not None:
            self._service_s += ALPHA * (duration_s - self._service_s)

    def positions(self, now: float) -> list[tuple[int, int, float]]:
        """(key, queue position, expected seconds until it starts), in the order in which `pop` would give them."""
        return [(key, place, round(self._start_s(place), 1)) for place, key in enumerate(self._order(now))]

    def changed(self, now: float) -> list[tuple[int, int, float]]:
        """Those of `positions` that differ from what was told before, now counted as told."""
        news = []
        for key, place, start_s in self.positions(now):
            entry = self._entries[key]
            if entry.told is not None and entry.told[0] == place:
                moved_s = abs(start_s - entry.told[1])
                if moved_s <= REVISE_S or moved_s <= REVISE_SHARE * entry.told[1]:
                    continue
            entry.told = (place, start_s)
            news.append((key, place, start_s))
        return news

    def stats(self) -> AdmissionStats:
        return AdmissionStats(len(self._entries), self._max_queue, self._service_s)

    def _start_s(self, place: int) -> float:
        """A request with `place` others in front: slots free one after another, `service_s / num_slots` apart."""
        num_free = max(0, self._num_slots - self._num_running)
        return max(0, place + 1 - num_free) * self._service_s / self._num_slots

    def _forget_idle(self, owner: Owner) -> None:
        """Nobody's turn is owed who waits for nothing: so the books never outgrow the queue."""
        if all(entry.owner != owner for entry in self._entries.values()):
            del self._served_owners[owner]
        if all(entry.owner[0] != owner[0] for entry in self._entries.values()):
            del self._served_users[owner[0]]

    def _order(self, now: float) -> Iterator[int]:
        """Keys as they would be popped: simulated turns on the highest level, until it falls."""
        waiting = dict(self._entries)
        users_turn, owners_turn, turn = dict(self._served_users), dict(self._served_owners), self._num_turns
        while waiting:
            ceiling = max(entry.priority for entry in waiting.values())
            users: dict[int, dict[Owner, deque[_Entry]]] = {}
            for entry in waiting.values():
                if entry.level(now) >= ceiling:
                    users.setdefault(entry.owner[0], {}).setdefault(entry.owner, deque()).append(entry)
            num_highest = sum(entry.priority == ceiling for entry in waiting.values())
            while num_highest:
                uid = min(users, key=users_turn.__getitem__)
                owner = min(users[uid], key=owners_turn.__getitem__)
                turn += 1
                users_turn[uid] = owners_turn[owner] = turn
                entry = users[uid][owner].popleft()
                if not users[uid][owner]:
                    del users[uid][owner]
                if not users[uid]:
                    del users[uid]
                del waiting[entry.key]
                num_highest -= entry.priority == ceiling
                yield entry.key
