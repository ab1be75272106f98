"""What lies in a checkpoint: whole, cut short, a pointer; and how much memory it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from service.models import unasked_context
from service.models.errors import ModelError
from service.models.survey import Survey, survey
from tests.processes import DEFAULT_MODEL

CHATGLM3 = {
    "model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32, "hidden_size": 4096, "kv_channels": 128,
    "multi_query_attention": True, "multi_query_group_num": 2, "seq_length": 8192,
}  # fmt: skip
CHATGLM1 = {
    "model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32, "hidden_size": 4096,
    "max_sequence_length": 2048,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "hidden_size": 576, "max_position_embeddings": 8192,
}  # fmt: skip


def checkpoint(folder: Path, config: dict[str, Any], num_shards: int = 2) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{number}.safetensors" for number in range(num_shards)]
    for name in names:
        save_file({name: np.zeros((4, 8), np.float32)}, folder / name)
    index = {"weight_map": {name: name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("config", "token_bytes", "context"),
    [
        (CHATGLM3, 2 * 28 * 2 * 128 * 2, 8192),
        (CHATGLM1, 2 * 28 * 4096 * 2, 2048),
        (LLAMA, 2 * 30 * 3 * 64 * 2, 8192),
    ],
    ids=["chatglm3", "chatglm", "llama"],
)
def test_each_family_tells_its_kv_size(tmp_path: Path, config: dict[str, Any], token_bytes: int, context: int) -> None:
    found = survey(checkpoint(tmp_path / "m", config))
    assert (found.token_bytes, found.context_limit, found.num_files) == (token_bytes, context, 2)


def test_the_default_model_is_whole_and_small() -> None:
    found = survey(DEFAULT_MODEL)
    assert found.is_gguf and found.context_limit == 8192 and found.token_bytes == 2 * 30 * 3 * 64 * 2
    need = found.memory_bytes(quantization="auto", num_slots=3, max_context=1024, kv_memory=0)
    assert 2 * found.file_bytes < need < 2**30


@pytest.mark.parametrize("damage", ["pointer", "missing", "short", "long", "garbage", "empty"])
def test_damage_is_named_by_its_file(tmp_path: Path, damage: str) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    path = folder / "model-1.safetensors"
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:5e97\nsize 2706249\n"
        path.write_bytes(
            {"pointer": pointer, "short": whole[:-1], "long": whole + b"x", "garbage": b"\xff" * 40, "empty": b""}[
                damage
            ]
        )
    with pytest.raises(ModelError, match=r"model-1\.safetensors"):
        survey(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[1, 2]"])
def test_a_config_that_is_no_object_is_a_model_error(tmp_path: Path, text: str) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        survey(folder)


def test_a_folder_without_weights_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelError, match="no weights"):
        survey(tmp_path)


@given(slots=st.integers(1, 64), context=st.integers(256, 8192), kv_memory=st.integers(1, 2**33))
def test_more_slots_and_context_want_more_memory_up_to_the_bound(slots: int, context: int, kv_memory: int) -> None:
    found = Survey(Path("m"), 7, 12 * 2**30, False, 28672, 8192)

    def need(num_slots: int, max_context: int, kv: int = 0) -> int:
        return found.memory_bytes(quantization="auto", num_slots=num_slots, max_context=max_context, kv_memory=kv)

    assert need(slots, context) - need(slots, 256) == slots * (context - 256) * 28672
    assert need(slots, context, kv_memory) <= need(slots, context)
    assert need(slots, 10**9) == need(slots, 8192)
    assert need(slots, 0) == need(slots, unasked_context(8192, slots, 28672)) <= need(slots, 8192)
    assert found.memory_bytes(quantization="none", num_slots=1, max_context=256, kv_memory=0) > need(1, 256)
