"""ChatGLM-6B and ChatGLM3-6B at full size with random weights, loaded and asked through the daemon at NF4.

    python -m benchmarks.full_size --scratch FOLDER [--families chatglm chatglm3] [--layers N] [--layout bin]
                                   [--tokenizers FOLDER] [--keep]

Writes one checkpoint at a time (13.4 and 12.5 GB, and 3.5 GB of quantised matrices beside it) and removes it again.
Starts `python -m service` three times: quantising; from the quantised cache; and with four slots. Prints a table, then
one JSON line. Memory is the process's: VmHWM when it is ready, VmRSS after its answers. A prompt's time is the
daemon's time to the first token. "share of bandwidth": bytes of matrices a token needs, times tokens a second at batch
1, over what a plain sum over 1 GiB reads. `--tokenizers` has chatglm-6b/ice_text.model and
chatglm2-6b_chatglm3-6b/tokenizer.model; without it the small ones of the tests stand in, which changes no speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve import print_table, words
from service.client import AsyncClient, ConnectionLost
from service.protocol import Done, HealthReport

TEST_DATA = Path(__file__).parent.parent / "tests" / "data"
SHARD_BYTES = 1_500_000_000
POOL = 70_000_000  # random numbers; every tensor is a stretch of them, from a random place
DECODE_TOKENS = 32
PROMPTS = (128, 512)
HIDDEN, HEADS, LAYERS = 4096, 32, 28


@dataclass(frozen=True)
class Family:
    name: str  # of the folder under tests/data
    tokenizer: tuple[str, str]  # the folder under --tokenizers, and the file
    vocabulary: int
    inner: int
    sizes: dict[str, Any]  # of config.json
    ids: dict[str, int]  # that go with the published tokenizer
    ends: tuple[str, str, str]  # names of embedding, head and final norm
    layer: str

    def shapes(self, layers: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint."""
        is_v1 = self.name == "chatglm-6b"
        attention, rows = ("attention", 3 * HIDDEN) if is_v1 else ("self_attention", HIDDEN + 2 * 2 * 128)
        matrices = {
            f"{attention}.query_key_value": (rows, HIDDEN), f"{attention}.dense": (HIDDEN, HIDDEN),
            "mlp.dense_h_to_4h": (self.inner if is_v1 else 2 * self.inner, HIDDEN),
            "mlp.dense_4h_to_h": (HIDDEN, self.inner),
        }  # fmt: skip
        embedding, head, final_norm = self.ends
        shapes: dict[str, tuple[int, ...]] = {f"{embedding}.weight": (self.vocabulary, HIDDEN)}
        for index in range(layers):
            prefix = self.layer.format(index)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes |= {f"{prefix}{norm}.{part}": (HIDDEN,) for part in ("weight", "bias")[: 1 + is_v1]}
            for name, shape in matrices.items():
                shapes[f"{prefix}{name}.weight"] = shape
                if is_v1 or name.endswith("query_key_value"):
                    shapes[f"{prefix}{name}.bias"] = shape[:1]
        shapes |= {f"{final_norm}.{part}": (HIDDEN,) for part in ("weight", "bias")[: 1 + is_v1]}
        return shapes | {f"{head}.weight": (self.vocabulary, HIDDEN)}

    def matrix_bytes(self, layers: int) -> float:
        """What a token reads in NF4: all matrices but the embedding."""
        shapes = self.shapes(layers).items()
        weights = sum(shape[0] * shape[1] for name, shape in shapes if len(shape) == 2 and self.ends[0] not in name)
        return weights * 4.25 / 8


FAMILIES = {
    "chatglm": Family(
        "chatglm-6b", ("chatglm-6b", "ice_text.model"), 130528, 16384,
        {"hidden_size": HIDDEN, "inner_hidden_size": 16384, "num_attention_heads": HEADS, "vocab_size": 130528},
        {"bos_token_id": 130004, "eos_token_id": 130005, "mask_token_id": 130000, "gmask_token_id": 130001},
        ("transformer.word_embeddings", "lm_head", "transformer.final_layernorm"), "transformer.layers.{}.",
    ),
    "chatglm3": Family(
        "chatglm3-6b", ("chatglm2-6b_chatglm3-6b", "tokenizer.model"), 65024, 13696,
        {"hidden_size": HIDDEN, "ffn_hidden_size": 13696, "num_attention_heads": HEADS, "kv_channels": 128,
         "multi_query_group_num": 2, "padded_vocab_size": 65024}, {},
        ("transformer.embedding.word_embeddings", "transformer.output_layer", "transformer.encoder.final_layernorm"),
        "transformer.encoder.layers.{}.",
    ),
}  # fmt: skip


