"""The torch runner keeps the `Runner` contract, over a random model small enough to run hundreds of steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from service.engine.base import Aborted, OutOfMemory, Runner
from service.engine.runner import TorchRunner
from service.models import LoadedModel
from service.protocol import Message, Params
from tests.models.conftest import MakeFolder, load, make_folder

__all__ = ["load", "make_folder"]  # fixtures

GREEDY = Params(temperature=0, top_p=1, repetition_penalty=1)
SAMPLED = Params(temperature=1.2, top_p=0.9, top_k=0, repetition_penalty=1.1, seed=11)
PROMPT = [(11 * i + 5) % 256 for i in range(30)]


@pytest.fixture
def model(make_folder: MakeFolder, load: object) -> LoadedModel:
    from service.models import load_model

    return load_model(
        make_folder()[0], family="auto", quantization="none", dtype="float32", device="cpu", num_slots=4,
        max_context=100, progress=lambda _: None,
    )  # fmt: skip


@pytest.fixture
def runner(model: LoadedModel) -> Iterator[TorchRunner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runner = TorchRunner(model)
    runner.warm_up()
    yield runner
    torch.set_num_threads(threads)


def never() -> bool:
    return False


def answer(
    runner: Runner, slot: int, params: Params, prompt: list[int], *, start: int = 0, count: int = 12
) -> list[int]:
    runner.open(slot, params, prompt)
    ids = [runner.prefill(slot, start, prompt[start:], is_last=True, should_abort=never)]
    while len(ids) < count:
        assert ids[-1] is not None
        ids += runner.decode([slot], [ids[-1]], [len(prompt) + len(ids) - 1])
    runner.close(slot)
    return [id for id in ids if id is not None]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_chunks_slots_and_company_do_not_change_an_answer(runner: TorchRunner, params: Params) -> None:
    wanted = answer(runner, 0, params, PROMPT)
    assert answer(runner, 3, params, PROMPT) == wanted

    for slot, cut in ((1, 7), (2, 29)):  # two copies in chunks, decoded together with a third, other sequence
        runner.open(slot, params, PROMPT)
        assert runner.prefill(slot, 0, PROMPT[:cut], is_last=False, should_abort=never) is None
    first = [
        runner.prefill(slot, cut, PROMPT[cut:], is_last=True, should_abort=never) for slot, cut in ((1, 7), (2, 29))
    ]
    runner.open(0, SAMPLED, PROMPT[:4])
    other = runner.prefill(0, 0, PROMPT[:4], is_last=True, should_abort=never)
    rows = [*first, other]
    got = [[id] for id in first]
    for step in range(len(wanted) - 1):
        ids = [id for id in rows if id is not None]
        rows = runner.decode([1, 2, 0], ids, [30 + step, 30 + step, 4 + step])
        for index in (0, 1):
            got[index].append(rows[index])
    assert got == [wanted, wanted]


def test_a_reused_or_copied_prefix_gives_the_same_answer(runner: TorchRunner) -> None:
    wanted = answer(runner, 0, GREEDY, PROMPT)
    assert answer(runner, 0, GREEDY, PROMPT, start=29) == wanted
    runner.copy_prefix(0, 2, 17)
    assert answer(runner, 2, GREEDY, PROMPT, start=17) == wanted


def test_an_aborted_prefill_leaves_what_was_before_it(runner: TorchRunner) -> None:
    wanted = answer(runner, 0, GREEDY, PROMPT)
    runner.open(0, GREEDY, PROMPT)
    with pytest.raises(Aborted):
        runner.prefill(0, 20, PROMPT[20:], is_last=True, should_abort=lambda: True)
    assert answer(runner, 0, GREEDY, PROMPT, start=20) == wanted


def test_a_row_with_broken_kv_fails_alone(runner: TorchRunner, model: LoadedModel) -> None:
    wanted = answer(runner, 0, GREEDY, PROMPT)
    for slot in (0, 1):
        runner.open(slot, GREEDY, PROMPT)
        runner.prefill(slot, 0, PROMPT, is_last=True, should_abort=never)
    with torch.inference_mode():
        model.decoder.kv.layers[1][1, 1, :, 3] = float("nan")
    assert runner.decode([1, 0], [wanted[0]] * 2, [30, 30]) == [None, wanted[1]]
    assert answer(runner, 1, GREEDY, PROMPT) == wanted  # written again, the slot works again


@pytest.mark.parametrize(
    "error",
    [MemoryError("no"), torch.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_running_out_of_memory_has_one_name(
    error: Exception, runner: TorchRunner, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(model.decoder, "decode", fail)
    with pytest.raises(OutOfMemory):
        runner.decode([0], [1], [0])


def test_other_errors_stay_what_they_are(runner: TorchRunner) -> None:
    with pytest.raises(IndexError):
        runner.decode([9], [1], [0])


def test_capabilities_are_the_models(runner: TorchRunner) -> None:
    assert (runner.capabilities.num_slots, runner.capabilities.context_limit) == (4, 100)
    assert runner.capabilities.causal_prompt


def test_the_last_position_of_the_context_can_be_used(runner: TorchRunner) -> None:
    runner.open(0, GREEDY, [])
    runner.prefill(0, 0, [1] * 99, is_last=False, should_abort=never)
    assert runner.decode([0], [1], [99])[0] is not None


def test_a_template_prompt_runs_end_to_end(runner: TorchRunner, model: LoadedModel, tmp_path: Path) -> None:
    ids = model.tokenizer.encode_chat([Message("user", "hi <|im_end|>")])
    assert answer(runner, 0, GREEDY, ids, count=3)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_saved_sampler_goes_on_in_another_slot_with_the_answer_as_if_undisturbed(
    runner: TorchRunner, params: Params
) -> None:
    wanted = answer(runner, 0, params, PROMPT, count=24)
    for num_before in (1, 7, 23):
        runner.open(1, params, PROMPT)
        ids = [runner.prefill(1, 0, PROMPT, is_last=True, should_abort=never)]
        while len(ids) < num_before:
            ids += runner.decode([1], [ids[-1] or 0], [len(PROMPT) + len(ids) - 1])
        saved = runner.save_sampler(1)
        runner.close(1)
        tokens = PROMPT + [id for id in ids if id is not None]
        runner.open(2, params, tokens, saved)
        ids.append(runner.prefill(2, 0, tokens, is_last=True, should_abort=never))
        while len(ids) < len(wanted):
            ids += runner.decode([2], [ids[-1] or 0], [len(PROMPT) + len(ids) - 1])
        runner.close(2)
        assert ids == wanted


def test_a_damaged_sampler_is_refused(runner: TorchRunner) -> None:
    with pytest.raises(ValueError, match="state"):
        runner.open(0, SAMPLED, PROMPT, b"nonsense")
