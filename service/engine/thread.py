"""The engine thread: it loads the model, then runs steps while there is work, and sleeps while there is none.

Two threads meet here. The engine's own has slots, sequences and the runner, through `Steps`; the event loop's sends it
commands, which wait in one `Inbox`, and is called back on the loop: once when the model is there, once a step with
that step's events, and once if the thread dies.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.engine import base
from service.engine.steps import Job, Steps
from service.protocol import Message, Params
from service.scheduler import Scheduler
from service.slots import Slots, SlotStats
from service.text import TextDecoder

log = logging.getLogger(__name__)


class ChatTokenizer(Protocol):
    @property
    def stop_ids(self) -> frozenset[int]: ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...

    def answer_decoder(self) -> TextDecoder: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the engine needs of a model: made on the engine thread by the `load` that the daemon passes."""

    runner: base.Runner
    tokenizer: ChatTokenizer
    info: base.EngineInfo
    defaults: Params


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: int
    reason: base.Reason


class _Stop:
    """The engine thread's last command."""


_Command = Job | _Cancel | _Stop


class Inbox:
    """Commands for the engine thread, in order. `take` waits only when asked to."""

    def __init__(self) -> None:
        self._commands: deque[_Command] = deque()
        self._news = threading.Condition()

    def put(self, command: _Command) -> None:
        with self._news:
            self._commands.append(command)
            self._news.notify()

    def take(self, *, wait: bool) -> list[_Command]:
        if not wait and not self._commands:  # the usual case while decoding: no lock
            return []
        with self._news:
            while wait and not self._commands:
                self._news.wait()
            taken = list(self._commands)
            self._commands.clear()
            return taken


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the event loop is told, on its own thread."""

    loaded: Callable[[Loaded], None]
    events: Callable[[list[tuple[int, base.Event]]], None]
    died: Callable[[BaseException], None]


class EngineThread:
    """Made on the event loop, whose the methods are; `slot_stats` and `step_since` may be read there at any time."""

    def __init__(
        self, load: Callable[[], Loaded], callbacks: Callbacks, *, step_budget_s: float, now: Callable[[], float]
    ) -> None:
        # shared: set once
        self._load = load
        self._callbacks = callbacks
        self._step_budget_s = step_budget_s
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        # both: keys whose cancel is on its way; added by the loop, read by the thread (`in` and `add` are atomic)
        self._cancelled: set[int] = set()
        # the engine thread's
        self._outbox: list[tuple[int, base.Event]] = []
        # written by the engine thread after each step, read by the loop: one reference to a tuple that never changes
        self.slot_stats: SlotStats | None = None
        self.step_since: float | None = None  # when the step that runs began; written and read in the same way
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- the event loop's side --------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def begin(self, job: Job) -> None:
        """Run a request; there is a slot for it."""
        self._inbox.put(job)

    def cancel(self, key: int, reason: base.Reason) -> None:
        """End a running request at the next step boundary, or between the layers of its prefill. Once is enough."""
        if key not in self._cancelled:
            self._cancelled.add(key)
            self._inbox.put(_Cancel(key, reason))

    def ended(self, key: int) -> None:
        """The request's last event was delivered: its key is free."""
        self._cancelled.discard(key)

    async def stop(self) -> None:
        """After the step that runs."""
        self._inbox.put(_Stop())
        await self._loop.run_in_executor(None, self._thread.join)

    # --- the engine thread's side -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            loaded = self._load()
        except BaseException as error:  # the daemon has one line for each kind; a traceback helps nobody here
            self._loop.call_soon_threadsafe(self._callbacks.died, error)
            return
        try:
            steps = self._make_steps(loaded)
            self._loop.call_soon_threadsafe(self._callbacks.loaded, loaded)
            while self._obey(steps):
                steps.run_step()
                self.step_since = None
                self.slot_stats = steps.slots.stats()
                self._post_step()
        except BaseException as error:
            log.error("the engine thread died", exc_info=error)
            self._loop.call_soon_threadsafe(self._callbacks.died, error)

    def _make_steps(self, loaded: Loaded) -> Steps:
        capabilities = loaded.runner.capabilities
        return Steps(
            runner=loaded.runner,
            slots=Slots(capabilities.num_slots, capabilities.context_limit),
            scheduler=Scheduler(step_budget_s=self._step_budget_s, causal_prompt=capabilities.causal_prompt),
            stop_ids=loaded.tokenizer.stop_ids,
            make_decoder=loaded.tokenizer.answer_decoder,
            now=self._now,
            post=lambda key, event: self._outbox.append((key, event)),
            is_cancelled=self._cancelled.__contains__,
        )

    def _obey(self, steps: Steps) -> bool:
        """Carry out what came in, waiting when there is nothing to run. False: stop."""
        commands = self._inbox.take(wait=not steps.has_work)
        self.step_since = self._now()
        for command in commands:
            match command:
                case Job():
                    steps.begin(command)
                case _Cancel():
                    steps.cancel(command.key, command.reason)
                case _Stop():
                    return False
        self._post_step()
        return True

    def _post_step(self) -> None:
        """Everything since the last call goes to the event loop in one hop."""
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(self._callbacks.events, events)
