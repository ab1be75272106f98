"""Engine-only speed: decode steps at batch 1, 2, 4, 8 and prefill of 64 to 1,500 tokens. No socket, no text.

    python -m benchmarks.step [--model PATH] [--threads N] [--repeat N]

Prints a table, then one JSON line. Times are medians in ms; "spread" is (p90 - p10) / median. Decode rows sit at
position 200. Other programs on the machine count: compare ratios inside one run only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from service.models import LoadedModel, choose_model, load_model
from service.models.threads import use_threads
from service.protocol import Params

BATCHES = (1, 2, 4, 8)
PROMPTS = (64, 256, 512, 1500)
POSITION = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=40)
    options = parser.parse_args()
    threads = use_threads(options.threads)
    from service.engine.runner import TorchRunner  # imports torch: after use_threads

    started = time.perf_counter()
    model = load(options, num_slots=max(BATCHES))
    runner = TorchRunner(model)
    runner.warm_up()
    result: dict[str, object] = {
        "model": model.name, "quantization": model.quantization, "device": model.device, "threads": threads,
        "load_s": round(time.perf_counter() - started, 2),
    }  # fmt: skip
    for name, params in (("greedy", Params(temperature=0)), ("sampled", Params(temperature=0.8, top_p=0.8, seed=1))):
        for slot in range(max(BATCHES)):
            runner.open(slot, params, [])
            runner.prefill(slot, 0, [7] * POSITION, is_last=False, should_abort=lambda: False)
        for rows in BATCHES:
            step = partial(runner.decode, range(rows), [7] * rows, [POSITION] * rows)
            result[f"decode_{name}_{rows}"] = show(f"decode, {name}, batch {rows}", step, options.repeat)
    for tokens in PROMPTS:
        prompt = partial(runner.prefill, 0, 0, [7] * tokens, is_last=True, should_abort=lambda: False)
        result[f"prefill_{tokens}"] = show(f"prefill of {tokens}", prompt, max(options.repeat // 8, 3))
    print(json.dumps(result))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="auto")
    parser.add_argument("--weights-dir", type=Path, default=Path("model_weights"))
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--dtype", default="auto")


def load(options: argparse.Namespace, *, num_slots: int) -> LoadedModel:
    """The model of `add_model_options`, with slots of 2,048 tokens."""
    return load_model(
        choose_model(options.model, options.weights_dir), family="auto", quantization=options.quantization,
        dtype=options.dtype, device="auto", num_slots=num_slots, max_context=2048, progress=lambda _: None,
    )  # fmt: skip


def show(name: str, run: Callable[[], object], repeat: int) -> float:
    """Run and print one line; returns the median in ms."""
    times = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - started))
    tenths = statistics.quantiles(times[1:], n=10)
    median = statistics.median(times[1:])
    print(f"{name:<28}{median:>9.1f} ms   spread {(tenths[-1] - tenths[0]) / median:>5.0%}", flush=True)
    return round(median, 2)


if __name__ == "__main__":
    main()
