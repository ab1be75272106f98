"""A real server and a real local engine over the toy runner, in this process, on a socket of its own.

`toy_service` runs it on the test's own event loop; `ThreadedService` on a thread, for blocking clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.engine.base import EngineInfo
from service.engine.local import LocalEngine
from service.engine.thread import Loaded
from service.metrics import Metrics
from service.protocol import Params
from service.server import Limits, Server
from service.socketfile import SocketFile
from service.spool import Spool
from tests.toy import ToyRunner, ToyTokenizer

DEFAULTS = Params(temperature=0.0, max_new_tokens=200)


@dataclass
class Service:
    path: str
    server: Server
    engine: LocalEngine
    runner: ToyRunner


def load_toy(runner: ToyRunner) -> Loaded:
    capabilities = runner.capabilities
    info = EngineInfo("toy", "toy", "local", "none", "cpu", capabilities.context_limit, capabilities.num_slots)
    return Loaded(runner, ToyTokenizer(), info, DEFAULTS)


@contextlib.asynccontextmanager
async def toy_service(
    tmp_path: Path, runner: ToyRunner | None = None, *, limits: Limits | None = None, max_queue: int = 32,
    is_ready: bool = True, spool: Spool | None = None, step_limit_s: float = 30.0,
) -> AsyncIterator[Service]:  # fmt: skip
    runner = runner or ToyRunner()
    if spool is not None:
        spool.open()
    socket_file = SocketFile.claim(str(tmp_path / "toy.sock"))
    metrics = Metrics()
    server = Server(
        socket_file.socket, socket_gid=socket_file.gid, limits=limits or Limits(), metrics=metrics, model="toy",
        now=time.monotonic, spool=spool,
    )  # fmt: skip
    await server.start()
    engine = LocalEngine(
        lambda: load_toy(runner), max_queue=max_queue, step_budget_s=0.1, step_limit_s=step_limit_s,
        on_slow_step=metrics.slow_steps.inc,
    )  # fmt: skip
    await engine.start()
    if is_ready:
        server.ready(engine)
    try:
        yield Service(socket_file.path, server, engine, runner)
    finally:
        await engine.close()
        await server.close(0.5)
        socket_file.release()


class ThreadedService:
    """`toy_service` on a thread of its own, as a context manager. `call` runs a function on its loop."""

    def __init__(self, tmp_path: Path, runner: ToyRunner | None = None, **options: Any) -> None:
        self._options = {"tmp_path": tmp_path, "runner": runner, **options}
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with toy_service(**self._options) as self.service:
            self._started.set()
            await self._stop.wait()

    def call(self, function: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def __enter__(self) -> Service:
        self._thread.start()
        assert self._started.wait(10)
        return self.service

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> float:
    """Wait for a condition that other tasks or threads bring about; returns the seconds it took."""
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at < within_s, "the condition did not come true in time"
        await asyncio.sleep(0.001)
    return time.monotonic() - started_at
