"""One request's events on their way to a client: numbered without a gap, merged for slow readers, kept for resume.

Thread: the event loop. Knows no sockets; the clock's reading is passed in.

An event gets its `seq` when a connection takes it, not when the engine makes it. So text that waits (a slow reader,
a client that is gone) merges into one pending piece, and what was numbered is kept as it was numbered:

    log:      accepted(1) started(2) delta(3) delta(4)      numbered, replayed by `resume`
    pending:  one piece of text, then perhaps done          merged, numbered when taken

Memory of one stream ≤ its request + its answer's text twice + ~200 bytes a delta; the number of streams is bounded
by the queue while they live and by `Retained` afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from service.engine import base
from service.protocol import (
    Accepted,
    BadRequest,
    Chat,
    Delta,
    Done,
    Error,
    Queued,
    Started,
)
from service.text import Merger

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from service.connection import Connection

StreamEvent = Accepted | Queued | Started | Delta | Done | Error

# A delta's text is cut here, so that its frame stays far below 2 MiB whatever JSON escapes cost (6 bytes at most).
MAX_DELTA_CHARS = 128 * 1024


class Stream:
    """`connection` is who reads it now; `key` is the engine's name for the request."""

    def __init__(self, chat: Chat, *, uid: int, resume_token: str) -> None:
        self.chat = chat
        self.id = chat.id  # the name on the connection that reads it
        self.uid = uid
        self.resume_token = resume_token
        self.key = -1
        self.connection: Connection | None = None
        self.has_started = False  # it has left the queue
        self.is_finished = False  # the engine's last event has come
        self.is_timed = False  # the server's timer will let held text go
        self.deadline_timer: TimerHandle | None = None
        self.expiry_timer: TimerHandle | None = None  # nobody reads it: when it goes
        self.num_chars = 0
        self._log: list[StreamEvent] = []
        self._waiting: base.Waiting | None = None
        self._running: base.Running | None = None
        self._texts: list[base.Text] = []
        self._end: base.Finished | base.Failed | None = None
        self._merger = Merger(chat.merge.max_delay_ms / 1000)
        self._last_t_ms = 0.0
        self.saved: base.Saved | None = None  # it was drained: how another engine goes on

    @classmethod
    def restored(
        cls, chat: Chat, *, uid: int, resume_token: str, events: Sequence[StreamEvent], goes_on: bool
    ) -> Stream:
        """A stream of the daemon before, with all it had numbered.

        If it goes on, its `drained` becomes a delta without text: no number is missing, and none means the end.
        """
        stream = cls(chat, uid=uid, resume_token=resume_token)
        for event in events:
            if isinstance(event, Delta):
                stream.num_chars += len(event.text)
                stream._last_t_ms = event.t_ms
            elif isinstance(event, Done) and goes_on:
                event = Delta(event.id, event.seq, "", 0, stream._last_t_ms)
            stream.has_started = stream.has_started or isinstance(event, Started)
            stream._log.append(event)
        stream.is_finished = not goes_on
        return stream

    def put(self, event: base.Event, now: float) -> None:
        """An event from the engine. Nothing may follow `Finished` or `Failed`; what does is ignored."""
        if self.is_finished:
            return
        match event:
            case base.Waiting():
                self._waiting = event
            case base.Running():
                if not self.has_started:  # a stream that goes on has told it already
                    self._running = event
                self.has_started = True
            case base.Text():
                self.num_chars += len(event.text)
                merged = self._merger.push(event.text, event.tokens, now)
                if merged is not None:
                    self._texts.append(base.Text(merged[0], merged[1], event.t_ms))
                self._last_t_ms = event.t_ms
            case base.Finished() | base.Failed():
                self._release()
                self._end = event
                self.is_finished = True
                self.saved = event.saved if isinstance(event, base.Finished) else None

    def due_at(self) -> float | None:
        """When text that is held for merging must be let go, if nothing else comes."""
        return self._merger.due_at()

    def let_go(self, now: float) -> None:
        """Let held text go if it is due."""
        due_at = self._merger.due_at()
        if due_at is not None and now >= due_at:
            self._release()

    def take(self) -> list[StreamEvent]:
        """Number what is pending and return it, to be written in this order. It stays in the log, for a replay."""
        events: list[StreamEvent] = []
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            events.append(self._numbered_waiting(waiting, len(events)))
        running, self._running = self._running, None
        if running is not None:
            events.append(
                Started(
                    self.id, self._seq(events), running.prompt_tokens, running.cached_tokens, running.context_limit,
                    running.dropped_messages,
                )
            )  # fmt: skip
        texts, self._texts = self._texts, []
        events += self._deltas(texts, len(self._log) + len(events))
        end, self._end = self._end, None
        if isinstance(end, base.Finished):
            events.append(Done(self.id, self._seq(events), end.reason, end.usage, end.timing))
        elif end is not None:
            # A request that was never accepted has no numbers: its error is its first and only event.
            seq = self._seq(events) if self._log or events else None
            events.append(Error.of(end.error, id=self.id, seq=seq))
        self._log += events
        return events

    def num_delivered_tokens(self) -> int:
        """Tokens whose text a connection has taken."""
        return sum(event.tokens for event in self._log if isinstance(event, Delta))

    def replay(self, after: int) -> list[StreamEvent]:
        """The numbered events with `seq` > `after`. Raises `BadRequest` for a number that was never given."""
        if after > len(self._log):
            last = len(self._log)
            raise BadRequest(f"$.after: the request's last seq is {last}, got {after}", path="$.after")
        return self._log[after:]

    @property
    def events(self) -> tuple[StreamEvent, ...]:
        """All that was numbered so far."""
        return tuple(self._log)

    @property
    def is_exhausted(self) -> bool:
        """The terminal event was taken: nothing will ever be pending again."""
        return self.is_finished and self._end is None

    def _seq(self, events: Sequence[StreamEvent]) -> int:
        return len(self._log) + len(events) + 1

    def _numbered_waiting(self, waiting: base.Waiting, num_before: int) -> Accepted | Queued:
        place, start_s = waiting.queue_position, waiting.expected_start_s
        seq = len(self._log) + num_before + 1
        if seq == 1:
            return Accepted(self.id, seq, self.resume_token, place, start_s)
        return Queued(self.id, seq, place, start_s)

    def _deltas(self, texts: Sequence[base.Text], num_before: int) -> list[StreamEvent]:
        """All of `texts` as one delta, or several where it would be too long for a frame."""
        if not texts:
            return []
        text, tokens = "".join(item.text for item in texts), sum(item.tokens for item in texts)
        pieces = [text[start : start + MAX_DELTA_CHARS] for start in range(0, len(text), MAX_DELTA_CHARS)] or [""]
        counts = [0] * (len(pieces) - 1) + [tokens]
        return [
            Delta(self.id, num_before + 1 + index, piece, count, texts[-1].t_ms)
            for index, (piece, count) in enumerate(zip(pieces, counts, strict=True))
        ]

    def _release(self) -> None:
        merged = self._merger.flush()
        if merged is not None:
            self._texts.append(base.Text(merged[0], merged[1], self._last_t_ms))


