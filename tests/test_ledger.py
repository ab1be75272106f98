"""What is counted of each request: audit records, metrics, log lines."""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.client import AsyncClient
from service.engine import base
from service.ledger import Ledger, Who, percentile
from service.metrics import Metrics
from service.protocol import Accepted, Busy, Chat, Delta, EngineFailed, Message, Timing, Usage
from service.server import Limits
from tests.harness import toy_service, until
from tests.toy import ToyRunner

CHAT = Chat("r1", (Message("user", "a secret"),))
WHO = Who(1000, 4242)


class Records(list[dict[str, Any]]):
    def put(self, record: dict[str, Any]) -> None:
        self.append(record)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def finished(reason: base.Reason = "stop", tokens: int = 3) -> base.Finished:
    return base.Finished(reason, Usage(20, 12, tokens), Timing(5.0, 80.0, 200.0, 15.0))


def taken(num_tokens: int, before: int = 0) -> Callable[[], int]:
    """How many tokens were taken: at the start, then at the end."""
    return iter([before, before + num_tokens]).__next__


def make(**options: Any) -> tuple[Ledger, Records, Metrics, Clock]:
    records, metrics, clock = Records(), Metrics(), Clock()
    ledger = Ledger(metrics, records, now=clock, wall=lambda: 1_700_000_000.0, **options)
    ledger.model = "toy"
    return ledger, records, metrics, clock


def test_a_delivered_answer_becomes_one_record_without_its_text() -> None:
    ledger, records, metrics, _ = make()
    ledger.open("token", CHAT, WHO, 7, taken(3))
    ledger.record("token", base.Running(20, 12, 2048, ()))
    for t_ms in (80.0, 90.0, 130.0):
        ledger.record("token", base.Text("好", 1, t_ms))
    ledger.record("token", finished())
    assert not records  # not settled: it may still be delivered
    ledger.settle("token")
    ledger.settle("token")
    assert records == [
        {
            "time": "2023-11-14T22:13:20.000+00:00", "uid": 1000, "pid": 4242, "id": "r1", "model": "toy",
            "reason": "stop", "error": None, "prompt_tokens": 20, "cached_tokens": 12, "completion_tokens": 3,
            "queue_ms": 5.0, "ttft_ms": 80.0, "total_ms": 200.0, "itl_p50_ms": 10.0, "itl_p95_ms": 40.0,
            "cancel_ms": None, "wasted_tokens": 0,
        }
    ]  # fmt: skip
    samples, _ = metrics.snapshot()
    assert samples["chatglm_inter_token_latency_seconds_count"] == 2
    assert samples["chatglm_inter_token_latency_seconds_sum"] == pytest.approx(0.05)
    assert samples["chatglm_wasted_tokens_total"] == 0 and ledger.num_open == 0


def test_audit_text_adds_the_messages_and_the_answer() -> None:
    ledger, records, _, _ = make(keeps_text=True)
    ledger.open("token", CHAT, WHO, 7, taken(2))
    ledger.record("token", base.Text("你", 1, 1.0))
    ledger.record("token", base.Text("好", 1, 2.0))
    ledger.record("token", finished())
    ledger.settle("token")
    assert records[0]["messages"] == [{"role": "user", "content": "a secret"}] and records[0]["answer"] == "你好"


def test_a_cancel_is_timed_from_its_first_request_and_waste_is_what_nobody_took() -> None:
    ledger, records, metrics, clock = make()
    ledger.open("token", CHAT, WHO, 7, taken(2))
    ledger.record("token", base.Text("abc", 5, 1.0))
    ledger.cancel("token")
    clock.now_s += 0.03
    ledger.cancel("token")
    ledger.record("token", finished("interrupted", tokens=5))
    ledger.record("token", base.Text("late", 9, 2.0))
    ledger.cancel("token")
    ledger.settle("token")
    assert records[0]["reason"] == "interrupted" and records[0]["cancel_ms"] == pytest.approx(30)
    assert records[0]["wasted_tokens"] == 3
    samples, _ = metrics.snapshot()
    assert samples["chatglm_wasted_tokens_total"] == 3
    assert samples["chatglm_cancel_latency_seconds_count"] == 1


def test_what_an_earlier_daemon_delivered_is_not_counted_again() -> None:
    ledger, records, _, _ = make()
    ledger.open("token", CHAT, WHO, 7, taken(2, before=50))
    ledger.record("token", base.Text("abc", 5, 1.0))
    ledger.record("token", finished("interrupted", tokens=55))
    ledger.settle("token")
    assert records[0]["wasted_tokens"] == 3 and records[0]["completion_tokens"] == 55


