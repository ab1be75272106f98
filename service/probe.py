"""`chatglm-service probe`: is the daemon ready? One block for people, an exit code for scripts.

A client like any other: it knows the socket and the protocol, and imports nothing that is slow to import. Exit codes:
0 ready (and, with --ask, an answer came), 1 not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from service.client import DEFAULT_SOCKET_PATH, Client, ConnectionLost, Timeouts
from service.protocol import Delta, Done, HealthReport, ServiceError

ASK_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """How one small request went. Seconds; `ttft_s` is None when the answer was empty."""

    ttft_s: float | None
    total_s: float
    num_tokens: int
    reason: str


def main(argv: Sequence[str], environ: Mapping[str, str], out: TextIO | None = None) -> int:
    out = out or sys.stdout
    parser = argparse.ArgumentParser(prog="chatglm-service probe", description="Print the daemon's health.")
    path = environ.get("CHATGLM_SOCKET_PATH", DEFAULT_SOCKET_PATH)
    parser.add_argument("--socket-path", default=path, metavar="V", help="socket of the daemon [%(default)s]")
    parser.add_argument("--ask", action="store_true", help="time a minimal request too")
    parser.add_argument("--timeout-s", type=float, default=10.0, metavar="V", help="seconds to wait [%(default)g]")
    options = parser.parse_args(argv)
    timeouts = Timeouts(connect_s=options.timeout_s, idle_s=options.timeout_s)
    try:
        with Client(options.socket_path, timeouts=timeouts) as client:
            report = client.health()
            print(describe(options.socket_path, report), file=out)
            if report.phase != "ready":
                return 1
            if options.ask:
                print(describe_asked(ask(client, options.timeout_s)), file=out)
            return 0
    except (ConnectionLost, ServiceError) as error:
        print(_line("problem", str(error)), file=out)
        return 1


def ask(client: Client, timeout_s: float, now: Callable[[], float] = time.monotonic) -> Asked:
    """One short answer, timed here. Raises `ServiceError` or `ConnectionLost`."""
    started_at = now()
    first_at, num_tokens, reason = None, 0, ""
    for event in client.chat("Hi", temperature=0, max_new_tokens=ASK_TOKENS, deadline_s=timeout_s):
        if isinstance(event, Delta):
            first_at = first_at if first_at is not None else now()
        elif isinstance(event, Done):
            num_tokens, reason = event.usage.completion_tokens, event.reason
    return Asked(None if first_at is None else first_at - started_at, now() - started_at, num_tokens, reason)


def describe(path: str, report: HealthReport) -> str:
    """The report as one block of lines. What is not known yet is left out."""
    lines = [("socket", path)]
    phase = report.phase if report.phase != "loading" else f"loading, {report.progress:.0%}"
    lines.append(("phase", phase))
    details = ", ".join(filter(None, (report.family, report.quantization, report.device, report.engine)))
    lines.append(("model", report.model + (f" ({details})" if details else "")))
    if report.slots:
        lines.append(("slots", f"{report.slots} of {report.context_limit} tokens"))
        lines.append(("requests", f"{report.running} running, {report.queued} queued"))
    lines += [("uptime", duration(report.uptime_s)), ("version", report.version)]
    return "\n".join(_line(name, value) for name, value in lines)


def describe_asked(asked: Asked) -> str:
    first = "no text" if asked.ttft_s is None else f"first text after {1000 * asked.ttft_s:.0f} ms"
    total = f"all {asked.num_tokens} tokens after {1000 * asked.total_s:.0f} ms"
    return _line("ask", f"{first}, {total}, ended by {asked.reason}")


def duration(seconds: float) -> str:
    """3725 → 1 h 2 min."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count or unit == "s")


def _line(name: str, value: str) -> str:
    return f"{name:<10} {value}"