class Retained:
    """Finished streams that may still be fetched: the oldest go when there are too many, or too much text."""

    def __init__(self, max_streams: int = 1024, max_chars: int = 16 * 1024 * 1024) -> None:
        self._max_streams = max_streams
        self._max_chars = max_chars
        self._num_chars = 0
        self._streams: OrderedDict[str, Stream] = OrderedDict()

    def add(self, stream: Stream) -> None:
        self._streams[stream.resume_token] = stream
        self._num_chars += _weight(stream)
        while len(self._streams) > self._max_streams or self._num_chars > self._max_chars:
            self.remove(next(iter(self._streams)))

    def get(self, resume_token: str) -> Stream | None:
        return self._streams.get(resume_token)

    def remove(self, resume_token: str) -> Stream | None:
        stream = self._streams.pop(resume_token, None)
        if stream is not None:
            self._num_chars -= _weight(stream)
        return stream

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())


def _weight(stream: Stream) -> int:
    return stream.num_chars + sum(len(message.content) for message in stream.chat.messages)


def with_last_message(chat: Chat, *, id: str, prompt: str) -> Chat:
    """The same conversation with its last user message replaced: what `edit` starts."""
    last = replace(chat.messages[-1], content=prompt)
    return replace(chat, id=id, messages=(*chat.messages[:-1], last))
