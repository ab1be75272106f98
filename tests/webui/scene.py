"""A scene: one scripted daemon and one page's session on one event loop, and what the session shows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from service.protocol import Message
from tests.toy_daemon import Talk, ToyDaemon
from webui.session import ChatSession
from webui.texts import Language
from webui.turn import Patience
from webui.view import View

QUESTION = [Message("user", "你好")]
QUICK = Patience(reach_s=0.0, retry_s=0.0)


def scene(
    path: Path, play: Callable[[ToyDaemon, ChatSession], Awaitable[None]], patience: Patience = QUICK, **options: Any
) -> None:
    """Run a scene with a daemon and one page's session."""

    async def run() -> None:
        toy = ToyDaemon(str(path / "toy.sock"))
        await toy.start()
        session = ChatSession(toy.path, patience=patience, **options)
        try:
            async with asyncio.timeout(20):
                await play(toy, session)
        finally:
            await session.close()
            await toy.kill()

    asyncio.run(run())


async def views_of(session: ChatSession, *, language: Language = "zh", **params: Any) -> list[View]:
    return [view async for view in session.ask(QUESTION, params, language=language)]


async def say_ok(talk: Talk) -> None:
    talk.say("ok")


async def hang_after_text(talk: Talk) -> None:
    talk.accepted()
    talk.started()
    talk.delta("so far")
    await asyncio.Event().wait()
