"""Answers over a restart: files that are private, whole or refused, bounded; and text as if undisturbed."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncClient
from service.engine.base import Saved
from service.protocol import (
    Accepted,
    BadRequest,
    Chat,
    Delta,
    Done,
    Draining,
    Event,
    Forbidden,
    Message,
    NotReady,
    ResumeExpired,
    Started,
    Timing,
    Usage,
)
from service.server import Limits
from service.spool import Record, Refused, Spool, decode_record, encode_record
from tests.harness import Service, toy_service, until
from tests.toy import ToyCost, ToyRunner

CHAT = Chat("a", (Message("user", "你好"),), {"temperature": 0.5, "stop": ("END",)}, priority=3, on_disconnect="detach")
EVENTS = (
    Accepted("a", 1, "token", 0, 0.0), Started("a", 2, 3, 0, 100, ()), Delta("a", 3, "世\x00", 1, 5.0),
    Done("a", 4, "drained", Usage(3, 0, 1), Timing(1.0, 2.0, 3.0, 4.0)),
)  # fmt: skip
SAVED = Saved(1.5, (1, 2, 3), (0,), 2, (4, 5), b"\x00state", 0.1, 0.2)


def make_record(number: int = 0, drained_at: float = 0.0) -> Record:
    return Record(f"token{number}", 0, "toy", drained_at, CHAT, EVENTS, SAVED)


def make_spool(folder: Path, at: float = 0.0, **bounds: int) -> Spool:
    return Spool(folder, window_s=30.0, now=lambda: at, **bounds)


def saved_in(folder: Path, *records: Record) -> list[Path]:
    spool = make_spool(folder)
    spool.open()
    assert spool.save(records) == len(records)
    return sorted(folder.iterdir())


def test_a_record_comes_back_as_it_was() -> None:
    for record in (make_record(), replace(make_record(), saved=None)):
        assert decode_record(encode_record(record)) == record


def test_the_next_daemon_finds_what_was_saved_in_private_files(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    (path,) = saved_in(folder, make_record())
    assert folder.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    assert "token" not in path.name
    spool = make_spool(folder, 29.0)
    spool.open()
    assert spool.get("token0") == make_record()
    spool.remove("token0")
    assert spool.get("token0") is None and not path.exists()


@pytest.mark.parametrize("at", [30.5, -1.0])  # its window is over; the machine was restarted
def test_what_is_too_old_is_removed(tmp_path: Path, at: float) -> None:
    (path,) = saved_in(tmp_path / "spool", make_record())
    spool = make_spool(tmp_path / "spool", at)
    spool.open()
    assert not len(spool) and not path.exists()


def test_number_and_bytes_are_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    spool = make_spool(tmp_path / "spool", max_entries=2)
    spool.open()
    assert spool.save([make_record(number, float(number)) for number in range(4)]) == 4
    assert [spool.get(f"token{number}") is not None for number in range(4)] == [False, False, True, True]
    assert len(list((tmp_path / "spool").iterdir())) == 2
    small = make_spool(tmp_path / "small", max_bytes=50)
    small.open()
    assert small.save([make_record()]) == 0 and not list((tmp_path / "small").iterdir())


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "renamed", "other version"])
def test_a_damaged_file_is_refused_logged_and_removed(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = saved_in(tmp_path / "spool", make_record())
    data = path.read_bytes()
    if damage == "renamed":
        path = path.rename(path.with_name("f" * 32 + ".answer"))
    else:
        broken = {
            "cut": data[:-7], "flip": data[:-9] + b"!" + data[-8:], "empty": b"", "other version": b"x" + data[1:],
        }  # fmt: skip
        path.write_bytes(broken[damage])
    spool = make_spool(tmp_path / "spool")
    with caplog.at_level(logging.WARNING):
        spool.open()
    assert not len(spool) and not path.exists() and "refused" in caplog.text and "你好" not in caplog.text


@pytest.mark.parametrize("kind", ["mode", "link", "folder", "two names", "fifo"])
def test_a_file_that_is_not_private_is_refused_and_left_alone(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = saved_in(tmp_path / "spool", make_record())
    if kind == "mode":
        path.chmod(0o640)
    elif kind == "two names":
        os.link(path, tmp_path / "other")
    else:
        target = path.rename(tmp_path / "target")
        {"link": lambda: path.symlink_to(target), "folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}[kind]()
    spool = make_spool(tmp_path / "spool")
    spool.open()
    assert not len(spool) and os.path.lexists(path) and "left alone" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_refused_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path,) = saved_in(tmp_path / "spool", make_record())
    os.chown(path, 65534, 65534)
    spool = make_spool(tmp_path / "spool")
    spool.open()
    assert not len(spool) and path.exists() and "65534" in caplog.text


def test_a_folder_that_is_not_private_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("open", "link", "file", "none/there"):
        with pytest.raises(Refused):
            make_spool(tmp_path / name).open()


def test_a_half_written_file_of_a_killed_daemon_is_cleared(tmp_path: Path) -> None:
    (path,) = saved_in(tmp_path / "spool", make_record())
    path.with_suffix(".new").write_bytes(b"half")
    spool = make_spool(tmp_path / "spool")
    spool.open()
    assert len(spool) == 1 and list((tmp_path / "spool").iterdir()) == [path]


def test_a_full_disk_is_logged_and_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = make_spool(tmp_path / "spool")
    spool.open()

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", no_room)
    assert spool.save([make_record()]) == 0
    assert "No space left" in caplog.text and not list((tmp_path / "spool").iterdir())


# --- over a restart, in one process ----------------------------------------------------------------------------

SLOW = ToyCost(0.002, 0.0, 0.002, 0.0)


def slow_toy(num_slots: int = 3, *, causal: bool = True) -> ToyRunner:
    return ToyRunner(num_slots, causal_prompt=causal, end_one_in=0, cost=SLOW, spend=time.sleep)


def new_spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", window_s=30.0, now=time.monotonic)


async def drain(service: Service) -> None:
    service.server.begin_drain(0.0)
    service.server.shelf.end_all("drained")
    assert await service.server.shelf.wait_idle(5)
    await service.server.shelf.save_answers()


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drained_answers_go_on_in_the_next_daemon_with_the_next_number(
    tmp_path: Path, temperature: float, causal: bool
) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 60}

    async def main() -> None:
        got: dict[str, list[Event]] = {}
        async with (
            toy_service(tmp_path, slow_toy(causal=causal), spool=new_spool(tmp_path)) as service,
            await AsyncClient.connect(service.path) as client,
        ):
            whole = {prompt: await client.chat(prompt, **options).text() for prompt in ("p1", "p2", "p3", "p4")}
            answers = {prompt: client.chat(prompt, **options) for prompt in whole}  # one of them waits
            await until(lambda: answers["p1"].mailbox.take() is not None)
            async for event in answers["p1"]:
                got.setdefault("p1", []).append(event)
                if isinstance(event, Delta) and len(text_of(got["p1"])) > 20 and service.server.phase == "ready":
                    await drain(service)
            for prompt in ("p2", "p3", "p4"):
                got[prompt] = [event async for event in answers[prompt]]
        for events in got.values():
            assert isinstance(events[-1], Done) and events[-1].reason == "drained"
        async with (
            toy_service(tmp_path, slow_toy(causal=causal), spool=new_spool(tmp_path)) as service,
            await AsyncClient.connect(service.path) as client,
        ):
            for prompt, events in got.items():
                mailbox = answers[prompt].mailbox
                more = [event async for event in client.resume(mailbox.resume_token, after=mailbox.last_seq)]
                done = more[-1]
                assert text_of(events) + text_of(more) == whole[prompt]
                assert isinstance(done, Done) and done.reason == "length" and done.usage.completion_tokens == 60
                assert not [e for e in more if isinstance(e, Accepted)]
                assert sum(isinstance(e, Started) for e in [*events, *more]) == 1
                with pytest.raises(ResumeExpired):
                    await client.resume(mailbox.resume_token, after=done.seq).text()
        assert not list((tmp_path / "spool").iterdir())

    asyncio.run(main())


def test_numbers_have_no_gap_and_nobody_sees_the_first_daemons_end_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            toy_service(tmp_path, slow_toy(), spool=new_spool(tmp_path)) as service,
            await AsyncClient.connect(service.path) as client,
        ):
            answer = client.chat("x", max_new_tokens=40)
            events = []
            async for event in answer:
                events.append(event)
                if isinstance(event, Delta) and service.server.phase == "ready":
                    await drain(service)
        async with toy_service(tmp_path, slow_toy(), spool=new_spool(tmp_path)) as service:
            stream_events = []
            async with await AsyncClient.connect(service.path) as client:  # as one who has missed everything
                with pytest.raises(BadRequest):
                    await client.resume(answer.mailbox.resume_token, after=10_000).text()
                await client.resume(answer.mailbox.resume_token, after=0).text()
            (stream,) = service.server.shelf.retained
            stream_events = list(stream.events)
        assert [event.seq for event in stream_events] == list(range(1, len(stream_events) + 1))
        assert [type(event) for event in stream_events if isinstance(event, Done)] == [Done]
        sent = [event for event in events if isinstance(event, Delta)]
        assert text_of(list(stream_events)).startswith(text_of(list(sent)))

    asyncio.run(main())


def test_an_answer_that_nobody_received_survives_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with toy_service(tmp_path, spool=new_spool(tmp_path)) as service:
            client = await AsyncClient.connect(service.path)
            whole = await client.chat("你好").text()
            answer = client.chat("你好", on_disconnect="detach")
            await client.wait_event(answer.mailbox)
            await client.aclose()
            await until(lambda: service.engine.num_running == 0 and not service.server._connections)
            await drain(service)
        async with (
            toy_service(tmp_path, spool=new_spool(tmp_path), is_ready=False) as service,
            await AsyncClient.connect(service.path) as client,
        ):
            assert await client.resume(answer.mailbox.resume_token).text() == whole

    asyncio.run(main())


def test_who_may_resume_when_and_into_what(tmp_path: Path) -> None:
    saved_in(tmp_path / "spool", replace(make_record(1), uid=os.getuid() + 1), replace(make_record(2), uid=os.getuid()))

    async def main() -> None:
        spool = make_spool(tmp_path / "spool", 1.0)
        async with (
            toy_service(tmp_path, spool=spool, is_ready=False, limits=Limits(resume_s=0.3)) as service,
            await AsyncClient.connect(service.path) as client,
        ):
            with pytest.raises(Forbidden):
                await client.resume("token1").text()
            with pytest.raises(NotReady):
                await client.resume("token2").text()
            service.server.ready(service.engine)
            with pytest.raises(ResumeExpired, match="another model"):
                await client.resume("token2").text()
            await until(lambda: not len(spool))
            with pytest.raises(ResumeExpired, match="its time is over"):
                await client.resume("token2").text()
            service.server.begin_drain(1.0)
            with pytest.raises(Draining):
                await client.chat("x").text()
        assert not list((tmp_path / "spool").iterdir())

    asyncio.run(main())
