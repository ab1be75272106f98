"""The local engine: requests wait in a bounded queue, run on the engine thread, and come back as events.

Thread: the event loop's, which owns the queue and the table of requests (so a busy answer, a queue position and an
interrupt of a waiting request need no step boundary); what runs is the engine thread's (`thread.py`).
Prompts are encoded in a worker beside both, so that a long one stalls neither the streams nor the decoding.

    submit → queue → (a slot is free) → prompt ready? → EngineThread → events → sink
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from service.admission import Admission
from service.engine import base
from service.engine.steps import Job
from service.engine.thread import Callbacks, EngineThread, Loaded
from service.prompt import Prompt, build_prompt
from service.protocol import Chat, EngineDead, EngineFailed, Params, ServiceError, Timing, Usage

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """One request on the event loop's side, until its last event."""

    key: int
    chat: Chat
    params: Params
    sink: base.Sink
    accepted_at: float
    saved: base.Saved | None = None
    prompt: Prompt | None = None
    has_slot: bool = False  # left the queue: a slot is its own
    slot_at: float = 0.0
    is_running: bool = False  # the engine thread has it


class LocalEngine:
    """`base.Engine` over a model in this process. Made on the event loop; `start` loads on the engine thread."""

    def __init__(
        self, load: Callable[[], Loaded], *, max_queue: int, step_budget_s: float,
        step_limit_s: float = 30.0, on_slow_step: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        # shared: set once, before the first request
        self._max_queue = max_queue
        self._step_limit_s = step_limit_s
        self._on_slow_step = on_slow_step
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._loaded: Loaded | None = None
        self._thread = EngineThread(
            load, Callbacks(self._begin_service, self._deliver, self._mourn), step_budget_s=step_budget_s, now=now
        )
        # the event loop's
        self.died: asyncio.Future[BaseException] = self._loop.create_future()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._admission: Admission | None = None
        self._requests: dict[int, _Request] = {}
        self._num_slots_taken = 0
        self._last_key = 0
        self._watchdog: asyncio.TimerHandle | None = None
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    async def start(self) -> None:
        """Load and warm up on the engine thread. Raises whatever loading raises."""
        self._thread.start()
        await self._ready
        self._watch_steps(None)

    # --- base.Engine -----------------------------------------------------------------------------------------

    @property
    def info(self) -> base.EngineInfo:
        assert self._loaded is not None
        return self._loaded.info

    @property
    def num_running(self) -> int:
        return self._num_slots_taken

    @property
    def num_queued(self) -> int:
        return len(self._requests) - self._num_slots_taken

    def submit(self, chat: Chat, *, owner: tuple[int, int], sink: base.Sink, saved: base.Saved | None = None) -> int:
        assert self._loaded is not None and self._admission is not None
        if self.died.done():
            raise EngineDead("the engine failed; the service restarts", retry_after_s=5.0)
        self._last_key += 1
        accepted_at = self._now() - (saved.spent_s if saved is not None else 0.0)
        params = replace(self._loaded.defaults, **chat.params)
        request = _Request(self._last_key, chat, params, sink, accepted_at, saved)
        self._admission.offer(request.key, owner, chat.priority, self._now())
        self._requests[request.key] = request
        if saved is not None and saved.prompt:
            request.prompt = Prompt(list(saved.prompt), saved.dropped)
        else:
            future = self._loop.run_in_executor(self._encoder, self._encode, request)
            future.add_done_callback(lambda done: self._encoded(request, done))
        self._fill_slots()
        if request.has_slot and saved is None:
            sink(base.Waiting(0, 0.0))  # passed through: the queue never told it a position
        self._report_positions()
        return request.key

    def cancel(self, key: int, reason: base.Reason) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        if request.is_running:
            self._thread.cancel(key, reason)
        else:
            self._end(request, self._end_waiting(request, reason))

    def stats(self) -> dict[str, float]:
        counts: dict[str, float] = {"num_requests_running": self.num_running, "num_requests_waiting": self.num_queued}
        slots = self._thread.slot_stats
        if slots is None:
            return counts
        share = slots.num_tokens / (slots.num_slots * slots.capacity)
        return {
            **counts, "kv_slots": slots.num_slots, "kv_slots_used": slots.num_busy, "kv_tokens": slots.num_tokens,
            "kv_cache_usage_perc": share,
        }  # fmt: skip

    async def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._thread.stop()
        self._encoder.shutdown(wait=False, cancel_futures=True)
        for request in list(self._requests.values()):
            self._end(request, base.Failed(EngineDead("the engine was stopped")))

    # --- the life of a request --------------------------------------------------------------------------------

    def _end_waiting(self, request: _Request, reason: base.Reason) -> base.Finished:
        """The end of a request that the engine thread never had, or not yet again."""
        waited_s = self._now() - request.accepted_at
        timing = Timing(round(1000 * waited_s, 3), 0.0, round(1000 * waited_s, 3), 0.0)
        before = request.saved or base.Saved(0.0)
        usage = Usage(len(before.prompt), before.cached, len(before.generated))
        saved = replace(before, spent_s=waited_s) if reason == "drained" else None
        return base.Finished(reason, usage, timing, saved)

    def _watch_steps(self, reported: float | None) -> None:
        """The watchdog: says once of a step that it takes far too long. It ends nothing: nobody can, from here."""
        since = self._thread.step_since
        if since is not None and since != reported and self._now() - since > self._step_limit_s:
            log.error("the engine's step has taken %.1f s so far (timeout)", self._now() - since)
            self._on_slow_step()
            reported = since
        if not self.died.done():
            self._watchdog = self._loop.call_later(self._step_limit_s / 4, self._watch_steps, reported)

    def _encode(self, request: _Request) -> Prompt:
        """In the worker: messages → ids."""
        assert self._loaded is not None
        return build_prompt(
            self._loaded.tokenizer, request.chat.messages, context_limit=self._loaded.info.context_limit,
            max_new_tokens=request.params.max_new_tokens,
        )  # fmt: skip

    def _encoded(self, request: _Request, done: asyncio.Future[Prompt]) -> None:
        if request.key not in self._requests or done.cancelled():
            return
        error = done.exception()
        if error is None:
            request.prompt = done.result()
            self._begin_when_ready(request)
        elif isinstance(error, ServiceError):
            self._end(request, base.Failed(error))
        else:
            log.error("request %d: the prompt cannot be encoded", request.key, exc_info=error)
            self._end(request, base.Failed(EngineFailed("the prompt cannot be encoded")))

    def _fill_slots(self) -> None:
        """Give free slots to those who are next in the queue."""
        assert self._admission is not None
        while self._num_slots_taken < self.info.slots:
            key = self._admission.pop(self._now())
            if key is None:
                break
            self._num_slots_taken += 1
            self._requests[key].has_slot = True
            self._requests[key].slot_at = self._now()
            self._begin_when_ready(self._requests[key])

    def _begin_when_ready(self, request: _Request) -> None:
        if request.has_slot and request.prompt is not None and not request.is_running:
            request.is_running = True
            prompt = request.prompt
            self._thread.begin(
                Job(request.key, prompt.ids, prompt.dropped, request.params, request.accepted_at, request.saved)
            )

    def _end(self, request: _Request, event: base.Finished | base.Failed) -> None:
        """The request's last event. Frees what it held and lets the next one in."""
        assert self._admission is not None
        del self._requests[request.key]
        self._thread.ended(request.key)
        if request.has_slot:
            self._num_slots_taken -= 1
            is_typical = isinstance(event, base.Finished) and event.reason in ("stop", "length")
            self._admission.finished(self._now() - request.slot_at if is_typical else None)
        else:
            self._admission.withdraw(request.key)
        request.sink(event)
        self._fill_slots()
        self._report_positions()

    def _report_positions(self) -> None:
        assert self._admission is not None
        for key, position, expected_start_s in self._admission.changed(self._now()):
            self._requests[key].sink(base.Waiting(position, expected_start_s))

    def _begin_service(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._admission = Admission(self._max_queue, loaded.info.slots)
        self._ready.set_result(None)

    def _deliver(self, events: list[tuple[int, base.Event]]) -> None:
        """One step's events."""
        for key, event in events:
            request = self._requests.get(key)
            if request is None:
                continue
            if isinstance(event, base.Finished | base.Failed):
                self._end(request, event)
            else:
                request.sink(event)

    def _mourn(self, error: BaseException) -> None:
        """The engine thread is dead: every request is told, then the daemon."""
        if not self._ready.done():
            self._ready.set_exception(error)
            return
        for request in list(self._requests.values()):
            if request.key in self._requests:
                self._end_dead(request, error)
        if not self.died.done():
            self.died.set_result(error)

    def _end_dead(self, request: _Request, error: BaseException) -> None:
        del self._requests[request.key]
        request.sink(base.Failed(EngineDead(f"the engine failed ({type(error).__name__}); the service restarts")))
