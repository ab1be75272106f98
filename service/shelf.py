"""The streams of all requests: while they live, afterwards while they can be fetched, and those of the daemon before.

Thread: the event loop. It knows the engine only by its contract, of a connection only that it takes what a stream
has, and nothing of what clients may ask. `server.py` decides that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from service.engine import base
from service.ledger import Ledger, Who
from service.protocol import ResumeExpired
from service.spool import Record, Spool
from service.streams import Retained, Stream


class Shelf:
    """`live` and `retained` are by resume token. `now` is a monotonic clock."""

    def __init__(self, ledger: Ledger, spool: Spool | None, *, resume_s: float, now: Callable[[], float]) -> None:
        self.live: dict[str, Stream] = {}
        self.retained = Retained()
        self._ledger = ledger
        self._spool = spool
        self._resume_s = resume_s
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._engine: base.Engine | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def ready(self, engine: base.Engine) -> None:
        """The engine can take requests. The window of what the daemon before left begins."""
        self._engine = engine
        if self._spool is not None:
            self._loop.call_later(self._resume_s, self._spool.expire)

    # --- one request, from its submission on -------------------------------------------------------------------

    def submit(
        self, engine: base.Engine, stream: Stream, who: Who, owner: tuple[int, int], saved: base.Saved | None = None
    ) -> None:
        """Hand a request to the engine. Raises what the engine raises; then nothing has happened."""
        chat = stream.chat
        # The stream has no connection yet, so nothing is written before the request is known to be in.
        stream.key = engine.submit(chat, owner=owner, sink=partial(self._on_event, stream), saved=saved)
        self._ledger.open(stream.resume_token, chat, who, stream.key, stream.num_delivered_tokens)
        self.live[stream.resume_token] = stream
        self._idle.clear()
        left_s = max(0.0, chat.deadline_s - (saved.spent_s if saved is not None else 0.0))
        stream.deadline_timer = self._loop.call_later(left_s, self.cancel, stream, "deadline")

    def cancel(self, stream: Stream, reason: base.Reason) -> None:
        if not stream.is_finished and self._engine is not None:
            self._ledger.cancel(stream.resume_token)
            self._engine.cancel(stream.key, reason)

    def end(self, stream: Stream, end: base.Failed) -> None:
        """End a request from this side; what the engine still says of it is ignored."""
        if not stream.is_finished:
            self.cancel(stream, "interrupted")
            self._on_event(stream, end)

    def _on_event(self, stream: Stream, event: base.Event) -> None:
        """The engine's sink. Called once a step and request."""
        now = self._now()
        stream.put(event, now)
        self._ledger.record(stream.resume_token, event)
        if isinstance(event, base.Finished | base.Failed):
            if stream.deadline_timer is not None:
                stream.deadline_timer.cancel()
        elif (due_at := stream.due_at()) is not None and not stream.is_timed:
            stream.is_timed = True
            self._loop.call_later(due_at - now, self._let_go, stream)
        if stream.saved is not None and self._spool is not None:
            self._keep(stream, self._spool)
        self._write(stream)

    def _keep(self, stream: Stream, spool: Spool) -> None:
        """Leave a drained answer for the next daemon, and only then tell its end: whoever was told can go on.

        NOTE: the one file that the loop writes itself, a few tens of kilobytes into the page cache. A worker would
        leave time in which the client knows and the file is not there, should the daemon be killed in its drain.
        """
        events = stream.take()
        spool.save([self._record_of(stream)])
        if stream.connection is not None:
            for event in events:
                stream.connection.write(event)

    def _write(self, stream: Stream) -> None:
        if stream.connection is not None:
            stream.connection.write_pending(stream)
        elif stream.is_finished:
            self._retain(stream)

    def _let_go(self, stream: Stream) -> None:
        now = self._now()
        stream.is_timed = False
        stream.let_go(now)
        if (due_at := stream.due_at()) is not None:
            stream.is_timed = True
            self._loop.call_later(due_at - now, self._let_go, stream)
        self._write(stream)

    def unread(self, stream: Stream) -> None:
        """Its connection is gone."""
        stream.connection = None
        if stream.is_finished:
            self._retain(stream)
        elif stream.chat.on_disconnect == "cancel":
            self.cancel(stream, "interrupted")
        else:
            self._expire_later(stream)

    def delivered(self, stream: Stream) -> None:
        """A connection has taken its end."""
        stream.connection = None
        self._ledger.settle(stream.resume_token)
        self._retain(stream)

    # --- taken up again ----------------------------------------------------------------------------------------

    def find(self, resume_token: str) -> tuple[Stream, Record | None]:
        """The stream, and what the daemon before left of it, if it is from there. Raises `ResumeExpired`."""
        stream = self.live.get(resume_token) or self.retained.get(resume_token)
        if stream is not None:
            return stream, None
        record = self._spool.get(resume_token) if self._spool is not None else None
        if record is None:
            raise ResumeExpired("nothing to continue under this token: its time is over, or it never was")
        stream = Stream.restored(
            record.chat, uid=record.uid, resume_token=record.resume_token, events=record.events,
            goes_on=record.saved is not None,
        )  # fmt: skip
        return stream, record

    def check_model(self, engine: base.Engine, record: Record, saved: base.Saved) -> None:
        """Raises `ResumeExpired` when this engine cannot go on with the answer."""
        if record.model != model_mark(engine.info):  # its ids would mean something else
            raise ResumeExpired("another model has been loaded since")
        if len(saved.prompt) + len(saved.generated) >= engine.info.context_limit:
            raise ResumeExpired("the context is shorter than before")

    def take_up(self, stream: Stream, record: Record | None) -> None:
        """Somebody reads it again; the file of the daemon before has done its work."""
        if record is not None and self._spool is not None:
            self._spool.remove(record.resume_token)
        if stream.expiry_timer is not None:
            stream.expiry_timer.cancel()
            stream.expiry_timer = None
        self.retained.remove(stream.resume_token)
        self.live[stream.resume_token] = stream
        self._idle.clear()

    # --- ends --------------------------------------------------------------------------------------------------

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether the last live request ended within the time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end_all(self, reason: base.Reason) -> None:
        """End every live request, keeping what was generated."""
        for stream in list(self.live.values()):
            self.cancel(stream, reason)

    async def save_answers(self) -> None:
        """Leave the other finished answers for the next daemon: of those who detach, or have not received the end."""
        if self._spool is None or self._engine is None:
            return
        kept = []
        for stream in [*self.live.values(), *self.retained]:
            wants_it = stream.chat.on_disconnect == "detach" or not stream.is_exhausted
            if stream.is_finished and stream.saved is None and wants_it:
                stream.take()  # numbered, it is replayed
                kept.append(self._record_of(stream))
        await asyncio.to_thread(self._spool.save, kept)

    def _record_of(self, stream: Stream) -> Record:
        assert self._engine is not None
        return Record(
            stream.resume_token,
            stream.uid,
            model_mark(self._engine.info),
            self._now(),
            stream.chat,
            stream.events,
            stream.saved,
        )

    def _expire_later(self, stream: Stream) -> None:
        """Nobody reads it: it has this long to be taken up again."""
        if stream.expiry_timer is not None:
            stream.expiry_timer.cancel()
        stream.expiry_timer = self._loop.call_later(self._resume_s, self._expire, stream)

    def _expire(self, stream: Stream) -> None:
        self.retained.remove(stream.resume_token)
        self.cancel(stream, "interrupted")

    def _retain(self, stream: Stream) -> None:
        """A finished request is no longer live, but can be fetched for a while."""
        if self.live.pop(stream.resume_token, None) is None:
            return
        self.retained.add(stream)
        self._expire_later(stream)
        self._loop.call_later(self._resume_s, self._ledger.settle, stream.resume_token)
        if not self.live:
            self._idle.set()


def model_mark(info: base.EngineInfo) -> str:
    """What must be the same for an answer to go on."""
    return f"{info.engine} {info.model} {info.family} {info.quantization}"
