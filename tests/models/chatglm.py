"""ChatGLM checkpoints for the tests, in the published layouts, and what to compare.

`trimmed` are the first layers of the golden checkpoints, with what the original computed after each of them. The head
is the identity there, so that logits are the normalised hidden state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from service.models.families import Model
from tests.models.golden import DATA, OPTIONAL
from tests.models.test_decoder import decode, prefill

TOLERANCE = 2e-4  # of float32 logits with a standard deviation near 3; measured: 2.4e-5
FAMILIES = {"chatglm-6b": "chatglm", "chatglm2-6b": "chatglm2", "chatglm3-6b": "chatglm3", "glm-4-9b": "glm4"}
LAYOUTS = ("safetensors", "bin")


def write_weights(folder: Path, tensors: dict[str, Tensor], layout: str, *, num_shards: int = 2) -> None:
    """Shards with their index, named as the published ones."""
    stem, suffix, index = {
        "safetensors": ("model", "safetensors", "model.safetensors.index.json"),
        "bin": ("pytorch_model", "bin", "pytorch_model.bin.index.json"),
    }[layout]
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"{stem}-{shard + 1:05}-of-{num_shards:05}.{suffix}"
        part = {key: tensors[key].clone() for key in list(tensors)[shard::num_shards]}
        weight_map |= dict.fromkeys(part, name)
        if layout == "bin":
            torch.save(part, folder / name)
        else:
            save_file(part, folder / name, metadata={"format": "pt"})
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_config(folder: Path, family: str, **changes: Any) -> dict[str, Any]:
    """The golden checkpoint's config.json and tokenizer, with changes."""
    shutil.copytree(DATA / family / "checkpoint", folder, dirs_exist_ok=True)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return config


@dataclass(frozen=True)
class Trimmed:
    folder: Path
    ids: list[int]
    hidden: list[Tensor]  # [T, E] each: the embedding, then the output of each layer


def trimmed(family: str, folder: Path, num_layers: int, layout: str = "safetensors") -> Trimmed:
    stored = load_file(DATA / family / "trimmed.safetensors")
    config = write_config(folder, family, num_layers=num_layers)
    write_weights(folder, trimmed_tensors(family, stored, config), layout)
    return Trimmed(folder, stored["golden.ids"].tolist(), list(stored["golden.hidden"][: num_layers + 1]))


def trimmed_tensors(family: str, stored: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """A checkpoint's tensors, made of the stored ones: rows of the embedding that are not stored are 0."""
    is_v1 = family == "chatglm-6b"
    vocabulary = config["vocab_size" if is_v1 else "padded_vocab_size"]
    width, num_layers = config["hidden_size"], config["num_layers"]
    embedding = torch.zeros(vocabulary, width, dtype=stored["embedding.rows"].dtype)
    embedding[stored["embedding.ids"]] = stored["embedding.rows"]
    head = torch.eye(vocabulary, width)
    prefix = "transformer." if is_v1 else "transformer.encoder."
    layers = tuple(f"{prefix}layers.{index}." for index in range(num_layers))
    tensors = {name: tensor for name, tensor in stored.items() if name.startswith(layers)}
    tensors[f"{prefix}final_layernorm.weight"] = torch.ones(width)
    if is_v1:
        tensors |= {f"{prefix}final_layernorm.bias": torch.zeros(width), "lm_head.weight": head}
        tensors["transformer.word_embeddings.weight"] = embedding
        tensors["transformer.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(3)  # to be ignored
    else:
        tensors["transformer.embedding.word_embeddings.weight"] = embedding
        tensors |= {"transformer.output_layer.weight": head, "transformer.rotary_pos_emb.inv_freq": torch.ones(3)}
    return tensors


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """float16 matrices that neither vanish nor explode; norms and biases far from what they start as."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        scale = 0.02 if "embedding" in name else 0.3 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        made[name] = (offset + scale * torch.randn(shape, generator=generator)).half()
    return made


def optional(family: str) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """The whole golden data of a family: its folder, golden.json and tensors. Skips where they are not here."""
    folder = OPTIONAL / family
    if not folder.is_dir():
        pytest.skip(f"no optional golden data in {OPTIONAL}: set CHATGLM_GOLDEN")
    return folder, json.loads((folder / "golden.json").read_text()), load_file(folder / "golden.safetensors")


def with_config(source: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """The same checkpoint with another config.json."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logit_error(model: Model, case: dict[str, Any], tensors: dict[str, Tensor], *, is_v1: bool) -> float:
    """The greatest difference of the logits: of the whole prompt's last row, and of rows that were decoded.

    Of v1 only the rows from <sop> on are seen: those before it are computed with the whole prompt.
    """
    ids, wanted = case["input_ids"], tensors[case["logits_key"]].reshape(-1, tensors[case["logits_key"]].shape[-1])
    errors = [prefill(model, 0, 0, ids) - wanted[-1]]
    first = max(len(ids) - len(wanted), case["context_length"] if is_v1 else 0, len(ids) - 20)
    errors.append(prefill(model, 1, 0, ids[: first + 1]) - wanted[first - len(ids)])
    for position in range(first + 1, len(ids)):
        errors.append(decode(model, [1], [ids[position]], [position])[0] - wanted[position - len(ids)])
    return max(float(error.abs().max()) for error in errors)


def greedy(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy ids of prompts of any lengths, each in a slot of its own, decoded in one batch."""
    rows = [[int(prefill(model, slot, 0, ids).argmax())] for slot, ids in enumerate(prompts)]
    slots = list(range(len(prompts)))
    for step in range(count - 1):
        logits = decode(model, slots, [row[-1] for row in rows], [len(ids) + step for ids in prompts])
        for row, best in zip(rows, logits.argmax(-1).tolist(), strict=True):
            row.append(best)
    return rows


def unpadded(ids: list[list[int]], pad_id: int) -> Iterator[list[int]]:
    for row in ids:
        start = next(index for index, id in enumerate(row) if id != pad_id)
        yield row[start:]
