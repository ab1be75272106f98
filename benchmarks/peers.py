"""A peer engine behind pipes, for `benchmarks.compare`: one JSON command a line in, one JSON reply a line out.

    python benchmarks/peers.py llama GGUF THREADS          needs llama-cpp-python in that interpreter
    python benchmarks/peers.py transformers GGUF THREADS   `generate` with bitsandbytes NF4

{"prefill": N, "decode": M} → {"prefill_ms": …, "decode_ms_per_token": …}. Run as a file, because the interpreter may be
another one than the project's.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

Measure = Callable[[list[int], int], tuple[float, float]]


def llama(path: str, threads: int) -> Measure:
    from llama_cpp import Llama

    model = Llama(path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)

    def measure(prompt: list[int], num_tokens: int) -> tuple[float, float]:
        model.reset()
        started_at = time.perf_counter()
        model.eval(prompt)
        prefill_s = time.perf_counter() - started_at
        started_at = time.perf_counter()
        for _ in range(num_tokens):
            model.eval([model.sample(temp=0.0)])
        return prefill_s, time.perf_counter() - started_at

    return measure


def transformers(path: str, threads: int) -> Measure:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.set_num_threads(threads)
    folder, name = Path(path).parent, Path(path).name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    del read.config.quantization_config  # it says "gguf", and such a model cannot be saved
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as place:
        plain.save_pretrained(place)
        model = AutoModelForCausalLM.from_pretrained(
            place, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
        )

    def measure(prompt: list[int], num_tokens: int) -> tuple[float, float]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "pad_token_id": 2, "attention_mask": torch.ones_like(ids)}
        started_at = time.perf_counter()
        model.generate(ids, max_new_tokens=1, **options)
        prefill_s = time.perf_counter() - started_at
        started_at = time.perf_counter()
        model.generate(ids, max_new_tokens=num_tokens + 1, min_new_tokens=num_tokens + 1, **options)
        return prefill_s, time.perf_counter() - started_at - prefill_s

    return measure


def main() -> None:
    measure = {"llama": llama, "transformers": transformers}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    rng = random.Random(1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        prompt = [rng.randrange(1000, 40_000) for _ in range(command["prefill"])]
        prefill_s, decode_s = measure(prompt, command["decode"])
        reply = {"prefill_ms": 1000 * prefill_s, "decode_ms_per_token": 1000 * decode_s / max(1, command["decode"])}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
