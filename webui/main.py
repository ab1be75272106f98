"""The page as a process: settings → port → app → serve until a signal.

Thread: the main one, which runs the event loop. Exit codes: 0 after a signal · 1 the port is taken or an unexpected
failure · 3 bad settings.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

from service.lifeline import die_with_parent
from service.settings import SettingsError
from webui.settings import Config, read_config

FAILED, MISCONFIGURED = 1, 3

# Open streams end at once when the page stops; this bounds what else may still run.
GRACE_S = 1


def main(argv: Sequence[str] | None = None) -> None:
    """The console script `chatglm-webui`."""
    parent_pid = os.getppid()
    try:
        config = read_config(sys.argv[1:] if argv is None else argv, os.environ)
    except SettingsError as error:
        print(f"chatglm-webui: {error}", file=sys.stderr)
        sys.exit(MISCONFIGURED)
    if "SUPERVISOR_ENABLED" in os.environ:
        die_with_parent(parent_pid)
    logging.basicConfig(
        level=config.settings.log_level.upper(), stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        listener = listen(config.settings.host, config.settings.port)
    except OSError as error:
        where = f"{config.settings.host}:{config.settings.port}"
        print(f"chatglm-webui: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        sys.exit(FAILED)
    # uvicorn raises the signal again when it has stopped; before it runs, there is nothing to stop.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    code = FAILED
    try:
        code = asyncio.run(serve(config, listener))
    except SystemExit as leaving:
        code = 0 if leaving.code is None else int(leaving.code)
    except Exception:
        logging.getLogger(__name__).exception("the page failed")
    logging.shutdown()
    os._exit(code)  # NOTE: Python would take more than a second to tear down Gradio's 1,600 modules


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `OSError`. From here on nobody else can take the port while the page is built."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


async def serve(config: Config, listener: socket.socket) -> int:
    """Serve until TERM or INT; returns the exit code."""
    import uvicorn  # here, so that bad settings and a taken port are told at once: these imports take seconds

    from webui.app import build_app

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.stopping.set()
            super().handle_exit(sig, frame)

    settings = config.settings
    app = build_app(settings.socket_path, credentials=config.credentials, root_path=settings.root_path)
    uvicorn_config = uvicorn.Config(
        app, log_level=settings.log_level, access_log=settings.log_level == "debug", server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )  # fmt: skip
    logging.getLogger(__name__).info("the page is at http://%s:%d", settings.host, settings.port)
    server = Server(uvicorn_config)
    # Gradio's 140,000 objects stay: to look through them again for garbage would stop every page for 0.1 s.
    gc.collect()
    gc.freeze()
    await server.serve(sockets=[listener])
    return 0 if server.started else FAILED


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(0)  # NOTE: SystemExit would be lost where the garbage collector or an import ignores what is raised
