"""The engine thread's work without a thread: faults, reuse, text, ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from service.engine import base
from service.engine.steps import Job, Steps
from service.protocol import Params
from service.scheduler import Scheduler
from service.slots import Slots
from tests.toy import ToyRunner, ToyTokenizer, no_fault

TOKENIZER = ToyTokenizer()


@dataclass
class Bench:
    """`Steps` over the toy runner with a clock that counts its readings."""

    runner: ToyRunner
    events: dict[int, list[base.Event]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    ticks: float = 0.0

    def __post_init__(self) -> None:
        capabilities = self.runner.capabilities
        self.steps = Steps(
            runner=self.runner,
            slots=Slots(capabilities.num_slots, capabilities.context_limit),
            scheduler=Scheduler(max_chunk=8, min_chunk=2, causal_prompt=capabilities.causal_prompt),
            stop_ids=TOKENIZER.stop_ids,
            make_decoder=TOKENIZER.answer_decoder,
            now=self.tick,
            post=lambda key, event: self.events.setdefault(key, []).append(event),
            is_cancelled=self.cancelled.__contains__,
        )

    def tick(self) -> float:
        self.ticks += 0.001
        return self.ticks

    def begin(self, key: int, prompt: str, **params: object) -> None:
        self.start(key, prompt, Params(temperature=0.0, **params))  # type: ignore[arg-type]

    def start(self, key: int, prompt: str, params: Params, saved: base.Saved | None = None) -> None:
        self.steps.begin(Job(key, TOKENIZER.encode(prompt), (), params, 0.0, saved))

    def run(self) -> None:
        for _ in range(10_000):
            if not self.steps.has_work:
                self.steps.slots.check()
                assert not self.runner.open_slots
                return
            self.steps.run_step()
        raise AssertionError("it does not end")

    def answer(self, key: int) -> str:
        return "".join(event.text for event in self.events[key] if isinstance(event, base.Text))

    def end(self, key: int) -> base.Event:
        ends = [event for event in self.events[key] if isinstance(event, base.Finished | base.Failed)]
        assert len(ends) == 1 and self.events[key][-1] is ends[0]
        return ends[0]

    def alone(self, prompt: str, **params: object) -> str:
        other = Bench(ToyRunner(context_limit=self.runner.capabilities.context_limit))
        other.begin(1, prompt, **params)
        other.run()
        return other.answer(1)


def test_three_together_are_each_as_alone() -> None:
    bench = Bench(ToyRunner())
    prompts = {1: "one prompt that is long", 2: "two", 3: "three is in between"}
    for key, prompt in prompts.items():
        bench.begin(key, prompt)
        bench.steps.run_step()
    bench.run()
    assert {key: bench.answer(key) for key in prompts} == {key: bench.alone(text) for key, text in prompts.items()}


def test_a_next_turn_computes_only_what_is_new() -> None:
    bench = Bench(ToyRunner())
    bench.begin(1, "a conversation that began")
    bench.run()
    before = bench.runner.num_computed
    bench.begin(2, "a conversation that began and goes on")
    bench.run()
    started = bench.events[2][0]
    assert isinstance(started, base.Running) and started.cached_tokens == len("a conversation that began")
    assert bench.runner.num_computed - before == len(" and goes on")
    assert bench.answer(2) == bench.alone("a conversation that began and goes on")


def test_length_and_context_end_an_answer() -> None:
    bench = Bench(ToyRunner(context_limit=30, end_one_in=0))
    bench.begin(1, "short", max_new_tokens=4)
    bench.begin(2, "short", max_new_tokens=400)
    bench.run()
    for key, count in ((1, 4), (2, 25)):
        end = bench.end(key)
        assert isinstance(end, base.Finished) and end.reason == "length" and end.usage.completion_tokens == count


def test_a_cancel_keeps_what_was_generated_and_the_slot_is_free() -> None:
    bench = Bench(ToyRunner(end_one_in=0))
    bench.begin(1, "x")
    for _ in range(6):
        bench.steps.run_step()
    bench.steps.cancel(1, "interrupted")
    bench.steps.cancel(1, "interrupted")
    end = bench.end(1)
    assert isinstance(end, base.Finished) and end.reason == "interrupted"
    assert end.usage.completion_tokens == sum(e.tokens for e in bench.events[1] if isinstance(e, base.Text)) > 0
    bench.run()


def test_a_long_prefill_stops_between_layers_when_a_cancel_is_on_its_way() -> None:
    bench = Bench(ToyRunner())
    bench.begin(1, "a prompt of some length")
    bench.cancelled.add(1)
    bench.steps.run_step()
    assert bench.runner.num_computed == 0
    bench.steps.cancel(1, "interrupted")
    bench.cancelled.clear()
    bench.begin(2, "a prompt of some length")
    bench.run()
    assert bench.answer(2) == bench.alone("a prompt of some length")


@pytest.mark.parametrize("fault", ["nan", base.OutOfMemory("injected")])
@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_a_fault_ends_one_request_and_the_others_go_on(call: str, fault: object) -> None:
    bench = Bench(ToyRunner())
    bench.begin(1, "first prompt")
    for _ in range(3):
        bench.steps.run_step()
    bench.begin(2, "second prompt")
    struck: list[str] = []

    def strike(where: str, slot: int) -> object:
        if where == call and slot == 1 and (not struck or fault == "nan"):  # a chunk's logits count only at the last
            struck.append(where)
            return fault
        return None

    bench.runner.fault = strike  # type: ignore[assignment]
    bench.run()
    assert struck and isinstance(bench.end(2), base.Failed)
    assert isinstance(bench.end(1), base.Finished) and bench.answer(1) == bench.alone("first prompt")
    bench.runner.fault = no_fault
    bench.begin(3, "second prompt")
    bench.run()
    assert bench.answer(3) == bench.alone("second prompt")


def test_stop_strings_cut_the_answer() -> None:
    whole = Bench(ToyRunner()).alone("some prompt")
    bench = Bench(ToyRunner())
    bench.begin(1, "some prompt", stop=(whole[4:6],))
    bench.run()
    end = bench.end(1)
    assert isinstance(end, base.Finished) and end.reason == "stop"
    assert bench.answer(1) == whole[: whole.index(whole[4:6])]


@pytest.mark.parametrize("call", ["open", "copy_prefix"])
def test_no_memory_for_a_slot_fails_that_request_and_the_next_one_works(call: str) -> None:
    bench = Bench(ToyRunner())
    long = "a shared prefix that is long enough to copy"
    bench.begin(1, long + " one")
    bench.steps.run_step()
    bench.runner.fault = lambda where, slot: base.OutOfMemory("injected") if where == call else None
    for _ in range(12):
        bench.steps.run_step()
    bench.begin(2, long + " two")
    end = bench.end(2)
    assert isinstance(end, base.Failed) and "OOM" in end.error.message
    bench.runner.fault = no_fault
    bench.begin(3, long + " two")
    bench.run()
    assert bench.answer(3) == bench.alone(long + " two")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drained_answer_goes_on_in_another_engine_as_if_undisturbed(causal: bool, temperature: float) -> None:
    def bench() -> Bench:
        return Bench(ToyRunner(causal_prompt=causal))

    whole = bench()
    job = ("问题 that is asked", Params(temperature=temperature, seed=5, stop=("ENDEND",)))
    whole.start(1, *job)
    whole.run()
    text, last = whole.answer(1), whole.end(1)
    assert isinstance(last, base.Finished)
    for num_steps in range(1, 60):  # two drains, in every state: prefill, mid-character, catching up
        parts, saved, num_tokens = "", None, 0
        for pause in (num_steps, num_steps // 2 + 1, None):
            part = bench()
            part.start(1, *job, saved=saved)
            for _ in range(pause or 0):
                part.steps.run_step()
            if pause is None:
                part.run()
            else:
                part.steps.cancel(1, "drained")
            parts += part.answer(1)
            end = part.end(1)
            assert isinstance(end, base.Finished)
            saved, num_tokens = end.saved, end.usage.completion_tokens
            if saved is None:
                break
        assert (parts, num_tokens) == (text, last.usage.completion_tokens)
