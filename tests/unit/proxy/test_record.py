"""The phases of a request add up, whatever the engines tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_pd.wire.messages import Story
from proxy.record import Record

durations = st.floats(0, 1e4)
stories = st.none() | st.builds(
    Story,
    known=st.just(True),
    timings_ms=st.dictionaries(
        st.sampled_from(["prefill_queue", "prefill", "exposed", "decode_queue", "transfer"]), st.floats(-10, 1e7)
    ),
)


@given(st.lists(durations, min_size=6, max_size=6), st.booleans(), st.booleans(), stories, stories)
def test_phases_are_never_negative_and_sum_to_the_whole(
    steps: list[float], overlapping: bool, answered: bool, prefill: Story | None, decode: Story | None
) -> None:
    at = 100.0
    instants = []
    for step in steps:
        at += step / 1e3
        instants.append(at)
    record = Record(
        request_id="r",
        received_at=100.0,
        prefill_sent_at=instants[0],
        prefill_done_at=instants[1],
        decode_sent_at=instants[0] if overlapping else instants[2],
        first_event_at=instants[3] if answered else 0.0,
        ended_at=instants[4],
        prefill_story=prefill,
        decode_story=decode,
    )
    phases = record.phases_ms()
    assert all(value >= 0 for value in phases.values())
    assert sum(phases.values()) == pytest.approx(record.e2e_ms(), rel=1e-6, abs=1e-3)


def test_a_request_that_reached_no_engine_is_all_proxy() -> None:
    record = Record(request_id="r", received_at=1.0, ended_at=1.5)
    assert record.phases_ms() == pytest.approx(
        {**dict.fromkeys(record.phases_ms(), 0.0), "proxy": 500.0}, abs=1e-6
    )
