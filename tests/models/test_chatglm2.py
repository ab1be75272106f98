"""ChatGLM2, ChatGLM3 and GLM-4 against the originals' golden data, and against transformers on fresh random weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from service.models.chatglm2 import read_config
from service.models.errors import ModelError
from service.models.families import Model
from tests.models.chatglm import (
    FAMILIES,
    LAYOUTS,
    TOLERANCE,
    greedy,
    logit_error,
    optional,
    trimmed,
    unpadded,
    with_config,
    write_config,
    write_weights,
)
from tests.models.conftest import Load, reference_logits
from tests.models.glm_reference import as_published, glm
from tests.models.golden import DATA
from tests.models.test_decoder import decode, prefill

NAMES = [name for name in FAMILIES if name != "chatglm-6b"]
TRIMMED_TOLERANCE = 1e-5  # normalised hidden states; measured: 3e-6
PARITY_TOLERANCE = 5e-5
EXACT = {"quantization": "none", "dtype": "float32"}
IDS = [(7 * i * i + 3 * i) % 1024 for i in range(43)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_layer_gives_what_the_original_gave(name: str, layout: str, tmp_path: Path, load: Load) -> None:
    case = trimmed(name, tmp_path, 1, layout)
    eps = json.loads((tmp_path / "config.json").read_text())["layernorm_epsilon"]
    hidden = case.hidden[1].double()
    wanted = hidden / (hidden**2).mean(-1, keepdim=True).add(eps).sqrt()
    model = load(tmp_path, **EXACT).decoder
    rows = [prefill(model, 0, 0, case.ids[:1])]
    rows += [decode(model, [0], [id], [position])[0] for position, id in enumerate(case.ids) if position]
    got = torch.stack([*rows, prefill(model, 1, 0, case.ids)])[:, : hidden.shape[1]]
    torch.testing.assert_close(got.double(), torch.cat([wanted, wanted[-1:]]), atol=TRIMMED_TOLERANCE, rtol=0)


def subfolders() -> list[tuple[str, str]]:
    return [(name, sub) for name in NAMES for sub in ("checkpoint", "checkpoint-safetensors")][:-1]  # glm-4 has one


@pytest.mark.parametrize(("name", "subfolder"), subfolders())
def test_golden_logits_and_greedy_ids(name: str, subfolder: str, load: Load) -> None:
    folder, data, tensors = optional(name)
    model = load(folder / subfolder, **EXACT, max_context=1600).decoder
    for case in data["logit_cases"]:
        assert logit_error(model, case, tensors, is_v1=False) < TOLERANCE, case["name"]
    for case in data["generations"]:
        assert greedy(model, [case["input_ids"]], len(case["generated_ids"])) == [case["generated_ids"]], case["name"]


@pytest.mark.parametrize("name", NAMES)
def test_golden_variants_of_rotary(name: str, load: Load, tmp_path: Path) -> None:
    folder, data, tensors = optional(name)
    assert data["variants"]
    for variant in data["variants"]:
        changed = with_config(folder / "checkpoint", tmp_path / variant["name"], variant["config_overrides"])
        model = load(changed, **EXACT, max_context=2500).decoder
        for case in variant["cases"]:
            assert logit_error(model, case, tensors, is_v1=False) < TOLERANCE, (variant["name"], case["name"])
            if wanted := case.get("greedy12"):
                assert greedy(model, [case["input_ids"]], len(wanted)) == [wanted]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_original_did_in_a_padded_batch_comes_out_in_slots(name: str, load: Load) -> None:
    folder, data, tensors = optional(name)
    model = load(folder / "checkpoint", **EXACT).decoder
    batch = data["left_padded_batch"]
    pad_id = data["special_ids"].get("<|endoftext|>", 0) if name == "glm-4-9b" else 0
    prompts = list(unpadded(batch["input_ids"], pad_id))
    for slot, (ids, wanted) in enumerate(zip(prompts, tensors[batch["logits_key"]], strict=True)):
        got = prefill(model, slot, 0, ids)
        torch.testing.assert_close(got, wanted.reshape(-1, got.shape[-1])[-1], atol=TOLERANCE, rtol=0)
    stop_ids = set(data["stop_ids"])
    for got_ids, wanted_ids in zip(greedy(model, prompts, 16), batch["generated16"], strict=True):
        count = next((index + 1 for index, id in enumerate(wanted_ids) if id in stop_ids), 16)
        assert got_ids[:count] == wanted_ids[:count]


def make_glm(folder: Path, name: str, seed: int, layout: str, spread: float = 0.15, **changes: Any) -> Any:
    """transformers' GLM with random weights, written to `folder` as a checkpoint of the family."""
    sizes = {
        "hidden_size": 72, "num_layers": 3, "num_attention_heads": 8, "kv_channels": 12, "ffn_hidden_size": 100,
        "multi_query_group_num": 2,
    }  # fmt: skip
    config = write_config(folder, name, **(sizes | changes))
    torch.manual_seed(seed)
    model = glm(name, config, spread)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:  # they start as 1 and 0, which hides what is left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    write_weights(folder, as_published(model.state_dict(), config["num_layers"]), layout)
    return model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("chatglm2-6b", {}),
        ("chatglm2-6b", {"rope_ratio": 16, "multi_query_group_num": 4}),
        ("chatglm3-6b", {"rope_ratio": 50, "kv_channels": 8, "hidden_size": 51, "ffn_hidden_size": 33}),
        ("chatglm3-6b", {"num_attention_heads": 6, "multi_query_group_num": 3, "num_layers": 1}),
        ("glm-4-9b", {"multi_query_group_num": 4}),
        ("glm-4-9b", {"rope_ratio": 1, "multi_query_group_num": 8, "layernorm_epsilon": 1e-3}),
    ],
    ids=str,
)
def test_logits_equal_transformers_on_random_weights(
    name: str, changes: dict[str, Any], tmp_path: Path, load: Load
) -> None:
    layout = LAYOUTS[len(changes) % 2]
    reference = make_glm(tmp_path, name, seed=len(str(changes)), layout=layout, **changes)
    model = load(tmp_path, **EXACT).decoder
    wanted = reference_logits(reference, IDS)
    for length in (1, 2, 17, len(IDS)):
        torch.testing.assert_close(
            prefill(model, 0, 0, IDS[:length]), wanted[length - 1], atol=PARITY_TOLERANCE, rtol=0
        )
    prefill(model, 1, 0, IDS[:5])
    for position in range(5, len(IDS)):
        row = decode(model, [1], [IDS[position]], [position])[0]
        torch.testing.assert_close(row, wanted[position], atol=PARITY_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_uneven_rows_in_one_batch_and_chunks_equal_transformers_on_each(name: str, tmp_path: Path, load: Load) -> None:
    reference = make_glm(tmp_path, name, seed=9, layout="safetensors")
    model = load(tmp_path, **EXACT).decoder
    lengths = [3, 41, 1, 17]
    for slot, length in enumerate(lengths):
        for start in range(0, length, 7):  # in chunks
            prefill(model, slot, start, IDS[start : min(start + 7, length)])
    next_ids = [100, 200, 300, 400]
    together = decode(model, [0, 1, 2, 3], next_ids, lengths)
    for row, (length, id) in enumerate(zip(lengths, next_ids, strict=True)):
        wanted = reference_logits(reference, [*IDS[:length], id])[-1]
        torch.testing.assert_close(together[row], wanted, atol=PARITY_TOLERANCE, rtol=0)


def test_queries_of_the_128k_model_grow_with_the_logarithm_of_the_position() -> None:
    raw = json.loads((DATA / "chatglm3-6b" / "checkpoint" / "config.json").read_text())
    config = read_config(Path("x"), raw | {"seq_length": 131072, "rope_ratio": 500}, "chatglm3")
    scales = config.query_scales(4096)
    assert config.log_scale_from and config.rope_theta == 10000 * 500
    assert scales[:1983].eq(1).all()
    assert scales[3000] == pytest.approx(math.log(3065) / math.log(2048))
    assert not read_config(Path("x"), raw, "chatglm3").log_scale_from


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"add_bias_linear": True}, "add_bias_linear=True"),
        ({"multi_query_group_num": ...}, "lacks 'multi_query_group_num'"),
        ({"num_layers": 2}, r"no tensor 'transformer\.encoder\.layers\.1\.input_layernorm\.weight' \(7 missing\)"),
        ({"num_layers": 0}, r"unknown tensor 'transformer\.encoder\.layers\.0\.input_layernorm\.weight' \(7 such\)"),
    ],
)
def test_configs_that_cannot_be_run_say_why(changes: dict[str, Any], words: str, tmp_path: Path, load: Load) -> None:
    case = trimmed("chatglm3-6b", tmp_path / "chatglm3-6b", 1)
    config = json.loads((case.folder / "config.json").read_text()) | changes
    (case.folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...})
    )
    with pytest.raises(ModelError, match=words):
        load(case.folder, **EXACT)


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, while it is imported
@pytest.mark.parametrize("name", NAMES)
def test_nf4_stays_close(name: str, tmp_path: Path, load: Load) -> None:
    sizes = {"hidden_size": 128, "kv_channels": 16, "ffn_hidden_size": 192, "num_layers": 2}
    reference = make_glm(tmp_path, name, 4, "bin", 0.05, **sizes)
    loaded = load(tmp_path)
    assert loaded.quantization == "nf4"
    model: Model = loaded.decoder
    wanted = reference_logits(reference, IDS)[-1]
    error = (prefill(model, 0, 0, IDS) - wanted).norm() / wanted.norm()
    assert error < 0.4  # 4 bits: about 9 % a matrix, several matrices deep
