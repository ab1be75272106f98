"""Which family a checkpoint is of, and how each is opened: config, tokenizer, defaults, and the decoder to build.

Any thread, once. The only file that knows all families; what differs between them later is in `Opened`, so nobody else
asks for a family's name. Imports torch: `service.models` imports it late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from service.models import chatglm1, chatglm2, llama
from service.models.attention import KvSlots
from service.models.decoder import Decoder
from service.models.errors import ModelError
from service.models.linear import LinearFormat
from service.models.matrices import Matrices
from service.models.tensor_files import TensorFiles
from service.models.tokenizer_files import read_config as read_tokenizer_config
from service.models.tokenizer_files import read_json
from service.protocol import Message, Params
from service.text import TextDecoder

FAMILIES = ("chatglm", "chatglm2", "chatglm3", "glm4", "llama")

# What the originals' chat() samples with; SmolLM2's model card for Llama. generation_config.json overrides.
_DEFAULTS = {
    "chatglm": Params(temperature=0.95, top_p=0.7),
    "chatglm2": Params(temperature=0.8, top_p=0.8),
    "chatglm3": Params(temperature=0.8, top_p=0.8),
    "glm4": Params(temperature=0.8, top_p=0.8),
    "llama": Params(temperature=0.2, top_p=0.9),
}


class Model(Protocol):
    """A loaded decoder. Rows, slots and positions as in `Decoder`."""

    kv: KvSlots
    device: torch.device

    def decode(self, slots: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> Tensor: ...

    def prefill(
        self, slot: int, start: int, ids: Sequence[int], *, wants_logits: bool, is_replay: bool = False,
        should_abort: Callable[[], bool],
    ) -> Tensor | None: ...  # fmt: skip


class Tokenizer(Protocol):
    @property
    def stop_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...

    def token_bytes(self, id: int, /) -> bytes: ...

    def answer_decoder(self) -> TextDecoder: ...


class Shape(Protocol):
    """What of a config decides how much memory a slot takes."""

    @property
    def context_limit(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def num_matrix_weights(self) -> int: ...


Build = Callable[[LinearFormat, int, int, Callable[[float], None]], Model]


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint whose config is read and whose weights are not. `build` takes (format, slots, context, progress).

    `quantization` is what "auto" comes to on a device.
    """

    family: str
    config: Shape
    causal_prompt: bool
    tokenizer: Tokenizer
    defaults: Params
    quantization: Callable[[torch.device], str]
    build: Build


def open_checkpoint(path: Path, family: str, *, keeps_quantized: bool) -> Opened:
    """`path`: a GGUF file, or a folder with config.json. `family`: "auto", or one of FAMILIES.

    `keeps_quantized`: what is quantised while loading is kept beside the checkpoint, for the next start.

    Raises `ModelError` for a checkpoint that cannot be run, saying what to do.
    """
    if path.is_file():
        return _open_llama(llama.GgufSource(path), path.parent)
    config = read_json(path / "config.json")
    chosen = family if family != "auto" else _recognise(path, config)
    if chosen == "llama":
        return _open_llama(llama.FolderSource(path), path)
    if config.get("quantization_bit"):
        raise ModelError(
            f"{path} is quantised already (quantization_bit {config['quantization_bit']}): take the full checkpoint, "
            "this service quantises it while loading"
        )
    if chosen == "chatglm":
        return _open_chatglm1(path, config, keeps_quantized)
    return _open_chatglm2(path, config, chosen, keeps_quantized)


def _recognise(path: Path, config: dict[str, Any]) -> str:
    """The family by config.json, the tokenizer, and the names that a checkpoint carries."""
    kind = config.get("model_type")
    if kind == "llama":
        return "llama"
    if kind != "chatglm":
        raise ModelError(f"{path} has model_type {kind!r}: chatglm and llama checkpoints can be run")
    if "inner_hidden_size" in config:
        return "chatglm"
    if read_tokenizer_config(path).get("tokenizer_class") == "ChatGLM4Tokenizer":
        return "glm4"
    # NOTE: ChatGLM2-32k and ChatGLM3 have the same keys, yet rope_ratio means different things: only names tell.
    for name in (str(config.get("_name_or_path", "")), path.resolve().name):
        for family in ("chatglm2", "chatglm3"):
            if family in name.lower().replace("-", "").replace("_", ""):
                return family
    raise ModelError(f"{path} may be ChatGLM2 or ChatGLM3, which its files do not tell: say it with --family")


def _read_defaults(folder: Path, family: str) -> Params:
    """Sampling defaults: what generation_config.json says, on top of the family's."""
    path = folder / "generation_config.json"
    given = read_json(path) if path.exists() else {}
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    changes = {name: given[name] for name in names if given.get(name) is not None}
    if given.get("do_sample") is False:
        changes["temperature"] = 0.0
    return replace(_DEFAULTS[family], **changes)


def _open_llama(source: llama.GgufSource | llama.FolderSource, folder: Path) -> Opened:
    from service.models.tokenizer import HubTokenizer

    def build(form: LinearFormat, num_slots: int, context: int, progress: Callable[[float], None]) -> Model:
        weights = llama.load_weights(source, form, progress)
        return Decoder(
            source.config, weights, num_slots=num_slots, context=context, dtype=form.dtype, device=form.device
        )

    return Opened(
        "llama", source.config, True, HubTokenizer(folder), _read_defaults(folder, "llama"), source.quantization, build
    )


def _open_chatglm1(folder: Path, raw: dict[str, Any], keeps_quantized: bool) -> Opened:
    from service.models.chatglm1_tokenizer import ChatGLM1Tokenizer

    config = chatglm1.read_config(folder, raw)

    def build(form: LinearFormat, num_slots: int, context: int, progress: Callable[[float], None]) -> Model:
        matrices = Matrices(TensorFiles(folder), form, keeps_quantized=keeps_quantized)
        return chatglm1.ChatGLM1(matrices, config, num_slots=num_slots, context=context, progress=progress)

    tokenizer = ChatGLM1Tokenizer(folder)
    return Opened("chatglm", config, False, tokenizer, _read_defaults(folder, "chatglm"), lambda device: "nf4", build)


def _open_chatglm2(folder: Path, raw: dict[str, Any], family: str, keeps_quantized: bool) -> Opened:
    from service.models.chatglm23_tokenizer import ChatGLM2Tokenizer, ChatGLM3Tokenizer
    from service.models.glm4_tokenizer import GLM4Tokenizer

    config = chatglm2.read_config(folder, raw, family)

    def build(form: LinearFormat, num_slots: int, context: int, progress: Callable[[float], None]) -> Model:
        matrices = Matrices(TensorFiles(folder), form, keeps_quantized=keeps_quantized)
        weights = chatglm2.load_weights(matrices, config, progress)
        return Decoder(config, weights, num_slots=num_slots, context=context, dtype=form.dtype, device=form.device)

    makers: dict[str, Callable[[Path], Tokenizer]] = {
        "chatglm2": ChatGLM2Tokenizer, "chatglm3": ChatGLM3Tokenizer, "glm4": GLM4Tokenizer,
    }  # fmt: skip
    return Opened(
        family, config, True, makers[family](folder), _read_defaults(folder, family), lambda device: "nf4", build
    )
