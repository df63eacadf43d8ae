"""Deadlines come up in order, once, and where they were moved to."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from connectors.handoff.timers import Timers

KEYS = st.sampled_from("abc")
TIMES = st.integers(0, 20).map(float)
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.one_of(TIMES, st.just(inf))),
    st.tuples(st.just("take"), st.just(""), TIMES),
)


@given(st.lists(OPERATIONS, max_size=40))
def test_timers_do_what_a_plain_dictionary_would(operations: list[tuple[str, str, float]]) -> None:
    timers, plain = Timers(), dict[str, float]()
    for operation, key, when in operations:
        if operation == "set":
            timers.set(key, when)
            plain.pop(key, None)
            if when != inf:
                plain[key] = when
        else:
            due = sorted((at, name) for name, at in plain.items() if at <= when)
            assert sorted((plain[name], name) for name in timers.take(when)) == due
            for _, name in due:
                del plain[name]
        assert timers.next() == min(plain.values(), default=inf)
        assert len(timers) == len(plain)
        assert all(timers.is_set(name) == (name in plain) for name in "abc")


def test_renewing_for_ever_does_not_grow_anything() -> None:
    timers = Timers()
    for n in range(10_000):
        timers.set("a", float(n))
        timers.next()
    assert len(timers._heap) <= 2


def test_what_is_due_first_comes_first() -> None:
    timers = Timers()
    for key, when in (("late", 3.0), ("early", 1.0), ("never", 9.0)):
        timers.set(key, when)
    assert timers.take(5.0) == ["early", "late"]
