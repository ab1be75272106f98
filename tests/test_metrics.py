"""Numbers for operators."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from service.metrics import Metrics


def test_a_finished_answer_counts_in_samples_and_exposition() -> None:
    metrics = Metrics()
    metrics.watch(lambda: {"num_requests_running": 2, "num_requests_waiting": 5, "kv_slots_used": 2, "unknown": 1})
    metrics.count_finished(
        "stop", prompt_tokens=10, cached_tokens=4, completion_tokens=3, queue_s=0.001, ttft_s=0.1, total_s=0.3
    )
    samples, text = metrics.snapshot()
    assert samples['chatglm_request_success_total{finished_reason="stop"}'] == 1
    assert samples["chatglm_prefix_cache_hits_total"] == 4
    assert samples["chatglm_num_requests_running"] == 2 and samples["chatglm_num_requests_waiting"] == 5
    assert samples["chatglm_kv_slots_used"] == 2 and "chatglm_unknown" not in samples
    assert samples["chatglm_request_time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert "chatglm_generation_tokens_total 3.0" in text


def test_an_answer_without_tokens_has_no_ttft() -> None:
    metrics = Metrics()
    metrics.count_finished(
        "interrupted", prompt_tokens=0, cached_tokens=0, completion_tokens=0, queue_s=1.0, ttft_s=0.0, total_s=1.0
    )
    samples, _ = metrics.snapshot()
    assert samples["chatglm_time_to_first_token_seconds_count"] == 0
    assert samples["chatglm_request_queue_time_seconds_count"] == 0


def test_two_servers_do_not_mix() -> None:
    first, second = Metrics(), Metrics()
    first.resumes.inc()
    assert second.snapshot()[0]["chatglm_resumes_total"] == 0


def test_buckets_begin_at_a_millisecond_between_tokens_and_at_ten_for_the_first() -> None:
    samples, _ = Metrics().snapshot()
    assert 'chatglm_inter_token_latency_seconds_bucket{le="0.001"}' in samples
    assert 'chatglm_time_to_first_token_seconds_bucket{le="0.01"}' in samples


def test_every_name_has_our_prefix_and_the_readme_lists_it() -> None:
    samples, _ = Metrics().snapshot()
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for family in Metrics()._registry.collect():
        assert family.name.startswith("chatglm_")
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"`{name}" in readme, name
    assert samples["chatglm_audit_dropped_total"] == 0


def test_dropped_lines_may_be_counted_on_several_threads() -> None:
    metrics = Metrics()

    def drop() -> None:
        for _ in range(1000):
            metrics.audit_dropped.inc(1)

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.snapshot()[0]["chatglm_audit_dropped_total"] == 4000
