"""Interrupt, edit, resume and cuts against the end of an answer: one end each, and no character lost or doubled."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncAnswer, AsyncClient, make_chat
from service.protocol import (
    Delta,
    Done,
    Event,
    Interrupt,
    ResumeExpired,
    UnknownRequest,
)
from service.server import Limits
from tests.harness import Service, until
from tests.test_server import collect, gated, serve, text_of
from tests.test_spool import slow_toy
from tests.toy import ToyCost, ToyRunner

RUNS = 20


def reason(events: list[Event]) -> str:
    assert isinstance(events[-1], Done) and sum(isinstance(event, Done) for event in events) == 1
    return events[-1].reason


async def whole_text(service: Service, prompt: str, **options: Any) -> str:
    async with await AsyncClient.connect(service.path) as client:
        return await client.chat(prompt, **options).text()


def test_an_interrupt_before_the_start(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            running = client.chat("x", max_new_tokens=1)
            for _ in range(RUNS):
                waiting = client.chat("y")
                waiting.interrupt()
                assert reason(await collect(waiting)) == "interrupted"
            gate.set()
            assert reason(await collect(running)) == "length"

    serve(tmp_path, scenario, gated(gate, 1))


def test_an_interrupt_in_prefill(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            for number in range(RUNS):
                answer = client.chat(f"{number} " + "x" * 400)
                await until(lambda: service.engine.num_running == 1)
                answer.interrupt()
                events = await collect(answer)
                assert reason(events) == "interrupted" and not text_of(events)

    runner = ToyRunner(cost=ToyCost(0.001, 0.0, 0.04, 0.0), spend=time.sleep)
    serve(tmp_path, scenario, runner)


def test_interrupts_at_the_last_token_and_twice(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        whole = await whole_text(service, "x", max_new_tokens=12)
        seen = set()
        async with await AsyncClient.connect(service.path) as client:
            for number in range(2 * RUNS):
                answer = client.chat("x", max_new_tokens=12)
                events: list[Event] = []
                async for event in answer:
                    events.append(event)
                    if sum(e.tokens for e in events if isinstance(e, Delta)) >= 9 + number % 4:
                        client.send(Interrupt(answer.id))
                        client.send(Interrupt(answer.id))
                seen.add(reason(events))
                assert whole.startswith(text_of(events))
            client.send(Interrupt(answer.id))  # it has ended: not an error
            await client.health()
            assert client.session._refusal is None
        assert "interrupted" in seen or "length" in seen

    serve(tmp_path, scenario, slow_toy())


def test_somebody_elses_request_cannot_be_named(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scenario(service: Service) -> None:
        async with (
            await AsyncClient.connect(service.path) as owner,
            await AsyncClient.connect(service.path) as other,
        ):
            answer = owner.chat("x", id="mine", max_new_tokens=3)
            await owner.wait_event(answer.mailbox)
            for _ in range(RUNS):
                mailbox, _ = other.session.open(make_chat("x", id="mine"))  # only to hear what is said of the name
                other.send(Interrupt("mine"))
                with pytest.raises(UnknownRequest):
                    await other.wait_event(mailbox)
            gate.set()
            assert reason(await collect(answer)) == "length"

    serve(tmp_path, scenario, gated(gate))


@pytest.mark.parametrize("queued", [False, True])
def test_an_edit_racing_the_end_gives_each_request_one_end(tmp_path: Path, queued: bool) -> None:
    async def scenario(service: Service) -> None:
        whole = {prompt: await whole_text(service, prompt, max_new_tokens=8) for prompt in ("first", "second")}
        async with await AsyncClient.connect(service.path) as client:
            for number in range(RUNS):
                block = client.chat("block", max_new_tokens=4) if queued else None
                answer = client.chat("first", max_new_tokens=8)
                events: list[Event] = []
                edited: AsyncAnswer | None = None
                async for event in answer:
                    events.append(event)
                    if len(events) > number % 12 and edited is None:
                        edited = answer.edit("second")
                edited = edited or answer.edit("second")
                assert await edited.text() == whole["second"]
                assert reason(events) in ("interrupted", "length")
                assert whole["first"].startswith(text_of(events))
                if block is not None:
                    await block.text()

    runner = ToyRunner(1, end_one_in=0, cost=ToyCost(0.001, 0.0, 0.001, 0.0), spend=time.sleep)
    serve(tmp_path, scenario, runner)


def test_a_refused_edit_leaves_the_request_as_it_was(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            running, waiting = client.chat("x", max_new_tokens=1), client.chat("y", max_new_tokens=1)
            await client.wait_event(waiting.mailbox)
            service.server.begin_drain(5.0)
            with pytest.raises(Exception, match="stopping"):
                await waiting.edit("z").text()
            gate.set()
            for answer in (running, waiting):
                assert reason(await collect(answer)) == "length"

    runner = gated(gate, 1)
    serve(tmp_path, scenario, runner)


def test_resumes_racing_the_end_and_each_other(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        whole = await whole_text(service, "x", max_new_tokens=8)
        for number in range(2 * RUNS):
            first = await AsyncClient.connect(service.path)
            answer = first.chat("x", max_new_tokens=8, on_disconnect="detach")
            got: list[Event] = []
            async for event in answer:
                got.append(event)
                if len(got) > number % 10:
                    break
            second, third = [await AsyncClient.connect(service.path) for _ in range(2)]
            token, last = answer.mailbox.resume_token, answer.mailbox.last_seq
            if number % 2:
                await first.aclose()
            lost = second.resume(token, after=last)  # taken away again by the third
            await asyncio.sleep(0)
            kept = third.resume(token, after=last)
            try:
                rest = text_of(await collect(kept))
            except ResumeExpired:
                rest = ""  # everything had been received
            assert text_of(got) + rest == whole, lost.id
            for client in (first, second, third):
                await client.aclose()

    serve(tmp_path, scenario, slow_toy())


def test_a_resume_on_the_same_connection_moves_the_answer_to_another_name(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        whole = await whole_text(service, "x", max_new_tokens=20)
        async with await AsyncClient.connect(service.path) as client:
            answer = client.chat("x", max_new_tokens=20)
            got: list[Event] = []
            async for event in answer:
                got.append(event)
                if len(text_of(got)) > 3:
                    break
            again = client.resume(answer.mailbox.resume_token, after=answer.mailbox.last_seq)
            client._writer.write_eof()
            assert text_of(got) + await again.text() == whole

    serve(tmp_path, scenario, slow_toy())


def test_a_second_cut_has_a_whole_window_of_its_own(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        client = await AsyncClient.connect(service.path)
        answer = client.chat("x", max_new_tokens=1900, on_disconnect="detach")
        await client.wait_event(answer.mailbox)
        await client.aclose()
        await asyncio.sleep(0.3)
        client = await AsyncClient.connect(service.path)
        taken = client.resume(answer.mailbox.resume_token, after=0)
        await client.wait_event(taken.mailbox)
        await client.aclose()
        await asyncio.sleep(0.3)  # the first cut's window is over
        assert service.engine.num_running == 1
        await until(lambda: service.engine.num_running == 0, within_s=2)

    serve(tmp_path, scenario, slow_toy(), limits=Limits(resume_s=0.5))


def test_a_thousand_cuts_lose_and_double_nothing(tmp_path: Path) -> None:
    """What a client has taken before a cut counts; what was on its way is sent again."""
    chance = random.Random(5)

    async def one(service: Service, prompt: str, num_cuts: int) -> int:
        whole = await whole_text(service, prompt, max_new_tokens=300, temperature=1, seed=7)
        got, token, last, done = "", "", 0, False
        for cut in range(num_cuts + 1):
            client = await AsyncClient.connect(service.path)
            if not token:
                answer = client.chat(
                    prompt, max_new_tokens=300, temperature=1, seed=7, on_disconnect="detach", merge_ms=cut % 3 * 20
                )
            else:
                answer = client.resume(token, after=last)
            num_events = chance.randrange(1, 12) if cut < num_cuts else 10**6
            try:
                async for event in answer:
                    got += event.text if isinstance(event, Delta) else ""
                    token, last = token or answer.mailbox.resume_token, answer.mailbox.last_seq
                    done = isinstance(event, Done)
                    num_events -= 1
                    if not num_events:
                        break
            except ResumeExpired:
                assert done
            await client.aclose()
            if done:
                assert got == whole
                last, got = chance.randrange(last), ""  # once more from somewhere: it must be a suffix
                client = await AsyncClient.connect(service.path)
                assert whole.endswith(await client.resume(token, after=last).text())
                await client.aclose()
                return cut + 1
        raise AssertionError("it does not end")

    async def scenario(service: Service) -> None:
        num_cuts = 0
        while num_cuts < 1000:
            num_cuts += sum(await asyncio.gather(*(one(service, f"p{num_cuts}-{n}", 60) for n in range(6))))

    runner = ToyRunner(6, end_one_in=0, cost=ToyCost(0.001, 0.0, 0.001, 0.0), spend=time.sleep)
    serve(tmp_path, scenario, runner)


def test_a_client_that_vanishes_at_any_moment_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        for number in range(3 * RUNS):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(service.path)
            body = b'{"type":"chat","id":"a","prompt":"x"}'
            sock.sendall(len(body).to_bytes(4, "big") + body)
            if number % 3 == 1:
                sock.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.001 * (number % 20))
            sock.close()
        await until(lambda: service.engine.num_running + service.engine.num_queued == 0)
        await until(lambda: not service.server._connections)

    serve(tmp_path, scenario, slow_toy())


def test_twenty_times_two_daemons_racing_for_one_path_leave_exactly_one(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom service.socketfile import SocketFile, PathTaken\nsys.stdin.readline()\n"
        "for n in range(20):\n"
        "    try: held = SocketFile.claim(sys.argv[1] + str(n)); print(1, flush=True)\n"
        "    except PathTaken: print(0, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "s")]
    rivals = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for rival in rivals:
        assert rival.stdin is not None
        rival.stdin.write("go\n")
        rival.stdin.flush()
    won = []
    for rival in rivals:
        assert rival.stdout is not None
        won.append([int(rival.stdout.readline()) for _ in range(20)])
    for rival in rivals:
        rival.communicate("end\n", timeout=10)
    assert [a + b for a, b in zip(*won, strict=True)] == [1] * 20
