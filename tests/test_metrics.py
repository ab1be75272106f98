"""Numbers for operators."""

from __future__ import annotations

import pytest

from service.metrics import Metrics


def test_a_finished_answer_counts_in_samples_and_exposition() -> None:
    metrics = Metrics()
    metrics.watch(lambda: 2, lambda: 5)
    metrics.count_finished(
        "stop", prompt_tokens=10, cached_tokens=4, completion_tokens=3, queue_s=0.001, ttft_s=0.1, total_s=0.3
    )
    samples, text = metrics.snapshot()
    assert samples['chatglm_request_success_total{finished_reason="stop"}'] == 1
    assert samples["chatglm_prefix_cache_hits_total"] == 4
    assert samples["chatglm_num_requests_running"] == 2 and samples["chatglm_num_requests_waiting"] == 5
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
