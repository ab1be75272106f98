"""Bytes that are not the protocol: each is answered, costs nobody else anything, and the daemon goes on."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from service.client import AsyncClient
from service.protocol import MAX_FRAME_BYTES, Done
from service.server import Limits
from tests.harness import Service, until
from tests.test_server import collect, raw, serve
from tests.test_spool import slow_toy


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def objects(data: bytes) -> list[dict[str, object]]:
    """The frames of a reply, whole."""
    found = []
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(json.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    return found


async def still_well(service: Service) -> None:
    async with await AsyncClient.connect(service.path) as client:
        assert isinstance((await collect(client.chat("你好")))[-1], Done)


@pytest.mark.parametrize("length", [0, 2**31, 2**32 - 1, MAX_FRAME_BYTES + 1])
def test_an_impossible_length_gets_one_error_and_the_connection_is_closed(tmp_path: Path, length: int) -> None:
    async def scenario(service: Service) -> None:
        (error,) = objects(await asyncio.to_thread(raw, service.path, length.to_bytes(4, "big") + b"x" * 1000))
        assert error["code"] == "bad_frame"
        metrics, _ = service.server._metrics.snapshot()
        assert metrics['chatglm_errors_total{code="bad_frame"}'] == 1
        await still_well(service)

    serve(tmp_path, scenario)


@pytest.mark.parametrize("sent", [frame(b'{"type":"health"}')[:-3], b"\0", b'{"prompt": "x'])
def test_a_message_that_stands_still_is_given_up(tmp_path: Path, sent: bytes) -> None:
    async def scenario(service: Service) -> None:
        reply = await asyncio.to_thread(raw, service.path, sent)  # reads until the daemon closes
        assert json.loads(reply[reply.index(b"{") :])["code"] == "bad_frame" and b"within 0.2 s" in reply
        metrics, _ = service.server._metrics.snapshot()
        assert metrics['chatglm_limits_hit_total{setting="idle_s"}'] == 1
        await still_well(service)

    serve(tmp_path, scenario, limits=Limits(idle_s=0.2))


def test_a_connection_that_is_only_quiet_stays_and_so_does_a_running_answer(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as quiet:
            await quiet.health()
            answer = quiet.chat("x", max_new_tokens=60)
            await quiet.wait_event(answer.mailbox)
            quiet._writer.write(b"\0\0")  # begins a frame, beside the answer
            done = (await collect(answer))[-1]
            assert isinstance(done, Done) and done.reason == "length"
        async with await AsyncClient.connect(service.path) as quiet:
            await quiet.health()
            await asyncio.sleep(0.2)  # four times the limit
            await quiet.health()

    serve(tmp_path, scenario, slow_toy(), limits=Limits(idle_s=0.05))


def test_a_request_that_comes_byte_by_byte_is_answered(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        def trickle() -> bytes:
            body = json.dumps({"type": "chat", "id": "龙", "prompt": "你好"}, ensure_ascii=False).encode()
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(service.path)
                for byte in frame(body):
                    sock.sendall(bytes([byte]))
                sock.shutdown(socket.SHUT_WR)
                received = b""
                while data := sock.recv(65536):
                    received += data
            return received

        events = objects(await asyncio.to_thread(trickle))
        assert events[-1]["type"] == "done" and [e["seq"] for e in events] == list(range(1, len(events) + 1))

    serve(tmp_path, scenario)


CHAT = '{"type":"chat","id":"a","prompt":"x",%s}'
HOSTILE = {
    "invalid UTF-8": (b'{"type":"health\xff"}', "bad_frame"),
    "NaN": (b'{"type":"chat","id":"a","prompt":"x","deadline_s":NaN}', "bad_frame"),
    "infinity by overflow": ((CHAT % '"deadline_s":1e999').encode(), "bad_request"),
    "nested 50,000 deep": (b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "bad_frame"),
    "nested 50,000 deep, objects": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "bad_frame"),
    "lone surrogate": (b'{"type":"chat","id":"a","prompt":"\\ud800"}', "bad_request"),
    "an integer of 5,000 digits": ((CHAT % ('"params":{"seed":%s}' % ("9" * 5000))).encode(), "bad_frame"),
    "an integer of 40 digits": ((CHAT % ('"params":{"seed":%s}' % ("9" * 40))).encode(), "bad_request"),
    "the same key twice": (b'{"type":"health","type":"stats"}', "bad_frame"),
    "no object": (b"[1]", "bad_frame"),
    "no message": (b'{"type":["chat"]}', "bad_request"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_and_the_connection_goes_on(tmp_path: Path, name: str) -> None:
    body, code = HOSTILE[name]

    async def scenario(service: Service) -> None:
        sent = frame(body) * 20 + frame(b'{"type":"health"}')
        replies = objects(await asyncio.to_thread(raw, service.path, sent, half_close=True))
        assert [reply.get("code") for reply in replies[:-1]] == [code] * 20 and replies[-1]["type"] == "health"
        await still_well(service)

    serve(tmp_path, scenario)


def test_nul_and_other_odd_text_is_text(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            for prompt in ("\x00", "a\x00b\x1b[2J", "\u202e\ufeff", "<|im_end|>[MASK]<sop>", "𝕊" * 50):
                assert isinstance((await collect(client.chat(prompt)))[-1], Done)

    serve(tmp_path, scenario)


def test_duplicate_ids_twenty_at_once_refuse_all_but_the_first(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        sent = frame(b'{"type":"chat","id":"a","prompt":"x"}') * 21
        replies = objects(await asyncio.to_thread(raw, service.path, sent, half_close=True))
        assert [reply["code"] for reply in replies if reply["type"] == "error"] == ["bad_request"] * 20
        assert [reply["type"] for reply in replies if reply.get("id") == "a"][-1] == "done"

    serve(tmp_path, scenario)


def test_what_is_more_than_the_operator_allows_is_refused_with_its_path_and_counted(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        wishes = ['"params":{"max_new_tokens":11}', '"deadline_s":6', '"deadline_s":5']
        sent = b"".join(frame((CHAT % wish).encode()) for wish in wishes)
        replies = objects(await asyncio.to_thread(raw, service.path, sent, half_close=True))
        assert [reply.get("path") for reply in replies if reply["type"] == "error"] == [
            "$.params.max_new_tokens", "$.deadline_s",
        ]  # fmt: skip
        metrics, _ = service.server._metrics.snapshot()
        assert metrics['chatglm_limits_hit_total{setting="max_new_tokens"}'] == 1
        assert metrics['chatglm_limits_hit_total{setting="max_deadline_s"}'] == 1

    serve(tmp_path, scenario, limits=Limits(max_new_tokens=10, max_deadline_s=5.0))


def test_connections_and_requests_beyond_their_limits_are_told_busy_and_counted(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        clients = [await AsyncClient.connect(service.path) for _ in range(3)]
        for client in clients:
            await client.health()
        (error,) = objects(await asyncio.to_thread(raw, service.path, b""))
        assert error["code"] == "busy" and error["retry_after_s"]
        for client in clients[1:]:
            await client.aclose()
        await until(lambda: len(service.server._connections) == 1)
        sent = b"".join(frame((CHAT % '"x":1').replace('"a"', f'"{n}"').encode()) for n in range(3))
        replies = objects(await asyncio.to_thread(raw, service.path, sent, half_close=True))
        assert [(e["id"], e["code"]) for e in replies if e["type"] == "error"] == [("2", "busy")]
        await clients[0].aclose()
        metrics, _ = service.server._metrics.snapshot()
        for setting in ("max_connections", "max_requests_per_connection"):
            assert metrics[f'chatglm_limits_hit_total{{setting="{setting}"}}'] == 1

    serve(tmp_path, scenario, limits=Limits(max_connections=3, max_requests_per_connection=2))
