"""Each family is recognised, opened with its own tokenizer and defaults, and answers; a wrong folder says what to do.

The answers are those of the originals, through the engine: alone, and of five users at once.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.engine.base import EngineInfo, Failed, Finished, Text
from service.engine.local import LocalEngine
from service.engine.runner import TorchRunner
from service.engine.thread import Loaded
from service.models import LoadedModel
from service.models.errors import ModelError
from service.models.families import FAMILIES as KNOWN
from service.models.families import open_checkpoint
from service.protocol import Chat
from service.settings import FAMILIES as SETTABLE
from tests.models.chatglm import FAMILIES, LAYOUTS, optional, trimmed, with_config
from tests.models.conftest import Load
from tests.models.golden import Asked, asked

EXACT = {"quantization": "none", "dtype": "float32"}


def test_the_settings_name_the_families_there_are() -> None:
    assert SETTABLE == KNOWN


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_a_folder_is_recognised(name: str, family: str, tmp_path: Path, load: Load) -> None:
    case = trimmed(name, tmp_path / "any", 1)
    loaded = load(case.folder, **EXACT)
    assert (loaded.family, loaded.quantization, loaded.device) == (family, "none", "cpu")
    assert loaded.capabilities.causal_prompt == (family != "chatglm")
    expected = {"chatglm": (0.95, 0.7), "chatglm2": (0.8, 0.8), "chatglm3": (0.8, 0.8), "glm4": (0.8, 0.8)}[family]
    assert (loaded.defaults.temperature, loaded.defaults.top_p) == expected


def test_a_generation_config_changes_the_defaults(tmp_path: Path) -> None:
    case = trimmed("glm-4-9b", tmp_path, 1)
    path = case.folder / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_p": None, "top_k": 7, "max_length": 9}))
    defaults = open_checkpoint(case.folder, "auto", keeps_quantized=False).defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.8, 7)
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert open_checkpoint(case.folder, "auto", keeps_quantized=False).defaults.temperature == 0


def test_what_may_be_chatglm2_or_3_must_be_told(tmp_path: Path) -> None:
    case = trimmed("chatglm3-6b", tmp_path / "source", 1)
    nameless = with_config(case.folder, tmp_path / "weights", {"_name_or_path": "", "rope_ratio": 16})
    with pytest.raises(ModelError, match=r"may be ChatGLM2 or ChatGLM3.*--family"):
        open_checkpoint(nameless, "auto", keeps_quantized=False)
    for family in ("chatglm2", "chatglm3"):
        opened = open_checkpoint(nameless, family, keeps_quantized=False)
        assert opened.family == family
    named = with_config(case.folder, tmp_path / "ChatGLM2_6B-32k", {"_name_or_path": ""})
    assert open_checkpoint(named, "auto", keeps_quantized=False).family == "chatglm2"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("chatglm-6b", {"model_type": "mamba"}, "model_type 'mamba': chatglm and llama checkpoints can be run"),
        ("chatglm-6b", {"quantization_bit": 4}, r"quantised already \(quantization_bit 4\): take the full checkpoint"),
        ("chatglm2-6b", {"quantization_bit": 8}, "quantised already"),
        ("chatglm2-6b", {"rmsnorm": False}, "has rmsnorm=False: no chatglm2 checkpoint is known with that"),
        ("glm-4-9b", {"num_layers": 2}, r"has no tensor 'transformer\.encoder\.layers\.1\.input_layernorm\.weight'"),
        ("chatglm-6b", {"num_layers": 2}, r"has no tensor 'transformer\.layers\.1\.attention\.dense\.bias'"),
    ],
)
def test_a_checkpoint_that_cannot_be_run_says_what_to_do(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path, load: Load
) -> None:
    changed = with_config(trimmed(name, tmp_path / "source", 1).folder, tmp_path / name, changes)
    with pytest.raises(ModelError, match=words) as caught:
        load(changed, **EXACT)
    assert "\n" not in str(caught.value)


def test_an_unknown_tensor_is_named(tmp_path: Path, load: Load) -> None:
    case = trimmed("chatglm-6b", tmp_path, 2, "bin")
    config = json.loads((case.folder / "config.json").read_text()) | {"num_layers": 1}
    (case.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"unknown tensor 'transformer\.layers\.1\.attention\.dense\.bias' \(12 such\)"
    ):
        load(case.folder, **EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", ["missing", "pointer", "truncated"])
def test_damaged_shards_say_what_to_do(layout: str, damage: str, tmp_path: Path, load: Load) -> None:
    case = trimmed("chatglm2-6b", tmp_path, 1, layout)
    path = next(case.folder.glob("*-00002-of-*"))
    if damage == "missing":
        path.unlink()
    elif damage == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:5e97\nsize 2706249\n")
    else:
        path.write_bytes(path.read_bytes()[:-200])
    words = {"missing": "lacks the shard", "pointer": "git lfs pull", "truncated": "copy it again"}[damage]
    with pytest.raises(ModelError, match=words):
        load(case.folder, **EXACT)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_named(content: str, tmp_path: Path, load: Load) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json.*copy the checkpoint again"):
        load(tmp_path)


async def answers(model: LoadedModel, chats: list[Chat]) -> list[str]:
    """What a local engine over the model answers to all of them at once."""
    texts, ended = [""] * len(chats), [asyncio.Event() for _ in chats]

    def load() -> Loaded:
        runner = TorchRunner(model)
        info = EngineInfo(
            model.name, model.family, "local", model.quantization, model.device, model.capabilities.context_limit,
            model.capabilities.num_slots,
        )  # fmt: skip
        return Loaded(runner, model.tokenizer, info, model.defaults)

    engine = LocalEngine(load, max_queue=32, step_budget_s=0.1)
    await engine.start()

    def submit(index: int, chat: Chat) -> None:
        def sink(event: object) -> None:
            if isinstance(event, Text):
                texts[index] += event.text
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Finished):
                ended[index].set()

        engine.submit(chat, owner=(0, index), sink=sink)

    for index, chat in enumerate(chats):
        submit(index, chat)
    await asyncio.gather(*(event.wait() for event in ended))
    await engine.close()
    return texts


def as_chat(case: Asked) -> Chat:
    params = {"temperature": 0, "max_new_tokens": case.max_new_tokens, "repetition_penalty": 1}
    return Chat(id=case.name, messages=case.messages, params=params)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_answers_as_the_original_alone_and_five_at_once(name: str, load: Load) -> None:
    folder, data, _ = optional(name)
    model = load(folder / "checkpoint", **EXACT, num_slots=3)
    cases = asked(name, data)
    assert len(cases) >= 3
    alone = [asyncio.run(answers(model, [as_chat(case)]))[0] for case in cases]
    assert alone == [case.text for case in cases]
    five = [replace(as_chat(cases[index % len(cases)]), id=str(index)) for index in range(5)]
    together = asyncio.run(answers(model, five))
    assert together == [alone[index % len(cases)] for index in range(5)]
    assert torch.is_grad_enabled()
