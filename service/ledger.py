"""What is counted of each request, from its submission until its answer was delivered or given up.

Covers: metrics of requests, their log lines, their audit records. Does not cover: where those go (`metrics.py`,
`audit.py`), and what happens to the request (`server.py`).

Thread: the event loop. One entry a request that is live, or whose answer may still be fetched; 4 bytes a token.
No prompt and no answer is kept or written, unless the audit is to have them.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from service.engine import base
from service.metrics import Metrics
from service.protocol import Chat, ServiceError

log = logging.getLogger(__name__)


class Sink(Protocol):
    def put(self, record: dict[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Who:
    """The process at the other end of a connection, as the kernel knows it."""

    uid: int
    pid: int


@dataclass(slots=True)
class Entry:
    """One request. `num_delivered` tells how many of its tokens a connection took, in this daemon and before."""

    chat: Chat
    who: Who
    key: int
    num_delivered: Callable[[], int]
    num_delivered_before: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_tokens: int = 0
    last_text_ms: float | None = None
    gaps_ms: array[float] = field(default_factory=lambda: array("f"))
    cancelled_at: float | None = None
    cancel_ms: float | None = None
    end: base.Finished | base.Failed | None = None
    ended_at: float = 0.0  # wall clock
    texts: list[str] = field(default_factory=list)


class Ledger:
    """`audit` takes records; None: nobody wants them. `now` is a monotonic clock, `wall` the time of day."""

    def __init__(
        self, metrics: Metrics, audit: Sink | None = None, *, keeps_text: bool = False,
        now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.model = ""
        self._metrics = metrics
        self._audit = audit
        self._keeps_text = keeps_text and audit is not None
        self._now = now
        self._wall = wall
        self._entries: dict[str, Entry] = {}

    @property
    def num_open(self) -> int:
        """Requests that are not settled."""
        return len(self._entries)

    # --- one request, by its resume token ---------------------------------------------------------------------

    def open(self, token: str, chat: Chat, who: Who, key: int, num_delivered: Callable[[], int]) -> None:
        """The engine has taken the request; `key` is its name for it."""
        self._entries[token] = Entry(chat, who, key, num_delivered, num_delivered())

    def record(self, token: str, event: base.Event) -> None:
        """An event from the engine. What comes for an ended or unknown request is ignored."""
        entry = self._entries.get(token)
        if entry is None or entry.end is not None:
            return
        match event:
            case base.Text():
                self._record_text(entry, event)
            case base.Running():
                entry.prompt_tokens, entry.cached_tokens = event.prompt_tokens, event.cached_tokens
            case base.Finished() | base.Failed():
                self._record_end(entry, event)

    def cancel(self, token: str) -> None:
        """Somebody wants the request to end: its cancel latency begins, the first time."""
        entry = self._entries.get(token)
        if entry is not None and entry.cancelled_at is None and entry.end is None:
            entry.cancelled_at = self._now()

    def settle(self, token: str) -> None:
        """Nothing more will be delivered: count what was generated in vain, and write the record. Once a request."""
        entry = self._entries.get(token)
        if entry is None or entry.end is None:
            return
        del self._entries[token]
        num_wasted = max(0, entry.num_tokens - (entry.num_delivered() - entry.num_delivered_before))
        self._metrics.wasted_tokens.inc(num_wasted)
        self._write(entry, num_wasted)

    def settle_all(self) -> None:
        """The service ends."""
        for token in list(self._entries):
            self.settle(token)

    def refuse(self, chat_id: str, who: Who, error: ServiceError) -> None:
        """A request was turned away before it had a stream."""
        log.info("request refused, uid %d pid %d: %s: %s", who.uid, who.pid, error.code, error.message)
        if self._audit is not None:
            self._audit.put(self._record_of(chat_id, who, self._wall(), None, error.code))

    # --- inside -----------------------------------------------------------------------------------------------

    def _record_text(self, entry: Entry, event: base.Text) -> None:
        entry.num_tokens += event.tokens
        if entry.last_text_ms is not None:
            gap_ms = event.t_ms - entry.last_text_ms
            entry.gaps_ms.append(gap_ms)
            self._metrics.itl_s.observe(gap_ms / 1000)
        entry.last_text_ms = event.t_ms
        if self._keeps_text:
            entry.texts.append(event.text)

    def _record_end(self, entry: Entry, event: base.Finished | base.Failed) -> None:
        entry.end = event
        entry.ended_at = self._wall()
        if entry.cancelled_at is not None:
            cancel_s = self._now() - entry.cancelled_at
            entry.cancel_ms = round(1000 * cancel_s, 3)
            self._metrics.cancel_s.observe(cancel_s)
        if isinstance(event, base.Finished):
            usage, timing = event.usage, event.timing
            self._metrics.count_finished(
                event.reason, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens, queue_s=timing.queue_ms / 1000,
                ttft_s=timing.ttft_ms / 1000, total_s=timing.total_ms / 1000,
            )  # fmt: skip
        else:
            self._metrics.errors.labels(event.error.code).inc()
        log.info("request %d, uid %d pid %d: %s", entry.key, entry.who.uid, entry.who.pid, describe_end(event))

    def _write(self, entry: Entry, num_wasted: int) -> None:
        if self._audit is None:
            return
        end = entry.end
        assert end is not None
        reason, error = (end.reason, None) if isinstance(end, base.Finished) else (None, end.error.code)
        record = self._record_of(entry.chat.id, entry.who, entry.ended_at, reason, error)
        record |= {
            "prompt_tokens": entry.prompt_tokens, "cached_tokens": entry.cached_tokens,
            "completion_tokens": entry.num_tokens, "itl_p50_ms": percentile(entry.gaps_ms, 0.5),
            "itl_p95_ms": percentile(entry.gaps_ms, 0.95), "cancel_ms": entry.cancel_ms, "wasted_tokens": num_wasted,
        }  # fmt: skip
        if isinstance(end, base.Finished):
            record["completion_tokens"] = end.usage.completion_tokens
            record |= {
                "queue_ms": end.timing.queue_ms, "ttft_ms": end.timing.ttft_ms, "total_ms": end.timing.total_ms,
            }  # fmt: skip
        if self._keeps_text:
            record["messages"] = [{"role": turn.role, "content": turn.content} for turn in entry.chat.messages]
            record["answer"] = "".join(entry.texts)
        self._audit.put(record)

    def _record_of(self, id: str, who: Who, at: float, reason: base.Reason | None, error: str | None) -> dict[str, Any]:
        """The record's fields, in their order, with what a request has that never ran."""
        return {
            "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"), "uid": who.uid, "pid": who.pid,
            "id": id, "model": self.model, "reason": reason, "error": error, "prompt_tokens": 0, "cached_tokens": 0,
            "completion_tokens": 0, "queue_ms": None, "ttft_ms": None, "total_ms": None, "itl_p50_ms": None,
            "itl_p95_ms": None, "cancel_ms": None, "wasted_tokens": 0,
        }  # fmt: skip


def percentile(values: array[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)


def describe_end(event: base.Finished | base.Failed) -> str:
    """One line for the log: numbers, no text."""
    if isinstance(event, base.Failed):
        return f"{event.error.code}: {event.error.message}"
    usage, timing = event.usage, event.timing
    return (
        f"{'deadline (timeout)' if event.reason == 'deadline' else event.reason},"
        f" prompt {usage.prompt_tokens} (cached {usage.cached_tokens}) + {usage.completion_tokens}"
        f" tokens, queue {timing.queue_ms:.0f} ms, ttft {timing.ttft_ms:.0f} ms, total {timing.total_ms:.0f} ms,"
        f" {timing.tokens_per_s:.1f} tokens/s"
    )
