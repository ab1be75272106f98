"""What the model tests share: the default model, random checkpoints, and transformers as the reference.

One thread: on a busy machine torch's threads wait for each other far longer than these models compute.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from service.models import DEFAULT_MODEL, LoadedModel, load_model
from tests.models.golden import SOURCES, Golden, golden

DEFAULT_FOLDER = Path(__file__).parents[2] / "model_weights" / DEFAULT_MODEL
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Load = Callable[..., LoadedModel]
MakeFolder = Callable[..., tuple[Path, Any]]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def default_folder() -> Path:
    assert DEFAULT_FOLDER.exists(), "the default model is missing: run `make model`"
    return DEFAULT_FOLDER


@pytest.fixture(scope="session")
def load() -> Load:
    """`load_model` with small defaults."""

    def call(path: Path, **options: Any) -> LoadedModel:
        given: dict[str, Any] = {
            "family": "auto",
            "quantization": "auto",
            "dtype": "auto",
            "device": "cpu",
            "num_slots": 4,
            "max_context": 512,
        }
        return load_model(path, **(given | {"progress": lambda _: None} | options))

    return call


@pytest.fixture(scope="module", params=SOURCES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """What the original of the module's FAMILY made of texts and conversations."""
    return golden(request.module.FAMILY, request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """A random Llama checkpoint in Hugging Face layout, and transformers' model of it."""

    def make(*, seed: int = 0, **sizes: Any) -> tuple[Path, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM

        given: dict[str, Any] = {
            "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128,
            "initializer_range": 0.2, "bos_token_id": 256, "eos_token_id": 257, "tie_word_embeddings": False,
        }  # fmt: skip
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(given | sizes))).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # transformers starts them at 1, which would hide a norm that is left out
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        folder = tmp_path / f"llama-{seed}"
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return folder, model

    return make


def write_tokenizer(folder: Path) -> None:
    """Byte-level, no merges: ids 0-255 are bytes, then two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' logits [T, V] of a whole sequence."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits
