"""Prefill and decode whose caches hold one long prompt and a bit: both full at once, prompts preempted half-way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, cpu_spec, running, wait_empty
from tests.e2e.load import Load, Outcome, Prompt, ask, prompt_of

BLOCKS = 21
"""Of 128 tokens; a prompt of 1900 tokens needs 15, two of them do not fit."""
PROMPTS: list[Prompt] = [prompt_of(1100 + 160 * (i % 6), 500 + i) for i in range(7)]


@pytest.fixture(scope="module", params=["pull", "layerwise"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    document = cpu_spec(request.param)
    for pool in document["spec"]["pools"]:
        pool["extraArgs"] = ["--num-gpu-blocks-override", str(BLOCKS)]
    # vLLM would else admit only what fits whole, and preempt nothing while it prefills.
    document["spec"]["pools"][0]["extraArgs"] += ["--no-scheduler-reserve-full-isl"]
    cluster = Cluster(document, tmp_path_factory.mktemp(f"small-{request.param}"))
    with running(cluster):
        yield cluster


@pytest.fixture(scope="module")
def right(collocated: str) -> list[Outcome]:
    return [ask(collocated, prompt) for prompt in PROMPTS]


def test_a_full_prefill_and_a_full_decode_do_not_wait_for_each_other(small: Cluster, right: list[Outcome]) -> None:
    for expected, found in zip(right, Load(small.proxy.url, PROMPTS, len(PROMPTS)).outcomes(), strict=True):
        assert found.tokens == expected.tokens, f"{len(found.prompt)} tokens: {found.error or found.tokens}"
    assert small["prefill/0"].metrics()["vllm:num_preemptions_total"] > 0, "no prompt was preempted on prefill"
    for name in ("prefill/0", "decode/0"):
        wait_empty(small[name], 25.0)
