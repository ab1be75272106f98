"""The pages that are open now, and each one's session with the daemon.

Thread: the event loop. Knows no Gradio: a page is a name that the browser keeps.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from webui.session import ChatSession
from webui.texts import Language
from webui.turn import Patience
from webui.view import View

# Pages whose browser never said goodbye go when there are more than this, the longest unused first.
MAX_PAGES = 1024


@dataclass(slots=True)
class Page:
    session: ChatSession
    language: Language
    view: View | None = field(default=None)  # the last one shown
    has_taken_up: bool = field(default=False)  # its last answer was asked for before it was loaded


class Pages:
    """`is_leaving`: the process stops, and each page's answer is left to the page that its browser loads next."""

    def __init__(self, socket_path: str, patience: Patience, is_leaving: Callable[[], bool] = lambda: False) -> None:
        self._socket_path = socket_path
        self._patience = patience
        self._is_leaving = is_leaving
        self._pages: OrderedDict[str, Page] = OrderedDict()

    async def open(self, name: str, language: Language) -> Page:
        """A page was loaded; several events may tell that."""
        if (page := self.get(name)) is not None:
            return page
        page = self._pages[name] = self._new_page(language)
        while len(self._pages) > MAX_PAGES:
            await self.close(next(iter(self._pages)))
        return page

    def get(self, name: str) -> Page | None:
        if name in self._pages:
            self._pages.move_to_end(name)
        return self._pages.get(name)

    async def is_read(self, resume_token: str, wait_s: float) -> bool:
        """Whether some page shows this answer now, and will after a while.

        Who loads a page again is soon known to have left the one before; a copied tab stays beside the first.
        """
        for page in list(self._pages.values()):
            if page.session.reads(resume_token):
                await page.session.pause(wait_s)
        return any(page.session.reads(resume_token) for page in self._pages.values())

    @asynccontextmanager
    async def borrow(self, name: str, language: Language) -> AsyncIterator[Page]:
        """The page of this name; for a caller that never opened one (an API client), a page for this time only."""
        page = self.get(name)
        if page is not None:
            yield page
            return
        page = Page(ChatSession(self._socket_path, patience=self._patience), language)  # its caller never comes again
        try:
            yield page
        finally:
            await page.session.close()

    async def close(self, name: str) -> None:
        """The page is gone: whatever it asked for ends at the daemon."""
        page = self._pages.pop(name, None)
        if page is not None:
            await page.session.close()

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(name) for name in list(self._pages)))

    def _new_page(self, language: Language) -> Page:
        session = ChatSession(self._socket_path, patience=self._patience, is_leaving=self._is_leaving)
        return Page(session, language)
