"""Which part of a cached prefix was computed before the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from connectors.layerwise.settled import BlockTables

pytestmark = pytest.mark.engine
BLOCK = 16
Scheduled = tuple[list[int], int, int]
"""Block ids (new ones of a running request), tokens computed before, tokens of this step."""


def step(
    new: dict[str, Scheduled] | None = None,
    running: dict[str, Scheduled] | None = None,
    resumed: dict[str, Scheduled] | None = None,
    finished: tuple[str, ...] = (),
) -> Any:
    new, cached = new or {}, {**(running or {}), **(resumed or {})}
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (blocks, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[(blocks,) if blocks else None for blocks, _, _ in cached.values()],
            num_computed_tokens=[computed for _, computed, _ in cached.values()],
            resumed_req_ids=set(resumed or {}),
        ),
        num_scheduled_tokens={name: count for name, (_, _, count) in {**new, **cached}.items()},
    )


def settled(*steps: Any) -> int:
    """Of a request that finds tokens 0-31 in blocks 7 and 8, in the last of these steps."""
    tables = BlockTables(BLOCK)
    for each in steps:
        tables.step(each)
    return tables.settled(([7, 8, 9],), 2 * BLOCK)


HIT: dict[str, Scheduled] = {"hit": ([7, 8, 9], 32, 10)}


def test_what_nobody_writes_is_settled() -> None:
    assert settled(step(new=HIT)) == 32
    assert settled(step(new={"a": ([7, 8, 5], 0, 40)}), step(new=HIT)) == 32


def test_what_another_new_request_writes_is_not() -> None:
    assert settled(step(new={"a": ([7, 8, 5], 0, 40), **HIT})) == 0
    assert settled(step(new={"a": ([7, 8, 5], 16, 30), **HIT})) == 16


def test_what_a_running_request_writes_in_this_step_is_not() -> None:
    begun = step(new={"a": ([7], 0, 16)})
    assert settled(begun, step(running={"a": ([8], 16, 16)}, new=HIT)) == 16
    assert settled(begun, step(running={"a": ([4], 16, 16)}, new=HIT)) == 32


def test_blocks_allocated_ahead_count_when_they_are_written() -> None:
    """As speculative decoding allocates: the block of the second chunk comes with the first."""
    begun = step(new={"a": ([7, 8], 0, 16)})
    assert settled(begun, step(running={"a": ([3], 16, 20)}, new=HIT)) == 16


def test_a_block_that_was_begun_earlier_is_written_until_it_is_whole() -> None:
    begun = step(new={"a": ([7, 8], 0, 20)})
    assert settled(begun, step(running={"a": ([], 20, 12)}, new=HIT)) == 16
    assert settled(begun, step(running={"a": ([], 20, 12)}), step(new=HIT)) == 32


def test_a_resumed_request_has_other_blocks() -> None:
    begun = step(new={"a": ([1, 2], 0, 20)})
    assert settled(begun, step(resumed={"a": ([7, 8, 3], 16, 20)}, new=HIT)) == 16
    assert settled(begun, step(resumed={"a": ([7, 2, 3], 16, 20)}, new=HIT)) == 32


def test_a_request_that_ended_is_forgotten() -> None:
    tables = BlockTables(BLOCK)
    tables.step(step(new={"a": ([7], 0, 16)}))
    tables.step(step(finished=("a",)))
    assert not tables._tables


def test_with_several_groups_nothing_is_settled() -> None:
    assert BlockTables(BLOCK).settled(([1], [2]), BLOCK) == 0
