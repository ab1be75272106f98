"""Small checkpoints that answer with texts of the originals: the trimmed golden layers, under a head solved for them.

A reference that shares nothing with the service says in which state each token of prompt and answer leaves the model;
the head is what makes of each of these states the next token of the answer. So the answer comes out whole only where
every state before it was right. Its text is the one to which the original decoded these ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from service.models.families import open_checkpoint
from service.protocol import Message
from tests.models.chatglm import trimmed_tensors, write_config, write_weights
from tests.models.chatglm1_reference import reference
from tests.models.conftest import reference_logits
from tests.models.glm_reference import as_transformers, glm
from tests.models.golden import DATA, Asked, messages_of, read_json

V1 = "chatglm-6b"
NUM_LAYERS = {V1: 6}  # of the others there is one
# Conversation → what is answered. Few tokens: there are no more equations than the states have numbers (v1: 64).
LESSONS = {
    "single_zh": "你好", "single_en": "Hello, world!", "two_turn_zh": "a\tb\t\tc", "whitespace": "𠮷野家 𝒳 龘",
    "emoji_newlines": "x  y   z",
}  # fmt: skip
EDITED = "edited"
EDITED_PROMPT, EDITED_ANSWER = "What is the capital of France?", "你好"
_RIVAL = 300  # an id of plain text that is in none of the answers: what comes out when a state is a little wrong
_MARGIN = 0.005  # of logits that float32 gets right to about 1e-5
_TO_ORIGINAL = 1e-4  # of hidden states after the last layer; measured: 3e-5


def teach(family: str, folder: Path) -> dict[str, Asked]:
    """Write the checkpoint; what it answers, by the conversation's name. `EDITED` is `two_turn_zh` asked otherwise."""
    stored = load_file(DATA / family / "trimmed.safetensors")
    config = write_config(folder, family, num_layers=NUM_LAYERS.get(family, 1))
    data = read_json(DATA / family / "text.json")
    tensors = trimmed_tensors(family, stored, config)
    embedding = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors[embedding] = _filled(tensors[embedding])
    states_of = _reference_states(family, tensors, config)
    _check_reference(states_of, stored, config)
    states, wanted, cases = [], [], {}
    for case, prompt, answer in _lessons(folder, data):
        states.append(states_of([*prompt, *answer[:-1]])[len(prompt) - 1 :])
        wanted += answer
        cases[case.name] = case
    head = _solve(torch.cat(states), wanted, num_rows=len(tensors[embedding]))
    tensors["lm_head.weight" if family == V1 else "transformer.output_layer.weight"] = head
    write_weights(folder, tensors, "safetensors")
    return cases


def _filled(embedding: Tensor) -> Tensor:
    """The rows that are not stored, at random and as large as those that are."""
    missing = embedding.eq(0).all(-1)
    rows = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0)) * embedding[~missing].float().std()
    return torch.where(missing[:, None], rows.to(embedding.dtype), embedding)


def _reference_states(family: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> Callable[[list[int]], Tensor]:
    """Ids → normalised states [T, E]. The head is the identity still: they are the first logits."""
    width = config["hidden_size"]
    if family == V1:
        arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        return lambda ids: torch.from_numpy(reference(arrays, config, ids))[:, :width]
    model = glm(family, config)
    model.load_state_dict(as_transformers(tensors, config))
    return lambda ids: reference_logits(model, ids)[:, :width].double()


def _check_reference(
    states_of: Callable[[list[int]], Tensor], stored: dict[str, Tensor], config: dict[str, Any]
) -> None:
    """It is in the original's state where that is known: at the end of the stored prompt, after the last layer."""
    known, got = stored["golden.hidden"][-1][-1].double(), states_of(stored["golden.ids"].tolist())[-1]
    if "inner_hidden_size" in config:
        known = known - known.mean()
    wanted = known / known.pow(2).mean().add(config["layernorm_epsilon"]).sqrt()
    torch.testing.assert_close(got, wanted, atol=_TO_ORIGINAL, rtol=0)


def _lessons(folder: Path, data: dict[str, Any]) -> list[tuple[Asked, list[int], list[int]]]:
    """(case, prompt's ids, answer's ids with the stop), the original's ids wherever it left them."""
    conversations = {one["name"]: one for one in data["conversations"]}
    texts = {one["text"]: one for one in data["tokenizer_cases"]}
    lessons = []
    for name, text in LESSONS.items():
        ids = [*texts[text]["ids_no_special"], data["stop_ids"][0]]
        case = Asked(name, tuple(messages_of(conversations[name])), 40, texts[text]["decode_no_special"])
        lessons.append((case, conversations[name]["input_ids"], ids))
        if name == "two_turn_zh":
            messages = (*case.messages[:-1], Message("user", EDITED_PROMPT))
            prompt = open_checkpoint(folder, "auto", keeps_quantized=False).tokenizer.encode_chat(messages)
            answer = texts[EDITED_ANSWER]
            edited = replace(case, name=EDITED, messages=messages, text=answer["decode_no_special"])
            lessons.append((edited, prompt, [*answer["ids_no_special"], data["stop_ids"][0]]))
    return lessons


def _solve(states: Tensor, ids: list[int], num_rows: int) -> Tensor:
    """The head whose logit is 1 for the id that follows a state, a little less for `_RIVAL`, and 0 for the others."""
    assert _RIVAL not in ids
    assert len(ids) < states.shape[1], "more answers than the states can tell apart"
    wanted = torch.zeros(len(ids), num_rows, dtype=torch.float64)
    wanted[:, _RIVAL] = 1 - _MARGIN
    wanted[range(len(ids)), ids] = 1.0
    return torch.linalg.lstsq(states, wanted, driver="gelsd").solution.T.float().contiguous()
