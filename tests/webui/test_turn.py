"""Answers that are cut and go on: over a restart of the daemon, a lost connection, and a page that is loaded again.

Most scenes have the real server with the toy model; those about what the page does meanwhile, the scripted daemon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.spool import Spool
from tests.harness import Service, toy_service, until
from tests.toy import ToyCost, ToyRunner
from tests.toy_daemon import Talk, ToyDaemon
from tests.webui.scene import QUESTION, hang_after_text, scene, views_of
from webui.session import ChatSession
from webui.texts import say
from webui.turn import Patience
from webui.view import View

WAITING = Patience(reach_s=5.0, retry_s=0.01)
NUM_TOKENS = 60


def slow_toy() -> ToyRunner:
    return ToyRunner(end_one_in=0, cost=ToyCost(0.005, 0.0, 0.0, 0.0), spend=time.sleep)


@asynccontextmanager
async def daemon(path: Path, **options: Any) -> AsyncIterator[Service]:
    spool = Spool(path / "spool", window_s=30.0, now=time.monotonic)
    async with toy_service(path, slow_toy(), spool=spool, **options) as service:
        yield service


def stop(service: Service) -> None:
    """As a signal does, with no time left for what runs."""
    service.server.begin_drain(0.0)
    service.server.shelf.end_all("drained")


class Reader:
    """One answer, read by a task of its own."""

    def __init__(self, session: ChatSession, **params: Any) -> None:
        self.views: list[View] = []
        params = {"max_new_tokens": NUM_TOKENS, **params}
        self.task = asyncio.create_task(self._read(session, params))

    async def _read(self, session: ChatSession, params: dict[str, Any]) -> None:
        async with aclosing(session.ask(QUESTION, params, language="zh")) as views:
            async for view in views:
                self.views.append(view)

    @property
    def last(self) -> View:
        return self.views[-1] if self.views else View()

    async def until_text(self) -> None:
        await until(lambda: len(self.last.text) > 10)

    async def until_sentence(self, key: str, **values: Any) -> None:
        await until(lambda: self.last.sentence == say("zh", key, **values))


@asynccontextmanager
async def page(path: Path, patience: Patience = WAITING, **options: Any) -> AsyncIterator[ChatSession]:
    session = ChatSession(str(path / "toy.sock"), patience=patience, **options)
    try:
        async with asyncio.timeout(30):
            yield session
    finally:
        await session.close()


async def undisturbed(path: Path) -> str:
    async with daemon(path) as _, page(path) as session:
        reader = Reader(session)
        await reader.task
        return reader.last.text


@pytest.mark.parametrize("is_queued", [False, True], ids=["answering", "queued"])
def test_an_answer_goes_on_by_itself_in_the_next_daemon_and_says_what_it_waits_for(
    tmp_path: Path, is_queued: bool
) -> None:
    async def main() -> None:
        whole = await undisturbed(tmp_path)
        async with page(tmp_path) as session:
            async with daemon(tmp_path) as service:
                others = [Reader(session, seed=n) for n in range(3)] if is_queued else []
                for other in others:
                    await other.until_text()
                reader = Reader(session)
                if is_queued:
                    await until(lambda: reader.last.is_accepted and service.engine.num_queued == 1)
                else:
                    await reader.until_text()
                stop(service)
                await reader.until_sentence("restarting")
                assert reader.last.state == "restarting" and not reader.last.is_finished
                before = reader.last.text
                assert bool(before) != is_queued and len(before) < len(whole)
            async with daemon(tmp_path, is_ready=False) as service:
                service.server.progress = 0.42
                await reader.until_sentence("restarting_loading", percent=42)
                assert (reader.last.text, reader.last.progress) == (before, 0.42)
                service.server.ready(service.engine)
                await asyncio.gather(reader.task, *(other.task for other in others))
        assert (reader.last.text, reader.last.sentence) == (whole, say("zh", "length", tokens=NUM_TOKENS))
        assert all(whole.startswith(view.text) for view in reader.views), "no view loses or doubles text"

    asyncio.run(main())


def test_the_daemon_that_stops_is_not_asked_to_go_on(tmp_path: Path) -> None:
    """It would say that the answer is over."""

    async def main() -> None:
        async with daemon(tmp_path) as service, page(tmp_path) as session:
            reader = Reader(session)
            await reader.until_text()
            stop(service)
            await until(lambda: [view.state for view in reader.views].count("restarting") > 5)
            assert not reader.task.done()

    asyncio.run(main())


def test_a_lost_connection_is_resumed_and_no_word_is_said_or_lost(tmp_path: Path) -> None:
    async def main() -> None:
        whole = await undisturbed(tmp_path)
        async with daemon(tmp_path) as service, page(tmp_path) as session:
            reader = Reader(session)
            for length in (5, 25, 45):
                await until(lambda length=length: len(reader.last.text) > length)  # type: ignore[misc]
                for connection in list(service.server._connections):
                    connection.abort()
            await reader.task
        assert reader.last.text == whole
        assert {view.state for view in reader.views} <= {"queued", "answering", "done"}

    asyncio.run(main())


def test_a_daemon_that_was_killed_leaves_the_text_with_a_sentence(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = hang_after_text
        reader = Reader(session)
        await until(lambda: reader.last.text == "so far")
        await toy.kill()
        await reader.until_sentence("reconnecting")
        assert (reader.last.text, reader.last.state) == ("so far", "reconnecting")
        await toy.start()
        await reader.task
        assert (reader.last.text, reader.last.state) == ("so far", "error")
        assert reader.last.sentence == say("zh", "restarted")

    scene(tmp_path, play, WAITING)


def test_a_daemon_that_never_comes_back_is_waited_for_as_long_as_one_that_loads(tmp_path: Path) -> None:
    now = 0.0

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        nonlocal now
        toy.script = hang_after_text
        reader = Reader(session)
        await until(lambda: reader.last.text == "so far")
        await toy.kill()
        await reader.until_sentence("reconnecting")
        now = WAITING.loading_s - 1
        count = len(reader.views)
        await until(lambda: len(reader.views) > count + 2)
        now = WAITING.loading_s
        await reader.task
        assert (reader.last.text, reader.last.sentence) == ("so far", say("zh", "restarted"))

    scene(tmp_path, play, WAITING, now=lambda: now)


@pytest.mark.parametrize("way", ["stop", "close"])
def test_leaving_while_the_connection_is_lost_still_stops_the_daemons_work(tmp_path: Path, way: str) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = hang_after_text
        reader = Reader(session)
        await until(lambda: reader.last.text == "so far")
        away = Path(toy.path).rename(toy.path + ".away")  # nobody can reach it
        await toy.cut()
        await reader.until_sentence("reconnecting")
        away.rename(toy.path)
        if way == "stop":
            reader.task.cancel()
            await asyncio.gather(reader.task, return_exceptions=True)
        else:
            await session.close()
        await toy.until(lambda: toy.talks[0].end == "interrupted")

    scene(tmp_path, play, Patience(retry_s=60.0))


@pytest.mark.parametrize("is_queued", [False, True], ids=["answering", "queued"])
@pytest.mark.parametrize("way", ["stop", "cancel", "close", "generator"])
def test_who_leaves_stops_the_work_within_a_step(tmp_path: Path, way: str, is_queued: bool) -> None:
    """With the real server: nothing runs and nothing waits any more, one step and 50 ms later."""

    async def main() -> None:
        async with daemon(tmp_path) as service, page(tmp_path) as other, page(tmp_path) as session:
            others = [Reader(other, max_new_tokens=2000) for _ in range(3 if is_queued else 0)]
            for one in others:
                await one.until_text()
            reader = Reader(session, max_new_tokens=2000)
            await until(lambda: service.engine.num_queued == 1 if is_queued else len(reader.last.text) > 3)
            await until(lambda: reader.last.is_accepted)
            left_at = time.monotonic()
            if way == "stop":
                session.interrupt()
            elif way == "close":
                await session.close()
            else:
                reader.task.cancel()
            await until(lambda: service.engine.num_running + service.engine.num_queued == len(others))
            assert time.monotonic() - left_at < 0.005 + 0.05 + 0.1, "one step and 50 ms, and 100 for a busy machine"
            await asyncio.gather(reader.task, return_exceptions=True)

    asyncio.run(main())


def test_a_page_process_that_stops_leaves_the_answer_to_the_next_one(tmp_path: Path) -> None:
    async def main() -> None:
        whole = await undisturbed(tmp_path)
        is_leaving = False
        async with daemon(tmp_path) as service:
            async with page(tmp_path, is_leaving=lambda: is_leaving) as session:
                reader = Reader(session)
                await reader.until_text()
                token = reader.last.resume_token
                assert session.reads(token) and not session.reads("another")
                is_leaving = True
                reader.task.cancel()
                await asyncio.gather(reader.task, return_exceptions=True)
            assert service.engine.num_running == 1, "it goes on for nobody"
            async with page(tmp_path) as session:
                views = [view async for view in session.take_up(token, QUESTION, language="zh")]
        assert (views[-1].text, views[-1].state) == (whole, "done")
        assert views[-1].tokens_per_s and views[-1].ttft_ms and views[-1].ttft_ms == views[-1].daemon_ttft_ms
        assert {(view.ttft_ms, view.tokens_per_s) for view in views[:-1]} == {(None, None)}, "nobody here knows"
        assert len(views) > 1 and all(whole.startswith(view.text) for view in views)

    asyncio.run(main())


def test_taken_up_after_the_page_was_reloaded_it_is_shown_as_stopped(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = hang_after_text
        reader = Reader(session)
        await until(lambda: reader.last.text == "so far")
        await session.close()
        again = ChatSession(toy.path, patience=WAITING)
        views = [view async for view in again.take_up(reader.last.resume_token, QUESTION, language="zh")]
        assert (views[-1].text, views[-1].state) == ("so far", "stopped")
        assert views[-1].sentence == say("zh", "stopped_by_reload")
        await again.close()

    scene(tmp_path, play)


def test_stopped_by_the_user_after_it_was_taken_up_it_says_nothing_of_reloading(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = hang_after_text
        gone = ChatSession(toy.path, is_leaving=lambda: True)
        reader = Reader(gone)
        await until(lambda: reader.last.text == "so far")
        await gone.close()
        async for view in session.take_up(reader.last.resume_token, QUESTION):
            if view.text and not view.is_finished:
                session.interrupt()
        assert (view.text, view.state, view.sentence) == ("so far", "stopped", "")
        assert toy.talks[0].end == "interrupted"

    scene(tmp_path, play)


def test_a_token_that_nobody_knows_is_said(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        views = [view async for view in session.take_up("no such token", QUESTION, language="en")]
        assert (views[-1].state, views[-1].sentence) == ("error", say("en", "not_taken_up"))
        assert (await views_of(session))[-1].text == "你好，世界"

    scene(tmp_path, play)


def test_a_question_that_the_daemon_has_not_taken_is_refused_in_a_drain_as_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with daemon(tmp_path) as service, page(tmp_path) as session:
            service.server.begin_drain(7.0)
            reader = Reader(session)
            await reader.task
            assert reader.last.state == "error" and not reader.last.text

    asyncio.run(main())


def test_a_full_daemon_is_asked_again_for_what_it_should_go_on_with(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started()
        talk.delta("so far")
        await talk.go_on.wait()
        talk.delta(", and the rest")
        talk.done()

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = script
        reader = Reader(session)
        await until(lambda: reader.last.text == "so far")
        toy.num_busy = 3
        await toy.cut()
        await until(lambda: toy.num_busy == 0)
        toy.talks[0].go_on.set()
        await reader.task
        assert (reader.last.text, reader.last.state) == ("so far, and the rest", "done")

    scene(tmp_path, play, WAITING)
