"""Which pages are open, and what ends with them."""

from __future__ import annotations

import asyncio

import pytest

from service.protocol import Message
from webui import pages
from webui.turn import Patience


def test_the_longest_unused_page_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_PAGES", 2)

    async def play() -> None:
        book = pages.Pages("/nowhere.sock", Patience())
        a, b = await book.open("a", "en"), await book.open("b", "en")
        assert book.get("a") is a
        await book.open("c", "en")
        assert b.session.is_closed and not a.session.is_closed
        assert book.get("b") is None
        await book.close_all()
        assert a.session.is_closed

    asyncio.run(play())


def test_a_borrowed_page_ends_with_its_use_and_an_open_one_does_not() -> None:
    async def play() -> None:
        book = pages.Pages("/nowhere.sock", Patience())
        async with book.borrow("api", "zh") as page:
            assert book.get("api") is None
        assert page.session.is_closed
        opened = await book.open("tab", "zh")
        async with book.borrow("tab", "zh") as page:
            assert page is opened
        assert book.get("tab") is opened
        assert await book.open("tab", "zh") is opened
        await book.close("tab")
        again = await book.open("tab", "zh")
        assert opened.session.is_closed and not again.session.is_closed
        await book.close_all()

    asyncio.run(play())


def test_an_answer_is_read_by_the_page_that_shows_it_until_that_is_closed() -> None:
    async def play() -> None:
        book = pages.Pages("/nowhere.sock", Patience(retry_s=60.0))
        page = await book.open("a", "en")
        views = page.session.take_up("token", [Message("user", "x")])
        await anext(views)
        assert await book.is_read("token", wait_s=0.0)
        assert not await book.is_read("another", wait_s=60.0)
        asking = asyncio.create_task(book.is_read("token", wait_s=60.0))
        await asyncio.sleep(0)
        await book.close("a")
        await views.aclose()
        assert not await asking, "who leaves is not waited for any longer"

    asyncio.run(play())
