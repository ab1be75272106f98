"""Faults inside: memory, NaN, no end, a step that hangs, a bug, a dead device. Processes are the daemon with a toy."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncClient, Client
from service.engine.base import OutOfMemory
from service.protocol import Delta, Done, EngineDead, EngineFailed
from tests.faults.common import running_toy
from tests.harness import Service, toy_service, until
from tests.processes import wait_until
from tests.test_server import collect, serve
from tests.test_spool import slow_toy
from tests.toy import Call, ToyRunner, no_fault


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        *((where, "OOM") for where in ("open", "prefill", "decode", "copy_prefix")),
        ("prefill", "nan"),
        ("decode", "nan"),
    ],
)
def test_faults_at_random_end_that_request_free_its_slot_and_the_next_one_works(
    tmp_path: Path, where: Call, fault: str
) -> None:
    chance = random.Random(3)
    blow: Any = OutOfMemory("injected") if fault == "OOM" else "nan"

    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            prompts = [f"a shared beginning that may be copied, then {n}" for n in range(4)]
            whole = {prompt: await client.chat(prompt).text() for prompt in prompts}

            async def one(number: int) -> bool:
                prompt = prompts[number % 4]
                try:
                    assert await client.chat(prompt).text() == whole[prompt]
                except EngineFailed as error:
                    assert "OOM" in error.message or "NaN" in error.message
                    return False
                return True

            service.runner.fault = lambda call, slot: blow if call == where and chance.random() < 0.05 else None
            ends = await asyncio.gather(*map(one, range(24)))
            if where == "decode":
                assert not all(ends)
            service.runner.fault = no_fault
            assert all(await asyncio.gather(*map(one, range(8))))

    serve(tmp_path, scenario)


def test_an_answer_without_an_end_stops_at_the_context(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            done = (await collect(client.chat("x", max_new_tokens=10**9)))[-1]
            assert isinstance(done, Done) and done.reason == "length"
            assert done.usage.prompt_tokens + done.usage.completion_tokens == 256

    serve(tmp_path, scenario, ToyRunner(context_limit=256, end_one_in=0))


def test_a_step_that_takes_far_too_long_is_reported_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()

    def hang(call: Call, slot: int) -> None:
        assert gate.wait(10)

    async def main() -> None:
        runner = ToyRunner(fault=hang)
        async with toy_service(tmp_path, runner, step_limit_s=0.1) as service:
            async with await AsyncClient.connect(service.path) as client:
                answer = client.chat("x", max_new_tokens=2)
                await until(lambda: "step has taken" in caplog.text)
                assert (await client.health()).running == 1  # the loop is not held up
                await asyncio.sleep(0.15)
                gate.set()
                await collect(answer)
            assert caplog.text.count("step has taken") == 1 and "timeout" in caplog.text
            metrics, _ = service.server._metrics.snapshot()
            assert metrics["chatglm_slow_steps_total"] == 1

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())


def test_a_dead_engine_refuses_at_once_what_still_comes(tmp_path: Path) -> None:
    async def main() -> None:
        runner = ToyRunner(fault=lambda call, slot: RuntimeError("injected"))
        async with toy_service(tmp_path, runner) as service, await AsyncClient.connect(service.path) as client:
            for _ in range(20):
                with pytest.raises(EngineDead):
                    await client.chat("x").text()

    asyncio.run(main())


@pytest.mark.parametrize(("fault", "code"), [("bug", 1), ("memory", 2), ("CUDA", 2)])
def test_an_engine_thread_that_dies_tells_every_request_and_the_exit_code_tells_supervisor(
    tmp_path: Path, fault: str, code: int
) -> None:
    with running_toy(tmp_path, fault=fault) as (process, path):
        clients = [Client(str(path)) for _ in range(4)]  # three run, one waits
        answers = [client.chat("x", max_new_tokens=500) for client in clients]
        for answer in answers:
            with pytest.raises(EngineDead):
                answer.text()
        for client in clients:
            client.close()
        assert process.wait(5) == code
        assert not path.exists()
    assert ("CUDA" if fault == "CUDA" else "OOM" if code == 2 else "injected") in (tmp_path / "daemon.log").read_text()


@contextmanager
def a_jump_of_time(seconds: float) -> Any:
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + seconds)
        yield


@pytest.mark.parametrize("jump_s", [10**7, -(10**7)])
def test_a_jump_of_the_clock_changes_no_deadline_and_no_number(tmp_path: Path, jump_s: float) -> None:
    async def scenario(service: Service) -> None:
        async with await AsyncClient.connect(service.path) as client:
            answer = client.chat("x", max_new_tokens=100, deadline_s=10)
            events = []
            async for event in answer:
                events.append(event)
                if len(events) == 10:
                    with a_jump_of_time(jump_s):
                        for _ in range(5):
                            events.append(await client.wait_event(answer.mailbox))
            done = events[-1]
            assert isinstance(done, Done) and done.reason == "length" and 0 < done.timing.total_ms < 10_000
            times = [event.t_ms for event in events if isinstance(event, Delta)]
            assert times == sorted(times)

    serve(tmp_path, scenario, slow_toy())


def test_no_module_measures_time_with_the_wall_clock() -> None:
    root = Path(__file__).parents[2] / "service"
    users = {path.name for path in root.rglob("*.py") if "time.time" in path.read_text()}
    assert users <= {"ledger.py", "audit.py"}, "the audit says when; everything else measures"


def test_the_log_line_of_a_request_has_numbers_and_no_text(tmp_path: Path) -> None:
    with running_toy(tmp_path) as (_, path), Client(str(path)) as client:
        client.chat("secret-words", max_new_tokens=5).text()
        stats = client.stats().metrics
        assert json.dumps(stats)
        log = tmp_path / "daemon.log"
        wait_until(lambda: "request 1" in log.read_text(), within_s=10, what="its line is written", log=log)
    assert "secret" not in log.read_text()
