from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ascend_pd.wire.registry import EngineEntry
from metaserver.store import Ended, EngineStore, PostOutcome, ReservationStore
from tests.unit.metaserver_fixture import reservation


@pytest.fixture
def store() -> ReservationStore:
    return ReservationStore(max_reservations=3, max_bytes=1000, max_ended=4, ended_seconds=100)


def test_a_reservation_is_found_with_what_is_left_of_its_deadline(store) -> None:
    assert store.post(reservation(deadline_seconds=30), 100, now=1000) is PostOutcome.ACCEPTED
    assert store.find("t1", now=1012) == reservation(deadline_seconds=18)


def test_a_copy_changes_nothing_but_the_deadline(store) -> None:
    store.post(reservation(deadline_seconds=30), 100, now=0)
    assert store.post(reservation(deadline_seconds=28), 100, now=2.5) is PostOutcome.KNOWN
    assert (len(store), store.num_bytes) == (1, 100)
    assert store.find("t1", now=30.25) == reservation(deadline_seconds=0.25)
    assert isinstance(store.find("t1", now=30.5), Ended)


@pytest.mark.parametrize("change", [{"sink_epoch": "other"}, {"block_ids": [[3, 4, 6]]}, {"num_cached_tokens": 0}])
def test_another_body_for_the_same_transfer_is_a_conflict_and_changes_nothing(store, change) -> None:
    store.post(reservation(), 100, now=0)
    assert store.post(reservation(**change), 100, now=1) is PostOutcome.CONFLICT
    assert store.find("t1", now=1) == reservation(deadline_seconds=29)


def test_a_passed_deadline_ends_a_reservation_and_its_copies(store) -> None:
    store.post(reservation(deadline_seconds=5), 100, now=0)
    assert store.find("t1", now=5) == Ended("its deadline passed")
    assert store.post(reservation(deadline_seconds=5), 100, now=6) is PostOutcome.ENDED
    assert (len(store), store.num_bytes, store.num_expired) == (0, 0, 1)


def test_a_release_ends_a_reservation_even_before_its_post_arrives(store) -> None:
    assert store.release("t1", "cancelled", now=0)
    assert store.post(reservation(), 100, now=1) is PostOutcome.ENDED
    assert store.find("t1", now=1) == Ended("cancelled")
    assert not store.release("t1", "again", now=2)
    assert store.find("t1", now=2) == Ended("cancelled")


def test_full_of_reservations_or_of_bytes_refuses_new_ones_only(store) -> None:
    for name in ("a", "b", "c"):
        assert store.post(reservation(name), 10, now=0) is PostOutcome.ACCEPTED
    assert store.post(reservation("d"), 10, now=0) is PostOutcome.FULL
    assert store.post(reservation("a"), 10, now=0) is PostOutcome.KNOWN
    store.release("a", "done", now=0)
    assert store.post(reservation("d"), 981, now=0) is PostOutcome.FULL
    assert store.post(reservation("d"), 980, now=0) is PostOutcome.ACCEPTED


def test_what_ended_is_forgotten_in_the_end_and_when_there_is_too_much_of_it(store) -> None:
    store.release("old", "x", now=0)
    assert store.find("old", now=99) is not None
    assert store.find("old", now=100) is None
    for number in range(5):
        store.release(str(number), "x", now=200)
    assert store.find("0", now=200) is None
    assert store.find("1", now=200) is not None


def test_endless_copies_take_no_memory(store) -> None:
    for step in range(10_000):
        store.post(reservation(deadline_seconds=30), 100, now=step * 0.001)
    assert len(store._expiries) < 100


class AgainstANaiveStore(RuleBasedStateMachine):
    """The store does what a list that is searched from end to end does."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = ReservationStore(3, 10_000, max_ended=1000, ended_seconds=20)
        self.live: dict[str, tuple[int, float]] = {}
        self.ended: dict[str, tuple[str, float]] = {}

    def tidy(self) -> None:
        # `forget` counts from when the store noticed: every rule here touches it, so at the passing of time.
        for name, (_, expires) in list(self.live.items()):
            if expires <= self.now:
                del self.live[name]
                self.ended[name] = ("its deadline passed", self.now + 20)
        self.ended = {n: e for n, e in self.ended.items() if e[1] > self.now}

    names = st.sampled_from("abcdef")

    @rule(name=names, port=st.integers(1, 2), seconds=st.integers(1, 9))
    def post(self, name: str, port: int, seconds: int) -> None:
        outcome = self.store.post(reservation(name, sink_port=port, deadline_seconds=seconds), 100, self.now)
        if name in self.ended:
            assert outcome is PostOutcome.ENDED
        elif name in self.live and self.live[name][0] != port:
            assert outcome is PostOutcome.CONFLICT
        elif name not in self.live and len(self.live) == 3:
            assert outcome is PostOutcome.FULL
        else:
            assert outcome is (PostOutcome.KNOWN if name in self.live else PostOutcome.ACCEPTED)
            self.live[name] = (port, self.now + seconds)

    @rule(name=names)
    def release(self, name: str) -> None:
        assert self.store.release(name, "asked", self.now) is (name not in self.ended)
        self.live.pop(name, None)
        self.ended.setdefault(name, ("asked", self.now + 20))

    @rule(seconds=st.sampled_from([1, 2, 7, 21]))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.store.expire(self.now)
        self.tidy()

    @invariant()
    def agrees(self) -> None:
        assert (len(self.store), self.store.num_bytes) == (len(self.live), 100 * len(self.live))
        for name in "abcdef":
            found = self.store.find(name, self.now)
            if name in self.live:
                port, expires = self.live[name]
                assert found == reservation(name, sink_port=port, deadline_seconds=expires - self.now)
            else:
                assert found == (Ended(self.ended[name][0]) if name in self.ended else None)


TestAgainstANaiveStore = AgainstANaiveStore.TestCase
TestAgainstANaiveStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def entry(engine_id: str = "p0", **changes) -> EngineEntry:
    plain = {"engine_id": engine_id, "epoch": "1", "role": "prefill", "host": "h", "side_channel_port": 5}
    return msgspec.convert(plain | changes, EngineEntry)


def test_an_engine_lives_for_its_ttl_after_its_last_heartbeat() -> None:
    store = EngineStore(max_engines=10)
    assert store.post(entry(ttl_seconds=10), now=0) is PostOutcome.ACCEPTED
    assert store.post(entry(ttl_seconds=10), now=8) is PostOutcome.KNOWN
    assert store.live(now=17) == [entry(ttl_seconds=1)]
    assert store.live(now=18) == []


def test_a_new_epoch_replaces_the_one_before_whose_goodbye_comes_too_late() -> None:
    store = EngineStore(max_engines=10)
    store.post(entry(epoch="1"), now=0)
    assert store.post(entry(epoch="2"), now=0) is PostOutcome.ACCEPTED
    assert not store.remove("p0", "1")
    assert [e.epoch for e in store.live(now=0)] == ["2"]
    assert store.remove("p0", "2")
    assert store.live(now=0) == []


def test_engines_are_listed_by_role_and_bounded() -> None:
    store = EngineStore(max_engines=2)
    store.post(entry("p0"), now=0)
    store.post(entry("d0", role="decode"), now=0)
    assert store.post(entry("p1"), now=0) is PostOutcome.FULL
    assert [e.engine_id for e in store.live(0, "prefill")] == ["p0"]
    assert [e.engine_id for e in store.live(0)] == ["d0", "p0"]
