"""How often a greedy answer differs when it runs beside others, on a running daemon.

    python -m benchmarks.batch_equality --prompts 200

Kernels for one row and for several add in different orders, so the last bits of logits differ and near ties fall
otherwise. With `--dtype float32 --quantization none` none may differ; for the 4-bit paths this prints how many do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random

from benchmarks.serve import ask, print_table, words
from service.client import DEFAULT_SOCKET_PATH, AsyncClient


async def answer(path: str, prompt: str, num_tokens: int) -> str:
    async with await AsyncClient.connect(path) as client:
        trace = await ask(client, prompt, temperature=0, max_new_tokens=num_tokens)
    assert trace.is_answered, trace.reason
    return trace.text


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket-path", default=DEFAULT_SOCKET_PATH)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--beside", type=int, default=3, help="answers at once; at most the daemon's slots")
    options = parser.parse_args()
    rng = random.Random(7)
    prompts = [f"Write about {words(12, rng)}." for _ in range(options.prompts)]
    alone = [await answer(options.socket_path, prompt, options.tokens) for prompt in prompts]
    beside: list[str] = []
    for start in range(0, len(prompts), options.beside):
        batch = prompts[start : start + options.beside]
        beside += await asyncio.gather(*(answer(options.socket_path, prompt, options.tokens) for prompt in batch))
    num_different = sum(one != other for one, other in zip(alone, beside, strict=True))
    figures = {"prompts": len(prompts), "tokens_each": options.tokens, "different": num_different}
    print_table(["figure", "value"], [[name, value] for name, value in figures.items()])
    print(json.dumps({"run": "batch_equality", **figures}))


if __name__ == "__main__":
    asyncio.run(main())