def write_checkpoint(family: Family, folder: Path, options: argparse.Namespace) -> None:
    """Random weights in shards, with config and tokenizer."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(TEST_DATA / family.name / "checkpoint", folder, dirs_exist_ok=True)
    changes = dict(family.sizes)
    if options.tokenizers:
        shutil.copy(Path(options.tokenizers).joinpath(*family.tokenizer), folder)
        changes |= family.ids
    config = json.loads((folder / "config.json").read_text()) | changes | {"num_layers": options.layers}
    (folder / "config.json").write_text(json.dumps(config))

    rng = random.Random(0)
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02).half()

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(shape).numel()
        made = torch.empty(count, dtype=torch.float16)
        for start in range(0, count, POOL // 2):
            size, offset = min(POOL // 2, count - start), rng.randrange(POOL // 2)
            made[start : start + size] = pool[offset : offset + size]
        return made.view(shape)

    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    suffix, stem = ("bin", "pytorch_model") if options.layout == "bin" else ("safetensors", "model")

    def flush() -> None:
        name = f"{stem}-{len(set(weight_map.values())) + 1:05}.{suffix}"
        torch.save(shard, folder / name) if suffix == "bin" else save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in family.shapes(options.layers).items():
        is_norm = "norm" in name and name.endswith("weight")
        shard[name] = torch.ones(shape, dtype=torch.float16) if is_norm else draw(shape)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def measure_bandwidth() -> float:
    """Bytes a second of a sum over 1 GiB, the best of some, in a process of its own."""
    code = (
        "import time, torch; d = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "x = torch.ones(2**28, device=d); best = 9e9\n"
        "for _ in range(10):\n"
        "    t = time.perf_counter(); float(x.sum()); best = min(best, time.perf_counter() - t)\n"
        "print(x.nbytes / best)"
    )
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


class Daemon:
    """`python -m service` over the checkpoint, as a context manager; ready when entered."""

    def __init__(self, folder: Path, slots: int, device: str) -> None:
        self._socket = folder.parent / "full-size.sock"
        self._log = folder.parent / "full-size.log"
        self._command = [
            sys.executable, "-m", "service", "--socket-path", str(self._socket), "--model", str(folder),
            "--max-batch-size", str(slots), "--max-context", "1024", "--quantization", "nf4", "--device", device,
        ]  # fmt: skip
        self.load_s = 0.0

    async def __aenter__(self) -> Daemon:
        started_at = time.perf_counter()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CHATGLM_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        while (report := await self._health()) is None or report.phase != "ready":
            if self._process.poll() is not None:
                raise SystemExit(f"the daemon ended with {self._process.returncode}: see {self._log}")
            await asyncio.sleep(0.2)
        self.load_s = time.perf_counter() - started_at
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.wait)

    def memory_gb(self, what: str) -> float:
        """VmHWM or VmRSS."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(text.split(f"{what}:")[1].split()[0]) * 1024 / 1e9

    async def _health(self) -> HealthReport | None:
        try:
            async with await AsyncClient.connect(str(self._socket)) as client:
                return await client.health()
        except (ConnectionLost, OSError):
            return None

    async def ask(self, text: str, tokens: int) -> Done:
        async with await AsyncClient.connect(str(self._socket)) as client:
            async for event in client.chat(text, temperature=0.0, max_new_tokens=tokens, deadline_s=3600):
                if isinstance(event, Done):
                    return event
        raise SystemExit("an answer did not end")

    async def prompt_of(self, tokens: int, rng: random.Random) -> str:
        """A text whose prompt has about so many tokens, whatever the vocabulary."""
        count = (await self.ask(words(40, rng), 1)).usage.prompt_tokens
        return words(max(1, tokens * 40 // count), rng)


def decode_ms(done: Done) -> float:
    return (done.timing.total_ms - done.timing.ttft_ms) / max(1, done.usage.completion_tokens - 1)


async def measure(family: Family, folder: Path, options: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    rng = random.Random()
    figures: dict[str, Any] = {}
    async with Daemon(folder, 1, options.device) as daemon:
        figures["first start, s"] = daemon.load_s
        figures["peak memory of the first start, GB"] = daemon.memory_gb("VmHWM")
    async with Daemon(folder, 1, options.device) as daemon:
        figures["second start, s"] = daemon.load_s
        figures["peak memory of the second start, GB"] = daemon.memory_gb("VmHWM")
        for tokens in PROMPTS:
            text = await daemon.prompt_of(tokens, rng)
            done = await daemon.ask(text, 1)
            figures[f"prefill of {done.usage.prompt_tokens} tokens, ms"] = done.timing.ttft_ms
        done = await daemon.ask(words(20, rng), DECODE_TOKENS)
        figures["decode at batch 1, ms a token"] = decode_ms(done)
        figures["share of bandwidth"] = family.matrix_bytes(options.layers) * 1000 / decode_ms(done) / bandwidth
        figures["steady memory, GB"] = daemon.memory_gb("VmRSS")
    async with Daemon(folder, 4, options.device) as daemon:
        texts = [words(20, rng) for _ in range(4)]
        answers = await asyncio.gather(*(daemon.ask(text, DECODE_TOKENS) for text in texts))
        # The last to begin ran beside all others, but for the ends of those.
        figures["decode at batch 4, ms a step"] = min(decode_ms(one) for one in answers)
        figures["steady memory with 4 slots, GB"] = daemon.memory_gb("VmRSS")
    return {name: round(value, 2) for name, value in figures.items()}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--layout", choices=("bin", "safetensors"), default="bin")
    parser.add_argument("--tokenizers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints; those that are there are used")
    options = parser.parse_args()
    bandwidth = measure_bandwidth()
    result: dict[str, Any] = {"layers": options.layers, "bandwidth, GB/s": round(bandwidth / 1e9, 1)}
    for name in options.families:
        folder = options.scratch / f"{FAMILIES[name].name}-random"
        if not (folder / "complete").exists():
            write_checkpoint(FAMILIES[name], folder, options)
            (folder / "complete").touch()
        result[name] = await measure(FAMILIES[name], folder, options, bandwidth)
        print_table([name, "value"], [[what, value] for what, value in result[name].items()])
        if not options.keep:
            shutil.rmtree(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
