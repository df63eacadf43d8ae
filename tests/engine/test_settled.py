"""Which part of a cached prefix was computed before the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from connectors.layerwise.settled import StepWrites

BLOCK = 16


def step(new: list[tuple[list[int], int]], cached: list[tuple[list[int], int, int]], resumed: bool = False) -> Any:
    """new: (block ids, tokens found in the cache); cached: (new block ids, computed before, scheduled)."""
    ids = [f"c{n}" for n in range(len(cached))]
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=(b,), num_computed_tokens=n) for b, n in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=ids,
            new_block_ids=[(b,) if b else None for b, _, _ in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
            resumed_req_ids=set(ids) if resumed else set(),
        ),
        num_scheduled_tokens={name: scheduled for name, (_, _, scheduled) in zip(ids, cached, strict=True)},
    )


@pytest.mark.parametrize(
    ("output", "settled"),
    [
        (step([([7, 8, 9], 32)], []), 32),
        (step([([7, 8, 5], 0), ([7, 8, 9], 32)], []), 0),
        (step([([7, 8, 5], 16), ([7, 8, 9], 32)], []), 16),
        (step([([7, 8, 9], 32)], [([8], 16, 16)]), 16),
        (step([([7, 8, 9], 32)], [([4], 16, 16)]), 32),
        (step([([7, 8, 9], 32)], [([], 40, 4)]), 32),  # stays inside a block that it began before
        (step([([7, 8, 9], 32)], [([], 40, 8)]), 0),  # makes that block whole: which one is not said
        (step([([7, 8, 9], 32)], [([7, 8, 3], 20, 40)], resumed=True), 16),
    ],
)
def test_blocks_that_this_step_writes_are_not_settled(output: Any, settled: int) -> None:
    assert StepWrites(output, BLOCK).settled(([7, 8, 9],), 32) == settled


def test_with_several_groups_nothing_is_settled() -> None:
    assert StepWrites(step([([7], 0)], []), BLOCK).settled(([1], [2]), BLOCK) == 0
