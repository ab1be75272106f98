"""ChatGLM-6B against the original's golden data, against a plain reference of its own, and against mutations of itself.

Each mutation is one of the ways in which other implementations went wrong.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from service.models import chatglm1
from service.models.errors import ModelError
from service.models.families import Model
from service.models.linear import LinearFormat
from service.models.matrices import Matrices
from service.models.tensor_files import TensorFiles
from tests.models.chatglm import (
    LAYOUTS,
    TOLERANCE,
    greedy,
    logit_error,
    optional,
    trimmed,
    unpadded,
    with_config,
)
from tests.models.chatglm1_reference import GMASK, MASK, SOP, reference, write_random
from tests.models.conftest import Load
from tests.models.test_decoder import decode, prefill

FAMILY = "chatglm-6b"
NUM_TRIMMED = 6
FLOAT32 = LinearFormat("none", torch.float32, torch.device("cpu"), keeps_dense=False)
# Normalised hidden states and logits of order 1; the wrong epsilon, the least of the mutations, makes 5e-5.
TRIMMED_TOLERANCE = 5e-6
REFERENCE_TOLERANCE = 1e-4
PROMPTS = [
    [5, 58, GMASK, SOP],
    [161, 236, 11, 5, 19, 14, 76, 26, 135, 44, 79, 47, 23, 165, 22, GMASK, SOP],
    [(7 * i * i + 3 * i) % 480 for i in range(57)] + [GMASK, SOP],
    [9, 9, 12, MASK, 31, 7, SOP, 20, 21],
    [GMASK, SOP],
]


def build(folder: Path, module: ModuleType = chatglm1) -> Model:
    config = module.read_config(folder, json.loads((folder / "config.json").read_text()))
    matrices = Matrices(TensorFiles(folder), FLOAT32)
    with torch.inference_mode():
        model: Model = module.ChatGLM1(matrices, config, num_slots=5, context=700, progress=lambda _: None)
    return model


def trimmed_error(folder: Path, num_layers: int, module: ModuleType = chatglm1, layout: str = "safetensors") -> float:
    """How far the state of <sop> is from the original's after so many layers."""
    case = trimmed(FAMILY, folder, num_layers, layout)
    hidden = case.hidden[-1][-1]
    wanted = F.layer_norm(hidden.double(), hidden.shape, eps=1e-5)
    got = prefill(build(folder, module), 0, 0, case.ids)[: len(hidden)]
    return float((got - wanted).abs().max())


@pytest.mark.parametrize("num_layers", range(1, NUM_TRIMMED + 1))
def test_every_layer_gives_what_the_original_gave(num_layers: int, tmp_path: Path) -> None:
    assert trimmed_error(tmp_path, num_layers) < TRIMMED_TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_give_what_the_original_gave(layout: str, tmp_path: Path) -> None:
    assert trimmed_error(tmp_path, NUM_TRIMMED, layout=layout) < TRIMMED_TOLERANCE


def reference_error(
    folder: Path, ids: list[int], seed: int, sizes: dict[str, int], module: ModuleType = chatglm1
) -> float:
    """The whole prompt's last row, and each row from <sop> on as it is decoded."""
    weights, config = write_random(folder, seed, **sizes)
    wanted, model = torch.from_numpy(reference(weights, config, ids)), build(folder, module)
    first = ids.index(SOP)
    errors = [prefill(model, 0, 0, ids) - wanted[-1], prefill(model, 1, 0, ids[: first + 1]) - wanted[first]]
    for position in range(first + 1, len(ids)):
        errors.append(decode(model, [1], [ids[position]], [position])[0] - wanted[position])
    return max(float(error.abs().max()) for error in errors)


SIZES = {"num_heads": 2, "head_dim": 16, "num_layers": 2, "inner": 40}


@pytest.mark.parametrize("ids", PROMPTS, ids=len)
def test_logits_equal_a_plain_reference_on_random_weights(ids: list[int], tmp_path: Path) -> None:
    assert reference_error(tmp_path, ids, seed=len(ids), sizes=SIZES) < REFERENCE_TOLERANCE


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_heads": 1, "head_dim": 8, "num_layers": 1, "inner": 7},
        {"num_heads": 3, "head_dim": 12, "num_layers": 3, "inner": 31},
        {"num_heads": 5, "head_dim": 4, "num_layers": 4, "inner": 64},
    ],
    ids=str,
)
def test_logits_equal_a_plain_reference_for_any_shape(sizes: dict[str, int], tmp_path: Path) -> None:
    ids = [*PROMPTS[1], 40, 41, 42, 7, 7]  # with five tokens of an answer
    assert reference_error(tmp_path, ids, seed=3, sizes=sizes) < REFERENCE_TOLERANCE