def test_a_failure_and_a_refusal_are_recorded_by_their_code(caplog: pytest.LogCaptureFixture) -> None:
    ledger, records, metrics, _ = make()
    ledger.open("token", CHAT, WHO, 7, lambda: 0)
    with caplog.at_level(logging.INFO, "service"):
        ledger.record("token", base.Failed(EngineFailed("OOM in prefill: 2 GiB")))
        ledger.refuse("r2", WHO, Busy("the queue is full"))
    ledger.settle_all()
    assert [(record["id"], record["reason"], record["error"]) for record in records] == [
        ("r2", None, "busy"), ("r1", None, "engine_failed"),
    ]  # fmt: skip
    assert records[0].keys() == records[1].keys()
    assert metrics.snapshot()[0]['chatglm_errors_total{code="engine_failed"}'] == 1
    assert "OOM in prefill" in caplog.text and "busy" in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize(("reason", "word"), [("deadline", "timeout"), ("drained", "drain"), ("stop", "stop")])
def test_the_log_has_one_line_a_request_with_the_word_to_look_for(
    reason: base.Reason, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger, _, _, _ = make()
    ledger.open("token", CHAT, WHO, 7, lambda: 0)
    with caplog.at_level(logging.INFO, "service"):
        ledger.record("token", finished(reason))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("request 7, uid 1000 pid 4242: ") and word in caplog.messages[0]


def test_what_is_still_running_is_not_settled() -> None:
    ledger, records, _, _ = make()
    ledger.open("token", CHAT, WHO, 7, lambda: 0)
    ledger.settle_all()
    assert not records and ledger.num_open == 1


@given(st.lists(st.integers(0, 2**20), min_size=1), st.sampled_from([0.5, 0.95, 1.0]))
def test_a_percentile_is_the_least_value_that_covers_its_share(values: list[int], share: float) -> None:
    found = percentile(array("f", map(float, values)), share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_no_values_have_no_percentile() -> None:
    assert percentile(array("f"), 0.5) is None


def test_over_a_socket_each_request_leaves_one_record(tmp_path: Path) -> None:
    """Delivered, refused, and abandoned with text on its way: through the real server."""
    records = Records()
    gate = threading.Event()
    gate.set()
    num_decodes = 0

    def wait(call: str, slot: int) -> None:
        """Shut after some steps of the second request, so that it cannot end before the others have come."""
        nonlocal num_decodes
        num_decodes += call == "decode"
        if call == "decode" and num_decodes == 10:
            gate.clear()
        assert gate.wait(10)

    async def main() -> None:
        runner = ToyRunner(1, end_one_in=0, fault=wait)
        async with toy_service(tmp_path, runner, limits=Limits(resume_s=0.05), max_queue=1) as service:
            service.server._ledger._audit = records
            async with await AsyncClient.connect(service.path) as client:
                events = [event async for event in client.chat("hi", id="whole", max_new_tokens=4)]
                assert isinstance(events[0], Accepted)
                gone = client.chat("hi", id="gone", max_new_tokens=2000)
                async for event in gone:
                    if isinstance(event, Delta):
                        break
                waiting = client.chat("hi", id="waiting")
                assert isinstance(await anext(aiter(waiting)), Accepted)
                with pytest.raises(Busy):
                    await client.chat("hi", id="refused").text()
            await until(lambda: len(records) == 3)  # the one in the queue is dropped, the other one asked to stop
            gate.set()
            await until(lambda: len(records) == 4)
            samples, _ = service.server._metrics.snapshot()
            assert samples["chatglm_kv_slots"] == 1 and samples["chatglm_kv_tokens"] > 0
            assert samples['chatglm_errors_total{code="busy"}'] == 1
            assert samples["chatglm_cancel_latency_seconds_count"] == 2 and service.server._ledger.num_open == 0

    asyncio.run(main())
    by_id = {record["id"]: record for record in records}
    assert by_id["whole"]["reason"] == "length" and by_id["whole"]["completion_tokens"] == 4
    assert by_id["whole"]["wasted_tokens"] == 0 and by_id["whole"]["model"] == "toy"
    assert by_id["refused"]["error"] == "busy"
    assert by_id["gone"]["reason"] == by_id["waiting"]["reason"] == "interrupted"
    assert by_id["gone"]["cancel_ms"] > 0 and by_id["waiting"]["completion_tokens"] == 0
