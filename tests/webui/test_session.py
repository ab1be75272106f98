"""The page's view-model against a scripted daemon: no Gradio, no browser, no sleeping."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.toy_daemon import Talk, ToyDaemon
from tests.webui.scene import QUESTION, hang_after_text, say_ok, scene, views_of
from webui.session import ChatSession
from webui.texts import say
from webui.turn import Patience


def test_an_answer_comes_with_its_numbers(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        last = (await views_of(session))[-1]
        assert (last.text, last.state, last.sentence) == ("你好，世界", "done", "")
        assert (last.tokens, last.context_used, last.context_limit) == (3, 10, 2048)
        assert last.ttft_ms is not None and last.ttft_ms >= 0
        assert (last.daemon_ttft_ms, last.tokens_per_s) == (10.0, 80.0)

    scene(tmp_path, play)


def test_only_changed_parameters_and_the_long_deadline_are_sent(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        await views_of(session, temperature=0.2)
        assert toy.talks[0].chat.params == {"temperature": 0.2}
        assert toy.talks[0].chat.deadline_s == 600.0
        assert toy.talks[0].chat.on_disconnect == "detach"

    scene(tmp_path, play)


def test_the_first_token_is_shown_at_once_and_later_ones_are_merged(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started()
        talk.delta("a")
        await talk.go_on.wait()
        for _ in range(500):
            talk.delta("b")
            await asyncio.sleep(0)
        talk.done()

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = script
        texts = []
        async for view in session.ask(QUESTION):
            texts.append(view.text)
            if view.text == "a":  # seen while nothing else is on its way
                toy.talks[0].go_on.set()
        assert texts[-1] == "a" + "b" * 500
        assert len(set(texts)) <= 4, "the clock stands still, so all later text comes with the end"

    scene(tmp_path, play, now=lambda: 100.0)


def test_text_that_waits_is_shown_when_it_is_due_even_if_nothing_follows(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started()
        talk.delta("a")
        await talk.go_on.wait()
        talk.delta("b")
        await asyncio.Event().wait()

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = script
        async with aclosing(session.ask(QUESTION)) as views:
            async for view in views:
                if view.text == "a":
                    toy.talks[0].go_on.set()
                if view.text == "ab":
                    break
        await toy.until(lambda: toy.talks[0].end == "interrupted")

    scene(tmp_path, play)


@pytest.mark.parametrize("has_text", [False, True], ids=["while queued", "while answering"])
@pytest.mark.parametrize("way", ["close", "cancel"])
def test_leaving_an_answer_interrupts_it_at_the_daemon(tmp_path: Path, has_text: bool, way: str) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted(position=0 if has_text else 2, start_s=9.0)
        if has_text:
            talk.started()
            talk.delta("a")
        await asyncio.Event().wait()

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = script
        seen = asyncio.Event()

        async def read() -> None:
            async with aclosing(session.ask(QUESTION)) as views:
                async for view in views:
                    if view.text or view.queue_position:
                        seen.set()
                        if way == "close":
                            return

        task = asyncio.create_task(read())
        await seen.wait()
        if way == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await toy.until(lambda: toy.talks[0].end == "interrupted")
        toy.script = say_ok
        assert (await views_of(session))[-1].text == "ok"
        assert toy.num_connections == 1

    scene(tmp_path, play)


def test_closing_the_session_ends_its_answers_at_once(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = hang_after_text
        reader = asyncio.create_task(views_of(session))
        await toy.until(lambda: bool(toy.talks and toy.talks[0].tokens))
        await session.close()
        views = await reader
        assert all(view.state != "error" for view in views)
        assert toy.talks[0].end == "interrupted", "the daemon knows before the connection is closed"
        assert await views_of(session) == []

    scene(tmp_path, play)


def test_interrupt_keeps_the_text_and_says_stopped(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = hang_after_text
        async for view in session.ask(QUESTION):
            if view.text and not view.is_finished:
                session.interrupt()
        assert (view.state, view.text, view.sentence) == ("stopped", "so far", "")

    scene(tmp_path, play)


def test_queued_shows_the_place_and_the_expected_start(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted(position=2, start_s=12.4)
        talk.queued(position=1, start_s=6.0)
        talk.queued(position=0, start_s=1.0)
        talk.started()
        talk.delta("x")
        talk.done()

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = script
        views = await views_of(session)
        queued = [(view.queue_position, view.sentence) for view in views if view.state == "queued"]
        assert queued[0] == (2, say("zh", "queued", ahead=2, seconds=13))
        assert queued[-1] == (0, "")
        assert views[-1].sentence == ""

    scene(tmp_path, play)


def test_loading_shows_progress_and_the_answer_starts_by_itself(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.reports = [replace(toy.report, phase="loading", progress=part) for part in (0.25, 0.75)]
        views = await views_of(session)
        assert [view.progress for view in views if view.state == "loading"] == [0.25, 0.75]
        assert views[0].sentence == say("zh", "loading", percent=25)
        assert (views[-1].state, views[-1].text) == ("done", "你好，世界")

    scene(tmp_path, play)


def test_loading_for_too_long_is_said_with_numbers(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.report = replace(toy.report, phase="loading", progress=0.5)
        last = (await views_of(session))[-1]
        assert (last.state, last.sentence) == ("error", say("zh", "still_loading", seconds=0, percent=50))

    scene(tmp_path, play, Patience(loading_s=0.0, retry_s=0.0))


def test_a_daemon_that_is_gone_is_said_with_where_to_look(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        await toy.kill()
        for language in ("zh", "en"):
            last = (await views_of(session, language=language))[-1]
            assert last.state == "error" and "supervisorctl -c supervisord.conf status" in last.sentence
        assert await session.health() is None
        await toy.start()
        assert (await views_of(session))[-1].text == "你好，世界"

    scene(tmp_path, play)


def test_a_daemon_that_is_just_starting_is_waited_for(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        await toy.kill()
        views = []
        async for view in session.ask(QUESTION, language="zh"):
            views.append(view)
            if len(views) == 1:
                await toy.start()
        assert (views[0].state, views[0].sentence) == ("loading", say("zh", "reaching"))
        assert views[-1].state == "done"

    scene(tmp_path, play, Patience(reach_s=60.0, retry_s=0.0))


def test_a_daemon_that_dies_leaves_the_text_and_the_next_message_works(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = hang_after_text
        async for view in session.ask(QUESTION, language="zh"):
            if view.state == "answering" and view.text:
                await toy.kill()
                await toy.start()
        assert (view.state, view.text, view.sentence) == ("error", "so far", say("zh", "restarted"))
        toy.script = say_ok
        assert (await views_of(session))[-1].text == "ok"

    scene(tmp_path, play)


def test_text_that_was_not_shown_yet_is_kept_when_the_daemon_dies(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started()
        talk.delta("a")
        await talk.go_on.wait()
        talk.delta("b")
        talk.end = "done"  # so that this task lives on
        await talk.daemon.kill()
        await talk.daemon.start()

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = script
        async for view in session.ask(QUESTION):
            if view.text == "a":
                toy.talks[0].go_on.set()
        assert (view.text, view.state) == ("ab", "error")

    scene(tmp_path, play, now=lambda: 100.0)


def test_a_connection_lost_while_idle_is_opened_again_without_a_word(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        await views_of(session)
        await toy.kill()
        await toy.start()
        views = await views_of(session)
        assert [view.state for view in views if view.sentence] == []
        assert views[-1].text == "你好，世界"

    scene(tmp_path, play)


def test_a_restart_that_is_coming_is_announced_while_answering(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started()
        talk.daemon.drain(25.0)
        talk.delta("a")
        await talk.go_on.wait()
        talk.done()

    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        toy.script = script
        async for view in session.ask(QUESTION, language="zh"):
            if view.text and not view.is_finished:
                assert view.sentence == say("zh", "drain_notice", seconds=25)
                toy.talks[0].go_on.set()
        assert (view.state, view.sentence) == ("done", "")

    scene(tmp_path, play)


def test_two_answers_of_one_page_share_its_connection(tmp_path: Path) -> None:
    async def play(toy: ToyDaemon, session: ChatSession) -> None:
        both = await asyncio.gather(views_of(session), views_of(session))
        assert [views[-1].text for views in both] == ["你好，世界", "你好，世界"]
        assert toy.num_connections == 1

    scene(tmp_path, play)
