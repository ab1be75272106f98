"""Ten times more clients than fit, for a while: what is done stays at the plateau, and memory stays flat."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import pytest

from service.client import AsyncClient
from service.protocol import Busy, Delta
from service.server import Limits
from tests.faults.test_readers import resident_bytes
from tests.harness import Service
from tests.test_server import serve
from tests.toy import ToyCost, ToyRunner

NUM_SLOTS = 4
PLATEAU_S, OVERLOAD_S = 5.0, 60.0


def held_bytes() -> int:
    """Of this process, without what only waits for the garbage collector. Quick, as what was there before is frozen."""
    gc.collect()
    return resident_bytes()


@pytest.mark.timeout(180)
def test_ten_times_overload_for_a_minute_keeps_goodput_and_memory(tmp_path: Path) -> None:
    async def load(service: Service, num_clients: int, seconds: float) -> tuple[float, int]:
        """Tokens a second of whole answers; how often somebody was told busy, at once and with a time."""
        num_tokens = num_busy = 0
        started_at = time.monotonic()

        async def one(number: int) -> None:
            nonlocal num_tokens, num_busy
            async with await AsyncClient.connect(service.path) as client:
                while time.monotonic() - started_at < seconds:
                    asked_at = time.monotonic()
                    try:
                        events = [e async for e in client.chat(f"client {number}", max_new_tokens=10)]
                        if time.monotonic() - started_at < seconds:
                            num_tokens += sum(e.tokens for e in events if isinstance(e, Delta))
                    except Busy as error:
                        assert error.retry_after_s and time.monotonic() - asked_at < 2
                        num_busy += 1
                        await asyncio.sleep(0.2)  # less patient than it was told to be

        await asyncio.gather(*map(one, range(num_clients)))
        return num_tokens / seconds, num_busy

    async def scenario(service: Service) -> None:
        plateau, _ = await load(service, NUM_SLOTS, PLATEAU_S)
        await load(service, 10 * NUM_SLOTS, 3.0)
        start, held = held_bytes(), asyncio.create_task(held_when_full())
        goodput, num_busy = await load(service, 10 * NUM_SLOTS, OVERLOAD_S)
        assert num_busy > 0 and goodput >= 0.9 * plateau, (goodput, plateau)
        # Ended answers are kept for the window: memory grows until it is full, and then no more.
        assert held_bytes() - await held < 6 * 2**20 and held_bytes() - start < 16 * 2**20

    async def held_when_full() -> int:
        await asyncio.sleep(limits.resume_s + 5)
        return held_bytes()

    limits = Limits()
    runner = ToyRunner(NUM_SLOTS, end_one_in=0, cost=ToyCost(0.03, 0.003, 0.015, 0.0), spend=time.sleep)
    gc.freeze()  # to collect among all the modules of the other tests would stop everybody here for a second
    try:
        serve(tmp_path, scenario, runner, max_queue=8, limits=limits)
    finally:
        gc.unfreeze()
