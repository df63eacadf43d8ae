"""The staging schedule, driven at random: bounded, ordered, and never two batches in one slot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_pd.errors import LocalProtocolError
from ascend_pd.layout.slots import Pipeline, SlotPool, Step

STEPS = ([Step.WIRE, Step.SCATTER], [Step.GATHER, Step.WIRE], [Step.GATHER, Step.WIRE, Step.SCATTER])


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(1, 4), st.sampled_from(STEPS), st.data())
def test_every_batch_takes_every_step_in_order_within_the_slots(
    batches: int, slots: int, steps: list[Step], data: st.DataObject
) -> None:
    pool = SlotPool(1 << 20, slots * 100, 100)
    pipeline = Pipeline(batches, steps, pool)
    running: dict[Step, tuple[int, int]] = {}
    history: list[tuple[Step, int]] = []
    while not pipeline.finished:
        assert all(pipeline.start(step) is None for step in running)
        started = {step: got for step in steps if (got := pipeline.start(step))}
        running |= started
        history += [(step, batch) for step, (batch, _) in started.items()]
        held = [slot for _, slot in running.values()]
        assert len(set(held)) == len(held)
        assert running, "nothing runs and nothing can start: a deadlock"
        step = data.draw(st.sampled_from(sorted(running)))
        pipeline.end(step, running.pop(step)[0])
    assert pipeline.quiet and pool.num_free == slots
    for step in steps:
        assert [batch for done, batch in history if done is step] == list(range(batches))
    for batch in range(batches):
        assert [step for step, one in history if one == batch] == list(steps)


def test_three_slots_overlap_gather_wire_and_scatter() -> None:
    pipeline = Pipeline(3, list(Step), SlotPool(0, 3, 1))
    for step in (Step.GATHER, Step.WIRE):
        assert pipeline.start(step) == (0, 0)
        pipeline.end(step, 0)
    assert pipeline.start(Step.SCATTER) == (0, 0)
    assert pipeline.start(Step.GATHER) == (1, 1)
    pipeline.end(Step.GATHER, 1)
    assert pipeline.start(Step.WIRE) == (1, 1)
    assert pipeline.start(Step.GATHER) == (2, 2)


def test_without_a_free_slot_nothing_starts_and_another_transfer_s_slot_lets_it_go_on() -> None:
    pool = SlotPool(0, 1, 1)
    first, second = Pipeline(1, [Step.WIRE, Step.SCATTER], pool), Pipeline(1, [Step.WIRE, Step.SCATTER], pool)
    assert first.start(Step.WIRE) == (0, 0)
    assert second.start(Step.WIRE) is None
    first.end(Step.WIRE, 0)
    assert second.start(Step.WIRE) is None
    first.start(Step.SCATTER)
    first.end(Step.SCATTER, 0)
    assert second.start(Step.WIRE) == (0, 0)


def test_a_stopped_transfer_starts_nothing_and_frees_a_running_step_s_slot_only_at_its_end() -> None:
    pool = SlotPool(0, 3, 1)
    pipeline = Pipeline(5, [Step.WIRE, Step.SCATTER], pool)
    pipeline.start(Step.WIRE)
    pipeline.end(Step.WIRE, 0)
    pipeline.start(Step.WIRE)
    assert pool.num_free == 1
    pipeline.stop()
    assert pool.num_free == 2 and not pipeline.quiet
    assert pipeline.start(Step.SCATTER) is None
    pipeline.end(Step.WIRE, 1)
    assert pool.num_free == 3 and pipeline.quiet and not pipeline.finished
    assert pipeline.start(Step.WIRE) is None


def test_slots_lie_side_by_side_in_the_buffer() -> None:
    pool = SlotPool(4096, 1000, 300)
    taken = [pool.take() for _ in range(4)]
    assert taken[3] is None
    assert [pool.address(slot) for slot in taken if slot is not None] == [4096, 4396, 4696]


def test_misuse_is_refused() -> None:
    pool = SlotPool(0, 2, 1)
    with pytest.raises(LocalProtocolError):
        pool.give_back(0)
    with pytest.raises(LocalProtocolError):
        SlotPool(0, 10, 11)
    with pytest.raises(LocalProtocolError):
        Pipeline(1, [Step.SCATTER, Step.WIRE], pool)
    with pytest.raises(LocalProtocolError):
        Pipeline(1, [], pool)
    with pytest.raises(LocalProtocolError):
        Pipeline(1, [Step.WIRE], pool).end(Step.WIRE, 0)
