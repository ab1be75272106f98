"""The running daemon against peers on the same file, turn by turn, so that a noisy machine troubles all alike.

    python -m benchmarks.compare --llama-python PYTHON     an interpreter that has llama-cpp-python
    python -m benchmarks.compare --transformers            generate with NF4, in this interpreter

Ours is measured through the socket: decode by the deltas' arrival, prefill as TTFT of a prompt that no cache has seen.
Prints a table, then one JSON line; ratios above 1 are in our favour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.serve import ask, print_table, words
from service.client import DEFAULT_SOCKET_PATH, AsyncClient

GGUF = Path("model_weights/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
SHORT_TOKENS = 40


class Peer:
    def __init__(self, python: str, name: str, threads: int) -> None:
        script = Path(__file__).with_name("peers.py")
        self.name = name
        self._process = subprocess.Popen(
            [python, str(script), name, str(GGUF), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def measure(self, prefill: int, decode: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prefill": prefill, "decode": decode}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                reply: dict[str, Any] = json.loads(line)
                return reply
        raise SystemExit(f"{self.name} ended: is it installed in that interpreter?")


async def ours(path: str, prefill: int, decode: int, rng: random.Random) -> dict[str, float]:
    async with await AsyncClient.connect(path) as client:
        long = await ask(client, words(prefill, rng), max_new_tokens=1)
        # An essay that does not end early: its rate is what a reader sees.
        story = await ask(client, "Write a very long story. " + words(SHORT_TOKENS, rng), max_new_tokens=decode, seed=1)
    prefill_ms = long.ttft_ms * prefill / long.prompt_tokens
    return {"prefill_ms": prefill_ms, "decode_ms_per_token": story.tpot_ms}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket-path", default=DEFAULT_SOCKET_PATH)
    parser.add_argument("--llama-python", metavar="PYTHON")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=1500)
    parser.add_argument("--decode", type=int, default=128)
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    peers = [Peer(options.llama_python, "llama", threads)] if options.llama_python else []
    peers += [Peer(sys.executable, "transformers", threads)] if options.transformers else []
    rng = random.Random()
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ("ours", *(peer.name for peer in peers))}
    for _ in range(options.rounds):
        figures["ours"].append(await ours(options.socket_path, options.prefill, options.decode, rng))
        for peer in peers:
            long, short = peer.measure(options.prefill, 0), peer.measure(SHORT_TOKENS, options.decode)
            figures[peer.name].append(
                {"prefill_ms": long["prefill_ms"], "decode_ms_per_token": short["decode_ms_per_token"]}
            )
    rows, result = [], {}
    for name, rounds in figures.items():
        for what in ("decode_ms_per_token", "prefill_ms"):
            values = [one[what] for one in rounds]
            ratio = statistics.median(theirs / mine[what] for theirs, mine in zip(values, figures["ours"], strict=True))
            rows.append(
                [
                    name,
                    what,
                    *(round(value, 2) for value in (min(values), statistics.median(values), max(values))),
                    round(ratio, 2),
                ]
            )
            result[f"{name}_{what}"] = round(statistics.median(values), 3)
            result[f"{name}_{what}_over_ours"] = round(ratio, 3)
    print_table(["engine", "figure", "min", "median", "max", "over ours"], rows)
    print(json.dumps(result))
    for peer in peers:
        peer.close()


if __name__ == "__main__":
    asyncio.run(main())
