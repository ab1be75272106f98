"""Requests over a real socket, with the real local engine over the toy runner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncAnswer, AsyncClient
from service.engine.base import OutOfMemory
from service.protocol import (
    Accepted,
    BadRequest,
    Busy,
    Delta,
    Done,
    Draining,
    Edit,
    EngineFailed,
    Event,
    Queued,
    ResumeExpired,
    Started,
    TooLong,
    UnknownRequest,
)
from service.server import Limits
from tests.harness import Service, toy_service, until
from tests.toy import ToyCost, ToyRunner

Scenario = Callable[[Service], Awaitable[None]]


def serve(tmp_path: Path, scenario: Scenario, runner: ToyRunner | None = None, **options: Any) -> None:
    """Run a scenario against a fresh service; afterwards nothing may be left behind."""

    async def main() -> None:
        async with toy_service(tmp_path, runner, **options) as service:
            await scenario(service)
            await until(lambda: service.engine.num_running == service.engine.num_queued == 0)
            assert not service.server.shelf.live and not service.runner.open_slots

    asyncio.run(main())


async def collect(answer: AsyncAnswer) -> list[Event]:
    return [event async for event in answer]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def gated(gate: threading.Event, num_slots: int = 3) -> ToyRunner:
    """A runner whose answers never end, and whose steps wait for the gate."""

    def wait(call: str, slot: int) -> None:
        assert gate.wait(10)

    return ToyRunner(num_slots, end_one_in=0, fault=wait)


def test_events_are_numbered_without_a_gap(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            for _ in range(3):
                # One frame at a time: the client's own merging would hide a gap.
                events = await collect(client.chat("你好", merge_ms=0))
                assert isinstance(events[0], Accepted) and events[0].seq == 1
                done = events[-1]
                assert isinstance(done, Done) and done.seq >= len(events)

    serve(tmp_path, scenario)


def raw(path: str, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes, read to the end."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(path)
        with contextlib.suppress(BrokenPipeError):  # it may have said why, and gone
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        received = b""
        while data := sock.recv(65536):
            received += data
        return received


@pytest.mark.parametrize("half_close", [False, True])
@pytest.mark.parametrize("newline", ["", "\n"])
def test_plain_mode_streams_text_and_the_end_mark(tmp_path: Path, newline: str, half_close: bool) -> None:
    async def scenario(service: Service) -> None:
        data = ('{"prompt":"test","history":[]}' + newline).encode()
        plain = await asyncio.to_thread(raw, service.path, data, half_close=half_close)
        async with await AsyncClient.connect(service.path) as client:
            text = await client.chat("test").text()
        assert plain.decode() == text + "\nEND_OF_RESPONSE\n"

    serve(tmp_path, scenario)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"{}", "bad_frame"),
        (b"   nonsense", "bad_frame"),
        (b'{"prompt": 5}', "bad_request"),
        (b'{"prompt": "x", "params": {"temperature": 9}}', "bad_request"),
        (b'{"type": "chat"}', "bad_request"),
    ],
)
def test_plain_mode_answers_bad_input_with_one_json_line_and_closes(tmp_path: Path, sent: bytes, code: str) -> None:
    async def scenario(service: Service) -> None:
        reply = await asyncio.to_thread(raw, service.path, sent)
        assert reply.endswith(b"\n") and reply.count(b"\n") == 1
        assert json.loads(reply)["code"] == code

    serve(tmp_path, scenario)


def test_plain_typed_messages_reply_a_line_each_and_close_when_done(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        sent = b'{"type":"health"}\n{"type":"chat","id":"a","prompt":"hi"}'
        lines = [json.loads(line) for line in (await asyncio.to_thread(raw, service.path, sent)).splitlines()]
        assert lines[0]["type"] == "health" and lines[0]["phase"] == "ready"
        assert [line["seq"] for line in lines[1:]] == list(range(1, len(lines)))
        assert lines[-1]["type"] == "done"

    serve(tmp_path, scenario)


def test_a_bad_length_gets_one_error_frame_and_the_connection_closes(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        reply = await asyncio.to_thread(raw, service.path, (2**31).to_bytes(4, "big"))
        size = int.from_bytes(reply[:4], "big")
        assert len(reply) == 4 + size and json.loads(reply[4:])["code"] == "bad_frame"

    serve(tmp_path, scenario)


def test_a_bad_body_loses_nothing_else_on_the_connection(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            answer = client.chat("你好")
            client._writer.write((3).to_bytes(4, "big") + b"[1]")
            with pytest.raises(Exception, match="not one JSON object"):
                while True:
                    await client.health()
            assert isinstance((await collect(answer))[-1], Done)

    serve(tmp_path, scenario)


def test_half_close_still_delivers_the_whole_answer(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            whole = await client.chat("你好").text()
            answer = client.chat("你好")
            client._writer.write_eof()
            assert await answer.text() == whole

    serve(tmp_path, scenario)


def test_a_vanished_client_ends_its_work_while_running_and_while_queued(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scenario(service: Service) -> None:
        clients = [await AsyncClient.connect(service.path) for _ in range(3)]
        for client in clients:
            client.chat("x", max_new_tokens=2000)
        await until(lambda: (service.engine.num_running, service.engine.num_queued) == (1, 2))
        await clients[2].aclose()  # queued, and nothing was ever written that could fail
        await until(lambda: service.engine.num_queued == 1)
        clients[1]._writer.write_eof()  # queued, half-closed first
        await asyncio.sleep(0)
        await clients[1].aclose()
        await until(lambda: service.engine.num_queued == 0)
        gate.set()
        await clients[0].aclose()
        await until(lambda: service.engine.num_running == 0)

    serve(tmp_path, scenario, gated(gate, 1))


def test_nothing_more_is_written_once_a_write_found_the_peer_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    num_decodes = 0

    def wait(call: str, slot: int) -> None:
        nonlocal num_decodes
        num_decodes += call == "decode"
        assert gate.wait(10)

    async def scenario(service: Service) -> None:
        client = await AsyncClient.connect(service.path)
        client.chat("x", max_new_tokens=200)
        await until(lambda: service.engine.num_running == 1)
        client._writer.transport.abort()
        await asyncio.sleep(0)
        gate.set()
        while num_decodes < 100:  # the loop is held up: what was decoded meanwhile is all written in one turn of it
            time.sleep(0.001)

    with caplog.at_level(logging.WARNING, "asyncio"):
        serve(tmp_path, scenario, ToyRunner(1, end_one_in=0, fault=wait))
    assert "socket.send()" not in caplog.text


def test_a_second_connection_may_resume_exactly_where_the_first_was_cut(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            whole = await client.chat("你好").text()
        first = await AsyncClient.connect(service.path)
        answer = first.chat("你好", on_disconnect="detach")
        got = ""
        async for event in answer:
            if isinstance(event, Delta):
                got += event.text
                break
        await first.aclose()
        async with await AsyncClient.connect(service.path) as second:
            rest = await second.resume(answer.mailbox.resume_token, after=answer.mailbox.last_seq).text()
        assert got + rest == whole

    serve(tmp_path, scenario)


def test_resume_of_nothing_is_expired_and_of_too_much_is_bad(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            with pytest.raises(ResumeExpired):
                await client.resume("no such token").text()
            answer = client.chat("你好")
            await answer.text()
            with pytest.raises(BadRequest, match="last seq"):
                await client.resume(answer.mailbox.resume_token, after=10_000).text()
            with pytest.raises(ResumeExpired, match="all its events"):
                await client.resume(answer.mailbox.resume_token, after=answer.mailbox.last_seq).text()

    serve(tmp_path, scenario)


def test_a_finished_answer_expires_after_its_window(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            answer = client.chat("你好")
            await answer.text()
            await until(lambda: len(service.server.shelf.retained) == 0)
            with pytest.raises(ResumeExpired):
                await client.resume(answer.mailbox.resume_token).text()

    serve(tmp_path, scenario, limits=Limits(resume_s=0.05))


def test_a_full_queue_is_busy_at_once_and_says_when_to_come_back(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            answers = [client.chat("x", max_new_tokens=1) for _ in range(3)]
            with pytest.raises(Busy) as caught:
                await client.chat("x").text()
            assert caught.value.retry_after_s and caught.value.retry_after_s >= 1
            gate.set()
            results = [await collect(answer) for answer in answers]
        assert [events[0].queue_position for events in results] == [0, 0, 1]  # type: ignore[union-attr]
        moved = [event for event in results[2] if isinstance(event, Queued)]
        assert [event.queue_position for event in moved] == [0]

    runner = gated(gate, 1)
    serve(tmp_path, scenario, runner, max_queue=2)


def test_forty_users_see_only_answers_and_busy_and_equal_text_to_alone(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        prompts = [f"prompt {number}" for number in range(40)]

        async def one(prompt: str) -> str | None:
            async with await AsyncClient.connect(service.path) as client:
                try:
                    return await client.chat(prompt).text()
                except Busy as error:
                    assert error.retry_after_s
                    return None

        texts = await asyncio.gather(*map(one, prompts))
        assert sum(text is not None for text in texts) >= 3 + 8
        for prompt, text in zip(prompts, texts, strict=True):
            if text is not None:
                assert text == await one(prompt)

    serve(tmp_path, scenario, max_queue=8)


def test_a_live_id_cannot_be_used_twice_and_the_live_request_goes_on(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        sent = b'{"type":"chat","id":"a","prompt":"hi"}' * 2
        lines = [json.loads(line) for line in (await asyncio.to_thread(raw, service.path, sent)).splitlines()]
        errors = [line for line in lines if line["type"] == "error"]
        assert len(errors) == 1 and errors[0]["path"] == "$.id" and "id" not in errors[0]
        assert [line["type"] for line in lines if line.get("id") == "a"][-1] == "done"

    serve(tmp_path, scenario)


def test_interrupting_what_is_unknown_is_an_error_and_what_has_ended_is_not(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        sent = (
            b'{"type":"interrupt","id":"zz"}{"type":"chat","id":"a","prompt":"hi","params":{"max_new_tokens":1}}'
            b'{"type":"interrupt","id":"a"}{"type":"interrupt","id":"a"}'
        )
        lines = [json.loads(line) for line in (await asyncio.to_thread(raw, service.path, sent)).splitlines()]
        assert [(line["id"], line["code"]) for line in lines if line["type"] == "error"] == [("zz", "unknown_request")]
        assert sum(line["type"] == "done" for line in lines) == 1

    serve(tmp_path, scenario)


def test_edit_replaces_a_queued_request_in_a_full_queue(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            running = client.chat("x", max_new_tokens=1)
            queued = client.chat("y", max_new_tokens=1)
            edited = queued.edit("z")
            gate.set()
            assert [(await collect(answer))[-1].reason for answer in (running, queued, edited)] == [  # type: ignore[union-attr]
                "length", "interrupted", "length",
            ]  # fmt: skip
            with pytest.raises(UnknownRequest):
                await client.open(Edit("nobody", "n", "z")).text()

    runner = gated(gate, 1)
    serve(tmp_path, scenario, runner, max_queue=1)


def test_a_deadline_ends_a_running_and_a_queued_request(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            answers = [client.chat("x", deadline_s=0.1, max_new_tokens=2000) for _ in range(2)]
            for answer in answers:
                done = (await collect(answer))[-1]
                assert isinstance(done, Done) and done.reason == "deadline"
                assert 90 < done.timing.total_ms < 2000

    runner = ToyRunner(num_slots=1, end_one_in=0, cost=ToyCost(), spend=time.sleep)
    serve(tmp_path, scenario, runner)


def test_a_step_that_fails_ends_that_request_and_the_next_one_works(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            whole = await client.chat("你好").text()
            for fault in ("nan", OutOfMemory("injected")):
                for where in ("prefill", "decode"):
                    service.runner.fault = lambda call, slot, f=fault, w=where: f if call == w else None  # type: ignore[misc]
                    with pytest.raises(EngineFailed, match=r"NaN|OOM"):
                        await client.chat("你好").text()
                    service.runner.fault = lambda call, slot: None
                    assert await client.chat("你好").text() == whole

    serve(tmp_path, scenario)


def test_an_engine_that_dies_tells_every_request(tmp_path: Path) -> None:
    async def main() -> None:
        def explode(call: str, slot: int) -> Exception:
            return RuntimeError("injected")

        async with toy_service(tmp_path, ToyRunner(fault=explode)) as service:
            async with await AsyncClient.connect(service.path) as client:
                with pytest.raises(Exception, match="service restarts"):
                    await client.chat("x").text()
            assert isinstance(await service.engine.died, RuntimeError)

    asyncio.run(main())


def test_a_single_message_that_cannot_fit_is_too_long_with_the_numbers(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            with pytest.raises(TooLong, match=r"takes \d+ tokens.*at most \d+"):
                await client.chat("x" * 300).text()
            history = [{"role": role, "content": "y" * 40} for _ in range(4) for role in ("user", "assistant")]
            events = await collect(client.chat([*history, {"role": "user", "content": "z" * 40}], max_new_tokens=20))
            started = next(event for event in events if isinstance(event, Started))
            assert started.dropped_messages == (0, 1, 2, 3) and started.context_limit == 256

    serve(tmp_path, scenario, ToyRunner(context_limit=256))


def test_a_stopped_reader_delays_nobody_and_loses_nothing_when_it_reads_again(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(service.path)
        many = 60
        sent = "".join(
            f'{{"type":"chat","id":"{n}","prompt":"{n}","params":{{"max_new_tokens":1900}}}}' for n in range(many)
        )
        sock.sendall(sent.encode())
        await until(lambda: service.engine.num_running > 0)
        async with await AsyncClient.connect(service.path) as client:
            await collect(client.chat("你好", priority=10))
        lines = await asyncio.to_thread(_read_lines, sock, many)
        texts: dict[str, int] = {}
        for line in lines:
            if line["type"] == "delta":
                texts[line["id"]] = texts.get(line["id"], 0) + line["tokens"]
        ends = [line for line in lines if line["type"] == "done"]
        assert len(ends) == many and all(texts[end["id"]] == end["usage"]["completion_tokens"] for end in ends)
        for id in texts:
            assert [line["seq"] for line in lines if line.get("id") == id] == list(
                range(1, 1 + sum(line.get("id") == id for line in lines))
            )
        sock.close()

    serve(tmp_path, scenario, ToyRunner(end_one_in=300), max_queue=100)


def test_a_reader_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(service.path)
        await until(lambda: len(service.server._connections) == 1)
        request = b'{"type":"stats"}'
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                sock.send(request * 100)
        await until(lambda: not service.server._connections, within_s=10)
        sock.close()

    serve(tmp_path, scenario, limits=Limits(write_stall_s=0.2))


def test_drain_refuses_new_work_tells_everyone_and_lets_answers_finish(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            answer = client.chat("x", max_new_tokens=5)
            await until(lambda: service.engine.num_running == 1)
            service.server.begin_drain(7.0)
            with pytest.raises(Draining):
                await client.chat("y").text()
            assert client.session.drain_notice is not None and client.session.drain_notice.deadline_s == 7.0
            assert (await client.health()).phase == "draining"
            assert not await service.server.shelf.wait_idle(0.01)
            gate.set()
            assert (await collect(answer))[-1].reason == "length"  # type: ignore[union-attr]
            assert await service.server.shelf.wait_idle(5)

    serve(tmp_path, scenario, gated(gate))


def test_what_drain_has_to_end_is_told_drained_with_what_was_generated(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            answer = client.chat("x", max_new_tokens=2000)
            events = []
            async for event in answer:
                events.append(event)
                if isinstance(event, Delta) and service.server.phase == "ready":
                    service.server.begin_drain(0.0)
                    service.server.shelf.end_all("drained")
            done = events[-1]
            assert isinstance(done, Done) and done.reason == "drained"
            assert done.usage.completion_tokens == sum(e.tokens for e in events if isinstance(e, Delta)) > 0

    serve(tmp_path, scenario, ToyRunner(end_one_in=0, cost=ToyCost(0.002, 0.0, 0.002, 0.0), spend=time.sleep))


def test_merged_deltas_join_to_the_same_text_in_fewer_pieces(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            whole = await client.chat("你好").text()
            merged = await collect(client.chat("你好", merge_ms=500))
            assert text_of(merged) == whole

    serve(tmp_path, scenario)


def _read_lines(sock: socket.socket, num_ends: int) -> list[dict[str, Any]]:
    sock.settimeout(20)
    received = b""
    while received.count(b'"type":"done"') < num_ends:
        data = sock.recv(1 << 20)
        assert data, "the connection closed early"
        received += data
    return [json.loads(line) for line in received.splitlines()]