# What others did wrong -> what to replace in the source for it. The names are those of the golden sensitivity.json.
_PAIRED = "paired = torch.cat([half, half + 2 * quarter])"
MUTATIONS: dict[str, list[tuple[str, str]]] = {
    "alpha1": [("ALPHA = math.sqrt(2 * 28)", "ALPHA = 1.0")],
    "alpha_half": [("ALPHA = math.sqrt(2 * 28)", "ALPHA = math.sqrt(28)")],
    "resid_preln": [
        (".add_(normed, alpha=ALPHA)\n            normed =", ".add_(hidden, alpha=ALPHA)\n            normed =")
    ],
    "causal": [("num_mutual=prefix if", "num_mutual=0 if")],
    "ctx_incl_sop": [("num_mutual=prefix if", "num_mutual=prefix + 1 if")],
    "pos_continue": [("else (mask, index - sop + 1)", "else (index, index - sop + 1)")],
    "block_from_0": [("else (mask, index - sop + 1)", "else (mask, index - sop)")],
    "no_block": [("else (mask, index - sop + 1)", "else (mask, 0)")],
    "swap2d": [("self._turns[streams]", "self._turns[streams.flip(1)]")],
    "1d_full": [
        ("rotary_dim = head_dim // 2", "rotary_dim = head_dim"),
        ("self._turns[streams].flatten(1)", "self._turns[streams[:, 0]]"),
        (_PAIRED, "paired = torch.arange(head_dim).view(2, 2 * quarter).T.reshape(-1)"),
    ],
    "interleaved": [(_PAIRED, "paired = torch.arange(head_dim)")],
    "qkv_blocks": [
        ("[:, None] * 3 * head_dim", "[:, None] * head_dim"),
        ("starts + head_dim + paired", "starts + num_heads * head_dim + paired"),
        ("starts + 2 * head_dim +", "starts + 2 * num_heads * head_dim +"),
    ],
    "scale_layer": [
        (
            "self._heads(layer, normed, rotations)",
            "self._heads(layer, normed, torch.cat([rotations[:, : self.config.num_heads] / (index + 1), "
            "rotations[:, self.config.num_heads :]], 1))",
        )
    ],
    "gelu_erf": [('approximate="tanh"', 'approximate="none"')],
    "inv_freq_fp32": [(".half().float()", "")],
    "eps1e-6": [('config["layernorm_epsilon"]', "1e-6")],
}


@pytest.fixture
def mutant(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    source = inspect.getsource(chatglm1)
    for old, new in MUTATIONS[request.param]:
        assert source.count(old) == 1, f"{old!r} is not what the source says any more"
        source = source.replace(old, new)
    path = tmp_path / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutant", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mutant", MUTATIONS, indirect=True)
def test_the_comparisons_tell_each_known_mistake(mutant: ModuleType, tmp_path: Path) -> None:
    ids = [*PROMPTS[2], 40, 41]
    in_reference = reference_error(tmp_path / "random", ids, 1, SIZES, mutant)
    in_trimmed = trimmed_error(tmp_path / "trimmed", NUM_TRIMMED, mutant)
    assert in_reference > 2 * REFERENCE_TOLERANCE
    assert in_trimmed > 2 * TRIMMED_TOLERANCE


@pytest.mark.parametrize("mutant", MUTATIONS, indirect=True)
def test_the_golden_logits_tell_each_known_mistake(mutant: ModuleType) -> None:
    folder, data, tensors = optional(FAMILY)
    model = build(folder / "checkpoint", mutant)
    cases = [case for case in data["logit_cases"] if case["name"] in ("single_en", "gmask_with_generated")]
    for case in cases:
        assert logit_error(model, case, tensors, is_v1=True) > 1.5 * TOLERANCE


def test_every_known_mistake_is_tried() -> None:
    folder, _, _ = optional(FAMILY)
    known = json.loads((folder / "sensitivity.json").read_text())["max_abs_logit_diff"]
    assert set(MUTATIONS) == set(known)


