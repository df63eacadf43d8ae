"""What a client gets through P and D is what one collocated engine gives, token for token; nothing stays held."""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, wait_empty

MAX_TOKENS = 12
BLOCK = 128
LENGTHS = (1, 2, 5, 127, 128, 129, 255, 256, 257, 384, 400, 511, 512, 513, 640, 700, 900, 1024, 1300, 1900)
"""Shorter than a block, exactly one, one more; several; more than one chunk of 512."""
AT_A_TIME = 8

Prompt = tuple[int, ...]
Tokens = tuple[int, ...]


def prompt_of(length: int, seed: int) -> Prompt:
    """Random ordinary tokens of SmolLM2 (no special ones)."""
    return tuple(random.Random(seed).choices(range(20, 49_000), k=length))


def complete(url: str, prompt: Any, **extra: Any) -> dict[str, Any]:
    """One greedy completion."""
    body = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS, **extra}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=180) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def tokens_of(url: str, prompt: Prompt) -> Tokens:
    """The token ids of a greedy completion."""
    [choice] = complete(url, list(prompt), return_token_ids=True)["choices"]
    return tuple(choice["token_ids"])


def all_tokens(url: str, prompts: list[Prompt], at_a_time: int) -> list[Tokens]:
    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(lambda prompt: tokens_of(url, prompt), prompts))


@pytest.fixture(scope="package")
def prompts() -> list[Prompt]:
    distinct = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    shared = distinct[-1][:700]
    partly_cached = [shared + prompt_of(90, 77), shared + prompt_of(300, 78)]
    return [*distinct, *partly_cached, distinct[4], distinct[9], distinct[-2]]


@pytest.fixture(scope="package")
def expected(collocated: str, prompts: list[Prompt]) -> list[set[Tokens]]:
    """What the collocated engine says alone and in a batch: where these differ, either is right."""
    alone = all_tokens(collocated, prompts, 1)
    batched = all_tokens(collocated, prompts, AT_A_TIME)
    return [{one, other} for one, other in zip(alone, batched, strict=True)]


# The layout tests ask one at a time of both modes.
@pytest.mark.parametrize("at_a_time", [pytest.param(1, marks=pytest.mark.one_mode), AT_A_TIME])
def test_tokens_equal_the_collocated_engines(
    cluster: Cluster, prompts: list[Prompt], expected: list[set[Tokens]], at_a_time: int
) -> None:
    before = cluster["decode/0"].metrics()
    answers = all_tokens(cluster.proxy.url, prompts, at_a_time)
    wrong = [len(p) for p, answer, right in zip(prompts, answers, expected, strict=True) if answer not in right]
    assert not wrong, f"prompts of these lengths were answered differently: {wrong}"
    after = cluster["decode/0"].metrics()
    moved = "vllm:prompt_tokens_by_source_total"
    assert after[moved] > before[moved], "no prompt token reached the decode engine"


def test_requests_that_come_at_once_with_one_new_prefix_do_not_disturb_each_other(
    cluster: Cluster, collocated: str
) -> None:
    """Prefill schedules them in one step, where one hits blocks that another is only about to compute."""
    for turn in range(2):
        prefix = prompt_of(256, 9000 + turn)
        prompts = [prefix + prompt_of(20 + 7 * n, 9100 + 10 * turn + n) for n in range(4)]
        answers = all_tokens(cluster.proxy.url, prompts, len(prompts))
        alone, batched = (all_tokens(collocated, prompts, at_a_time) for at_a_time in (1, len(prompts)))
        for answer, *right in zip(answers, alone, batched, strict=True):
            assert answer in right


def test_cache_really_came_from_prefill(cluster: Cluster) -> None:
    name = "vllm:external_prefix_cache_hits_total"
    before = cluster["decode/0"].metrics()[name]
    tokens_of(cluster.proxy.url, prompt_of(300, 4711))
    assert cluster["decode/0"].metrics()[name] - before >= 299


def test_two_prompts_in_one_request_stay_apart(cluster: Cluster, collocated: str) -> None:
    prompts = [list(prompt_of(150, 1)), list(prompt_of(40, 2))]
    ours, theirs = (complete(url, prompts)["choices"] for url in (cluster.proxy.url, collocated))
    assert [choice["text"] for choice in ours] == [choice["text"] for choice in theirs]
    assert [choice["index"] for choice in ours] == [0, 1]


def test_chat_answers_sensibly(cluster: Cluster) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=cluster.proxy.url + "/v1", api_key="none", timeout=120)
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model="smollm2", messages=question, temperature=0, max_tokens=20)
    chunks = client.chat.completions.create(
        model="smollm2", messages=question, temperature=0, max_tokens=20, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in streamed
    assert whole.choices[0].message.content == streamed


def test_no_block_is_held_after_the_last_request(cluster: Cluster) -> None:
    tokens_of(cluster.proxy.url, prompt_of(500, 99))
    for name in ("prefill/0", "decode/0"):
        wait_empty(cluster[name], timeout_s=5.0)
