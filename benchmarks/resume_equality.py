"""How often an answer that another daemon goes on with is the one that would have come undisturbed. No socket.

    python -m benchmarks.resume_equality [--model PATH] [--quantization Q] [--dtype D] [--cuts 40] [--tokens 80]

Each answer is generated whole, then cut at a random place and gone on with as the engine does: the prompt is computed,
then what was generated, as decoding did, and the sampler has its saved state. Prints a table, then one JSON line: of
all cuts, how many texts are the same to the end, and how many for ten tokens after the cut; greedy, and seeded at 0.8.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.serve import print_table, words
from benchmarks.step import add_model_options, load
from service.models.threads import use_threads
from service.protocol import Message, Params
from service.scheduler import REPLAY_CHUNK

if TYPE_CHECKING:
    from service.engine.runner import TorchRunner

SOON = 10


def go_on(runner: TorchRunner, prompt: list[int], generated: list[int], num_tokens: int) -> list[int]:
    """The next tokens; the slot's sampler is open. End marks count as any other token."""
    ids = prompt + generated
    cuts = [0, *range(len(prompt), len(ids), REPLAY_CHUNK), len(ids)]
    for start, end in pairwise(dict.fromkeys(cuts)):
        id = runner.prefill(
            0, start, ids[start:end], is_last=end == len(ids), is_replay=start >= len(prompt),
            should_abort=lambda: False,
        )  # fmt: skip
    answer = [id]
    while len(answer) < num_tokens:
        answer += runner.decode([0], [answer[-1] or 0], [len(ids) + len(answer) - 1])
    return [id or 0 for id in answer]


def first_difference(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--cuts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=80)
    options = parser.parse_args()
    use_threads(0)
    from service.engine.runner import TorchRunner  # imports torch: after use_threads

    model = load(options, num_slots=1)
    runner = TorchRunner(model)
    rng = random.Random(11)
    result: dict[str, object] = {"model": model.name, "quantization": model.quantization, "cuts": options.cuts}
    for name, params in (("greedy", Params(temperature=0)), ("seeded", Params(temperature=0.8, top_p=0.8, seed=5))):
        num_same = num_same_soon = 0
        for _ in range(options.cuts):
            prompt = model.tokenizer.encode_chat([Message("user", f"Write about {words(12, rng)}.")])
            runner.open(0, params, prompt)
            whole = go_on(runner, prompt, [], options.tokens)
            cut = rng.randrange(1, options.tokens)
            runner.open(0, params, prompt)
            go_on(runner, prompt, [], cut)
            saved = runner.save_sampler(0)
            runner.open(0, params, prompt + whole[:cut], saved)
            same = first_difference(go_on(runner, prompt, whole[:cut], options.tokens - cut), whole[cut:])
            num_same += same == options.tokens - cut
            num_same_soon += same >= min(SOON, options.tokens - cut)
        result |= {f"{name}, same to the end": num_same, f"{name}, same for {SOON} tokens": num_same_soon}
    print_table(["figure", "value"], [[name, value] for name, value in result.items()])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
