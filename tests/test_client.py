"""One table of scenarios, run through the blocking and the asynchronous client alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncClient, Client, ConnectionLost, Mailbox, Session
from service.protocol import (
    Accepted,
    BadRequest,
    Delta,
    Done,
    Error,
    Event,
    HealthReport,
    NotReady,
    ServiceError,
    Started,
    StatsReport,
    encode_frame,
)
from tests.harness import ThreadedService
from tests.toy import ToyCost, ToyRunner


class Blocking:
    """The asynchronous client's surface over `Client`, so that a scenario is written once."""

    def __init__(self, path: str) -> None:
        self._client = Client(path)

    async def events(self, prompt: str, **options: Any) -> list[Event]:
        return list(self._client.chat(prompt, **options))

    async def interrupted(self, prompt: str) -> list[Event]:
        with self._client.chat(prompt) as answer:
            events = []
            for event in answer:
                events.append(event)
                if isinstance(event, Delta):
                    answer.interrupt()
            return events

    async def edited(self, prompt: str, better: str) -> tuple[list[Event], list[Event]]:
        first = self._client.chat(prompt)
        second = first.edit(better)
        return list(first), list(second)

    async def resumed(self, prompt: str) -> tuple[list[Event], list[Event]]:
        answer = self._client.chat(prompt)
        events = list(answer)
        return events, list(self._client.resume(answer.mailbox.resume_token, after=2))

    async def health(self) -> HealthReport:
        return self._client.health()

    async def stats(self) -> StatsReport:
        return self._client.stats()

    async def close(self) -> None:
        self._client.close()


class Asynchronous:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def events(self, prompt: str, **options: Any) -> list[Event]:
        return [event async for event in self._client.chat(prompt, **options)]

    async def interrupted(self, prompt: str) -> list[Event]:
        async with self._client.chat(prompt) as answer:
            events = []
            async for event in answer:
                events.append(event)
                if isinstance(event, Delta):
                    answer.interrupt()
            return events

    async def edited(self, prompt: str, better: str) -> tuple[list[Event], list[Event]]:
        first = self._client.chat(prompt)
        second = first.edit(better)
        return [event async for event in first], [event async for event in second]

    async def resumed(self, prompt: str) -> tuple[list[Event], list[Event]]:
        answer = self._client.chat(prompt)
        events = [event async for event in answer]
        return events, [event async for event in self._client.resume(answer.mailbox.resume_token, after=2)]

    async def health(self) -> HealthReport:
        return await self._client.health()

    async def stats(self) -> StatsReport:
        return await self._client.stats()

    async def close(self) -> None:
        await self._client.aclose()


AnyClient = Blocking | Asynchronous


async def answers(client: AnyClient) -> Any:
    events = await client.events("你好", seed=1)
    assert [type(event) for event in events[:2]] == [Accepted, Started]
    done = events[-1]
    assert isinstance(done, Done)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert sum(delta.tokens for delta in deltas) == done.usage.completion_tokens
    return "".join(delta.text for delta in deltas), done.reason


async def stops_at_a_stop_string(client: AnyClient) -> Any:
    (whole, _) = await answers(client)
    stop = whole[5:7]
    events = await client.events("你好", seed=1, stop=(stop,))
    text = "".join(event.text for event in events if isinstance(event, Delta))
    assert text == whole[: whole.index(stop)]
    return text


async def interrupts(client: AnyClient) -> Any:
    done = (await client.interrupted("endless"))[-1]
    assert isinstance(done, Done) and done.reason == "interrupted"
    return done.reason


async def edits(client: AnyClient) -> Any:
    first, second = await client.edited("endless", "你好")
    assert isinstance(first[-1], Done) and isinstance(second[-1], Done)
    return first[-1].reason, "".join(event.text for event in second if isinstance(event, Delta))


