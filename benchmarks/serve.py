"""Load for a running daemon, over its socket: how soon, how even, how fast, how many.

    python -m benchmarks.serve load --users 5 --requests 20      closed loop, or --rate 2 for Poisson arrivals
    python -m benchmarks.serve turns                             a ten-turn chat: TTFT with reuse
    python -m benchmarks.serve beside                            a reader, while a 1,500-token prompt comes in
    python -m benchmarks.serve cancel                            interrupt latency: decoding, queued, in prefill

Prints a table, then one JSON line. TTFT: sent until the first text. ITL: between tokens, `engine` by the daemon's
clock, `delivered` by ours (a delta of n tokens is one gap and n - 1 gaps of 0). TPOT: mean time of the tokens after
the first. Goodput: answers a second with TTFT ≤ 300 ms and TPOT ≤ 40 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.client import DEFAULT_SOCKET_PATH, AsyncClient
from service.protocol import Delta, Done, Message, ServiceError, Started

GOOD_TTFT_MS, GOOD_TPOT_MS = 300.0, 40.0
WORDS = (
    "time",
    "person",
    "year",
    "way",
    "day",
    "thing",
    "man",
    "world",
    "life",
    "hand",
    "part",
    "eye",
    "place",
    "work",
)


@dataclass
class Trace:
    """One request as its client saw it. Times are ours, in seconds, except `engine_ms`."""

    sent_at: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    engine_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended_at: float = 0.0
    reason: str = ""
    text: str = ""

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.arrivals[0] - self.sent_at)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def tpot_ms(self) -> float:
        later = self.num_tokens - self.tokens[0]
        return 1000 * (self.arrivals[-1] - self.arrivals[0]) / later if later else 0.0

    @property
    def is_answered(self) -> bool:
        return bool(self.arrivals) and self.reason in ("stop", "length", "interrupted")

    def gaps_ms(self, *, engine: bool = False) -> list[float]:
        times = self.engine_ms if engine else [1000 * at for at in self.arrivals]
        gaps: list[float] = []
        for before, after, tokens in zip(times, times[1:], self.tokens[1:], strict=False):
            gaps += [after - before] + [0.0] * (tokens - 1)
        return gaps


def words(count: int, rng: random.Random) -> str:
    """About `count` tokens of text that no cache has seen."""
    return f"{rng.getrandbits(32):x} " + " ".join(rng.choice(WORDS) for _ in range(max(1, count - 6)))


async def ask(
    client: AsyncClient,
    prompt: str | Sequence[Message],
    on_delta: Callable[[Trace], None] | None = None,
    **options: Any,
) -> Trace:
    trace = Trace(time.perf_counter())
    try:
        answer = client.chat(prompt, deadline_s=3600, **options)
        async for event in answer:
            if isinstance(event, Delta):
                trace.arrivals.append(time.perf_counter())
                trace.engine_ms.append(event.t_ms)
                trace.tokens.append(event.tokens)
                trace.text += event.text
                if on_delta is not None:
                    on_delta(trace)
            elif isinstance(event, Started):
                trace.prompt_tokens, trace.cached_tokens = event.prompt_tokens, event.cached_tokens
            elif isinstance(event, Done):
                trace.reason = event.reason
    except ServiceError as error:
        trace.reason = error.code
    trace.ended_at = time.perf_counter()
    return trace


def quantile(values: Sequence[float], share: float) -> float | None:
    """None without values."""
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 2) if ranked else None


def spread(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{round(100 * share)}": quantile(values, share) for share in (0.5, 0.95, 0.99)}


def report(traces: Sequence[Trace]) -> dict[str, Any]:
    """The figures of one run."""
    answered = [trace for trace in traces if trace.is_answered]
    delivered = [gap for trace in answered for gap in trace.gaps_ms()]
    engine = [gap for trace in answered for gap in trace.gaps_ms(engine=True)]
    span_s = max(trace.ended_at for trace in traces) - min(trace.sent_at for trace in traces)
    good = [trace for trace in answered if trace.ttft_ms <= GOOD_TTFT_MS and trace.tpot_ms <= GOOD_TPOT_MS]
    reasons = sorted({trace.reason for trace in traces})
    return {
        "requests": len(traces),
        "reasons": {reason: sum(trace.reason == reason for trace in traces) for reason in reasons},
        "ttft_cold_ms": spread([trace.ttft_ms for trace in answered if not trace.cached_tokens]),
        "ttft_reused_ms": spread([trace.ttft_ms for trace in answered if trace.cached_tokens]),
        "itl_engine_ms": spread(engine),
        "itl_delivered_ms": spread(delivered),
        "tpot_ms": spread([trace.tpot_ms for trace in answered if trace.num_tokens > 1]),
        "max_gap_ms": round(max(delivered, default=0.0), 2),
        "tokens_per_delta": round(
            sum(t.num_tokens for t in answered) / max(1, sum(len(t.tokens) for t in answered)), 3
        ),
        "tokens_per_s": round(sum(trace.num_tokens for trace in answered) / span_s, 2),
        "goodput_per_s": round(len(good) / span_s, 3),
    }


async def run_load(options: argparse.Namespace) -> tuple[list[Trace], dict[str, Any]]:
    """`users` in a closed loop, or Poisson arrivals at `rate` a second over as many connections as it takes."""
    rng = random.Random(options.seed)
    prompts = [words(options.prompt_tokens, rng) for _ in range(options.requests)]
    params = {"max_new_tokens": options.output_tokens, "temperature": options.temperature}
    traces: list[Trace] = []

    async def one(prompt: str) -> None:
        async with await AsyncClient.connect(options.socket_path) as client:
            traces.append(await ask(client, prompt, **params))

    if options.rate:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(one(prompt))
                await asyncio.sleep(rng.expovariate(options.rate))
    else:

        async def user(number: int) -> None:
            for prompt in prompts[number :: options.users]:
                await one(prompt)

        await asyncio.gather(*(user(number) for number in range(options.users)))
    return traces, report(traces)


async def run_turns(options: argparse.Namespace) -> tuple[list[Trace], dict[str, Any]]:
    """One chat of many turns, the client sending the whole conversation each time."""
    rng = random.Random(options.seed)
    messages: list[Message] = []
    traces = []
    async with await AsyncClient.connect(options.socket_path) as client:
        for _ in range(options.turns):
            messages.append(Message("user", words(options.prompt_tokens, rng)))
            trace = await ask(client, messages, max_new_tokens=options.output_tokens, temperature=options.temperature)
            messages.append(Message("assistant", trace.text))
            traces.append(trace)
    rows = [[t.prompt_tokens, t.cached_tokens, t.prompt_tokens - t.cached_tokens, round(t.ttft_ms, 1)] for t in traces]
    print_table(["prompt", "cached", "computed", "ttft ms"], rows)
    figures = report(traces)
    figures["ttft_turn_10_over_turn_2"] = round(traces[-1].ttft_ms / traces[1].ttft_ms, 3)
    return traces, figures


async def run_beside(options: argparse.Namespace) -> tuple[list[Trace], dict[str, Any]]:
    """A long prompt alone, then the same size while somebody reads."""
    rng = random.Random(options.seed)
    async with (
        await AsyncClient.connect(options.socket_path) as reader,
        await AsyncClient.connect(options.socket_path) as other,
    ):
        alone = [await ask(other, words(options.long_tokens, rng), max_new_tokens=2) for _ in range(3)]
        started = asyncio.Event()

        def note_start(trace: Trace) -> None:
            if len(trace.tokens) > 10:
                started.set()

        reading = asyncio.create_task(
            ask(
                reader,
                "Write a very long story about the sea.",
                note_start,
                max_new_tokens=options.output_tokens,
                temperature=options.temperature,
                seed=1,
            )
        )
        beside = []
        await started.wait()
        for _ in range(3):
            if not reading.done():
                trace = await ask(other, words(options.long_tokens, rng), max_new_tokens=2)
                beside.append(trace)
        reader_trace = await reading
    windows = [(trace.sent_at, trace.arrivals[0]) for trace in beside]
    gaps = [
        1000 * (after - before)
        for before, after in zip(reader_trace.arrivals, reader_trace.arrivals[1:], strict=False)
        if any(start <= after and before <= end for start, end in windows)
    ]
    alone_ms, beside_ms = (statistics.median(trace.ttft_ms for trace in traces) for traces in (alone, beside))
    return [*alone, *beside, reader_trace], {
        "long_prompt_tokens": alone[0].prompt_tokens,
        "ttft_alone_ms": round(alone_ms, 2),
        "ttft_beside_ms": round(beside_ms, 2),
        "ttft_beside_over_alone": round(beside_ms / alone_ms, 3),
        "reader_gap_ms": spread(gaps),
        "reader_max_gap_ms": round(max(gaps), 2),
        "long_prompts_beside": len(beside),
    }


async def run_cancel(options: argparse.Namespace) -> tuple[list[Trace], dict[str, Any]]:
    """From `interrupt` sent until `done` received."""
    rng = random.Random(options.seed)
    latencies: dict[str, list[float]] = {"decoding_ms": [], "queued_ms": [], "prefill_ms": []}

    async def cancel(
        name: str, client: AsyncClient, prompt: str, after: type, count: int = 1, delay_s: float = 0.0
    ) -> None:
        """Interrupt once `count` events of a kind have come; an answer that ended by itself says nothing."""
        answer = client.chat(prompt, max_new_tokens=1000)
        seen, sent_at = 0, 0.0
        last: object = None
        async for event in answer:
            last = event
            seen += isinstance(event, after)
            if seen >= count and not sent_at:
                await asyncio.sleep(delay_s)
                sent_at = time.perf_counter()
                answer.interrupt()
        if isinstance(last, Done) and last.reason == "interrupted":
            latencies[name].append(1000 * (time.perf_counter() - sent_at))

    async with await AsyncClient.connect(options.socket_path) as client:
        for _ in range(options.requests):
            await cancel("decoding_ms", client, "Write a very long story.", Delta, count=rng.randint(3, 12))
            delay_s = rng.uniform(0.0, 0.4)
            await cancel("prefill_ms", client, words(options.long_tokens, rng), Started, 1, delay_s)
        slots = (await client.health()).slots
        holders = [client.chat("Tell a very long story.", max_new_tokens=1000, deadline_s=600) for _ in range(slots)]
        for _ in range(options.requests):
            waiting = client.chat("x")
            sent_at = time.perf_counter()
            waiting.interrupt()
            _ = [event async for event in waiting]
            latencies["queued_ms"].append(1000 * (time.perf_counter() - sent_at))
        for holder in holders:
            holder.interrupt()
            _ = [event async for event in holder]
    return [], {name: spread(values) for name, values in latencies.items()}


RUNS: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, tuple[list[Trace], dict[str, Any]]]]] = {
    "load": run_load,
    "turns": run_turns,
    "beside": run_beside,
    "cancel": run_cancel,
}


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def plot(traces: Sequence[Trace], file: str) -> None:
    """When each request's tokens arrived: one line a request."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin = min(trace.sent_at for trace in traces)
    figure, axes = pyplot.subplots(figsize=(10, 5))
    for trace in traces:
        counts = [sum(trace.tokens[: index + 1]) for index in range(len(trace.tokens))]
        axes.plot([at - begin for at in [trace.sent_at, *trace.arrivals]], [0, *counts], marker=".", markersize=2)
    axes.set(xlabel="seconds", ylabel="tokens received", title="Tokens as they arrived")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--socket-path", default=DEFAULT_SOCKET_PATH)
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.0, help="Poisson arrivals a second; 0: closed loop")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--long-tokens", type=int, default=1500)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    options = parser.parse_args()
    traces, figures = asyncio.run(RUNS[options.run](options))
    print_table(["figure", "value"], [[name, value] for name, value in figures.items()])
    print(json.dumps({"run": options.run, **figures}))
    if options.plot and traces:
        plot(traces, options.plot)


if __name__ == "__main__":
    main()
