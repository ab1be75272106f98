"""One question on its way to its answer: what was asked, how much of the answer has come, and how to go on with it.

Pure: no sockets, no tasks; the clock's readings are passed in. `session.py` carries out what a turn says.

    asked ── accepted ──▶ answering ──▶ finished
                │            │
                └── drained, or the connection was lost ──▶ waiting ── resume ──▶ answering …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from service.client import ConnectionLost, make_chat
from service.protocol import (
    Accepted,
    Chat,
    Done,
    DrainNotice,
    Event,
    Forbidden,
    Message,
    Resume,
    ResumeExpired,
    ServiceError,
)
from webui.view import Say, State, View, advance, end_with


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: how long one answer may take, and how long to try again while there is no daemon or no model yet.

    `loading_s` is also how long an answer that was cut waits for the daemon that goes on with it.
    """

    deadline_s: float = 600.0
    reach_s: float = 5.0
    loading_s: float = 900.0
    retry_s: float = 1.0


@dataclass(slots=True, eq=False)
class Turn:
    """`resume_token` is "" until the daemon has taken the question; a turn that begins with one was asked before."""

    messages: Sequence[Message]
    params: Mapping[str, Any]
    say: Say
    patience: Patience
    asked_at: float
    resume_token: str = ""
    last_seq: int = 0
    view: View = field(default_factory=View)
    is_drained: bool = False  # the daemon that had it has ended it: only the next one goes on
    is_streaming: bool = False  # a connection brings its events
    is_stopped: bool = False  # the user has pressed stop
    lost_at: float | None = None  # since when it waits for a daemon that goes on with it
    reached_at: float = field(init=False)  # when a daemon was last there
    is_taken_up: bool = field(init=False)  # somebody else asked it; its text comes from the beginning

    def __post_init__(self) -> None:
        self.reached_at = self.asked_at
        self.is_taken_up = bool(self.resume_token)
        if self.is_taken_up:
            self.view = View(resume_token=self.resume_token)

    def request(self, id: str) -> Chat | Resume:
        """What brings the rest of the answer: the question, or the number of the last event."""
        if self.resume_token:
            return Resume(self.resume_token, self.last_seq, id=id)
        deadline_s = self.patience.deadline_s
        return make_chat(self.messages, id=id, deadline_s=deadline_s, on_disconnect="detach", **self.params)

    def advance(self, event: Event, now: float, drain: DrainNotice | None) -> None:
        """One event of the request; `drain` is what the connection said of its daemon's end."""
        self.last_seq = getattr(event, "seq", self.last_seq)
        self.is_drained = isinstance(event, Done) and event.reason == "drained"
        if self.is_drained:
            self.lost_at = now
            self._wait("restarting", "restarting")
            return
        self.lost_at = None
        if isinstance(event, Accepted):
            self.resume_token = event.resume_token
        self.view = advance(
            self.view, event, messages=self.messages, elapsed_ms=(now - self.asked_at) * 1000,
            deadline_s=self.patience.deadline_s, say=self.say,
        )  # fmt: skip
        if self.is_taken_up:
            self._correct(event)
        if drain is not None and not self.view.is_finished:
            self.view = replace(self.view, sentence=self.say("drain_notice", seconds=round(drain.deadline_s)))

    def not_ready(self, now: float, progress: float) -> None:
        """There is a daemon, and no model yet."""
        self.reached_at = now
        if self.resume_token:
            self._wait("restarting", "restarting_loading", progress)
            self._give_up_late(now)
            return
        percent = round(progress * 100)
        if now - self.asked_at < self.patience.loading_s:
            self.view = View(state="loading", progress=progress, sentence=self.say("loading", percent=percent))
        else:
            seconds = round(self.patience.loading_s)
            self.view = View(state="error", sentence=self.say("still_loading", seconds=seconds, percent=percent))

    def draining(self, now: float) -> None:
        """There is a daemon that takes nothing up: the one that stops, or a full one."""
        self._wait("restarting", "restarting")
        self._give_up_late(now)

    def lost(self, error: ConnectionLost, now: float) -> None:
        """The connection broke, or there is none."""
        if self.resume_token:
            self.lost_at = now if self.lost_at is None else self.lost_at
            waiting: State = "restarting" if self.is_drained else "reconnecting"
            self._wait(waiting, waiting)
            self._give_up_late(now)
        elif self.view.is_accepted or now - self.reached_at >= self.patience.reach_s:
            self.view = end_with(self.view, error, self.say)
        else:
            self.view = View(state="loading", sentence=self.say("reaching"))

    def fail(self, error: ServiceError | ConnectionLost) -> None:
        """It ends here; what was written so far stays."""
        if self.is_taken_up and not self.view.text and isinstance(error, ResumeExpired | Forbidden):
            self.view = replace(self.view, state="error", sentence=self.say("not_taken_up"))
        else:
            self.view = end_with(self.view, error, self.say)

    def _correct(self, event: Event) -> None:
        """What came before comes at once, so only the end knows times; a reloaded page stopped its answer itself."""
        if not isinstance(event, Done):
            self.view = replace(self.view, ttft_ms=None, tokens_per_s=None)
            return
        self.view = replace(self.view, ttft_ms=self.view.daemon_ttft_ms)
        if event.reason == "interrupted" and self.view.text and not self.is_stopped:
            self.view = replace(self.view, sentence=self.say("stopped_by_reload"))

    def _wait(self, state: State, key: str, progress: float = 0.0) -> None:
        sentence = self.say(key, percent=round(progress * 100))
        self.view = replace(self.view, state=state, progress=progress, sentence=sentence, queue_position=0)

    def _give_up_late(self, now: float) -> None:
        self.lost_at = now if self.lost_at is None else self.lost_at
        if now - self.lost_at >= self.patience.loading_s:
            self.fail(ConnectionLost("no daemon goes on with the answer"))
