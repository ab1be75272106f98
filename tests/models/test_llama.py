"""The default model against transformers on the same dequantised weights, and checkpoints that cannot be run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from service.models import ModelError
from service.protocol import Message
from tests.models.conftest import Load, MakeFolder, reference_logits
from tests.models.test_decoder import IDS, TOLERANCE, decode, prefill

QUESTION = [Message("user", "Why is the sky blue? Give 3 reasons.")]
ANSWER = "The sky is blue because of Rayleigh scattering."


@pytest.fixture(scope="module")
def reference(default_folder: Path) -> Any:
    """transformers' Llama with the weights as the `gguf` package reads them: none of our loading code."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, max_position_embeddings=8192, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {}
    for tensor in gguf.GGUFReader(next(default_folder.glob("*.gguf"))).tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        *block, kind = tensor.name.removesuffix(".weight").split(".")
        if kind in ("attn_q", "attn_k"):  # llama.cpp's converter swapped the halves and the pairs of each head
            weight = weight.view(-1, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
        where = f"layers.{block[1]}." if block else ""
        state[f"model.{where}{names[kind]}.weight"] = weight
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    rope = model.model.rotary_emb
    model.model.rotary_emb = type(rope)(config)  # its buffers are no weights, so they are still on "meta"
    return model.eval()


@pytest.fixture(scope="module")
def ids(default_folder: Path, load: Load) -> list[int]:
    tokenizer = load(default_folder, quantization="none").tokenizer
    return tokenizer.encode_chat(QUESTION) + tokenizer.encode(ANSWER)


@pytest.mark.parametrize(
    ("quantization", "dtype", "max_error", "max_divergence"),
    [
        # Logits have a standard deviation of 7.7. float32: only the order of additions differs (measured 8e-5), also
        # for the packed kernel, which therefore holds the file's weights exactly (measured 1.1e-4).
        ("none", "float32", 1e-3, 1e-6),
        ("auto", "float32", 1e-3, 1e-6),
        # bf16 has 8 bits: 30 layers of roundings of 0.2 % each. Dense bf16 measures 0.61 and 0.0023 nats, the packed
        # kernel 0.78 and 0.0025.
        ("none", "bfloat16", 2.5, 0.02),
        ("auto", "bfloat16", 2.5, 0.02),
    ],
)
def test_the_default_model_gives_the_logits_of_transformers(
    quantization: str, dtype: str, max_error: float, max_divergence: float,
    reference: Any, ids: list[int], default_folder: Path, load: Load,
) -> None:  # fmt: skip
    decoder = load(default_folder, quantization=quantization, dtype=dtype).decoder
    wanted = reference_logits(reference, ids)[-8:]
    prefill(decoder, 0, 0, ids[:-8])
    first = len(ids) - 8
    got = torch.cat([decode(decoder, [0], [id], [first + i]) for i, id in enumerate(ids[-8:])])
    assert (got - wanted).abs().max() < max_error
    assert torch.nn.functional.kl_div(got.log_softmax(-1), wanted.log_softmax(-1), log_target=True,
                                      reduction="none").sum(-1).max() < max_divergence  # fmt: skip


def test_the_default_model_knows_the_capital_of_france(default_folder: Path, load: Load) -> None:
    model = load(default_folder)
    assert (model.family, model.quantization, model.device) == ("llama", "int4", "cpu")
    # It begins with a near tie in float32 ("The" and "L'" are 0.08 apart): rounding must stay well below that.
    ids = model.tokenizer.encode_chat([Message("user", "What is the capital of France?")])
    row, answer = prefill(model.decoder, 1, 0, ids), b""
    for position in range(len(ids), len(ids) + 20):
        if (best := int(row.argmax())) in model.tokenizer.stop_ids:
            break
        answer += model.tokenizer.token_bytes(best)
        row = decode(model.decoder, [1], [best], [position])[0]
    assert answer.decode() == "The capital of France is Paris."


@pytest.mark.parametrize("quantization", ["int4", "nf4"])
@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, while it is imported
def test_a_dense_checkpoint_can_be_quantised_and_stays_close(
    quantization: str, make_folder: MakeFolder, load: Load
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 320}
    folder, reference = make_folder(**sizes, initializer_range=0.05)
    decoder = load(folder, quantization=quantization).decoder
    wanted = reference_logits(reference, IDS)[-1]
    error = (prefill(decoder, 0, 0, IDS) - wanted).norm() / wanted.norm()
    assert error < 0.4  # 4 bits: about 9 % a matrix, several matrices deep


def test_sharded_safetensors_load_like_one_file(make_folder: MakeFolder, load: Load) -> None:
    folder, reference = make_folder()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    reference.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    decoder = load(folder, dtype="float32").decoder
    torch.testing.assert_close(
        prefill(decoder, 0, 0, IDS), reference_logits(reference, IDS)[-1], atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "can be run"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type 'yarn'"),
        ({"attention_bias": True}, "biases"),
        ({"rms_norm_eps": ...}, "lacks 'rms_norm_eps'"),
        ({"num_hidden_layers": 9}, "no tensor 'model.layers.3.input_layernorm.weight'"),
    ],
)
def test_a_folder_that_cannot_be_run_is_refused_in_one_sentence(
    change: dict[str, Any], words: str, make_folder: MakeFolder, load: Load
) -> None:
    folder, _ = make_folder()
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_a_truncated_safetensors_file_is_refused(make_folder: MakeFolder, load: Load) -> None:
    folder, _ = make_folder()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or damaged"):
        load(folder)


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.005, 0.03, 0.5, 0.999])
def test_a_truncated_gguf_file_is_refused(share: float, default_folder: Path, load: Load, tmp_path: Path) -> None:
    source = next(default_folder.glob("*.gguf"))
    with source.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(int(source.stat().st_size * share)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_folder / name, tmp_path)
    with pytest.raises(ModelError, match=r"truncated|cannot read"):
        load(tmp_path / "cut.gguf")
