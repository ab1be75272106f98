"""What the user sees of one answer, and how each event of the daemon changes it.

Pure: knows no Gradio, no sockets and no clock. A `View` never changes; `advance` and `end_with` make the next one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from service.client import ConnectionLost
from service.protocol import (
    Accepted,
    BadFrame,
    BadRequest,
    Busy,
    Delta,
    Done,
    Draining,
    Event,
    Message,
    Queued,
    ResumeExpired,
    ServiceError,
    Started,
    TooLong,
)
from webui.texts import SENTENCES

State = Literal["queued", "loading", "answering", "restarting", "reconnecting", "done", "stopped", "error"]
Say = Callable[..., str]  # say(key, **values) -> a sentence in the user's language


@dataclass(frozen=True, slots=True)
class View:
    """One moment of one answer. `sentence` is for the user, "" when there is nothing to say.

    `ttft_ms` is what the user waited for the first text, `daemon_ttft_ms` what the daemon says of it.
    """

    text: str = ""
    state: State = "queued"
    sentence: str = ""
    queue_position: int = 0
    expected_start_s: float = 0.0
    progress: float = 0.0
    ttft_ms: float | None = None
    daemon_ttft_ms: float | None = None
    tokens_per_s: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    context_limit: int = 0
    dropped_turns: int = 0
    resume_token: str = ""  # the daemon has taken the request, and this continues it

    @property
    def is_accepted(self) -> bool:
        return bool(self.resume_token)

    @property
    def context_used(self) -> int:
        return self.prompt_tokens + self.tokens

    @property
    def is_finished(self) -> bool:
        return self.state in ("done", "stopped", "error")

    def as_stopped(self, say: Say) -> View:
        """What remains when the user presses stop."""
        if self.is_finished:
            return self
        return replace(self, state="stopped", sentence="" if self.text else say("stopped_early"), queue_position=0)


def advance(
    view: View, event: Event, *, messages: Sequence[Message], elapsed_ms: float, deadline_s: float, say: Say
) -> View:
    """The view after one event of its request, `elapsed_ms` after the user sent it."""
    match event:
        case Accepted():
            return _queued(replace(view, resume_token=event.resume_token), event, say)
        case Queued():
            return _queued(view, event, say)
        case Started():
            dropped = sum(messages[index].role == "user" for index in event.dropped_messages if index < len(messages))
            return replace(
                view, state="answering", sentence="", queue_position=0, expected_start_s=0.0,
                prompt_tokens=event.prompt_tokens, context_limit=event.context_limit, dropped_turns=dropped,
            )  # fmt: skip
        case Delta() if event.text or event.tokens:  # an empty one stands for the end of the daemon before
            return _with_text(view, event, elapsed_ms)
        case Done():
            return _finished(view, event, deadline_s, say)
    return view


def end_with(view: View, error: ServiceError | ConnectionLost, say: Say) -> View:
    """The last view of an answer that failed: its text is kept, and a sentence says what to do."""
    if isinstance(error, ConnectionLost | ResumeExpired):
        key = "unreachable" if not view.is_accepted else "restarted" if view.text else "restarted_early"
        return replace(view, state="error", sentence=say(key))
    match error:
        case Busy() | Draining():
            sentence = say(error.code, seconds=_whole(error.retry_after_s or 5.0))
        case TooLong():
            sentence = _too_long(error, say)
        case BadFrame():  # the conversation does not even fit a frame
            sentence = say("too_long_unmeasured")
        case BadRequest():
            sentence = say("bad_request", detail=error.message)
        case _ if error.code in SENTENCES:
            sentence = say(error.code)
        case _:
            sentence = say("unknown", code=error.code)
    return replace(view, state="error", sentence=sentence)


def _queued(view: View, event: Accepted | Queued, say: Say) -> View:
    waits = event.queue_position > 0
    sentence = say("queued", ahead=event.queue_position, seconds=_whole(event.expected_start_s))
    return replace(
        view, state="queued", queue_position=event.queue_position, expected_start_s=event.expected_start_s,
        sentence=sentence if waits else "",
    )  # fmt: skip


def _with_text(view: View, delta: Delta, elapsed_ms: float) -> View:
    is_first = view.daemon_ttft_ms is None
    first_ms = delta.t_ms if view.daemon_ttft_ms is None else view.daemon_ttft_ms
    tokens = view.tokens + delta.tokens
    took_s = (delta.t_ms - first_ms) / 1000
    return replace(
        view, state="answering", sentence="", text=view.text + delta.text, tokens=tokens,
        ttft_ms=elapsed_ms if is_first else view.ttft_ms, daemon_ttft_ms=first_ms,
        tokens_per_s=(tokens - 1) / took_s if took_s > 0 else view.tokens_per_s,
    )  # fmt: skip


def _finished(view: View, done: Done, deadline_s: float, say: Say) -> View:
    sentence = ""
    if done.reason == "length":
        sentence = say("length", tokens=done.usage.completion_tokens)
    elif done.reason == "deadline":
        sentence = say("deadline", seconds=_whole(deadline_s))
    elif done.reason == "interrupted" and not view.text:
        sentence = say("stopped_early")
    elif done.reason == "stop" and not view.text.strip():
        sentence = say("empty")
    has_speed = done.timing.tokens_per_s > 0
    return replace(
        view, state="done" if done.reason in ("stop", "length") else "stopped", sentence=sentence,
        tokens=done.usage.completion_tokens, queue_position=0,
        prompt_tokens=done.usage.prompt_tokens or view.prompt_tokens,
        daemon_ttft_ms=done.timing.ttft_ms if view.tokens else view.daemon_ttft_ms,
        tokens_per_s=done.timing.tokens_per_s if has_speed else view.tokens_per_s,
    )  # fmt: skip


def _too_long(error: TooLong, say: Say) -> str:
    """The daemon's message is for people, but it names the two numbers first: what is needed, what fits."""
    numbers = re.findall(r"\d+", error.message)
    if len(numbers) < 2:
        return say("too_long_unmeasured")
    return say("too_long", needed=numbers[0], limit=numbers[1])


def _whole(seconds: float) -> int:
    return max(1, math.ceil(seconds))
