"""Who is chosen."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.policy import POLICIES, Candidate, Work
from proxy.policy.power_of_two import PowerOfTwo
from proxy.policy.prefix import Prefix
from proxy.request import prefix_hashes
from tests.unit.proxy.conftest import StackOf, chat_body


def candidates(*tokens: int) -> list[Candidate]:
    return [Candidate(f"i{n}", t, 0) for n, t in enumerate(tokens)]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.sampled_from(sorted(POLICIES)))
def test_every_policy_names_one_of_its_candidates(tokens: list[int], name: str) -> None:
    offered = candidates(*tokens)
    policy = POLICIES[name]()
    for session in ("", "s"):
        assert policy.choose(offered, Work(10, (1, 2, 3), session)) in offered


def test_least_tokens_takes_the_least_loaded() -> None:
    assert POLICIES["least-tokens"]().choose(candidates(5, 3, 9), Work(1)).key == "i1"


@pytest.mark.parametrize("name", ["least-tokens", "prefix", "round-robin"])
def test_ties_rotate(name: str) -> None:
    policy = POLICIES[name]()
    chosen = Counter(policy.choose(candidates(4, 4, 4), Work(1, (), str(n))).key for n in range(9))
    assert set(chosen.values()) == {3}


def test_power_of_two_never_takes_the_more_loaded_of_its_two() -> None:
    policy = PowerOfTwo(seed=1)
    chosen = Counter(policy.choose(candidates(0, 10, 20), Work(1)).key for _ in range(300))
    assert chosen["i2"] == 0
    assert chosen["i0"] > chosen["i1"] > 0


def test_prefix_returns_to_where_the_prompt_was_unless_that_is_too_loaded() -> None:
    policy = Prefix()
    work = Work(512, (1, 2, 3, 4))
    first = policy.choose(candidates(0, 0), work).key
    other = {"i0": "i1", "i1": "i0"}[first]
    assert policy.choose(candidates(100, 100), work).key == first
    loaded = [Candidate(first, 600, 1), Candidate(other, 0, 0)]
    assert policy.choose(loaded, work).key == other


def test_prefix_forgets_the_oldest_blocks() -> None:
    policy = Prefix(blocks_per_instance=4)
    policy.choose(candidates(0), Work(512, (1, 2, 3, 4)))
    policy.choose(candidates(0), Work(256, (7, 8)))
    assert policy.cached_tokens("i0", Work(256, (7, 8))) == 256
    assert policy.cached_tokens("i0", Work(512, (1, 2, 3, 4))) == 256


def test_a_session_stays_and_moves_only_when_its_instance_goes_or_is_overloaded() -> None:
    policy = POLICIES["session"]()
    homes = {s: policy.choose(candidates(0, 0, 0), Work(1, (), s)).key for s in map(str, range(50))}
    assert len(set(homes.values())) == 3
    left = [c for c in candidates(0, 0, 0) if c.key != "i1"]
    for session, home in homes.items():
        now = policy.choose(left, Work(1, (), session)).key
        assert now == home or home == "i1"
    busy = [Candidate(c.key, 1000 if c.key == homes["0"] else 0, 0) for c in candidates(0, 0, 0)]
    assert policy.choose(busy, Work(1, (), "0")).key != homes["0"]


@given(st.text(max_size=3000), st.text(max_size=3000))
def test_prompts_with_a_common_beginning_share_their_first_hashes_and_no_others(one: str, other: str) -> None:
    hashes, others = (prefix_hashes({"prompt": text}, 16) for text in (one, other))
    shared = sum(1 for a, b in zip(hashes, others, strict=False) if a == b)
    data, data_other = one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass")
    equal = next((i for i, (a, b) in enumerate(zip(data, data_other, strict=False)) if a != b), None)
    equal = min(len(data), len(data_other)) if equal is None else equal
    assert shared == equal // 64


def test_token_ids_are_cut_at_blocks_of_tokens() -> None:
    assert len(prefix_hashes({"prompt": list(range(40))}, 16)) == 2
    head = prefix_hashes({"prompt": list(range(16))}, 16)
    assert prefix_hashes({"prompt": list(range(40))}, 16)[:1] == head


async def test_load_spreads_over_instances_and_is_given_back(stack_of: StackOf) -> None:
    async with stack_of(prefill=2, decode=2) as stack:
        for _ in range(4):
            await stack.chat()
        assert [len(e.seen) for e in (*stack.prefill, *stack.decode)] == [2, 2, 2, 2]
        assert all(i.tokens == 0 and i.requests == 0 for i in stack.app.services.fleet.instances())


async def test_short_prompts_skip_prefill_when_the_policy_says_so(stack_of: StackOf) -> None:
    from proxy.settings import PolicySettings

    async with stack_of(policy=PolicySettings(local_prefill_below_tokens=50)) as stack:
        await stack.chat()
        assert not stack.prefill[0].seen
        await stack.post("/v1/chat/completions", chat_body(messages=[{"role": "user", "content": "x" * 400}]))
        assert len(stack.prefill[0].seen) == 1


async def test_prompts_cached_on_decode_skip_prefill(stack_of: StackOf) -> None:
    from proxy.settings import PolicySettings

    policy = PolicySettings(decode="prefix", local_prefill_below_tokens=200)
    async with stack_of(policy=policy) as stack:
        body = chat_body(messages=[{"role": "user", "content": "x" * 4000}])
        await stack.post("/v1/chat/completions", body)
        await stack.post("/v1/chat/completions", body)
        assert len(stack.prefill[0].seen) == 1
        assert len(stack.decode[0].seen) == 2
