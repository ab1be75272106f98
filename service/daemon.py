"""The daemon's composition root and life: lock → bind → load → warm up → ready → drain → exit code.

Thread: the main one, which runs the event loop. Everything else receives its collaborators from here.

Exit codes: 0 drained after a signal · 1 unexpected failure · 2 out of GPU or host memory (a restart helps) · 3 bad
settings, missing or broken model files (it does not) · 4 another live daemon owns the socket.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from service.audit import Audit
from service.engine import base
from service.engine.local import LocalEngine
from service.engine.thread import Loaded
from service.guard import keep_socket, make_room, tell_no_files
from service.ledger import Ledger
from service.lifeline import die_with_parent, is_supervised, leave
from service.logs import start_logging
from service.metrics import Metrics
from service.server import Limits, Server
from service.settings import ENV_PREFIX, Settings, SettingsError, read_settings
from service.socketfile import PathRefused, PathTaken, SocketFile
from service.spool import Refused, Spool

log = logging.getLogger("service")

DRAINED, FAILED, OUT_OF_MEMORY, MISCONFIGURED, SOCKET_TAKEN = range(5)

# What --audit-file auto means under Supervisor.
AUDIT_FILE = "logs/audit.jsonl"

# Shares of the progress that `health` tells: importing torch, then the weights, then the warm-up.
WEIGHTS_BEGIN, WEIGHTS_END = 0.3, 0.95

# Time for the last replies to leave the buffers when the daemon stops.
FLUSH_S = 2.0
AUDIT_FLUSH_S = 1.0


def main(argv: Sequence[str] | None = None) -> None:
    """The console script `chatglm-service`."""
    parent_pid = os.getppid()
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in ("probe", "doctor"):
        sys.exit(run_tool(words[0], words[1:]))
    try:
        settings = read_settings(
            Settings, words, os.environ, prog="chatglm-service", prefix=ENV_PREFIX,
            not_ours=("CHATGLM_WEBUI_",),
        )  # fmt: skip
    except SettingsError as error:
        print(f"chatglm-service: {error}", file=sys.stderr)
        leave(MISCONFIGURED)
    metrics = Metrics()
    start_logging(settings.log_level, on_drop=metrics.log_dropped.inc)
    if is_supervised():
        die_with_parent(parent_pid)
    code = run(settings, metrics)
    if code in (MISCONFIGURED, SOCKET_TAKEN):
        leave(code)
    sys.exit(code)


def run_tool(name: str, argv: Sequence[str]) -> int:
    """A subcommand, which is a client or a reader of files: it starts no service."""
    from service import doctor, probe

    return (probe.main if name == "probe" else doctor.main)(argv, os.environ)


def run(settings: Settings, metrics: Metrics) -> int:
    """Claim the socket, serve until a signal, and return the exit code."""
    try:
        socket_file = SocketFile.claim(settings.socket_path)
    except PathTaken as error:
        log.error("%s", error)
        return SOCKET_TAKEN
    except PathRefused as error:
        log.error("%s", error)
        return MISCONFIGURED
    audit = open_audit(settings, on_drop=metrics.audit_dropped.inc)
    ledger = Ledger(metrics, audit, keeps_text=settings.audit_text == "on")
    try:
        make_room(settings.max_connections)
        return asyncio.run(Daemon(settings, socket_file, metrics, ledger, open_spool(settings)).run())
    finally:
        socket_file.release()
        ledger.settle_all()
        if audit is not None and not audit.close(AUDIT_FLUSH_S):
            log.warning("audit: the last lines could not be written in %g s", AUDIT_FLUSH_S)


class Daemon:
    """One run of the service, from a claimed socket to an exit code."""

    def __init__(
        self, settings: Settings, socket_file: SocketFile, metrics: Metrics, ledger: Ledger, spool: Spool | None
    ) -> None:
        self._settings = settings
        self._spool = spool
        self._socket_file = socket_file
        self._metrics = metrics
        self._ledger = ledger
        self._signals: asyncio.Queue[int] = asyncio.Queue()

    async def run(self) -> int:
        settings = self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        loop.set_exception_handler(tell_no_files(self._metrics.limits.labels("open files").inc))
        limits = Limits(
            settings.resume_s, settings.write_stall_s, settings.max_connections, settings.max_requests_per_connection,
            settings.idle_s, settings.max_new_tokens, settings.max_deadline_s,
        )  # fmt: skip
        server = Server(
            self._socket_file.socket, socket_gid=self._socket_file.gid, limits=limits, metrics=self._metrics,
            model=settings.model, now=time.monotonic, ledger=self._ledger, spool=self._spool,
        )  # fmt: skip
        await server.start()
        log.info("listening on %s, pid %d; phase loading", settings.socket_path, os.getpid())
        keeping = asyncio.create_task(keep_socket(self._socket_file, server))
        try:
            return await self._serve(server)
        finally:
            keeping.cancel()

    async def _serve(self, server: Server) -> int:
        """Load, answer until a signal or the engine's death, drain."""
        settings = self._settings
        loop = asyncio.get_running_loop()

        def show_progress(progress: float) -> None:
            loop.call_soon_threadsafe(setattr, server, "progress", progress)

        engine = LocalEngine(
            lambda: load(settings, show_progress), max_queue=settings.max_queue,
            step_budget_s=settings.step_budget_ms / 1000, step_limit_s=settings.step_limit_s,
            on_slow_step=self._metrics.slow_steps.inc,
        )  # fmt: skip
        starting = asyncio.create_task(engine.start())
        stopping = asyncio.create_task(self._signals.get())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            if (error := starting.exception()) is not None:
                return failure_code(error)
            # What is there now stays. To look through torch's 170,000 objects again for garbage would stop every answer
            # for a tenth of a second each time.
            gc.collect()
            gc.freeze()
            server.ready(engine)
            await asyncio.wait((stopping, engine.died), return_when=asyncio.FIRST_COMPLETED)
        if engine.died.done():
            await server.close(FLUSH_S)
            return failure_code(engine.died.result())
        log.info("signal %s: drain begins", signal.Signals(stopping.result()).name)
        if starting.done():
            await self._drain(server)
            await server.shelf.save_answers()
            await server.close(FLUSH_S)
            await engine.close()
        else:
            server.begin_drain(0.0)
            await server.close(FLUSH_S)  # nothing ran yet; the loading thread goes with the process
            starting.cancel()
        log.info("drain is over, exit 0")
        return DRAINED

    async def _drain(self, server: Server) -> None:
        """Running and queued answers finish within `drain_s`; a second signal, or the time, ends the rest."""
        drain_s = self._settings.drain_s
        server.begin_drain(drain_s)
        idle = asyncio.create_task(server.shelf.wait_idle(drain_s))
        again = asyncio.create_task(self._signals.get())
        await asyncio.wait((idle, again), return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not (idle.done() and idle.result()):
            log.warning("drain: time is over or a second signal came; ending what still runs")
            server.shelf.end_all("drained")
            await server.shelf.wait_idle(FLUSH_S)
            idle.cancel()


def open_spool(settings: Settings) -> Spool | None:
    """What the daemon before left; None where the folder cannot be trusted: then a restart loses what is unfinished."""
    folder = Path(settings.socket_path + ".spool" if settings.spool_dir == "auto" else settings.spool_dir)
    spool = Spool(folder, window_s=settings.resume_s, now=time.monotonic)
    try:
        spool.open()
    except Refused as error:
        log.error("spool: %s; answers will not outlive this daemon", error)
        return None
    return spool


def open_audit(settings: Settings, on_drop: Callable[[int], None]) -> Audit | None:
    """The audit file that is wanted, or None."""
    path = settings.audit_file
    if path == "auto":
        path = AUDIT_FILE if is_supervised() else "off"
    if path == "off":
        return None
    log.info("audit: one line a request to %s", path)
    return Audit(Path(path), max_bytes=settings.audit_max_bytes, num_backups=settings.audit_backups, on_drop=on_drop)


def failure_code(error: BaseException) -> int:
    """The exit code that tells Supervisor whether a restart can help, and one line for the log."""
    from service.models import ModelError

    if isinstance(error, ModelError):
        log.error("%s", error)
        return MISCONFIGURED
    if isinstance(error, MemoryError | base.OutOfMemory) or "out of memory" in str(error).lower():
        log.error("OOM: %s", error)
        return OUT_OF_MEMORY
    if "CUDA" in str(error):
        log.error("CUDA: %s", error)
        return OUT_OF_MEMORY
    log.error("unexpected failure", exc_info=error)
    return FAILED


def load(settings: Settings, progress: Callable[[float], None]) -> Loaded:
    """Load the model and warm it up; on the engine thread. Raises `ModelError`, `MemoryError`."""
    from service.models import choose_model, load_model
    from service.models.threads import use_threads

    started_at = time.monotonic()
    path = choose_model(settings.model, Path(settings.weights_dir))
    log.info("loading %s", path)
    threads = use_threads(settings.threads)  # before torch is imported
    progress(WEIGHTS_BEGIN)

    from service.engine.runner import TorchRunner

    model = load_model(
        path, family=settings.family, quantization=settings.quantization, dtype=settings.dtype, device=settings.device,
        num_slots=settings.max_batch_size, max_context=settings.max_context or None,
        kv_memory=settings.kv_memory or None, keeps_quantized=settings.quantized_cache == "on",
        progress=lambda done: progress(WEIGHTS_BEGIN + (WEIGHTS_END - WEIGHTS_BEGIN) * done),
    )  # fmt: skip
    runner = TorchRunner(model)
    runner.warm_up()
    info = base.EngineInfo(
        model.name, model.family, "local", model.quantization, model.device, runner.capabilities.context_limit,
        runner.capabilities.num_slots,
    )  # fmt: skip
    log.info(
        "loaded %s (%s, %s) on %s in %.1f s: %d slots of %d tokens, %d threads", info.model, info.family,
        info.quantization, info.device, time.monotonic() - started_at, info.slots, info.context_limit, threads,
    )  # fmt: skip
    defaults = model.defaults
    if settings.max_new_tokens:
        defaults = replace(defaults, max_new_tokens=min(defaults.max_new_tokens, settings.max_new_tokens))
    return Loaded(runner, model.tokenizer, info, defaults)
