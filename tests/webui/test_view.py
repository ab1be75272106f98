"""What the user reads of each refusal and each end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from service.prompt import build_prompt
from service.protocol import (
    BadRequest,
    Busy,
    Draining,
    EngineDead,
    EngineFailed,
    Forbidden,
    Message,
    ServiceError,
    SlowClient,
    TooLong,
)
from tests.toy_daemon import Talk, ToyDaemon
from tests.webui.scene import scene, views_of
from webui.session import ChatSession
from webui.texts import Language, say


def failing(error: ServiceError) -> Callable[[Talk], Awaitable[None]]:
    async def script(talk: Talk) -> None:
        talk.fail(error)

    return script


class _Words:
    """One id a word."""

    def encode_chat(self, messages: Any) -> list[int]:
        return [0] * sum(len(message.content.split()) for message in messages)


def _real_too_long() -> TooLong:
    with pytest.raises(TooLong) as caught:
        build_prompt(_Words(), [Message("user", "w " * 300)], context_limit=256, max_new_tokens=64)
    return caught.value


@pytest.mark.parametrize(
    ("error", "key", "values"),
    [
        (Busy("full", retry_after_s=3.2), "busy", {"seconds": 4}),
        (Draining("stopping", retry_after_s=20.0), "draining", {"seconds": 20}),
        (_real_too_long(), "too_long", {"needed": 300, "limit": 240}),
        (TooLong("no numbers here"), "too_long_unmeasured", {}),
        (EngineFailed("NaN"), "engine_failed", {}),
        (EngineDead("gone"), "engine_dead", {}),
        (SlowClient("slow"), "slow_client", {}),
        (Forbidden("no"), "forbidden", {}),
        (BadRequest("$.params: no"), "bad_request", {"detail": "$.params: no"}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("language", ["zh", "en"])
def test_each_refusal_is_one_sentence(
    tmp_path: Path, error: ServiceError, key: str, values: dict[str, Any], language: Language
) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = failing(error)
        last = (await views_of(session, language=language))[-1]
        assert (last.state, last.sentence) == ("error", say(language, key, **values))

    scene(tmp_path, play)


@pytest.mark.parametrize(
    ("reason", "state", "key", "values"),
    [
        ("length", "done", "length", {"tokens": 1}),
        ("deadline", "stopped", "deadline", {"seconds": 600}),
    ],
)
def test_each_early_end_keeps_the_text_and_says_why(
    tmp_path: Path, reason: Any, state: str, key: str, values: dict[str, Any]
) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started()
        talk.delta("so far")
        talk.done(reason)

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = script
        last = (await views_of(session))[-1]
        assert (last.text, last.state, last.sentence) == ("so far", state, say("zh", key, **values))

    scene(tmp_path, play)


def test_dropped_turns_are_counted_in_turns_not_messages(tmp_path: Path) -> None:
    messages = [Message("user", "1"), Message("assistant", "2"), Message("user", "3")]

    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started(dropped=(0, 1))
        talk.delta("a")
        talk.done()

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = script
        view = [view async for view in session.ask(messages)][-1]
        assert view.dropped_turns == 1

    scene(tmp_path, play)


def test_a_message_beyond_a_frame_is_too_long(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        huge = [Message("user", "x" * (2 * 1024 * 1024))]
        view = [view async for view in session.ask(huge, language="en")][-1]
        assert (view.state, view.sentence) == ("error", say("en", "too_long_unmeasured"))
        assert (await views_of(session))[-1].text == "你好，世界"

    scene(tmp_path, play)