async def resumes_what_has_ended(client: AnyClient) -> Any:
    events, again = await client.resumed("你好")
    assert all(getattr(event, "seq", 0) > 2 for event in again)
    assert isinstance(again[-1], Done) and isinstance(events[-1], Done) and again[-1].seq == events[-1].seq
    first, second = ("".join(event.text for event in part if isinstance(event, Delta)) for part in (events, again))
    assert first == second
    return first


async def raises_what_the_daemon_refuses(client: AnyClient) -> Any:
    with pytest.raises(BadRequest) as caught:
        await client.events("x", temperature=3)
    return caught.value.path


async def tells_health_and_stats(client: AnyClient) -> Any:
    health, stats = await client.health(), await client.stats()
    assert "chatglm_num_requests_running" in stats.metrics and "# TYPE" in stats.prometheus
    return health.phase, health.slots, health.protocol


SCENARIOS = [
    answers, stops_at_a_stop_string, interrupts, edits, resumes_what_has_ended, raises_what_the_daemon_refuses,
    tells_health_and_stats,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_both_clients_see_the_same(scenario: Callable[[AnyClient], Any], tmp_path: Path) -> None:
    async def asynchronous(path: str) -> Any:
        client = Asynchronous(await AsyncClient.connect(path))
        try:
            return await scenario(client)
        finally:
            await client.close()

    async def blocking(path: str) -> Any:
        client = Blocking(path)
        try:
            return await scenario(client)
        finally:
            await client.close()

    # A step takes 2 ms, so that an interrupt comes before the end.
    runner = ToyRunner(end_one_in=40, cost=ToyCost(0.002, 0.0, 0.002, 0.0), spend=time.sleep)
    with ThreadedService(tmp_path, runner) as service:
        assert asyncio.run(blocking(service.path)) == asyncio.run(asynchronous(service.path))


def test_a_daemon_that_is_not_there_is_a_lost_connection(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    with pytest.raises(ConnectionLost, match="cannot reach"):
        Client(path)
    with pytest.raises(ConnectionLost, match="cannot reach"):
        asyncio.run(AsyncClient.connect(path))


def test_a_daemon_that_goes_away_is_a_lost_connection(tmp_path: Path) -> None:
    with ThreadedService(tmp_path, ToyRunner(end_one_in=0, cost=None)) as service, Client(service.path) as client:
        answer = client.chat("endless", max_new_tokens=2000)
        events = iter(answer)
        next(events)
        for connection in list(service.server._connections):
            service.server._loop.call_soon_threadsafe(connection.abort)
        with pytest.raises(ConnectionLost):
            list(events)


def test_closing_a_client_tells_whoever_waits_on_it(tmp_path: Path) -> None:
    async def main(path: str) -> None:
        client = await AsyncClient.connect(path)
        waiting = asyncio.create_task(client.chat("endless").text())
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(ConnectionLost, match="closed here"):
            await waiting

    with ThreadedService(tmp_path, ToyRunner(end_one_in=0)) as service:
        asyncio.run(main(service.path))


def test_loading_is_told_as_not_ready(tmp_path: Path) -> None:
    with ThreadedService(tmp_path, is_ready=False) as service, Client(service.path) as client:
        assert client.health().phase == "loading"
        with pytest.raises(NotReady) as caught:
            list(client.chat("x"))
        assert caught.value.retryable and caught.value.retry_after_s


def test_a_reader_that_falls_behind_finds_its_deltas_merged() -> None:
    mailbox = Mailbox("a")
    for seq, text in enumerate("abc", start=3):
        mailbox.put(Delta("a", seq, text, 1, float(seq)))
    assert mailbox.take() == Delta("a", 5, "abc", 3, 5.0)
    assert mailbox.take() is None and mailbox.last_seq == 5


def test_an_error_without_an_id_concerns_the_connection() -> None:
    session = Session()
    session.feed(encode_frame(Error("forbidden", "not you")))
    with pytest.raises(ServiceError, match="not you"):
        session.check_refusal()
    session.check_refusal()