@pytest.mark.parametrize("subfolder", ["checkpoint", "checkpoint-safetensors"])
def test_golden_logits_and_greedy_ids(subfolder: str, load: Load) -> None:
    folder, data, tensors = optional(FAMILY)
    model = load(folder / subfolder, quantization="none", dtype="float32", max_context=700).decoder
    for case in data["logit_cases"]:
        assert logit_error(model, case, tensors, is_v1=True) < TOLERANCE, case["name"]
    for case in data["generations"]:
        ids = greedy(model, [case["input_ids"]], len(case["generated_ids"]))
        assert ids == [case["generated_ids"]], case["name"]


def test_what_the_original_did_in_a_padded_batch_comes_out_in_slots(load: Load) -> None:
    folder, data, tensors = optional(FAMILY)
    model = load(folder / "checkpoint", quantization="none", dtype="float32").decoder
    batch = data["left_padded_batch"]
    prompts = list(unpadded(batch["input_ids"], 3))
    for slot, (ids, wanted) in enumerate(zip(prompts, tensors[batch["logits_key"]], strict=True)):
        got = prefill(model, slot, 0, ids)
        torch.testing.assert_close(got, wanted.reshape(-1, got.shape[-1])[-1], atol=TOLERANCE, rtol=0)
    for got_ids, wanted_ids in zip(greedy(model, prompts, 16), batch["generated16"], strict=True):
        count = wanted_ids.index(489) + 1 if 489 in wanted_ids else 16  # <eop>, and the original pads behind it
        assert got_ids[:count] == wanted_ids[:count]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    write_random(tmp_path, 0, **SIZES)
    return build(tmp_path)


def test_prompts_of_different_length_in_one_batch_equal_each_alone(model: Model) -> None:
    prompts = [*PROMPTS[:3], PROMPTS[4]]
    together = greedy(model, prompts, 12)
    assert together == [greedy(model, [ids], 12)[0] for ids in prompts]


def test_the_same_whole_prompt_again_needs_only_its_last_token(model: Model) -> None:
    ids = PROMPTS[2]
    wanted = greedy(model, [ids], 12)[0]
    row = prefill(model, 0, len(ids) - 1, ids[-1:])  # its KV is there, behind it that of the answer
    again = [int(row.argmax())]
    while len(again) < 12:
        again.append(int(decode(model, [0], [again[-1]], [len(ids) + len(again) - 1])[0].argmax()))
    assert again == wanted


def test_a_prompt_computed_in_chunks_would_be_another_prompt(model: Model) -> None:
    ids = PROMPTS[2]
    whole = prefill(model, 0, 0, ids)
    prefill(model, 1, 0, ids[:20])
    assert (prefill(model, 1, 20, ids[20:]) - whole).abs().max() > 0.01  # so the scheduler is told: causal_prompt=False


def test_rows_never_see_what_another_slot_or_a_later_position_holds(model: Model) -> None:
    wanted = prefill(model, 0, 0, PROMPTS[1])
    with torch.inference_mode():
        for layer in model.kv.layers:
            layer[1:] = float("nan")
            layer[0, :, :, len(PROMPTS[1]) :] = float("nan")
    assert torch.equal(prefill(model, 0, 0, PROMPTS[1]), wanted)


def test_nf4_stays_close_and_its_best_logits_are_exact_rows_of_the_file(tmp_path: Path, load: Load) -> None:
    weights, config = write_random(tmp_path, 0, num_heads=4, head_dim=32, num_layers=1, inner=256)
    wanted = torch.from_numpy(reference(weights, config, PROMPTS[1]))[-1]
    got = prefill(load(tmp_path, quantization="nf4").decoder, 0, 0, PROMPTS[1])
    assert (got - wanted).norm() / wanted.norm() < 0.25
    assert int(got.argmax()) in wanted.topk(5).indices


def test_configs_that_cannot_be_run_say_why(tmp_path: Path, load: Load) -> None:
    case = trimmed(FAMILY, tmp_path / "a", 1)
    with pytest.raises(ModelError, match="num_image_tokens"):
        load(with_config(case.folder, tmp_path / "b", {"num_image_tokens": 20000}), quantization="none")
    config = json.loads((case.folder / "config.json").read_text())
    del config["gmask_token_id"]
    (case.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks 'gmask_token_id'"):
        load(case.folder, quantization="none")
